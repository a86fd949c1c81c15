"""LoRA files a run starts from: ``base_weights``, merged into the model, and ``network_weights``, for the adapter."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters import lora
from ..adapters.alpha_folding import change_alpha
from ..adapters.formats import AdapterFileContents, convert_from_file_format
from ..adapters.key_names import ComponentKeys
from ..adapters.lora import Adapter
from ..adapters.lora_file import InvalidAdapterFileError, read_safetensors
from ..adapters.merge import merge_adapter
from ..adapters.peft_types import RankAlpha
from ..adapters.state_dict import PEFT_SUFFIXES, UP, group_by_module, iter_named_tensors
from ..config.network_args import get_adapter_type
from ..config.schema import AdapterConfig
from ..errors import FileError, UserError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.loading import load_components_on_meta
from .component_keys import collect_component_keys

logger = logging.getLogger(__name__)
ROTATION_TYPES = {"oft", "boft"}


@dataclass(frozen=True)
class InitialWeights:
    """The contents of both kinds of files."""

    base_weights: Sequence[tuple[str, AdapterFileContents, float]] = ()
    """File name, content and multiplier."""
    network_weights: AdapterFileContents | None = None
    is_dim_from_weights: bool = False

    @property
    def rank_alphas(self) -> Mapping[str, RankAlpha] | None:
        """The rank and alpha of each module with ``dim_from_weights``."""
        if self.network_weights is None or not self.is_dim_from_weights:
            return None
        updates = group_by_module(self.network_weights.state_dict, self.network_weights.alphas)
        return {module: RankAlpha(update.rank, update.alpha) for module, update in updates.items()}


def read_initial_weights(
    adapter: AdapterConfig, family: Family, detected: DetectedModel, *, caches_text_outputs: bool = False
) -> InitialWeights:
    """Read all files before the model is loaded; all problems are reported at once."""
    if not adapter.base_weights and adapter.network_weights is None:
        return InitialWeights()
    pipe = load_components_on_meta(detected, (family.denoiser_name, *family.text_lora_prefixes))
    components = collect_component_keys(family, pipe)
    problems: list[str] = []
    bases, weights = [], None
    multipliers = [*adapter.base_weights_multiplier, *[1.0] * len(adapter.base_weights)]
    for path, multiplier in zip(adapter.base_weights, multipliers, strict=False):
        content = _read_contents("base_weights", path, components, problems)
        if content is not None:
            encoders = sorted({module.partition(".")[0] for module in content.alphas} - {family.denoiser_name})
            if encoders and caches_text_outputs:
                problems.append(
                    f"--base_weights: {path}: changes {encoders[0]}, but cached text encoder outputs are encoded"
                    " without it; remove cache_text_encoder_outputs"
                )
            if rotations := _list_adapter_types(content) & ROTATION_TYPES:
                problems.append(
                    f"--base_weights: {path}: has type {'/'.join(sorted(rotations))}, which cannot be merged;"
                    " LoRA, DoRA, LoHa and LoKr can"
                )
            bases.append((Path(path).name, content, multiplier))
    if adapter.network_weights is not None:
        weights = _read_contents("network_weights", adapter.network_weights, components, problems)
        if weights is not None:
            weights = _drop_unused_layers(weights, family, pipe)
            file_types, own_type = _list_adapter_types(weights), get_adapter_type(adapter)
            if file_types != {own_type}:
                problems.append(
                    f"--network_weights: {adapter.network_weights}: has type {'/'.join(sorted(file_types))}, but this"
                    f" run trains {own_type}; change network_module or network_args"
                )
    if problems:
        raise FileError(problems)
    return InitialWeights(bases, weights, adapter.dim_from_weights)


def _list_adapter_types(contents: AdapterFileContents) -> set[str]:
    return {update.adapter_type for update in group_by_module(contents.state_dict, contents.alphas).values()}


def _read_contents(
    option: str, path: str, components: Sequence[ComponentKeys], problems: list[str]
) -> AdapterFileContents | None:
    try:
        return convert_from_file_format(*read_safetensors(Path(path).expanduser()), components)
    except (UserError, InvalidAdapterFileError) as error:
        text = str(error)
        problems.append(f"--{option}: {text if text.startswith(path) else f'{path}: {text}'}")
        return None


def _drop_unused_layers(contents: AdapterFileContents, family: Family, pipe: Any) -> AdapterFileContents:
    """Drop zero LoRA layers of modules without a gradient, for which other trainers write them."""
    unused = [
        f"{family.denoiser_name}.{module}" for module in family.get_unused_layers(getattr(pipe, family.denoiser_name))
    ]
    for part in family.text_lora_prefixes:
        unused += [f"{part}.{module}" for module in family.get_unused_text_layers(getattr(pipe, part), part)]
    dropped = {
        module
        for module in unused
        if module in contents.alphas
        and not bool(contents.state_dict.get(f"{module}.{PEFT_SUFFIXES[UP]}", torch.ones(1)).any())
    }
    prefixes = tuple(f"{module}." for module in dropped)
    state = {key: tensor for key, tensor in contents.state_dict.items() if not key.startswith(prefixes)}
    return replace(
        contents, state_dict=state, alphas={key: alpha for key, alpha in contents.alphas.items() if key not in dropped}
    )


def merge_base_weights(pipe: Any, initial_weights: InitialWeights) -> None:
    """Merge ``base_weights`` into the loaded components."""
    for name, content, multiplier in initial_weights.base_weights:
        updates = group_by_module(content.state_dict, content.alphas)
        for path, update in updates.items():
            part, _, module = path.partition(".")
            layer: Any = getattr(pipe, part).get_submodule(module)
            merge_adapter(layer.weight, update, multiplier)
        logger.info("base_weights: merged %s: %d modules, multiplier %g", name, len(updates), multiplier)


def load_network_weights(model: nn.Module, adapter: Adapter, initial_weights: InitialWeights) -> None:
    """Load ``network_weights`` into the adapter; modules that the file lacks keep their usual initialization."""
    content = initial_weights.network_weights
    if content is None:
        return
    updates = group_by_module(content.state_dict, content.alphas)
    problems = [
        f"--network_weights: the file has {module}, which this run does not train"
        for module in updates
        if module not in adapter.rank_alphas
    ]
    for module, update in updates.items():
        own = adapter.rank_alphas.get(module)
        if own is not None and own.rank != update.rank:
            problems.append(
                f"--network_weights: {module} has rank {update.rank} in the file and {own.rank} in this run; add"
                " dim_from_weights, or change network_dim"
            )
    if problems:
        raise FileError([*problems[:3], *([f"... and {len(problems) - 3} more"] if len(problems) > 3 else [])])
    state_dict = lora.get_adapter_state_dict(model)
    for module, update in updates.items():
        rescaled = change_alpha(update, adapter.rank_alphas[module].alpha)
        state_dict |= iter_named_tensors(module, rescaled, PEFT_SUFFIXES)
    try:
        lora.load_adapter_state_dict(model, state_dict)
    except ValueError as error:
        raise UserError(
            f"--network_weights: cannot be loaded: {error}; layers that are one layer in the original checkpoint"
            " share one down matrix here, as in sd-scripts"
        ) from None
    logger.info("network_weights: loaded %d of %d modules", len(updates), len(adapter.rank_alphas))
