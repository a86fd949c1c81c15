"""LoRA files that a run starts from: ``base_weights`` go into the model, ``network_weights`` into what is trained."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import lora
from ..adapters.folding import of_alpha
from ..adapters.formats import Content, from_file
from ..adapters.keys import PartNames
from ..adapters.lora import Adapter, Size
from ..adapters.merging import merge
from ..adapters.updates import STATE, UP, named, updates_of
from ..adapters.verify import BrokenFileError, read
from ..config import RunConfig
from ..config.network_args import kind_of
from ..errors import ConfigError, UserError
from ..families.base import Family
from ..families.detect import Detected
from ..families.unloaded import unloaded
from .lora_parts import parts_of

logger = logging.getLogger(__name__)

ROTATIONS = {"oft", "boft"}


@dataclass(frozen=True)
class Starts:
    """What the files hold."""

    bases: Sequence[tuple[str, Content, float]] = ()
    """Name, content and strength of what goes into the model."""
    weights: Content | None = None
    """Where the adapter starts."""
    decides_sizes: bool = False

    @property
    def sizes(self) -> Mapping[str, Size] | None:
        """Of each module that is trained, if the file decides it."""
        if self.weights is None or not self.decides_sizes:
            return None
        updates = updates_of(self.weights.state, self.weights.alphas)
        return {module: Size(update.rank, update.alpha) for module, update in updates.items()}


def read_starts(config: RunConfig, family: Family, model: Detected) -> Starts:
    """Read all files; everything that is wrong with them is told together, before the model is loaded."""
    adapter = config.adapter
    if not adapter.base_weights and adapter.network_weights is None:
        return Starts()
    pipe = unloaded(model, (family.denoiser, *family.text_lora_prefixes))
    parts = parts_of(family, pipe)
    problems: list[str] = []
    bases, weights = [], None
    strengths = [*adapter.base_weights_multiplier, *[1.0] * len(adapter.base_weights)]
    for place, strength in zip(adapter.base_weights, strengths, strict=False):
        content = _content("base_weights", place, parts, problems)
        if content is not None:
            kept = sorted({module.partition(".")[0] for module in content.alphas} - {family.denoiser})
            if kept and config.cache.texts:
                problems.append(f"--base_weights: {place}: changes {kept[0]}, and captions are encoded without it;"
                                " take cache_text_encoder_outputs out")  # fmt: skip
            if turning := {update.kind for update in updates_of(content.state, content.alphas).values()} & ROTATIONS:
                problems.append(f"--base_weights: {place}: is of kind {'/'.join(sorted(turning))}, which cannot be"
                                " merged into a model here; LoRA, DoRA, LoHa and LoKr can")  # fmt: skip
            bases.append((Path(place).name, content, strength))
    if adapter.network_weights is not None:
        weights = _content("network_weights", adapter.network_weights, parts, problems)
        if weights is not None:
            weights = _without_idle(weights, family, pipe)
            kinds = {update.kind for update in updates_of(weights.state, weights.alphas).values()}
            if kinds != {kind_of(adapter)}:
                problems.append(f"--network_weights: {adapter.network_weights}: is of kind {'/'.join(sorted(kinds))},"
                                f" and {kind_of(adapter)} is to be trained; say so in network_module or"
                                " network_args")  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return Starts(bases, weights, adapter.dim_from_weights)


def _content(option: str, place: str, parts: Sequence[PartNames], problems: list[str]) -> Content | None:
    try:
        return from_file(*read(Path(place).expanduser()), parts)
    except (UserError, BrokenFileError) as error:
        text = str(error)
        problems.append(f"--{option}: {text if text.startswith(place) else f'{place}: {text}'}")
        return None


def _without_idle(content: Content, family: Family, pipe: Any) -> Content:
    """Others give layers a LoRA that no gradient reaches; it is zero, and not missed."""
    idle = [f"{family.denoiser}.{module}" for module in family.idle_layers(getattr(pipe, family.denoiser))]
    for part in family.text_lora_prefixes:
        idle += [f"{part}.{module}" for module in family.idle_text_layers(getattr(pipe, part), part)]
    gone = {module for module in idle if module in content.alphas
            and not bool(content.state.get(f"{module}.{STATE[UP]}", torch.ones(1)).any())}  # fmt: skip
    state = {key: tensor for key, tensor in content.state.items() if not key.startswith(tuple(f"{m}." for m in gone))}
    return replace(
        content, state=state, alphas={key: alpha for key, alpha in content.alphas.items() if key not in gone}
    )


def merge_bases(pipe: Any, starts: Starts) -> None:
    """Put ``base_weights`` into the parts that are loaded."""
    for name, content, strength in starts.bases:
        updates = updates_of(content.state, content.alphas)
        for place, update in updates.items():
            part, _, module = place.partition(".")
            layer: Any = getattr(pipe, part).get_submodule(module)
            merge(layer.weight, update, strength)
        logger.info("base_weights: %s is merged into the model: %d modules, strength %g", name, len(updates), strength)


def start_from(trained: nn.Module, adapter: Adapter, starts: Starts) -> None:
    """Give the adapter the weights of the file; what it does not hold starts as always."""
    content = starts.weights
    if content is None:
        return
    updates = updates_of(content.state, content.alphas)
    problems = [f"--network_weights: it trains {module}, and this run does not" for module in updates
                if module not in adapter.sizes]  # fmt: skip
    for module, update in updates.items():
        size = adapter.sizes.get(module)
        if size is not None and size.rank != update.rank:
            problems.append(f"--network_weights: {module} has rank {update.rank} in it and {size.rank} here; add "
                            "dim_from_weights, or change network_dim")  # fmt: skip
    if problems:
        raise ConfigError([*problems[:3], *([f"... and {len(problems) - 3} more"] if len(problems) > 3 else [])])
    own, given = lora.state(trained), dict[str, Tensor]()
    for module, update in updates.items():
        given |= dict(named(module, of_alpha(update, adapter.sizes[module].alpha), STATE))
    try:
        lora.load_state(trained, {**own, **given})
    except ValueError as error:
        raise UserError(f"--network_weights: cannot be represented here: {error}; parts of one layer of the original "
                        "model have one down matrix here, as in sd-scripts") from None  # fmt: skip
    logger.info("network_weights: %d of %d modules start where the file ends", len(updates), len(adapter.sizes))
