"""LoRA files that a run starts from: ``base_weights`` go into the model, ``network_weights`` into what is trained."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import lora
from ..adapters.alpha import change_alpha
from ..adapters.checkpoint_file import InvalidAdapterFileError, read_safetensors
from ..adapters.formats import AdapterFileContents, convert_from_file_format
from ..adapters.key_names import ComponentKeys
from ..adapters.lora import Adapter
from ..adapters.merge import merge_update
from ..adapters.peft_types import RankAlpha
from ..adapters.state_dict import PEFT_SUFFIXES, UP, group_updates, iter_named_tensors
from ..config import RunConfig
from ..config.network_args import get_adapter_type
from ..errors import ConfigError, UserError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.loading import load_components_on_meta
from .trainable import collect_component_keys

logger = logging.getLogger(__name__)


ROTATION_TYPES = {"oft", "boft"}


@dataclass(frozen=True)
class InitialWeights:
    """What the files hold."""

    base_weights: Sequence[tuple[str, AdapterFileContents, float]] = ()
    """Name, content and strength of what goes into the model."""
    network_weights: AdapterFileContents | None = None
    """Where the adapter starts."""
    is_dim_from_weights: bool = False

    @property
    def rank_alphas(self) -> Mapping[str, RankAlpha] | None:
        """Of each module that is trained, if the file decides it."""
        if self.network_weights is None or not self.is_dim_from_weights:
            return None
        updates = group_updates(self.network_weights.state_dict, self.network_weights.alphas)
        return {module: RankAlpha(update.rank, update.alpha) for module, update in updates.items()}


def read_initial_weights(config: RunConfig, family: Family, detected: DetectedModel) -> InitialWeights:
    """Read all files; everything that is wrong with them is told together, before the model is loaded."""
    adapter = config.adapter
    if not adapter.base_weights and adapter.network_weights is None:
        return InitialWeights()
    pipe = load_components_on_meta(detected, (family.denoiser_name, *family.text_lora_prefixes))
    parts = collect_component_keys(family, pipe)
    problems: list[str] = []
    bases, weights = [], None
    strengths = [*adapter.base_weights_multiplier, *[1.0] * len(adapter.base_weights)]
    for place, strength in zip(adapter.base_weights, strengths, strict=False):
        content = _read_contents("base_weights", place, parts, problems)
        if content is not None:
            kept = sorted({module.partition(".")[0] for module in content.alphas} - {family.denoiser_name})
            if kept and config.cache.caches_text_outputs:
                problems.append(
                    f"--base_weights: {place}: changes {kept[0]}, and captions are encoded without it;"
                    " take cache_text_encoder_outputs out"
                )
            if (
                turning := {
                    update.adapter_type for update in group_updates(content.state_dict, content.alphas).values()
                }
                & ROTATION_TYPES
            ):
                problems.append(
                    f"--base_weights: {place}: is of kind {'/'.join(sorted(turning))}, which cannot be"
                    " merged into a model here; LoRA, DoRA, LoHa and LoKr can"
                )
            bases.append((Path(place).name, content, strength))
    if adapter.network_weights is not None:
        weights = _read_contents("network_weights", adapter.network_weights, parts, problems)
        if weights is not None:
            weights = _drop_unused_layers(weights, family, pipe)
            kinds = {update.adapter_type for update in group_updates(weights.state_dict, weights.alphas).values()}
            if kinds != {get_adapter_type(adapter)}:
                problems.append(
                    f"--network_weights: {adapter.network_weights}: is of kind {'/'.join(sorted(kinds))},"
                    f" and {get_adapter_type(adapter)} is to be trained; say so in network_module or"
                    " network_args"
                )
    if problems:
        raise ConfigError(problems)
    return InitialWeights(bases, weights, adapter.dim_from_weights)


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
    """Others give layers a LoRA that no gradient reaches; it is zero, and not missed."""
    idle = [
        f"{family.denoiser_name}.{module}" for module in family.get_unused_layers(getattr(pipe, family.denoiser_name))
    ]
    for part in family.text_lora_prefixes:
        idle += [f"{part}.{module}" for module in family.get_unused_text_layers(getattr(pipe, part), part)]
    gone = {
        module
        for module in idle
        if module in contents.alphas
        and not bool(contents.state_dict.get(f"{module}.{PEFT_SUFFIXES[UP]}", torch.ones(1)).any())
    }
    state = {
        key: tensor for key, tensor in contents.state_dict.items() if not key.startswith(tuple(f"{m}." for m in gone))
    }
    return replace(
        contents, state_dict=state, alphas={key: alpha for key, alpha in contents.alphas.items() if key not in gone}
    )


def merge_base_weights(pipe: Any, initial_weights: InitialWeights) -> None:
    """Put ``base_weights`` into the parts that are loaded."""
    for name, content, strength in initial_weights.base_weights:
        updates = group_updates(content.state_dict, content.alphas)
        for place, update in updates.items():
            part, _, module = place.partition(".")
            layer: Any = getattr(pipe, part).get_submodule(module)
            merge_update(layer.weight, update, strength)
        logger.info("base_weights: %s is merged into the model: %d modules, strength %g", name, len(updates), strength)


def load_network_weights(model: nn.Module, adapter: Adapter, initial_weights: InitialWeights) -> None:
    """Give the adapter the weights of the file; what it does not hold starts as always."""
    content = initial_weights.network_weights
    if content is None:
        return
    updates = group_updates(content.state_dict, content.alphas)
    problems = [
        f"--network_weights: it trains {module}, and this run does not"
        for module in updates
        if module not in adapter.rank_alphas
    ]
    for module, update in updates.items():
        size = adapter.rank_alphas.get(module)
        if size is not None and size.rank != update.rank:
            problems.append(
                f"--network_weights: {module} has rank {update.rank} in it and {size.rank} here; add "
                "dim_from_weights, or change network_dim"
            )
    if problems:
        raise ConfigError([*problems[:3], *([f"... and {len(problems) - 3} more"] if len(problems) > 3 else [])])
    own, given = lora.get_adapter_state_dict(model), dict[str, Tensor]()
    for module, update in updates.items():
        given |= dict(
            iter_named_tensors(module, change_alpha(update, adapter.rank_alphas[module].alpha), PEFT_SUFFIXES)
        )
    try:
        lora.load_adapter_state_dict(model, {**own, **given})
    except ValueError as error:
        raise UserError(
            f"--network_weights: cannot be represented here: {error}; parts of one layer of the original "
            "model have one down matrix here, as in sd-scripts"
        ) from None
    logger.info("network_weights: %d of %d modules start where the file ends", len(updates), len(adapter.rank_alphas))
