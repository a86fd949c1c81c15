"""The frozen model in files on a disk, from which DeepSpeed reads it layer by layer."""

import ctypes
import json
import logging
import mmap
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.watchdog import ProcessIdentity
from ..errors import ConfigError, UserError

logger = logging.getLogger(__name__)


NVME_OPTION = "--offload_param_device nvme"


DIR_PREFIX, OWNER_FILE = "lorikeet-weights-", "process.json"


AllGather = Callable[[list[str]], Sequence[list[str]]]


LIBAIO_FIX = "apt install libaio-dev g++ (dnf: libaio-devel gcc-c++) and pip install ninja, or take cpu"


class NVMeOffload:
    """Where this process's part of the frozen model rests, for as long as it trains."""

    def __init__(self, path: str, all_gather: AllGather):
        _raise_gathered_problems(all_gather, _validate_libaio())
        self._all_gather = all_gather
        remove_stale_dirs(Path(path))
        self.directory = Path(tempfile.mkdtemp(prefix=DIR_PREFIX, dir=path))
        (self.directory / OWNER_FILE).write_text(json.dumps(ProcessIdentity.get_current().to_json()), "utf-8")

    def partition_model(
        self, deepspeed_zero: Any, model: nn.Module, config: dict[str, Any], world_size: int, ranks_per_machine: int
    ) -> None:
        """Put the frozen weights into files, but those that are small, or of another precision than most.

        ``sharing`` processes write to the same disk, of all.
        """
        from deepspeed.runtime.config import DeepSpeedConfig

        dtype = _find_common_dtype([parameter for parameter in model.parameters() if not parameter.requires_grad])
        smallest = DeepSpeedConfig(config).zero_config.param_persistence_threshold
        kept = [
            item for item in model.parameters() if item.requires_grad or item.dtype != dtype or item.numel() <= smallest
        ]
        parts = [-(-item.numel() // world_size) for item in _exclude_parameters(model, kept)]
        learnt = sum(-(-item.numel() // world_size) for item in model.parameters() if item.requires_grad)
        offload = {
            "buffer_size": max(parts, default=1),
            **config["zero_optimization"]["offload_param"],
            "nvme_path": str(self.directory),
        }
        config["zero_optimization"]["offload_param"] = offload
        known = DeepSpeedConfig(config)
        _raise_gathered_problems(
            self._all_gather,
            [
                *_validate_offload_buffers(known.zero_config.offload_param, parts, learnt, dtype),
                *_validate_disk_space(self.directory, sum(parts) * dtype.itemsize * ranks_per_machine),
            ],
        )

        pass

        in_memory = {name: value for name, value in offload.items() if name != "nvme_path"} | {"device": "cpu"}
        without = {**config, "zero_optimization": {**config["zero_optimization"], "offload_param": in_memory}}
        deepspeed_zero.Init(module=nn.ParameterList(kept), config_dict_or_path=without, dtype=torch.float32)
        between = build_param_swapper(known, dtype)
        deepspeed_zero.Init(module=model, config_dict_or_path=config, dtype=dtype, param_swapper=between)
        self._check_written(between)

    def _check_written(self, swapper: Any) -> None:
        """DeepSpeed does not look whether what it wrote has arrived."""
        size, written = swapper.swap_element_size, 0
        for number, path in swapper.id_to_path.items():
            here = Path(path).stat().st_size
            written += here
            if here < swapper.param_id_to_numel[number] * size:
                raise UserError(f"{NVME_OPTION}: {path} could not be written as a whole; is the disk full?")
        logger.info(
            "DeepSpeed: %.1f MiB of weights in %d files in %s", written / 2**20, len(swapper.id_to_path), self.directory
        )

    def remove(self) -> None:
        """Nothing of it is needed any more."""
        shutil.rmtree(self.directory, ignore_errors=True)


def remove_stale_dirs(directory: Path) -> None:
    """What processes of this machine left that were killed."""
    for path in directory.glob(f"{DIR_PREFIX}*"):
        with suppress(OSError, ValueError):
            owner = ProcessIdentity.from_json(json.loads((path / OWNER_FILE).read_text("utf-8")))
            if owner is not None and owner.is_on_this_machine and not owner.is_alive():
                shutil.rmtree(path, ignore_errors=True)


def _find_common_dtype(parameters: Collection[nn.Parameter]) -> torch.dtype:
    """The precision of most of the weights."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _exclude_parameters(model: nn.Module, excluded: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    known = {id(item) for item in excluded}
    return (item for item in model.parameters() if id(item) not in known)


def _validate_offload_buffers(
    offload: Any, partition_sizes: Sequence[int], trainable_numel: int, dtype: torch.dtype
) -> Iterator[str]:
    """Settings of the user's own file that DeepSpeed would fail with in the middle."""
    largest, locked = max(partition_sizes, default=0), offload.buffer_count * offload.buffer_size * dtype.itemsize
    if offload.buffer_size < largest:
        yield (
            f"DeepSpeed's file: offload_param.buffer_size is {offload.buffer_size}, and the largest weight has"
            f" {largest} numbers for each process; write {largest}, or leave it out"
        )
    elif offload.buffer_count < 2:
        yield f"DeepSpeed's file: offload_param.buffer_count is {offload.buffer_count}; write at least 2"
    elif not can_lock_memory(locked):
        yield (
            f"{NVME_OPTION}: {locked / 2**20:.0f} MiB of memory for each process cannot be locked; raise `ulimit -l`, or"
            " make buffer_count or buffer_size in DeepSpeed's file smaller"
        )
    if trainable_numel > offload.max_in_cpu:
        yield (
            f"DeepSpeed's file: offload_param.max_in_cpu is {offload.max_in_cpu}, and the adapter has {trainable_numel}"
            " numbers for each process, which stay in memory; leave it out"
        )


def _validate_disk_space(directory: Path, num_bytes: int) -> Iterator[str]:
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        yield (
            f"--offload_param_nvme_path {directory.parent}: the model takes {num_bytes / 2**30:.1f} GiB, and there is room"
            f" for {free / 2**30:.1f} GiB"
        )


def can_lock_memory(num_bytes: int) -> bool:
    """Whether so much memory may be kept from being moved out, without which DeepSpeed ends the process."""
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1))
    except (OSError, OverflowError, ValueError):
        return False
    address = ctypes.c_char.from_buffer(memory)
    place = (ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(num_bytes))
    system: Any = ctypes.CDLL(None)
    is_locked: bool = system.mlock(*place) == 0
    system.munlock(*place)
    return is_locked


def _raise_gathered_problems(all_gather: AllGather, problems: Iterable[str]) -> None:
    """Stop all processes over what is wrong on any of them; machines have disks and packages of their own."""
    found = dict.fromkeys(problem for each in all_gather(list(problems)) for problem in each)
    if found:
        raise ConfigError(list(found))


def _validate_libaio() -> Iterator[str]:
    """DeepSpeed compiles its way to the disk when it is first asked for."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        builder = AsyncIOBuilder()
        is_there = builder.is_compatible()
        if is_there:
            logger.info("DeepSpeed's async_io is loaded; the first time it is compiled, which takes minutes")
            builder.load(verbose=False)
    except Exception as error:  # compilers have kinds of their own
        why = str(error).partition("\n")[0]
        yield f"{NVME_OPTION}: DeepSpeed's async_io cannot be built: {why}; {LIBAIO_FIX}"
        return
    if not is_there:
        yield f"{NVME_OPTION}: DeepSpeed's async_io needs libaio and a compiler; {LIBAIO_FIX}"


def build_param_swapper(deepspeed_config: Any, dtype: torch.dtype) -> Any:
    """DeepSpeed's own, for settings as DeepSpeed knows them, with a better use of its buffers."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

    kind: Any = type("Swapper", (BufferReclaimingSwapper, AsyncPartitionedParameterSwapper), {})
    return kind(deepspeed_config, dtype)


class BufferReclaimingSwapper:
    """DeepSpeed expects the same order of modules in every forward, and here validation and previews come in between.

    What it read ahead for an order that did not come, and what it gathered and keeps for later, would hold buffers
    until there is none.  So only some of them are for reading ahead, and what is gathered gives its buffer back when
    another needs it: it is still in its file.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._base: Any = super()
        self._swapper: Any = self
        self._swapped_in: dict[int, Any] = {}

    def available_swap_in_buffers(self) -> int:
        """As whoever reads ahead gets to know it."""
        kept_back: int = (self._swapper.param_buffer_count + 1) // 2
        free: int = len(self._swapper.available_buffer_ids)
        return max(0, free - kept_back)

    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Sequence[Tensor] | None = None
    ) -> None:
        """Begin to read, or read."""
        if async_op:  # reading ahead: what is used twice comes twice, and what is there needs no reading
            params = [param for param in dict.fromkeys(params) if param.ds_status.name == "NOT_AVAILABLE"]
        if swap_in_buffers is None and len(self._swapper.available_buffer_ids) < len(params):
            self._release_gathered()
        self._base.swap_in(params, async_op=async_op, swap_in_buffers=swap_in_buffers)
        self._swapped_in.update((param.ds_id, param) for param in params)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Give the buffers of these to others."""
        if any(param is waiting for param in params for waiting in self._swapper.inflight_params):
            self._swapper.synchronize_reads()  # or the buffer gets what was meant for this one when it is another's
        self._base.remove_partition_and_release_buffers(params)

    def _release_gathered(self) -> None:
        from deepspeed.accelerator import get_accelerator

        gathered = [
            param
            for number, param in self._swapped_in.items()
            if number in self._swapper.available_params and param.ds_status.name == "AVAILABLE"
        ]
        get_accelerator().synchronize()  # copies to the device may still be under way
        for param in gathered:
            if param.data_ptr() == param.ds_tensor.data_ptr():  # of one process on the CPU: the buffer is the weight
                param.data = param.data.clone()
        self.remove_partition_and_release_buffers(gathered)
