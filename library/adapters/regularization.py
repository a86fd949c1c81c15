"""Dropout of adapters, as a function of seed, step and place: the same on every device and however a step is split.

torch's own draws from a global generator, and for a whole batch at once.  Here each number is a hash of the sample's
key, the module and the place in the module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .key_names import clean_parameter_name
from .lora import Adapter

_UINT32_MASK = 0xFFFFFFFF


SEQUENCE_NDIM = 3
"""Axes where a layer is given one token after the other."""


class LoraDropout:
    """Leaves out parts of what the down matrices of a LoRA say, while the model is in training."""

    def __init__(
        self,
        dropout: float,
        rank_dropout: float,
        module_dropout: float,
        get_token_positions: Callable[[nn.Module], Tensor | None] | None = None,
    ):
        self.dropout, self.rank_dropout, self.module_dropout = dropout, rank_dropout, module_dropout
        self.sample_keys: Tensor | None = None
        """One number for each sample of the batch; without it nothing is left out."""
        self.token_positions = get_token_positions or (lambda lora_a: None)
        """Which of all tokens a down matrix is given, where others are given the rest."""

    def attach(self, down_layers: Iterable[nn.Module]) -> None:
        """Down matrices that modules share are met once and speak alike for all of them."""
        for number, down in enumerate({id(down): down for down in down_layers}.values()):
            down.register_forward_hook(self._make_hook(torch.tensor(number)))

    def _make_hook(self, layer_index: Tensor) -> Any:
        # As a tensor, it is not part of what is compiled, which would be compiled for each module otherwise.
        def apply_dropout(module: nn.Module, given: Any, said: Tensor) -> Tensor:
            if not module.training or self.sample_keys is None:
                return said
            if isinstance(module, nn.Conv2d):
                return self.apply(said, layer_index, axis=1)
            places = self.token_positions(module) if said.dim() == SEQUENCE_NDIM else None
            return self.apply(said, layer_index, axis=-1, positions=places)

        return apply_dropout

    def apply(
        self, activations: Tensor, layer_index: int | Tensor, axis: int, positions: Tensor | None = None
    ) -> Tensor:
        """``said`` (B, ..., rank), or (B, rank, height, width), with what is left out at zero and the rest larger."""
        if self.sample_keys is None:
            raise AssertionError("the samples have no keys")
        pieces, left = divmod(
            len(activations), len(self.sample_keys)
        )  # a long caption is read in pieces, one after the other
        if left:
            raise AssertionError(f"{len(activations)} rows of {len(self.sample_keys)} samples")
        keys = self.sample_keys.to(activations.device).repeat_interleave(pieces)
        if self.dropout:
            columns = torch.arange(activations[0].numel(), device=activations.device)
            if positions is not None:
                columns = (
                    positions.to(activations.device)[:, None] * activations.shape[-1] + columns[: activations.shape[-1]]
                ).flatten()
            kept = hash_to_uniform(keys, 3 * layer_index, columns).view(activations.shape) >= self.dropout
            activations = activations * kept / (1 - self.dropout)
        shape = [len(keys)] + [1] * (activations.dim() - 1)
        if self.module_dropout:  # not made up for, as in sd-scripts
            activations = activations * (
                hash_to_uniform(keys, 3 * layer_index + 1, torch.zeros_like(keys[:1])).view(shape)
                >= self.module_dropout
            )
        if self.rank_dropout:
            shape[axis] = activations.shape[axis]
            columns = torch.arange(activations.shape[axis], device=activations.device)
            kept = hash_to_uniform(keys, 3 * layer_index + 2, columns).view(shape) >= self.rank_dropout
            activations = activations * kept / (1 - self.rank_dropout)
        return activations


def hash_to_uniform(keys: Tensor, stream: int | Tensor, columns: Tensor) -> Tensor:
    """(B, columns) numbers from 0 to 1, each a function of its row's key, the stream and the column."""
    rows = _mix_bits(_mix_bits(keys & _UINT32_MASK) + (keys >> 32 & _UINT32_MASK) + stream * 0x9E3779B1)
    return _mix_bits(rows[:, None] + columns * 0x85EBCA6B).float().div(2**32).clamp_max(1 - 2**-24)


