"""Activations of feed-forwards that are computed again in backward.

``hidden * gelu(gate)`` keeps hidden, gate and the output of the activation, and a LoRA layer that reads the product
keeps that, too.  The latter two take kernels that are bound by memory, so they are computed again: a fifth of what
training SDXL keeps.  The layer that reads an output finds how to compute it again by ``get_recomputation``.  Outputs
and gradients are equal to those of diffusers to the bit, in every precision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    compute: Callable[[Tensor], Tensor]
    backward: Any
    """The operator that computes the gradient of the input from that of the output."""


GELU = Activation(F.gelu, aten.gelu_backward)
SILU = Activation(F.silu, aten.silu_backward)


@dataclass(frozen=True)
class Recomputation:
    """How to compute a tensor again from others that are kept for backward in any case."""

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def get_recomputation(tensor: Tensor) -> Recomputation | None:
    """Return how to compute the output of an activation again; None for other tensors."""
    return getattr(tensor, "recomputation", None)


def _let_recompute(output: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    output.recomputation = Recomputation(compute, tuple(each.detach() for each in inputs))
    result: Tensor = output
    return result


class _GatedHalves(torch.autograd.Function):
    """The product of one half of a tensor with the activation of the other half."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, activation: Activation, gate_is_first: bool) -> Tensor:
        ctx.save_for_backward(states)
        ctx.activation, ctx.gate_is_first = activation, gate_is_first
        return _gate_halves(activation, gate_is_first, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (states,) = ctx.saved_tensors
        grad = torch.empty_like(states)
        _compute_gradients(ctx.activation, gradient, _split(states, ctx.gate_is_first), _split(grad, ctx.gate_is_first))
        return grad, None, None


class _GatedProduct(torch.autograd.Function):
    """The product of a tensor with the activation of another."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, hidden: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, hidden)
        ctx.activation = activation
        return _gate(activation, gate, hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, hidden = ctx.saved_tensors
        gradients = torch.empty_like(gate), torch.empty_like(hidden)
        _compute_gradients(ctx.activation, gradient, (gate, hidden), gradients)
        return *gradients, None


def _gate(activation: Activation, gate: Tensor, hidden: Tensor) -> Tensor:
    return activation.compute(gate) * hidden


def _gate_halves(activation: Activation, gate_is_first: bool, states: Tensor) -> Tensor:
    return _gate(activation, *_split(states, gate_is_first))


def _split(states: Tensor, gate_is_first: bool) -> tuple[Tensor, Tensor]:
    first, second = states.chunk(2, dim=-1)
    return (first, second) if gate_is_first else (second, first)


def _compute_gradients(
    activation: Activation, gradient: Tensor, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]
) -> None:
    """Write the gradients of gate and hidden, which may be halves of one tensor."""
    (gate, hidden), (grad_gate, grad_hidden) = inputs, outputs
    torch.mul(gradient, activation.compute(gate), out=grad_hidden)
    activation.backward.grad_input(gradient * hidden, gate, grad_input=grad_gate)


class RecomputedHalves:
    """Replaces the ``forward`` of a module that projects its input, if at all, and gates one half by the other."""

    def __init__(self, module: nn.Module, activation: Activation, *, gate_is_first: bool):
        self.module, self.activation, self.gate_is_first = module, activation, gate_is_first

    def __call__(self, states: Tensor) -> Tensor:
        project = getattr(self.module, "proj", None)
        states = states if project is None else project(states)
        kind = self.activation, self.gate_is_first
        output = _GatedHalves.apply(states, *kind)  # type: ignore[no-untyped-call]
        return _let_recompute(output, partial(_gate_halves, *kind), states)


class RecomputedFeedForward:
    """Replaces the ``forward`` of a feed-forward with layers of its own for the gate and for what it gates."""

    def __init__(self, module: nn.Module, activation: Activation, *names: str):
        """``names`` are those of the layers for the gate, for what it gates, and for the product."""
        self.module, self.activation, self.names = module, activation, names

    def __call__(self, states: Tensor) -> Tensor:
        project_gate, project, project_out = (getattr(self.module, name) for name in self.names)
        gate, hidden = project_gate(states), project(states)
        product = _GatedProduct.apply(gate, hidden, self.activation)  # type: ignore[no-untyped-call]
        output: Tensor = project_out(_let_recompute(product, partial(_gate, self.activation), gate, hidden))
        return output


class RecomputedActivation:
    """Replaces the ``forward`` of a module that projects its input and has an activation without a gate."""

    def __init__(self, module: nn.Module, compute: Callable[[Tensor], Tensor]):
        self.module, self.compute = module, compute

    def __call__(self, states: Tensor) -> Tensor:
        states = self.module.proj(states)  # type: ignore[operator]
        return _let_recompute(self.compute(states), self.compute, states)


HALVES = {
    "activations.GEGLU": (GELU, False),
    "activations.SwiGLU": (SILU, False),
    "transformer_flux2.Flux2SwiGLU": (SILU, True),
    "transformer_flux3.Flux3SwiGLU": (SILU, True),
}
FEED_FORWARDS = {
    "transformer_z_image.FeedForward": (SILU, "w1", "w3", "w2"),
    "transformer_krea2.Krea2SwiGLU": (SILU, "gate", "up", "down"),
    "transformer_qwenimage21.QwenImage21SwiGLUFeedForward": (SILU, "gate_layer", "proj", "out"),
    "transformer_ernie_image.ErnieImageFeedForward": (GELU, "gate_proj", "up_proj", "linear_fc2"),
    "auraflow_transformer_2d.AuraFlowFeedForward": (SILU, "linear_1", "linear_2", "out_projection"),
}
UNGATED = {"activations.GELU": "gelu", "activations.LinearActivation": "activation"}
"""Classes of diffusers by their module, which is not imported for it; of the last, the activation."""


def recompute_activations(model: nn.Module) -> int:
    """Let the activations of the feed-forwards of a model be computed again in backward; return their number."""
    count = 0
    for module in model.modules():
        package, _, file = type(module).__module__.rpartition(".")
        name = f"{file}.{type(module).__name__}"
        if not package.startswith("diffusers."):
            continue
        if name in HALVES:
            activation, gate_is_first = HALVES[name]
            module.forward = RecomputedHalves(module, activation, gate_is_first=gate_is_first)
        elif name in FEED_FORWARDS:
            module.forward = RecomputedFeedForward(module, *FEED_FORWARDS[name])
        elif name in UNGATED:
            module.forward = RecomputedActivation(module, getattr(module, UNGATED[name]))
        else:
            continue
        count += 1
    return count
