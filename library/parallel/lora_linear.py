"""LoRA on a frozen linear layer as one autograd function, for training in half precision.

peft computes ``base(x) + lora_B(lora_A(x)) * scaling`` module by module.  Under autocast each layer then casts its
input and both matrices of its adapter, keeps these copies, and multiplies and adds tensors of the size of its output.
Here the second matrix product adds to the output of the base, all adapters of a model are cast by one call before its
forward, and the gradients of an adapter leave their matrix products in float32 where the device has such products.

peft keeps the modules, their names and their parameters; only the ``forward`` of a layer is replaced.  Float32 is left
to peft, to the bit, and so is each call that needs more than this function: DoRA, merged or disabled adapters, layers
whose base or adapter has hooks or a ``forward`` of its own (ZeRO-3, tensor parallelism, a training adapter).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..adapters.injection import ADAPTER_NAME, find_linear_lora_layers
from .quantize import FrozenLinear


class HalfPrecisionCopies:
    """Copies of the adapters of a model in the dtype of autocast, written before each forward of the model."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype):
        self.dtype = dtype
        self._copies: dict[nn.Parameter, Tensor] = dict.fromkeys(parameters, torch.empty(0))
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}

    def get(self, parameter: nn.Parameter) -> Tensor:
        """Return the copy of a parameter; copies are written first if it has changed, as far as autograd knows."""
        if self._versions.get(parameter) != (parameter._version, parameter.data_ptr()):
            self._copies.setdefault(parameter, torch.empty(0))
            self.refresh()
        return self._copies[parameter]

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Write all copies: some optimizers change the parameters without telling autograd."""
        groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, copy in self._copies.items():
            self._versions[parameter] = parameter._version, parameter.data_ptr()
            if parameter.dtype == self.dtype:
                self._copies[parameter] = parameter.detach()
                continue
            if copy.shape != parameter.shape or copy.device != parameter.device:
                self._copies[parameter] = copy = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
            copies, sources = groups.setdefault(parameter.device, ([], []))
            copies.append(copy)
            sources.append(parameter.detach())
        for copies, sources in groups.values():
            torch._foreach_copy_(copies, sources)


class FusedLoraForward:
    """Replaces the ``forward`` of one of peft's LoRA layers."""

    def __init__(self, layer: Any, copies: HalfPrecisionCopies, *, multiplies_to_float32: bool):
        """``multiplies_to_float32``: whether the device multiplies half-precision matrices to a float32 matrix."""
        self.layer, self.copies, self.multiplies_to_float32 = layer, copies, multiplies_to_float32
        self.base, self.down, self.up = layer.base_layer, layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
        self._peft_forward = layer.forward

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self._is_supported(input):
            output: Tensor = self._peft_forward(input, *args, **kwargs)
        elif self.down._forward_hooks:  # LoRA dropout
            apply_base, apply_up = _BaseAndDown.apply, _Up.apply
            down, up = self.down.weight, self.up.weight
            output, hidden = apply_base(input, down, self.copies.get(down), self)  # type: ignore[no-untyped-call]
            for hook in self.down._forward_hooks.values():
                hidden = hook(self.down, (input,), hidden)
            hidden = hidden.to(output.dtype)
            output = apply_up(output, hidden, up, self.copies.get(up), self)  # type: ignore[no-untyped-call]
        else:
            apply, get, down, up = _LoraLinear.apply, self.copies.get, self.down.weight, self.up.weight
            output = apply(input, down, up, (get(down), get(up)), self)  # type: ignore[no-untyped-call]
        return output

    def _is_supported(self, input: Tensor) -> bool:
        layer, device = self.layer, input.device.type
        if layer._disable_adapters or layer.merged_adapters or layer.active_adapters != [ADAPTER_NAME]:
            return False
        if not input.is_meta and not (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self.copies.dtype
        ):
            return False
        return not (_is_modified(self.base) or _is_modified(self.up) or "forward" in self.down.__dict__)

    @property
    def scaling(self) -> float:
        factor: float = self.layer.scaling[ADAPTER_NAME]
        return factor

    def compute_base(self, states: Tensor, *, has_backward: bool) -> Tensor:
        bias = self.base.bias
        weight = self._fetch_base_weight(states.dtype, has_backward=has_backward)
        return F.linear(states, weight, None if bias is None else bias.to(states.dtype))

    def compute_input_grad(self, gradient: Tensor, hidden_grad: Tensor, half_down: Tensor) -> Tensor:
        """Compute the gradient of the input from those of the outputs of the base and of lora_A."""
        grad = torch.mm(gradient, self._fetch_base_weight(gradient.dtype, in_backward=True))
        return torch.addmm(grad, hidden_grad, half_down, out=grad)

    def _fetch_base_weight(self, dtype: torch.dtype, **when: bool) -> Tensor:
        base = self.base
        if isinstance(base, FrozenLinear):
            return base.fetch_weight(**when).dequantize(dtype)
        weight: Tensor = base.weight.to(dtype)
        return weight

    def compute_weight_grad(self, gradient: Tensor, states: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply in half precision, to the dtype of an adapter's weight."""
        if dtype == torch.float32 and self.multiplies_to_float32:
            grad: Tensor = torch.mm(gradient.t(), states, out_dtype=dtype)
            return grad
        return torch.mm(gradient.t(), states).to(dtype)


def _is_modified(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _multiply(first: Tensor, second: Tensor, factor: float) -> Tensor:
    """Multiply two matrices and a factor, by one kernel."""
    if factor == 1:
        return torch.mm(first, second)
    return torch.addmm(first.new_empty(()), first, second, beta=0, alpha=factor)


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _LoraLinear(torch.autograd.Function):
    """Saves the input in half precision, and the output of lora_A; copies keep their values until the next step."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, down: Tensor, up: Tensor, *rest: Any) -> Tensor:
        (half_down, half_up), layer = ctx.rest = rest
        states = _flatten(input.to(half_up.dtype))
        output: Tensor = layer.compute_base(states, has_backward=ctx.needs_input_grad[0])
        hidden = _multiply(states, half_down.t(), layer.scaling)
        torch.addmm(output, hidden, half_up.t(), out=output)
        ctx.save_for_backward(states, hidden)
        ctx.shape, ctx.dtype, ctx.weight_dtype = input.shape, input.dtype, down.dtype
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states, hidden), ((half_down, half_up), layer) = ctx.saved_tensors, ctx.rest
        gradient = _flatten(gradient)
        hidden_grad = _multiply(gradient, half_up, layer.scaling)
        input_grad = down_grad = up_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = layer.compute_input_grad(gradient, hidden_grad, half_down).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            down_grad = layer.compute_weight_grad(hidden_grad, states, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            up_grad = layer.compute_weight_grad(gradient, hidden, ctx.weight_dtype)
        return input_grad, down_grad, up_grad, None, None


class _BaseAndDown(torch.autograd.Function):
    """The base and lora_A of a layer, where hooks change the output of lora_A."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, down: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        half_down, layer = ctx.rest = rest
        states = _flatten(input.to(half_down.dtype))
        output = layer.compute_base(states, has_backward=ctx.needs_input_grad[0])
        hidden = torch.mm(states, half_down.t())
        ctx.save_for_backward(states)
        ctx.shape, ctx.dtype, ctx.weight_dtype = input.shape, input.dtype, down.dtype
        outer = input.shape[:-1]
        return output.view(*outer, output.shape[-1]), hidden.view(*outer, hidden.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, hidden_grad: Tensor) -> tuple[Tensor | None, ...]:
        (states,), (half_down, layer) = ctx.saved_tensors, ctx.rest
        gradient, hidden_grad = _flatten(gradient), _flatten(hidden_grad)
        input_grad = down_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = layer.compute_input_grad(gradient, hidden_grad, half_down).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            down_grad = layer.compute_weight_grad(hidden_grad, states, ctx.weight_dtype)
        return input_grad, down_grad, None, None


class _Up(torch.autograd.Function):
    """Adds lora_B to the output of the base."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, up: Tensor, *rest: Any) -> Tensor:
        half_up, layer = ctx.rest = rest
        ctx.save_for_backward(hidden)
        ctx.weight_dtype = up.dtype
        total = torch.addmm(_flatten(output), _flatten(hidden), half_up.t(), alpha=layer.scaling)
        return total.view(output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), (half_up, layer), flat = ctx.saved_tensors, ctx.rest, _flatten(gradient)
        hidden_grad = up_grad = None
        if ctx.needs_input_grad[1]:
            hidden_grad = _multiply(flat, half_up, layer.scaling).view(hidden.shape)
        if ctx.needs_input_grad[2]:
            up_grad = layer.compute_weight_grad(flat, _flatten(hidden) * layer.scaling, ctx.weight_dtype)
        return gradient, hidden_grad, up_grad, None, None


def fuse_lora_layers(model: nn.Module, dtype: torch.dtype) -> int:
    """Fuse the LoRA layers of a model that is trained under autocast to ``dtype``; return their number.

    Call it before the model is wrapped, after its base is quantized and its adapter is on the device.
    """
    layers: list[Any] = [layer for layer in find_linear_lora_layers(model) if _can_fuse(layer)]
    parameters = [getattr(layer, half)[ADAPTER_NAME].weight for layer in layers for half in ("lora_A", "lora_B")]
    copies = HalfPrecisionCopies(parameters, dtype)
    devices = {parameter.device: _multiplies_to_float32(parameter.device, dtype) for parameter in parameters}
    for layer in layers:
        device = layer.lora_A[ADAPTER_NAME].weight.device
        layer.forward = FusedLoraForward(layer, copies, multiplies_to_float32=devices[device])
    if layers:
        model.register_forward_pre_hook(copies.refresh)
    return len(layers)


def _can_fuse(layer: Any) -> bool:
    return type(layer.base_layer) in (nn.Linear, FrozenLinear)


def _multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this dtype to float32; its table of operations does not say."""
    matrix = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True
