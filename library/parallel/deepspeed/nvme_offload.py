"""NVMe offload of the frozen model (ZeRO-Infinity): DeepSpeed reads its partitions from files, layer by layer."""

import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.watchdog import ProcessIdentity
from ...errors import UserError
from ...problems import Problem
from ..validate_engines import (
    AllGather,
    raise_problems,
    validate_disk_space,
    validate_libaio,
    validate_offload_buffers,
)

logger = logging.getLogger(__name__)
DIR_PREFIX, OWNER_FILE = "lorikeet-weights-", "process.json"


class NVMeOffload:
    """The directory with this rank's partitions, which exists as long as it trains."""

    def __init__(self, path: str, all_gather: AllGather):
        raise_problems(validate_libaio(), all_gather)
        self._all_gather = all_gather
        remove_stale_dirs(Path(path))
        self.directory = Path(tempfile.mkdtemp(prefix=DIR_PREFIX, dir=path))
        (self.directory / OWNER_FILE).write_text(json.dumps(ProcessIdentity.get_current().to_json()), "utf-8")

    def partition_model(
        self, deepspeed_zero: Any, model: nn.Module, config: dict[str, Any], world_size: int, ranks_per_machine: int
    ) -> None:
        """Write the frozen weights to files, except small ones and those of a dtype that few weights have."""
        from deepspeed.runtime.config import DeepSpeedConfig

        zero = config["zero_optimization"]
        dtype = _find_common_dtype([parameter for parameter in model.parameters() if not parameter.requires_grad])
        threshold = DeepSpeedConfig(config).zero_config.param_persistence_threshold
        parameters = list(model.parameters())
        in_memory = [
            item for item in parameters if item.requires_grad or item.dtype != dtype or item.numel() <= threshold
        ]
        in_memory_ids = {id(item) for item in in_memory}
        sizes = [-(-item.numel() // world_size) for item in parameters if id(item) not in in_memory_ids]
        trainable_numel = sum(-(-item.numel() // world_size) for item in parameters if item.requires_grad)
        offload = {"buffer_size": max(sizes, default=1), **zero["offload_param"], "nvme_path": str(self.directory)}
        zero["offload_param"] = offload
        deepspeed_config = DeepSpeedConfig(config)
        problems = [
            *validate_offload_buffers(deepspeed_config.zero_config.offload_param, sizes, trainable_numel, dtype),
            *validate_disk_space(self.directory, sum(sizes) * dtype.itemsize * ranks_per_machine),
        ]
        raise_problems(problems, self._all_gather)

        cpu_offload = {name: value for name, value in offload.items() if name != "nvme_path"} | {"device": "cpu"}
        cpu_config = {**config, "zero_optimization": {**zero, "offload_param": cpu_offload}}
        deepspeed_zero.Init(module=nn.ParameterList(in_memory), config_dict_or_path=cpu_config, dtype=torch.float32)
        swapper = build_param_swapper(deepspeed_config, dtype)
        deepspeed_zero.Init(module=model, config_dict_or_path=config, dtype=dtype, param_swapper=swapper)
        self._check_written(swapper)

    def _check_written(self, swapper: Any) -> None:
        """Compare file sizes: DeepSpeed does not check whether its writes succeeded."""
        written = 0
        for param_id, path in swapper.id_to_path.items():
            num_bytes = Path(path).stat().st_size
            written += num_bytes
            if num_bytes < swapper.param_id_to_numel[param_id] * swapper.swap_element_size:
                text = f"{path} was not written completely"
                raise UserError(Problem("offload_param_device", text, "is the disk full?", value="nvme"))
        num_files, mib = len(swapper.id_to_path), written / 2**20
        logger.info("DeepSpeed: %.1f MiB of weights in %d files in %s", mib, num_files, self.directory)

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


def remove_stale_dirs(directory: Path) -> None:
    """Remove directories of processes of this machine that were killed."""
    for path in directory.glob(f"{DIR_PREFIX}*"):
        with suppress(OSError, ValueError):
            owner = ProcessIdentity.from_json(json.loads((path / OWNER_FILE).read_text("utf-8")))
            if owner is not None and owner.is_on_this_machine and not owner.is_alive():
                shutil.rmtree(path, ignore_errors=True)


def _find_common_dtype(parameters: Collection[nn.Parameter]) -> torch.dtype:
    """Return the dtype of most of the elements."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def build_param_swapper(deepspeed_config: Any, dtype: torch.dtype) -> Any:
    """Build DeepSpeed's swapper with the buffer management of ``BufferReclaimingSwapper``."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

    swapper_class: Any = type("Swapper", (BufferReclaimingSwapper, AsyncPartitionedParameterSwapper), {})
    return swapper_class(deepspeed_config, dtype)


class BufferReclaimingSwapper:
    """Mixin for DeepSpeed's swapper, which assumes the same module order in every forward.

    Validation and previews run between steps in another order.  Buffers of weights that were prefetched for the
    expected order, or gathered and kept for later, would never be released.  So half of the buffers are reserved for
    synchronous reads, and gathered weights release theirs when another weight needs it: they are still in their files.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._base: Any = super()
        self._swapper: Any = self
        self._swapped_in: dict[int, Any] = {}

    def available_swap_in_buffers(self) -> int:
        """Return the number of buffers that DeepSpeed may prefetch into."""
        reserved: int = (self._swapper.param_buffer_count + 1) // 2
        free: int = len(self._swapper.available_buffer_ids)
        return max(0, free - reserved)

    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Sequence[Tensor] | None = None
    ) -> None:
        if async_op:  # a prefetch, which may list a weight twice, or one that is available
            params = [param for param in dict.fromkeys(params) if param.ds_status.name == "NOT_AVAILABLE"]
        if swap_in_buffers is None and len(self._swapper.available_buffer_ids) < len(params):
            self._release_gathered()
        self._base.swap_in(params, async_op=async_op, swap_in_buffers=swap_in_buffers)
        self._swapped_in.update((param.ds_id, param) for param in params)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        if any(param is waiting for param in params for waiting in self._swapper.inflight_params):
            self._swapper.synchronize_reads()  # or a read in flight overwrites the buffer's next weight
        self._base.remove_partition_and_release_buffers(params)

    def _release_gathered(self) -> None:
        from deepspeed.accelerator import get_accelerator

        gathered = [
            param
            for param_id, param in self._swapped_in.items()
            if param_id in self._swapper.available_params and param.ds_status.name == "AVAILABLE"
        ]
        get_accelerator().synchronize()  # copies to the device may be in flight
        for param in gathered:
            if param.data_ptr() == param.ds_tensor.data_ptr():  # one process on the CPU: the buffer is the weight
                param.data = param.data.clone()
        self.remove_partition_and_release_buffers(gathered)
