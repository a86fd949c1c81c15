"""Weights between files and memory, by DeepSpeed, so that what it reads into one buffer is never meant for another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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

        gathered = [param for number, param in self._swapped_in.items()
                    if number in self._swapper.available_params and param.ds_status.name == "AVAILABLE"]  # fmt: skip
        get_accelerator().synchronize()  # copies to the device may still be under way
        for param in gathered:
            if param.data_ptr() == param.ds_tensor.data_ptr():  # of one process on the CPU: the buffer is the weight
                param.data = param.data.clone()
        self.remove_partition_and_release_buffers(gathered)
