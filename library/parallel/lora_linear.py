"""LoRA on a frozen linear layer as one autograd function, for training in half precision.

peft computes ``base(x) + lora_B(lora_A(x)) * scaling`` module by module.  Under autocast each layer then casts its
input and both matrices of its adapter, keeps these copies, and multiplies and adds tensors of the size of its output.
Here the second matrix product adds to the output of the base, all adapters of a model are cast by one call before its
forward, and the gradients of an adapter leave their matrix products in float32 where the device has such products.

peft keeps the modules, their names and their parameters; only the ``forward`` of a layer is replaced.  Float32 is left
to peft, to the bit, and so is each call that needs more than this function: DoRA, merged or disabled adapters, layers
whose base or adapter has hooks or a ``forward`` of its own (ZeRO-3, tensor parallelism, a training adapter).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..adapters.injection import ADAPTER_NAME
from ..models.recomputed_activations import Recomputation, get_recomputation
from .quantize import FrozenLinear
from .quantized_matmul import QuantizedMatmulLinear


class HalfPrecisionCopies:
    """Copies of the adapters of a model in the dtype of autocast, written before each forward of the model."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype):
        self.dtype = dtype
        self._copies: dict[nn.Parameter, Tensor] = dict.fromkeys(parameters, torch.empty(0))
        self._stacks: dict[tuple[nn.Parameter, ...], Tensor] = {}
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}
        self._pointers: list[int] | None = None
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []
        """Copies and parameters, as far as they differ, for each device."""

    def get(self, parameter: nn.Parameter) -> Tensor:
        """Return the copy of a parameter; copies are written first if it has changed, as far as autograd knows."""
        if not self._is_current(parameter):
            self._copies.setdefault(parameter, torch.empty(0))
            self.refresh()
        return self._copies[parameter]

    def stack(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Let the copies of these parameters be the rows of one matrix."""
        self._stacks[parameters], self._pointers = torch.empty(0), None
        self._copies.update(dict.fromkeys(parameters, torch.empty(0)))

    def get_stack(self, parameters: tuple[nn.Parameter, ...]) -> Tensor:
        """Return the matrix of the copies of a stack."""
        if parameters not in self._stacks:
            self.stack(parameters)
            self.refresh()
        elif not all(map(self._is_current, parameters)):
            self.refresh()
        return self._stacks[parameters]

    def _is_current(self, parameter: nn.Parameter) -> bool:
        return self._versions.get(parameter) == (parameter._version, parameter.data_ptr())

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Write all copies: some optimizers change the parameters without telling autograd."""
        pointers = [parameter.data_ptr() for parameter in self._copies]
        if pointers != self._pointers:
            self._allocate()
            self._pointers = pointers
        versions = [parameter._version for parameter in self._copies]
        self._versions = dict(zip(self._copies, zip(versions, pointers, strict=True), strict=True))
        for copies, sources in self._copied:
            torch._foreach_copy_(copies, sources)

    def _allocate(self) -> None:
        stacked = dict[nn.Parameter, Tensor]()
        for parameters in self._stacks:
            rows, first = [len(parameter) for parameter in parameters], parameters[0]
            self._stacks[parameters] = matrix = first.new_empty(sum(rows), first.shape[1], dtype=self.dtype)
            stacked.update(zip(parameters, torch.split(matrix, rows), strict=True))
        groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter in self._copies:
            source = parameter.detach()
            if parameter.dtype == self.dtype and parameter not in stacked:
                self._copies[parameter] = source
                continue
            copy = stacked[parameter] if parameter in stacked else torch.empty_like(source, dtype=self.dtype)
            self._copies[parameter] = copy
            copies, sources = groups.setdefault(parameter.device, ([], []))
            copies.append(copy)
            sources.append(source)
        self._copied = list(groups.values())


class SharedInput(Protocol):
    """Layers that read the same input."""

    def compute(self, layer: "FusedLoraForward", input: Tensor) -> Tensor | None: ...


class FusedLoraForward:
    """Replaces the ``forward`` of one of peft's LoRA layers."""

    def __init__(
        self,
        layer: Any,
        copies: HalfPrecisionCopies,
        *,
        multiplies_to_float32: bool,
        adds_in_place: bool = True,
        report_peft: Callable[[], None] | None = None,
    ):
        """Take the layer, how it computes, and what reports that peft computes it.

        ``multiplies_to_float32``: whether the device does so with half precision; ``adds_in_place``: whether the LoRA
        is added to the output of the base itself, which selective checkpointing then cannot save.
        """
        self.layer, self.copies, self.multiplies_to_float32 = layer, copies, multiplies_to_float32
        self.adds_in_place, self._report_peft = adds_in_place, report_peft
        self.base, self.down, self.up = layer.base_layer, layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
        self.group: SharedInput | None = None
        self._peft_forward = layer.forward

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self._is_supported(input):
            output: Tensor = self._peft_forward(input, *args, **kwargs)
        elif self.down._forward_hooks:  # LoRA dropout
            apply_base, apply_up = _BaseAndDown.apply, _Up.apply
            down, up = self.down.weight, self.up.weight
            recomputation = self._get_recomputation(input)
            half_down = self.copies.get(down)
            output, hidden = apply_base(input, down, half_down, self, recomputation)  # type: ignore[no-untyped-call]
            for hook in self.down._forward_hooks.values():
                hidden = hook(self.down, (input,), hidden)
            hidden = hidden.to(output.dtype)
            output = apply_up(output, hidden, up, self.copies.get(up), self)  # type: ignore[no-untyped-call]
        elif self.group is None or (grouped := self.group.compute(self, input)) is None:
            apply, get, down, up = _LoraLinear.apply, self.copies.get, self.down.weight, self.up.weight
            details = (get(down), get(up)), self, self._get_recomputation(input)
            output = apply(input, down, up, *details)  # type: ignore[no-untyped-call]
        else:
            output = grouped
        return output

    def _get_recomputation(self, input: Tensor) -> Recomputation | None:
        return get_recomputation(input) if input.dtype == self.copies.dtype else None

    def can_share_input(self, input: Tensor, other: "FusedLoraForward") -> bool:
        """Whether one function may compute this layer together with another that reads the same input."""
        return self._is_supported(input) and not self.down._forward_hooks and self.scaling == other.scaling

    def _is_supported(self, input: Tensor) -> bool:
        layer, device = self.layer, input.device.type
        if layer._disable_adapters or layer.merged_adapters or layer.active_adapters != [ADAPTER_NAME]:
            return False
        if not input.is_meta and not (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == self.copies.dtype
        ):
            return False
        if _is_modified(self.base) or _is_modified(self.up) or "forward" in self.down.__dict__:
            if self._report_peft is not None:
                self._report_peft()
            return False
        return True

    @property
    def scaling(self) -> float:
        factor: float = self.layer.scaling[ADAPTER_NAME]
        return factor

    def compute_base(self, states: Tensor, shape: torch.Size, *, has_backward: bool) -> Tensor:
        """Compute the output of the base for the rows of an input of this shape."""
        base, bias = self.base, None if self.base.bias is None else self.base.bias.to(states.dtype)
        if isinstance(base, QuantizedMatmulLinear):
            return flatten(base.compute_forward(states.view(shape), bias, has_backward=has_backward))
        return F.linear(states, self._fetch_base_weight(states.dtype, has_backward=has_backward), bias)

    def add_up(self, output: Tensor, hidden: Tensor, half_up: Tensor) -> Tensor:
        """Add the output of lora_B to that of the base."""
        return torch.addmm(output, hidden, half_up.t(), out=output if self.adds_in_place else None)

    def compute_input_grad(self, gradient: Tensor, hidden_grad: Tensor, half_down: Tensor, shape: torch.Size) -> Tensor:
        """Compute the gradient of an input of this shape from those of the outputs of the base and of lora_A."""
        grad = self.add_base_grad(gradient, None, shape)
        return torch.addmm(grad, hidden_grad, half_down, out=grad)

    def add_base_grad(self, gradient: Tensor, total: Tensor | None, shape: torch.Size) -> Tensor:
        """Compute the gradient of the input from that of the output of the base, and add it to a total."""
        base = self.base
        if isinstance(base, QuantizedMatmulLinear):  # whose kernels do not add
            grad = flatten(base.compute_backward(gradient.view(*shape[:-1], -1), shape))
            return grad if total is None else total.add_(grad)
        weight = self._fetch_base_weight(gradient.dtype, in_backward=True)
        return torch.mm(gradient, weight) if total is None else torch.addmm(total, gradient, weight, out=total)

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


def multiply(first: Tensor, second: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """Multiply two matrices and a factor, by one kernel."""
    if factor == 1:
        return torch.mm(first, second, out=out)
    return torch.addmm(first.new_empty(()), first, second, beta=0, alpha=factor, out=out)


def flatten(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _save_states(ctx: Any, states: Tensor, recomputation: Recomputation | None, *others: Tensor) -> None:
    """Save an input in half precision, or what it is computed from."""
    if recomputation is None:
        ctx.save_for_backward(*others, states)
        ctx.compute_states = None
    else:
        ctx.save_for_backward(*others, *recomputation.inputs)
        ctx.compute_states = recomputation.compute


def _restore_states(ctx: Any, saved: Sequence[Tensor]) -> Tensor:
    return saved[0] if ctx.compute_states is None else flatten(ctx.compute_states(*saved))


class _LoraLinear(torch.autograd.Function):
    """Saves the input in half precision, and the output of lora_A; copies keep their values until the next step."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, down: Tensor, up: Tensor, *rest: Any) -> Tensor:
        (half_down, half_up), layer, recomputation = rest
        states = flatten(input.to(half_up.dtype))
        output: Tensor = layer.compute_base(states, input.shape, has_backward=ctx.needs_input_grad[0])
        hidden = multiply(states, half_down.t(), layer.scaling)
        output = layer.add_up(output, hidden, half_up)
        _save_states(ctx, states, recomputation, hidden)
        ctx.half_down, ctx.half_up, ctx.layer = half_down, half_up, layer
        ctx.shape, ctx.dtype, ctx.weight_dtype = input.shape, input.dtype, down.dtype
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, *saved), layer = ctx.saved_tensors, ctx.layer
        gradient = flatten(gradient)
        hidden_grad = multiply(gradient, ctx.half_up, layer.scaling)
        input_grad = down_grad = up_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = layer.compute_input_grad(gradient, hidden_grad, ctx.half_down, ctx.shape)
            input_grad = input_grad.view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            down_grad = layer.compute_weight_grad(hidden_grad, _restore_states(ctx, saved), ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            up_grad = layer.compute_weight_grad(gradient, hidden, ctx.weight_dtype)
        return input_grad, down_grad, up_grad, None, None, None


class _BaseAndDown(torch.autograd.Function):
    """The base and lora_A of a layer, where hooks change the output of lora_A."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, down: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        half_down, layer, recomputation = rest
        states = flatten(input.to(half_down.dtype))
        output = layer.compute_base(states, input.shape, has_backward=ctx.needs_input_grad[0])
        hidden = torch.mm(states, half_down.t())
        _save_states(ctx, states, recomputation)
        ctx.half_down, ctx.layer = half_down, layer
        ctx.shape, ctx.dtype, ctx.weight_dtype = input.shape, input.dtype, down.dtype
        outer = input.shape[:-1]
        return output.view(*outer, output.shape[-1]), hidden.view(*outer, hidden.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, hidden_grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, half_down, layer = ctx.saved_tensors, ctx.half_down, ctx.layer
        gradient, hidden_grad = flatten(gradient), flatten(hidden_grad)
        input_grad = down_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = layer.compute_input_grad(gradient, hidden_grad, half_down, ctx.shape)
            input_grad = input_grad.view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            down_grad = layer.compute_weight_grad(hidden_grad, _restore_states(ctx, saved), ctx.weight_dtype)
        return input_grad, down_grad, None, None, None


class _Up(torch.autograd.Function):
    """Adds lora_B to the output of the base."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, up: Tensor, *rest: Any) -> Tensor:
        half_up, layer = ctx.rest = rest
        ctx.save_for_backward(hidden)
        ctx.weight_dtype = up.dtype
        total = torch.addmm(flatten(output), flatten(hidden), half_up.t(), alpha=layer.scaling)
        return total.view(output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), (half_up, layer), flat = ctx.saved_tensors, ctx.rest, flatten(gradient)
        hidden_grad = up_grad = None
        if ctx.needs_input_grad[1]:
            hidden_grad = multiply(flat, half_up, layer.scaling).view(hidden.shape)
        if ctx.needs_input_grad[2]:
            up_grad = layer.compute_weight_grad(flat, flatten(hidden) * layer.scaling, ctx.weight_dtype)
        return gradient, hidden_grad, up_grad, None, None
