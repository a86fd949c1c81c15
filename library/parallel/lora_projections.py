"""LoRA layers that read one input, such as q, k and v of an attention or a gate, as one autograd function.

One matrix product computes the outputs of their ``lora_A``, and one the gradients of these weights; gradients of the
input are added by the matrix products.  Whichever layer is called first computes the outputs of all, which the others
return when they are called with the same input.  A layer that is called with another input computes its own output.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .lora_linear import FusedLoraForward, HalfPrecisionCopies, flatten, multiply

PROJECTIONS = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("to_query", "to_key", "to_value"),
    ("q_proj", "k_proj", "v_proj"),
    ("w1", "w3"),
    ("gate", "up"),
    ("gate_proj", "up_proj"),
    ("gate_layer", "proj"),
)
"""Names in an attention or a gated feed-forward, in the order in which ``recomputed_activations`` calls the latter.

q of a cross attention reads another input than k and v.  A module whose ``first_projection`` is another one says so.
"""


class PendingOutputs:
    """The outputs of the latest group, until its layers are called."""

    def __init__(self) -> None:
        self.discarded = 0
        """How many outputs no layer asked for."""
        self.clear()

    def clear(self, *_: Any) -> None:
        self.discarded += len(getattr(self, "_outputs", ()))
        self._input: Tensor | None = None
        self._version: int | None = None
        self._outputs: dict[FusedLoraForward, Tensor] = {}

    def put(self, input: Tensor, outputs: Iterable[tuple[FusedLoraForward, Tensor]]) -> None:
        self.clear()
        self._input, self._version, self._outputs = input, _get_version(input), dict(outputs)

    def pop(self, layer: FusedLoraForward, input: Tensor) -> Tensor | None:
        if self._input is not input or self._version != _get_version(input):
            return None
        output = self._outputs.pop(layer, None)
        if not self._outputs:
            self._input = None
        return output


def _get_version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class ProjectionGroup:
    """Layers that read one input, in the order in which they are called; some may share one ``lora_A``."""

    def __init__(self, layers: Sequence[FusedLoraForward], pending: PendingOutputs):
        self.layers, self.pending = layers, pending
        self.copies: HalfPrecisionCopies = layers[0].copies
        downs = self.downs
        self.ranks = [len(down) for down in downs]
        self.parts = [next(i for i, down in enumerate(downs) if down is layer.down.weight) for layer in layers]
        """The ``lora_A`` of each layer, among the different ones."""

    @property
    def downs(self) -> tuple[nn.Parameter, ...]:
        return tuple(dict.fromkeys(layer.down.weight for layer in self.layers))

    def compute(self, layer: FusedLoraForward, input: Tensor) -> Tensor | None:
        """Return the output of a layer; None if it has to compute it alone."""
        output = self.pending.pop(layer, input)
        if output is not None or layer is not self.layers[0]:
            return output
        if not all(other.can_share_input(input, layer) for other in self.layers[1:]):
            return None
        downs, ups = self.downs, [each.up.weight for each in self.layers]
        half_down, half_ups = self.copies.get_stack(downs), list(map(self.copies.get, ups))
        apply = _LoraProjections.apply
        outputs = apply(input, self, half_down, half_ups, *downs, *ups)  # type: ignore[no-untyped-call]
        self.pending.put(input, zip(self.layers, outputs, strict=True))
        return self.pending.pop(layer, input)

    def split_ranks(self, hidden: Tensor) -> list[Tensor]:
        """Return what belongs to the ``lora_A`` of each layer."""
        columns = torch.split(hidden, self.ranks, dim=1)
        return [columns[part] for part in self.parts]


class _LoraProjections(torch.autograd.Function):
    """Does for each layer of a group what ``lora_linear`` does for one."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: ProjectionGroup, *weights: Any) -> tuple[Tensor, ...]:
        half_down, half_ups, first, *_ = weights
        layers, states = group.layers, flatten(input.to(half_down.dtype))
        shape, has_backward = input.shape, ctx.needs_input_grad[0]
        outputs = [layer.compute_base(states, shape, has_backward=has_backward) for layer in layers]
        hidden = multiply(states, half_down.t(), layers[0].scaling)
        rest = zip(layers, outputs, group.split_ranks(hidden), half_ups, strict=True)
        outputs = [layer.add_up(*tensors) for layer, *tensors in rest]
        ctx.save_for_backward(states, hidden)
        ctx.set_materialize_grads(False)
        ctx.group, ctx.half_down, ctx.half_ups = group, half_down, half_ups
        ctx.shape, ctx.dtype, ctx.weight_dtype = shape, input.dtype, first.dtype
        return tuple(output.view(*input.shape[:-1], output.shape[-1]) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        group, (states, hidden), needs = ctx.group, ctx.saved_tensors, list(ctx.needs_input_grad)
        grads = [None if each is None else flatten(each) for each in gradients]
        hidden_grad, input_grad = _differentiate_inputs(ctx, grads, hidden)
        if input_grad is not None:
            torch.addmm(input_grad, hidden_grad, ctx.half_down, out=input_grad)
            input_grad = input_grad.view(ctx.shape).to(ctx.dtype)
        layer, dtype, first_up = group.layers[0], ctx.weight_dtype, 4 + len(group.ranks)
        down_grads: list[Tensor | None] = [None] * len(group.ranks)
        if any(needs[4:first_up]):
            rows = layer.compute_weight_grad(hidden_grad, states, dtype).split(group.ranks)
            used = {part for part, grad in zip(group.parts, grads, strict=True) if grad is not None}
            down_grads = [each if needs[4 + part] and part in used else None for part, each in enumerate(rows)]
        up_grads = [
            layer.compute_weight_grad(grad, part, dtype) if is_needed and grad is not None else None
            for is_needed, grad, part in zip(needs[first_up:], grads, group.split_ranks(hidden), strict=True)
        ]
        return input_grad, None, None, None, *down_grads, *up_grads


def _differentiate_inputs(ctx: Any, gradients: Sequence[Tensor | None], hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the outputs of all ``lora_A``, and those of the inputs of the base, added."""
    group, input_grad = ctx.group, None
    hidden_grad = torch.zeros_like(hidden) if any(each is None for each in gradients) else torch.empty_like(hidden)
    is_written = set[int]()
    for number, (layer, grad) in enumerate(zip(group.layers, gradients, strict=True)):
        if grad is None:
            continue
        part, half_up = group.split_ranks(hidden_grad)[number], ctx.half_ups[number]
        if group.parts[number] in is_written:
            torch.addmm(part, grad, half_up, alpha=layer.scaling, out=part)
        else:
            multiply(grad, half_up, layer.scaling, out=part)
        is_written.add(group.parts[number])
        if ctx.needs_input_grad[0]:
            input_grad = layer.add_base_grad(grad, input_grad, ctx.shape)
    return hidden_grad, input_grad


def find_projections(model: nn.Module) -> Iterator[list[FusedLoraForward]]:
    """Yield the fused layers of a model that read one input."""
    for path, module in model.named_modules():
        children = {name for name, child in module.named_children() if child is not None}
        for names in PROJECTIONS:
            is_cross = getattr(module, "is_cross_attention", path.endswith((".cross_attention", ".attn2")))
            readers = [name for name in (names[1:] if is_cross else names) if name in children]
            readers.sort(key=lambda name: name != getattr(module, "first_projection", None))
            forwards = [vars(module.get_submodule(name)).get("forward") for name in readers]
            layers = [each for each in forwards if isinstance(each, FusedLoraForward)]
            if len(layers) > 1 and _have_one_input(layers):
                yield layers


def _have_one_input(layers: Sequence[FusedLoraForward]) -> bool:
    downs = [layer.down.weight for layer in layers]
    kinds = {(down.shape[1], down.dtype, down.device) for down in downs}
    return len(kinds) == 1
