"""The norms of the updates of adapted layers, and max-norm regularization (``scale_weight_norms``)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .component_key_names import clean_parameter_name
from .injection import Adapter

MAX_COPIED_NUMEL = 2**24
"""Weights that are stacked at once to compute update norms: 64 MiB in float32."""


class MaxNormRegularizer:
    """Scale updates down to a maximum norm after each step (``scale_weight_norms``), without synchronizing."""

    def __init__(self, model: nn.Module, adapter: Adapter, max_norm: float):
        self.max_norm = max_norm
        self.groups: dict[int, tuple[nn.Parameter, float, list[nn.Parameter]]] = {}
        self.products: list[tuple[nn.Module, list[nn.Parameter]]] = []
        """The layers of LoHa and LoKr, whose updates are products of these factors."""
        for name, size in adapter.rank_alphas.items():
            layer = model.get_submodule(name)
            if factors := _list_product_factors(layer):
                self.products.append((layer, factors))
                continue
            down, up = (getattr(layer, half)["default"].weight for half in ("lora_A", "lora_B"))
            # Modules that are fused in the original model share lora_A and count as one.
            ups = self.groups.setdefault(id(down), (down, size.alpha / size.rank, []))[2]
            if not any(up is other for other in ups):  # two experts may have one adapter
                ups.append(up)

    @torch.no_grad()
    def __call__(self) -> None:
        for down, scale, ups in self.groups.values():
            self._scale_factors(compute_lora_norm(down, ups, scale), (down, *ups), 2)
        for layer, factors in self.products:
            norm = _compute_product_norm(layer)
            if norm is not None:
                self._scale_factors(norm, factors, len(factors))

    def _scale_factors(self, norm: Tensor, factors: Sequence[nn.Parameter], num_factors: int) -> None:
        """Scale each factor alike, so that the update, a product of ``num_factors`` of them, has at most the norm."""
        ratio = (self.max_norm / norm).clamp(max=1) ** (1 / num_factors)
        for factor in factors:
            factor.mul_(ratio)


def _list_product_factors(layer: Any) -> list[nn.Parameter]:
    """List the weights whose product is the update of a LoHa or LoKr layer; empty for other types."""
    names = [name for name in layer.adapter_layer_names if name.startswith(("hada_", "lokr_"))]
    return [weights["default"] for name in names if "default" in (weights := getattr(layer, name))]


def compute_lora_norm(down: Tensor, ups: Sequence[Tensor], scale: float) -> Tensor:
    """The Frobenius norm of ``scale * up @ down``; ``ups`` that share ``down`` count as one."""
    return compute_lora_norms(down.flatten(1), [up.flatten(1) for up in ups], scale)


def compute_lora_norms(down: Tensor, ups: Sequence[Tensor], scale: float) -> Tensor:
    """Compute the norms of ``scale * up @ down``, of matrices or stacks of them, from Gram matrices of rank x rank."""
    inner = down @ down.mT
    outer = sum((up.mT @ up for up in ups), torch.zeros_like(inner))
    return (inner * outer).sum(dim=(-2, -1)).clamp_min(0).sqrt() * scale


def find_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with an adapter, by name."""
    modules = model.named_modules()
    return {clean_parameter_name(name): each for name, each in modules if _is_adapter_layer(each)}


def _is_adapter_layer(layer: nn.Module) -> bool:  # mypy would narrow the type of the layer to BaseTunerLayer
    return isinstance(layer, BaseTunerLayer)


def compute_update_norms(model: nn.Module) -> dict[str, float]:
    """Compute the norm of each layer's update, which is 0 before training; synchronizes with the device once."""
    return compute_layer_update_norms(find_adapter_layers(model))


@torch.no_grad()
def compute_layer_update_norms(layers: Mapping[str, nn.Module]) -> dict[str, float]:
    """Compute the norm of the update of these layers, for callers that keep them: finding layers is slower than norms.

    LoRA layers of one shape are computed at once: large models have hundreds, and each takes a dozen small kernels.
    """
    groups: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(_get_lora_kind(layer) or name, []).append(name)
    chunks = [chunk for names in groups.values() for chunk in _split_into_chunks(names, layers)]
    norms = [_compute_update_norms([layers[name] for name in chunk]) for chunk in chunks]
    stacked = torch.cat([norm.to(norms[0].device) for norm in norms])  # layers may be on several devices
    by_name = dict(zip((name for chunk in chunks for name in chunk), stacked.tolist(), strict=True))
    return {name: by_name[name] for name in layers}


def _split_into_chunks(names: Sequence[str], layers: Mapping[str, nn.Module]) -> Iterator[Sequence[str]]:
    """Split layers of one shape so that the copies of a chunk's weights stay small."""
    numel = sum(parameter.numel() for parameter in layers[names[0]].parameters() if parameter.requires_grad)
    size = max(1, MAX_COPIED_NUMEL // max(1, numel))
    return (names[start : start + size] for start in range(0, len(names), size))


def _get_lora_kind(layer: Any) -> tuple[Any, ...] | None:
    """Device, shapes and scale of its LoRA; None for other adapter types."""
    if "lora_A" not in layer.adapter_layer_names:
        return None
    down, up = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    return down.device, down.flatten(1).shape, up.flatten(1).shape, layer.scaling["default"]


def _compute_update_norms(layers: Sequence[Any]) -> Tensor:
    """The norms of LoRA updates of one shape and scale, or of one adapter of another type."""
    weights = layers[0].adapter_layer_names
    if "lora_A" in weights:
        downs, ups = (
            torch.stack([getattr(layer, name)["default"].weight.flatten(1).float() for layer in layers])
            for name in ("lora_A", "lora_B")
        )
        return compute_lora_norms(downs, [ups], layers[0].scaling["default"])
    (layer,) = layers
    norm = _compute_product_norm(layer)
    if norm is None:  # OFT and BOFT: zero weights are the identity rotation
        weights = [weight.flatten() for name, weight in layer.named_parameters() if "default" in name]
        norm = torch.cat(weights).float().norm()
    return norm[None]


def _compute_product_norm(layer: Any) -> Tensor | None:
    """The norm of the update of a LoHa or LoKr layer; None for other types.

    peft's ``get_delta_weight`` gives the update the shape of the base weight, which ZeRO 3 empties between forwards.
    """
    names, scale = layer.adapter_layer_names, layer.scaling["default"] if hasattr(layer, "scaling") else 1.0
    if "hada_w1_a" in names:
        first, second = (_multiply_factors(layer, f"hada_w{half}", f"hada_t{half}") for half in (1, 2))
        hadamard: Tensor = (first * second).norm() * abs(scale)
        return hadamard
    if "lokr_w1" in names:
        first, second = (_multiply_factors(layer, f"lokr_w{half}", f"lokr_t{half}") for half in (1, 2))
        kronecker: Tensor = first.norm() * second.norm() * abs(scale)
        return kronecker
    return None


def _multiply_factors(layer: Any, weight: str, core: str) -> Tensor:
    """Multiply the factors of one half of a LoHa or LoKr, with the core of a Tucker decomposition between them."""

    def get_factor(name: str) -> Tensor | None:
        weights = getattr(layer, name, {})
        return weights["default"].float() if "default" in weights else None

    whole = get_factor(weight)
    if whole is not None:
        return whole
    first, second, middle = get_factor(f"{weight}_a"), get_factor(f"{weight}_b"), get_factor(core)
    if first is None or second is None:
        raise KeyError(f"{type(layer).__name__} has neither {weight} nor both of its factors")
    if middle is not None:
        return torch.einsum("ijkl,ip,jr->prkl", middle, first, second)
    return first @ second
