"""Block swap of trained weights (``--blocks_to_swap`` with ``--train full``): in host memory between their uses.

The ring of device buffers and the order of copies are those of frozen weights (block_swap.py).  The data of a
parameter is a view of host memory, so that optimizer, EMA, checkpoints and files find it there, and a view of a buffer
while its block is visited.  The fused backward pass updates the weights of a block in its buffer before the block is
left; then they are copied back.

What autograd saves of a weight, such as its transpose, would be a view of a buffer that later has another block.  So
it is saved by its place in the block, and found again in the buffer that has the block in the backward pass.

Large optimizer state (``MIN_STATE_SHARE``) is in host memory as well, and on the device for the update of its weight.
So are gradients of micro-batches before the last.  Both are copied by the compute stream.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ..config.schema import TrainConfig
from ..optim.fused_backward import WeightPlacement
from .activation_checkpointing import bypass_op_selection
from .async_copy import CopyStream
from .block_swap import BlockOffloader, HostBlock, OffloadedBytes, Visit, align_bytes, count_block_bytes
from .frozen_base import find_innermost_blocks, number_experts, select_spread_indices
from .quantize import QuantizedWeight

MIN_STATE_SHARE = 8
"""State of a weight is in host memory if it has at least 1/8 of the bytes of the weight."""


class SavedView(NamedTuple):
    """A tensor that autograd saves and that is a view of a block's weights: where it is in the block."""

    block: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class TrainedBlock:
    """The parameters of a block, whose data is in host memory unless the block is visited."""

    def __init__(self, parameters: Sequence[nn.Parameter], host: HostBlock):
        self.parameters, self.host = parameters, host
        self._host_values = [weight.tensors[0] for weight in host.view_weights(host.bytes)]
        self.is_changed = False
        """Whether the weights in the buffer were updated since they were copied there."""
        self.set_data(self._host_values)

    def set_data(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    def leave_device(self) -> None:
        self.set_data(self._host_values)


class TrainedBlockSwap(BlockOffloader, WeightPlacement):
    """Blocks whose parameters, trained or not, are on the device while their block computes."""

    def __init__(self, device: torch.device, sizes: OffloadedBytes, stream: CopyStream | None = None):
        super().__init__(device, sizes, stream)
        self._trained: list[TrainedBlock] = []
        self._block_of: dict[Tensor, int] = {}
        self._modules: list[list[nn.Module]] = []
        self._buffer_storages = {_get_storage(buffer.bytes) for buffer in self._ring}
        self._on_device: TrainedBlock | None = None
        self._update_collected: Callable[[], None] = lambda: None
        self._backward_id = -1
        self._written: list[Any] = []
        """The events after copies to host memory for which the host has not waited."""
        self._kept_gradients: dict[Tensor, Tensor] = {}
        """Gradients of micro-batches before the last, in host memory."""
        self._host_buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._uses, self._gradients = Counter[int](), Counter[Tensor]()
        """How often each block was entered for a forward pass with gradients, and how many of a weight came since."""

    @property
    def swapped_weights(self) -> set[Tensor]:
        """The parameters in host memory."""
        return {*self._block_of}

    def add_block(self, block: nn.Module, parameters: Sequence[nn.Parameter], expert: int = 0) -> None:
        """Move these parameters of a block to host memory."""
        index = len(self.blocks)
        self.offload_block([QuantizedWeight.quantize(each, "none") for each in parameters], expert)
        self._trained.append(TrainedBlock(parameters, self.blocks[index]))
        self._block_of |= dict.fromkeys(parameters, index)
        owners = [module for module in block.modules() if module is not block and module._parameters]
        self._modules.append([block, *owners])
        for module in self._modules[index]:
            keep_parameters_in_place(module, parameters)

    def watch(self, denoiser: nn.Module) -> None:
        """Fetch blocks when they are called; call it after other code has replaced ``forward`` of their layers."""
        for block, modules in enumerate(self._modules):
            for module in modules:  # also layers, which checkpointing within a block calls again
                module.forward = self._wrap_forward(module.forward, block)
        denoiser.forward = self._wrap_denoiser(denoiser.forward)

    def _wrap_forward(self, forward: Callable[..., Any], block: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter_block(block)
            with self._save_views():
                return forward(*args, **kwargs)

        return run

    def _wrap_denoiser(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._forget_buffers()
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave_block()

        return run

    def _enter_block(self, block: int) -> None:
        graph_task = torch._C._current_graph_task_id()
        visit = Visit(block, graph_task != -1)
        if visit == self._visit and self._on_device is not None:
            return
        if visit.is_backward and graph_task != self._backward_id:
            self._backward_id = graph_task
            variable: Any = torch.autograd.Variable
            variable._execution_engine.queue_callback(self._end_backward)
        self._leave_block()
        self._start_visit(visit)
        self._uses[block] += torch.is_grad_enabled() and not visit.is_backward
        self._on_device = self._trained[block]
        self._on_device.set_data([weight.tensors[0] for weight in self._weights])

    def _leave_block(self) -> None:
        """Update the weights that are collected, copy those of the visited block back, and let them be on the host."""
        block, self._on_device = self._on_device, None
        if block is None or self._visit is None:
            return
        if self._visit.is_backward or block.is_changed:
            # A backward pass may get here from a recomputation, which has autocast and counts operations.
            with bypass_op_selection(), torch.autocast(self.device.type, enabled=False):
                self._update_collected()
        block.leave_device()
        if block.is_changed:
            block.is_changed = False
            source, target = self._buffer_by_block[self._visit.block].bytes, block.host.bytes
            _, written = self._stream.run_after_compute(
                lambda: target.copy_(source[: block.host.nbytes], non_blocking=True)
            )
            self._written.append(written)

    def _end_backward(self) -> None:
        self._leave_block()
        self._visit = None
        self._uses.clear()
        self._gradients.clear()
        self._wait_for_host()

    def _wait_for_host(self) -> None:
        """Wait until host memory has the weights."""
        for event in self._written:
            self._stream.wait_for_event(event)
            if event is not None:
                event.synchronize()
        self._written = []

    def _forget_buffers(self) -> None:
        """Copy each block again when it is next visited: between forwards other values may be written to weights."""
        self._leave_block()
        self._visit = None
        self._buffer_by_block.clear()
        for buffer in self._ring:
            buffer.block = buffer.event = None

    def _save_views(self) -> AbstractContextManager[Any]:
        """Return a context that saves views of buffers for backward by their places, and the rest as it would be."""
        if not torch.is_grad_enabled():
            return nullcontext()
        autograd: Any = torch._C._autograd
        outer = autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and getattr(outer[0], "swap", None) is self:
            return nullcontext()

        def pack(tensor: Tensor) -> Any:
            if _get_storage(tensor) in self._buffer_storages:
                return self._describe_view(tensor)
            return tensor.detach() if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, SavedView):
                return self._find_view(saved)
            found: Tensor = saved if outer is None else outer[1](saved)
            return found

        pack.swap = self  # type: ignore[attr-defined]
        return saved_tensors_hooks(pack, unpack)

    def _describe_view(self, tensor: Tensor) -> SavedView:
        assert self._visit is not None
        return SavedView(self._visit.block, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _find_view(self, saved: SavedView) -> Tensor:
        self._enter_block(saved.block)
        values = self._buffer_by_block[saved.block].bytes.view(saved.dtype)
        return values.as_strided(saved.shape, saved.stride, saved.offset)

    def call_before_leaving(self, update_collected: Callable[[], None]) -> None:
        self._update_collected = update_collected

    def enter(self, weight: Tensor) -> None:
        if (block := self._block_of.get(weight)) is not None:
            self._enter_block(block)

    def is_complete(self, weight: Tensor) -> bool:
        """Whether this gradient of a weight is the last of the backward pass.

        When the data of a parameter changes its device, autograd forgets the node that adds up its gradients.  So a
        block that was left and entered again has a gradient for each time.
        """
        if (block := self._block_of.get(weight)) is None:
            return True
        self._gradients[weight] += 1
        return self._gradients[weight] >= self._uses[block]

    def keep_gradient(self, weight: Tensor) -> None:
        if weight not in self._block_of or weight.grad is None:
            return
        self._add_kept(weight)
        self._kept_gradients[weight] = self._copy_to_host(weight, "gradient", weight.grad)
        weight.grad = None

    def restore_gradient(self, weight: Tensor) -> None:
        self._add_kept(weight)
        self._kept_gradients.pop(weight, None)

    def _add_kept(self, weight: Tensor) -> None:
        """Add what is kept of the gradient of a weight."""
        kept = self._kept_gradients.get(weight)
        if kept is not None and weight.grad is not None:
            with torch.no_grad():
                weight.grad += kept.to(weight.grad.device, non_blocking=True)

    def discard_gradients(self) -> None:
        self._kept_gradients.clear()

    def iter_unreached(self) -> Iterator[list[Tensor]]:
        blocks = dict[int, list[Tensor]]()
        for weight in self._kept_gradients:
            blocks.setdefault(self._block_of[weight], []).append(weight)
        for block, weights in blocks.items():
            self._enter_block(block)
            for weight in weights:
                weight.grad = self._kept_gradients.pop(weight).to(self.device, non_blocking=True, copy=True)
            yield weights
            self._leave_block()
        if blocks:
            self._end_backward()

    @contextmanager
    def hold_state(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> Iterator[None]:
        swapped = [weight for weight in weights if weight in self._block_of]
        on_device = {
            weight for group in optimizer.param_groups if _has_state_on_device(group) for weight in group["params"]
        }
        for weight in swapped:
            self._trained[self._block_of[weight]].is_changed = True
            for key, value in _iter_state(optimizer, weight):
                if value.dim() or weight in on_device:
                    optimizer.state[weight][key] = value.to(self.device, non_blocking=True)
        yield
        for weight in swapped:
            for key, value in _iter_state(optimizer, weight):
                if is_large_state(value, weight):
                    optimizer.state[weight][key] = self._copy_to_host(weight, key, value)

    def _copy_to_host(self, weight: Tensor, key: str, value: Tensor) -> Tensor:
        """Copy a tensor that belongs to a weight to a buffer of its own in host memory."""
        buffer = self._host_buffers.get((weight, key))
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            layout = torch.empty_like(value, device="meta")
            values = self._memory.allocate(align_bytes(layout.nbytes), self.device)[: layout.nbytes].view(layout.dtype)
            buffer = self._host_buffers[weight, key] = values.as_strided(layout.shape, layout.stride())
        with torch.no_grad():
            return buffer.copy_(value.detach(), non_blocking=True)


def _get_storage(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor while it exists, on the meta device as well."""
    storage: int = tensor.untyped_storage()._cdata
    return storage


def is_large_state(value: Tensor, weight: Tensor) -> bool:
    """Whether a value of the optimizer state of a swapped weight is in host memory: moments are, means of rows not."""
    return MIN_STATE_SHARE * value.nbytes >= weight.nbytes and value.dim() > 0


def _iter_state(optimizer: Optimizer, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the state of a weight, but what bitsandbytes pages, which the device and the host share."""
    for key, value in list(optimizer.state.get(weight, {}).items()):
        if isinstance(value, Tensor) and not getattr(value, "is_paged", False):
            yield key, value


def _has_state_on_device(group: dict[str, Any]) -> bool:
    """Whether torch's optimizers expect numbers, such as that of the step, on the device as well."""
    return bool(group.get("fused") or group.get("capturable"))


def keep_parameters_in_place(module: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Let ``to`` and its like leave these parameters of a module where they are, and move others and buffers."""
    apply: Any = module._apply

    def apply_to_others(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = module._parameters
        module._parameters = {name: each for name, each in own.items() if each is None or each not in known}
        try:
            moved: nn.Module = apply(function, recurse)
            return moved
        finally:
            module._parameters = {**own, **module._parameters}

    known = set(parameters)
    module._apply = apply_to_others  # type: ignore[method-assign]


def list_swappable_parameters(denoiser: nn.Module) -> list[list[nn.Parameter]]:
    """List the parameters of each block, without those that are also used elsewhere."""
    uses = Counter(each for _, each in denoiser.named_parameters(remove_duplicate=False))
    blocks = find_innermost_blocks(denoiser)
    return [[each for each in block.parameters() if uses[each] == 1] for block in blocks]


def swap_trained_blocks(
    denoiser: nn.Module, device: torch.device, train: TrainConfig, stream: CopyStream | None = None
) -> TrainedBlockSwap:
    """Move the parameters of some blocks to host memory, evenly spread so that copies overlap with computation."""
    blocks, parameters = find_innermost_blocks(denoiser), list_swappable_parameters(denoiser)
    experts = number_experts(denoiser, blocks)
    chosen = [index for index in select_spread_indices(len(blocks), train.blocks_to_swap) if parameters[index]]
    sizes = [count_swapped_bytes(parameters[index]) for index in chosen]
    swap = TrainedBlockSwap(device, OffloadedBytes.from_blocks(sizes, train.block_swap_ring_size), stream)
    for index in chosen:
        swap.add_block(blocks[index], parameters[index], experts[index])
    return swap


def count_swapped_bytes(parameters: Sequence[Tensor]) -> int:
    """Count the bytes of the parameters of a block in host memory."""
    return count_block_bytes([QuantizedWeight.quantize(each, "none") for each in parameters])
