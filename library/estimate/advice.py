"""Find the fastest options that fit into a memory: checkpointing, format and place of the base weights.

All combinations are estimated from two steps on the meta device, with checkpointing and without; the ones that are
advised are estimated again by a step of their own.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import RunConfig
from ..config.options import build_config, flatten_config
from ..models.families import FAMILIES
from ..models.trained_components import caches_only_t5, select_trained_text_encoders
from ..parallel.quantize import RELATIVE_ERRORS
from .memory_estimate import estimate_memory, estimate_optimizer_state, split_model
from .meta_run import LargestBatch, MetaRun, disable_logging
from .parallel_layouts import LayoutFinder, ParallelLayout
from .step_time import Devices, estimate_images_per_second

logger = logging.getLogger(__name__)
MARGIN = 0.05
"""Share of the memory that stays free: estimates are that exact."""
SAME_SPEED = 0.1
"""Relative difference of speeds that does not count: the model of a step's time is no more exact."""
CHECKPOINTING_DETAILS = ("gradient_checkpointing_every", "activation_memory_budget", "cpu_offload_checkpointing")
INTERVALS = (3, 2)
"""Values of ``gradient_checkpointing_every`` between no checkpointing and every block."""
SWAP_SHARES = (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)
"""Shares of the blocks that are swapped."""


@dataclass(frozen=True)
class Candidate:
    """A combination of options with its estimates."""

    options: Mapping[str, Any]
    layout: ParallelLayout
    """The layout, with the options in its configuration."""
    total: int
    """Bytes on the fullest device."""
    images_per_second: float

    @property
    def error(self) -> float:
        """Relative error of the base weights."""
        return RELATIVE_ERRORS[self.layout.config.model.quantize_base]


def add_free_savings(finder: LayoutFinder) -> tuple[LayoutFinder, dict[str, Any]]:
    """Add what saves memory and costs nothing, as far as the run allows it: caches, and bf16 if no precision is set."""
    adapter, optim, facts = finder.config.adapter, finder.config.optim, FAMILIES.get(finder.model.family).facts
    wanted: list[dict[str, Any]] = [{"cache_latents": True}]
    if not select_trained_text_encoders(adapter, optim, facts) or caches_only_t5(adapter, optim, facts):
        wanted.append({"cache_text_encoder_outputs": True})
    if finder.config.distributed.mixed_precision is None:
        wanted.append({"mixed_precision": "bf16"})
    added = dict[str, Any]()
    for options in wanted:
        changed = None if finder.explicit & options.keys() else finder.add_options(options)
        if changed is not None:
            finder, added = changed, added | options
    return finder, added


class GridSearch:
    """The combinations of options on a layout whose devices hold the whole model, with their estimates."""

    def __init__(self, finder: LayoutFinder, layout: ParallelLayout, batch: LargestBatch, devices: Devices):
        self._finder, self._layout, self._batch, self._devices = finder, layout, batch, devices
        self._runs: dict[bool, MetaRun] = {}
        self._optimizer_state = 0

    def estimate_candidates(self) -> Iterator[Candidate]:
        """Yield every combination; options that the user set stay as they are."""
        for checkpointing, run in self._run_checkpointed_steps():
            for storage, blocks_to_swap in self._list_storages(run):
                options = {**checkpointing}
                if storage != "none":
                    options["quantize_base"] = storage
                if blocks_to_swap:
                    options["blocks_to_swap"] = blocks_to_swap
                layout = change_layout(self._layout, options)
                yield self._estimate(options, layout, run.replace_storage(layout.config))

    def _run_checkpointed_steps(self) -> Iterator[tuple[Mapping[str, Any], MetaRun]]:
        """Yield options of checkpointing with a run of each: steps of every n-th block are put together from two."""
        train = self._layout.config.train
        if self._finder.explicit & {"gradient_checkpointing", *CHECKPOINTING_DETAILS}:
            yield {}, self._get_run(train.gradient_checkpointing)
            return
        plain, checkpointed = self._get_run(False), self._get_run(True)
        yield {}, plain
        if not plain.family.facts.blocks.has_skip_connections:  # blocks of a UNet are not those that are checkpointed
            for every in INTERVALS:
                options = {"gradient_checkpointing": True, "gradient_checkpointing_every": every}
                step = plain.step.mix_blocks(checkpointed.step, every)
                yield options, plain.replace_step(change_layout(self._layout, options).config, step)
        yield {"gradient_checkpointing": True}, checkpointed

    def _get_run(self, is_checkpointed: bool) -> MetaRun:
        if is_checkpointed not in self._runs:
            same_settings = next(iter(self._runs.values()), None)
            plain = {"gradient_checkpointing": is_checkpointed, "quantize_base": "none", "blocks_to_swap": 0}
            config = change_layout(self._layout, plain).config
            logger.info("estimating memory: a step %s checkpointing", "with" if is_checkpointed else "without")
            with disable_logging():
                self._runs[is_checkpointed] = MetaRun(
                    config, self._finder.model, self._batch, same_settings=same_settings
                )
        return self._runs[is_checkpointed]

    def _list_storages(self, run: MetaRun) -> Iterator[tuple[str, int]]:
        """Yield formats of the base weights, and numbers of swapped blocks."""
        config, count = self._layout.config, run.base_weights.count
        is_format_set, is_swap_set = (name in self._finder.explicit for name in ("quantize_base", "blocks_to_swap"))
        formats = [config.model.quantize_base] if is_format_set else [*RELATIVE_ERRORS]
        numbers = {round(share * count) for share in SWAP_SHARES}
        for storage in formats:
            for blocks_to_swap in sorted({config.train.blocks_to_swap} if is_swap_set else numbers):
                yield storage, blocks_to_swap

    def _estimate(self, options: Mapping[str, Any], layout: ParallelLayout, run: MetaRun) -> Candidate:
        parts = split_model(run, layout, self._devices.count, self._devices.memory)
        if not self._optimizer_state:
            self._optimizer_state = estimate_optimizer_state(layout.config.optim, run.build_param_groups())
        memory = estimate_memory(layout, run, parts, self._optimizer_state, self._batch.buffered_shapes)
        speed = estimate_images_per_second(layout, run, parts, len(self._batch.captions), self._devices)
        return Candidate(options, layout, memory.total, speed)


def change_layout(layout: ParallelLayout, options: Mapping[str, Any]) -> ParallelLayout:
    """Return the same layout with other options in its configuration."""
    return replace(layout, config=build_config(RunConfig, {**flatten_config(layout.config), **options}))


def select_candidates(candidates: Iterable[Candidate], limit: float) -> list[Candidate]:
    """Select the fastest that fits, and for each more exact format of the base weights the fastest with that.

    Of candidates that are as good as equally fast, the most exact is taken, then the one with the fewest options.
    """
    fitting = [each for each in candidates if each.total <= limit]
    selected = list[Candidate]()
    while fitting:
        fastest = max(each.images_per_second for each in fitting)
        equal = [each for each in fitting if each.images_per_second >= (1 - SAME_SPEED) * fastest]
        best = min(equal, key=lambda each: (each.error, len(each.options), -each.images_per_second))
        selected.append(best)
        fitting = [each for each in fitting if each.error < best.error]
    return selected
