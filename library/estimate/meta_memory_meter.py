"""Count live bytes, FLOPs and kernels op by op, and emulate autocast and fused kernels on torch's meta device."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""The fused attention that has a meta kernel; it saves for backward what the fused kernels of GPUs save."""
HALF_OPS: Any = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.scaled_dot_product_attention, torch.einsum),
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, torch.addmm),
}
"""Ops that CUDA's autocast runs in half precision, as far as diffusion models use them."""
ALLOCATIONS: Any = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided, torch.ops.aten._unsafe_view),
}
RMS_NORMS: Any = {F.rms_norm, torch.rms_norm}
RMS_NORM_OPERATOR: Any = torch.ops.aten.rms_norm.default
"""The operator that norms which write half precision call, and that autocast leaves alone."""
FLOAT32_OPS: Any = {
    *(RMS_NORMS if torch.__version__ >= "2.12" else ()),
    *(F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, torch.pow, Tensor.pow, Tensor.__pow__),
    *(torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, torch.sum, Tensor.sum, torch.cumsum, torch.norm, Tensor.norm),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.normalize),
}
"""Ops that CUDA's autocast runs in float32."""


@dataclass(frozen=True)
class MeterReading:
    """What a ``MemoryMeter`` counted since it was read last."""

    live: int
    """Bytes that are alive now."""
    peak: int
    """The most bytes that were alive at once."""
    flops: int
    kernels: int
    """Ops that launch a kernel: the time in which the host starts them is a lower bound of a step's."""
    grown: int = 0
    """Bytes of gradients that backward has completed so far, where the model itself is trained."""
    grown_peak: int = 0
    """The most bytes that were alive at once with them; 0 if there were none."""


@dataclass(frozen=True)
class _KnownCall:
    """The result of an op on the meta device: most blocks of a model are equal, and meta kernels in Python are slow."""

    results: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
    """Size, strides and dtype of each tensor."""
    is_tuple: bool
    flops: int

    @classmethod
    def from_result(cls, result: Any, flops: int) -> "_KnownCall | None":
        """Record the result of an op; return None unless it is a tensor without gaps, or several of them."""
        tensors, results = result if isinstance(result, tuple) else (result,), list[Any]()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_meta and not tensor.storage_offset():
                results.append((tensor.size(), tensor.stride(), tensor.dtype))
                if _build_empty(results[-1]).untyped_storage().nbytes() == tensor.untyped_storage().nbytes():
                    continue
            elif tensor is None:
                results.append(None)
                continue
            return None
        return cls(tuple(results), tensors is result, flops)

    def repeat(self) -> Any:
        """Build the result of an equal call."""
        tensors = tuple(map(_build_empty, self.results))
        return tensors if self.is_tuple else tensors[0]


def _build_empty(shape: Any) -> Any:
    return None if shape is None else torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")