def _mix_bits(values: Tensor) -> Tensor:
    """A hash of 32 bits; products that overflow 64 bits are right in the 32 that are kept."""
    values = values & _UINT32_MASK
    values = (values ^ values >> 16) * 0x7FEB352D & _UINT32_MASK
    values = (values ^ values >> 15) * 0x846CA68B & _UINT32_MASK
    return values ^ values >> 16


class MaxNormRegularizer:
    """After each step, makes updates shorter that have become too long; nobody waits for the device."""

    def __init__(self, model: nn.Module, adapter: Adapter, max_norm: float):
        self.max_norm = max_norm
        self.groups: dict[int, tuple[nn.Parameter, float, list[nn.Parameter]]] = {}
        for name, size in adapter.rank_alphas.items():
            layer = model.get_submodule(name)
            down, up = (getattr(layer, half)["default"].weight for half in ("lora_A", "lora_B"))
            # What is one module in the original model shares its down matrix, and is as long as a whole.
            self.groups.setdefault(id(down), (down, size.alpha / size.rank, []))[2].append(up)

    @torch.no_grad()
    def __call__(self) -> None:
        for down, scale, ups in self.groups.values():
            ratio = (self.max_norm / compute_lora_norm(down, ups, scale)).clamp(max=1).sqrt()
            for half in (down, *ups):
                half.mul_(ratio)


def compute_lora_norm(down: Tensor, ups: Sequence[Tensor], scale: float) -> Tensor:
    """The norm of ``scale * up @ down``, by way of small matrices of rank x rank."""
    inner = down.flatten(1) @ down.flatten(1).T
    outer = sum((up.flatten(1).T @ up.flatten(1) for up in ups), torch.zeros_like(inner))
    return (inner * outer).sum().clamp_min(0).sqrt() * scale


def find_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those with an adapter, by name."""
    return {clean_parameter_name(name): layer for name, layer in model.named_modules() if _is_adapter_layer(layer)}


def compute_update_norms(model: nn.Module) -> dict[str, float]:
    """Name of a layer -> the norm; 0 where nothing was learnt.  It waits for the device once."""
    return compute_layer_update_norms(find_adapter_layers(model))


def _is_adapter_layer(layer: nn.Module) -> bool:
    return isinstance(layer, BaseTunerLayer)


@torch.no_grad()
def compute_layer_update_norms(layers: Mapping[str, nn.Module]) -> dict[str, float]:
    """The same of layers that were looked up before, which takes longer than to compute their norms."""
    found = [_compute_update_norm(layer) for layer in layers.values()]
    norms = torch.stack([norm.to(found[0].device) for norm in found])  # layers may be on several devices
    return dict(zip(layers, norms.tolist(), strict=True))


def _compute_update_norm(layer: Any) -> Tensor:
    """Of ``scale * up @ down`` by products of the size of the rank; of other kinds as peft makes the update."""
    weights = layer.adapter_layer_names
    if "lora_A" in weights:
        down, up = (getattr(layer, name)["default"].weight.flatten(1).float() for name in ("lora_A", "lora_B"))
        square: Tensor = ((up.T @ up) * (down @ down.T)).sum().clamp(min=0)
        return square.sqrt().mul(layer.scaling["default"])
    if {"hada_w1_a", "lokr_w1"} & set(weights):
        update: Tensor = layer.get_delta_weight("default")
    else:  # rotations begin with weights of zero, which stand for none
        update = torch.cat([weight.flatten() for name, weight in layer.named_parameters() if "default" in name])
    return update.float().square().sum().sqrt()