def _describe_argument(value: Any) -> Any:
    """Describe an argument; equal descriptions lead to results of equal shapes."""
    if isinstance(value, Tensor):
        return (value.size(), value.stride(), value.dtype) if value.is_meta else object()  # its values may matter
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe_argument, value))
    return type(value), value


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count FLOPs, kernels and the bytes of storages that are alive on a device, without its allocator."""

    def __init__(self, device: torch.device, allocated: Iterable[Tensor] = ()):
        """``allocated`` tensors exist beforehand and do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.live, self.peak, self.flops, self.kernels = device, 0, 0, 0, 0
        self.grown = self._grown_peak = 0
        self._known_calls: dict[Any, _KnownCall] = {}
        self._is_pure: dict[Any, bool] = {}
        self._launches: dict[Any, bool] = {}
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in allocated}

    def read_and_reset(self) -> MeterReading:
        """Return live bytes, and the peak, FLOPs and kernels since the last reset."""
        grown_peak = max(self._grown_peak, self.live + self.grown) if self.grown else 0
        counted = self.live, self.peak, self.flops, self.kernels
        reading = MeterReading(*counted, grown=self.grown, grown_peak=grown_peak)
        self.peak, self.flops, self.kernels, self._grown_peak = self.live, 0, 0, grown_peak
        return reading

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self._get_call_key(function, args, kwargs)
        call = self._known_calls.get(key) if key is not None else None
        if call is not None:
            result, flops = call.repeat(), call.flops
        else:
            result = function(*args, **kwargs)
            flops = _count_flops(function.overloadpacket, args, kwargs, result)
            if key is not None and (call := _KnownCall.from_result(result, flops)) is not None:
                self._known_calls[key] = call
        self.flops += flops
        self.kernels += self._launches_kernel(function)
        for item in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(item, Tensor) and self._is_local(item.device):
                self._add(item.untyped_storage())
        return result

    def _get_call_key(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a key that is equal for calls with equal results; None if the op shares memory or reads values."""
        if function not in self._is_pure:
            schema = function._schema
            has_alias = any(each.alias_info is not None for each in schema.returns)
            self._is_pure[function] = self.device.type == "meta" and not schema.is_mutable and not has_alias
        if not self._is_pure[function] or not args:
            return None
        first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        if not isinstance(first, Tensor) or not first.is_meta:
            return None
        return function, _describe_argument(args), _describe_argument([*kwargs.items()])

    def _launches_kernel(self, function: Any) -> bool:
        """Whether the op computes: views share the memory of an argument, and allocations are no work."""
        if function not in self._launches:
            schema = function._schema
            is_view = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
            self._launches[function] = not is_view and function.overloadpacket not in ALLOCATIONS
        return self._launches[function]

    def _is_local(self, device: torch.device) -> bool:
        return device.type == self.device.type and self.device.index in (None, device.index)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = weakref.ref(storage, lambda _: self._remove(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.grown:
            self._grown_peak = max(self._grown_peak, self.live + self.grown)

    def _remove(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size


def _count_flops(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Look up torch's table, which lacks this attention: two matrix products, and five in backward."""
    if operation in (ATTENTION, ATTENTION_BACKWARD):
        query, key, _ = args[:3] if operation is ATTENTION else args[1:4]
        return int(2 * key.shape[-2] * query.numel() * (2 if operation is ATTENTION else 5))
    formula = flop_registry.get(operation)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class _FusedRMSNorm(torch.autograd.Function):
    """A model of the fused kernel of GPUs, which saves its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, num_dims: int) -> Tensor:
        ctx.save_for_backward(states, states.new_empty(states.shape[:-num_dims], dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _normalize_fused(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    """Do what GPUs do in one kernel; None where they do not, either."""
    if not input.is_meta or (weight is not None and (weight.dtype != input.dtype or weight.requires_grad)):
        return None
    output: Tensor = _FusedRMSNorm.apply(input, len(normalized_shape))  # type: ignore[no-untyped-call]
    return output


class AutocastEmulation(TorchFunctionMode):
    """Autocast, fused attention and fused RMS norms on the meta device, which has none of them."""

    def __init__(self, dtype: torch.dtype | None, *, fused_attention: bool = True):
        """``dtype`` is that of autocast; None switches it off."""
        super().__init__()
        self._dtype, self._fused_attention = dtype, fused_attention

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None and (function in HALF_OPS or function in FLOAT32_OPS):
            dtype = self._dtype if function in HALF_OPS else torch.float32
            args, kwargs = tree_map(lambda item: _cast(item, dtype), (tuple(args), kwargs))
        if self._fused_attention and function is F.scaled_dot_product_attention:
            inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            if all(each.ndim == 4 and each.shape[-1] == inputs[0].shape[-1] for each in inputs):
                return ATTENTION(*inputs)[0]
        if function in RMS_NORMS or function is RMS_NORM_OPERATOR:
            output = _normalize_fused(*args, **kwargs)
            if output is not None:
                return output
        return function(*args, **kwargs)


def _cast(item: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, except float64, which autocast leaves alone."""
    if isinstance(item, Tensor) and item.is_floating_point() and item.dtype not in (dtype, torch.float64):
        return item.to(dtype)
    return item


def run_backward(loss: Tensor) -> None:
    """Run backward; ``Tensor.backward`` would switch off an ``AutocastEmulation`` for its duration (torch 2.13)."""
    engine: Any = torch.autograd.Variable._execution_engine
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), **options)
