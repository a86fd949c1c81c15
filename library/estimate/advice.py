"""Find the fastest options that fit into a memory: layout, checkpointing, format and place of the base weights, batch.

All combinations are estimated from few steps on the meta device: without checkpointing, with it, with its activations
offloaded, with a budget of activations.  Every n-th checkpointed block is put together from two of them; memory is
linear in the number of blocks, in the bytes of the stored weights and in the batch size.  What is advised first is
estimated again by a step of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import RunConfig
from ..config.options import build_config, flatten_config
from ..models.families import FAMILIES
from ..models.trained_components import caches_only_t5, select_trained_text_encoders
from ..parallel.quantize import RELATIVE_ERRORS
from .memory_estimate import MemoryEstimate, estimate_memory, split_model
from .meta_run import MetaRun, disable_logging
from .meta_run_cache import WHOLE_MODEL, MetaRuns, get_partition
from .parallel_layouts import LayoutFinder, ParallelLayout, format_flags
from .step_time import Devices, estimate_images_per_second

MARGIN = 0.05
"""Share of the memory that stays free: estimates are that exact."""
SAME_SPEED = 0.1
"""Relative difference of speeds for which exact weights are preferred: the model of a step's time is no more exact."""
FEWER_OPTIONS = 0.03
"""Relative difference of speeds for which fewer options are preferred, with equally exact weights."""
CHECKPOINTING_OPTIONS = (
    "gradient_checkpointing",
    "gradient_checkpointing_every",
    "activation_memory_budget",
    "cpu_offload_checkpointing",
)
STORAGE_OPTIONS = ("quantize_base", "blocks_to_swap")
BATCH_OPTIONS = ("train_batch_size", "gradient_accumulation_steps")
INTERVALS = (4, 3, 2)
"""Values of ``gradient_checkpointing_every`` between no checkpointing and every block."""
BUDGET = 0.5
"""The value of ``activation_memory_budget`` that is tried."""


@dataclass(frozen=True)
class Candidate:
    """A combination of options on a layout, with its estimates."""

    options: Mapping[str, Any]
    """Options that are added to the user's, without those of the layout."""
    layout: ParallelLayout
    """The layout without the options."""
    total: int
    """Bytes on the fullest device."""
    images_per_second: float
    error: float
    """Relative error of the base weights."""
    mode: str = ""
    """The checkpointing and the batch; candidates that differ in the base weights only have the same."""

    @property
    def kind(self) -> Any:
        """What candidates share that differ in the number of swapped blocks only."""
        return self.mode, self.error, self.layout.name


@dataclass(frozen=True)
class LayoutEstimate:
    """A layout with its memory and speed."""

    layout: ParallelLayout
    memory: MemoryEstimate
    images_per_second: float
    """A speed to compare layouts by; it does not predict how long a run takes."""
    savings: Mapping[str, Any]
    """Options that were added to the user's."""

    @property
    def flags(self) -> str:
        return format_flags({**self.savings, **self.layout.options})

    @property
    def options(self) -> dict[str, Any]:
        """All options that were added to the user's."""
        return {**self.savings, **self.layout.options}

    @property
    def error(self) -> float:
        """Relative error of the base weights."""
        return RELATIVE_ERRORS[self.layout.config.model.quantize_base]

    @property
    def precision(self) -> str:
        """How exact the base weights are."""
        config = self.layout.config
        if config.adapter.is_full:
            return f"{'bf16' if config.distributed.full_bf16 else 'float32'} weights"
        kind = config.model.quantize_base
        return f"{kind} weights, error {self.error:.2%}" if self.error else "exact weights"


def estimate_layout(
    layout: ParallelLayout,
    run: MetaRun,
    runs: MetaRuns,
    devices: Devices,
    savings: Mapping[str, Any],
    num_images: int | None = None,
) -> LayoutEstimate:
    """Estimate memory and speed of a layout from a step; ``num_images`` are those of its micro-batch."""
    parts = split_model(run, layout, devices.count, devices.memory)
    optimizer = runs.measure_optimizer(layout, run)
    memory = estimate_memory(layout, run, parts, optimizer, runs.batch.buffered_shapes)
    num_images = len(runs.batch.captions) if num_images is None else num_images
    state = optimizer.count_large_state(run.stored.swapped_kinds)
    speed = estimate_images_per_second(layout, run, parts, num_images, devices, swapped_state=state)
    return LayoutEstimate(layout, memory, speed, dict(savings))


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


@dataclass(frozen=True)
class _Mode:
    """Options of checkpointing and batch, with a step of them."""

    options: Mapping[str, Any]
    run: MetaRun
    is_step: bool
    """Whether it is a step that was run, and not put together from others."""
    num_images: int


class GridSearch:
    """All combinations of options on the layouts that share the step of the whole model, with their estimates."""

    def __init__(
        self,
        finder: LayoutFinder,
        runs: MetaRuns,
        devices: Devices,
        allows: Callable[[ParallelLayout], bool] = lambda _: True,
        *,
        same_steps: "GridSearch | None" = None,
    ):
        """``allows`` restricts the layouts; what saves memory and costs nothing is added to the settings.

        ``same_steps`` is a search whose settings differ in nothing that changes a step: its steps serve for both.
        """
        self._same_steps = same_steps
        self._finder, self._savings = add_free_savings(finder)
        self._runs, self._devices = runs, devices
        layouts = filter(allows, self._finder.find_layouts()[0])
        self._layouts = [each for each in layouts if get_partition(each, finder.model) == WHOLE_MODEL]
        self._allowed: dict[Any, bool] = {}
        self._are_modules_used = False

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every combination that training would accept; options that the user set stay as they are."""
        if not self._layouts:
            return []
        return [candidate for layout in self._layouts for candidate in self._estimate_layout(layout)]

    def _estimate_layout(self, layout: ParallelLayout) -> Iterator[Candidate]:
        for mode in self._modes:
            for storage in self._list_formats():
                options = {**mode.options, **({} if storage == self._base_format else {"quantize_base": storage})}
                if not self._is_allowed(layout, options):
                    continue
                changed = change_layout(layout, options)
                stored = mode.run.replace_storage(changed.config)
                for blocks_to_swap in self._list_swaps(layout, options, stored):
                    added = {**options, **({"blocks_to_swap": blocks_to_swap} if blocks_to_swap else {})}
                    swapped = _swap_blocks(changed, blocks_to_swap)
                    run = stored.replace_swaps(swapped.config)
                    found = self._estimate_derived(swapped, run, added, mode)
                    name, error = format_flags(mode.options), RELATIVE_ERRORS[storage]
                    yield Candidate(added, layout, found.memory.total, found.images_per_second, error=error, mode=name)

    def _estimate_derived(
        self, layout: ParallelLayout, run: MetaRun, savings: Mapping[str, Any], mode: _Mode
    ) -> LayoutEstimate:
        """Estimate a step that was not run."""
        return estimate_layout(layout, run, self._runs, self._devices, savings=savings, num_images=mode.num_images)

    def estimate(self, candidate: Candidate) -> LayoutEstimate:
        """Return the estimates of a candidate as they were derived."""
        layout = change_layout(candidate.layout, candidate.options)
        mode = self._get_mode(candidate)
        run = mode.run.replace_storage(layout.config)
        return self._estimate_derived(layout, run, {**self._savings, **candidate.options}, mode)

    def advise(self, limit: float, slowest: float = 0.0) -> list[LayoutEstimate]:
        """Return the fastest that fits into ``limit`` and is faster than ``slowest``, then more exact and slower ones.

        The first is estimated by a step of its own.  Where that needs more memory than was derived, so do all of its
        mode and format.
        """
        candidates = [each for each in self.candidates if each.images_per_second > slowest]
        missing = dict[Any, int]()
        while selected := select_candidates(candidates, limit):
            first = selected[0]
            if (kind := first.kind) in missing:  # only the number of swapped blocks is another one
                verified = add_bytes(self.estimate(first), missing[kind])
            else:
                verified = self.verify(first)
            if verified.memory.total <= limit:
                # Steps on the meta device unpack weights by other kernels than GPUs, so the speed stays.
                verified = replace(verified, images_per_second=first.images_per_second)
                return [verified, *map(self.estimate, selected[1:])]
            missing[kind] = verified.memory.total - first.total
            candidates = add_to_similar(candidates, first, missing[kind])
        return []

    def find_smallest(self) -> LayoutEstimate | None:
        """Return what needs least memory; None if no layout can be estimated."""
        smallest = min(self.candidates, key=lambda each: (each.total, len(each.options)), default=None)
        return None if smallest is None else self.estimate(smallest)

    def verify(self, candidate: Candidate) -> LayoutEstimate:
        """Estimate a candidate by a step of its own, unless its step was run before."""
        mode, is_stored = self._get_mode(candidate), self._changes_modules(candidate)
        if mode.is_step and not is_stored and not self._has_stored_base:
            return self.estimate(candidate)
        layout = change_layout(candidate.layout, candidate.options)
        if mode.num_images != len(self._runs.batch.captions):
            captions = self._runs.batch.captions[: mode.num_images]
            run = MetaRuns(self._finder.model, replace(self._runs.batch, captions=captions)).get(layout, "to verify")
        elif layout.config.train.activation_memory_budget or self._are_modules_used:
            run = self._runs.get(layout, "to verify")
        else:
            self._runs.remove(self._plain_layout)
            self._are_modules_used = is_stored or self._has_stored_base
            with disable_logging():
                run = self._plain_run.run_again(layout.config)
        added = {**self._savings, **candidate.options}
        return estimate_layout(layout, run, self._runs, self._devices, savings=added, num_images=mode.num_images)

    def _changes_modules(self, candidate: Candidate) -> bool:
        """Whether a candidate stores frozen weights otherwise; swapped weights that are trained change no step."""
        return not self._finder.config.adapter.is_full and bool(candidate.options.keys() & {*STORAGE_OPTIONS})

    def _get_mode(self, candidate: Candidate) -> _Mode:
        return next(mode for mode in self._modes if format_flags(mode.options) == candidate.mode)

    @cached_property
    def _modes(self) -> list[_Mode]:
        """Checkpointing in each way, on the user's batch and on parts of it that are accumulated."""
        if self._same_steps is not None:
            return self._same_steps._modes
        modes, count = [*self._list_checkpointing()], len(self._runs.batch.captions)
        train, explicit = self._finder.config.train, self._finder.explicit
        if self._runs.batch.can_be_split and "gradient_accumulation_steps" not in explicit:
            for parts in (parts for parts in range(2, count + 1) if count % parts == 0):
                size, steps = count // parts, parts * train.gradient_accumulation_steps
                for mode in modes[:]:
                    if mode.num_images == count:
                        options = {**mode.options, **dict(zip(BATCH_OPTIONS, (size, steps), strict=True))}
                        config = change_config(mode.run.config, options)
                        run = mode.run.replace_step(config, mode.run.step.split_batch(parts))
                        modes.append(_Mode(options, run, is_step=False, num_images=size))
        return modes

    def _list_checkpointing(self) -> Iterator[_Mode]:
        count, blocks = len(self._runs.batch.captions), self._plain_run.family.facts.blocks
        plain_config = self._plain_layout.config
        if self._finder.explicit & {*CHECKPOINTING_OPTIONS}:
            yield _Mode({}, self._plain_run, is_step=True, num_images=count)
            return
        yield _Mode({}, self._plain_run, is_step=True, num_images=count)
        checkpointed = self._run_checkpointed({})
        # Blocks of a UNet are not those that are checkpointed, and most of its time is that of the host.
        if not blocks.has_skip_connections:
            for every in INTERVALS:
                options = {"gradient_checkpointing": True, "gradient_checkpointing_every": every}
                step = self._plain_run.step.mix_blocks(checkpointed.run.step, every)
                run = self._plain_run.replace_step(change_config(plain_config, options), step)
                yield _Mode(options, run, is_step=False, num_images=count)
            yield self._run_checkpointed({"cpu_offload_checkpointing": True})
            yield self._run_checkpointed({"activation_memory_budget": BUDGET})
        yield checkpointed

    def _run_checkpointed(self, more: Mapping[str, Any]) -> _Mode:
        options = {"gradient_checkpointing": True, **more}
        layout = change_layout(self._plain_layout, options)
        if "activation_memory_budget" in more and not layout.config.adapter.is_full:
            run = self._runs.get(layout, "with a budget of activations")
        else:
            with disable_logging():
                run = self._plain_run.run_again(layout.config)
        return _Mode(options, run, is_step=True, num_images=len(self._runs.batch.captions))

    @cached_property
    def _plain_layout(self) -> ParallelLayout:
        """The first layout, without the checkpointing and storage that the user may have set."""
        return change_layout(self._layouts[0], dict(quantize_base="none", blocks_to_swap=0))

    @cached_property
    def _plain_run(self) -> MetaRun:
        if self._same_steps is not None:
            return self._same_steps._plain_run
        return self._runs.get(self._plain_layout, "base weights as they are")

    @property
    def has_bf16_weights(self) -> bool:
        """Whether trained weights are held in bf16."""
        return self._finder.config.distributed.full_bf16

    @cached_property
    def _base_format(self) -> str:
        return self._finder.config.model.quantize_base

    @property
    def _has_stored_base(self) -> bool:
        config = self._finder.config
        return self._base_format != "none" or (bool(config.train.blocks_to_swap) and not config.adapter.is_full)

    def _list_formats(self) -> list[str]:
        return [self._base_format] if "quantize_base" in self._finder.explicit else [*RELATIVE_ERRORS]

    def _list_swaps(self, layout: ParallelLayout, options: Mapping[str, Any], run: MetaRun) -> Sequence[int]:
        if "blocks_to_swap" in self._finder.explicit:
            return [self._finder.config.train.blocks_to_swap]
        can_swap = self._is_allowed(layout, {**options, "blocks_to_swap": 1})
        return range(run.base_weights.count + 1) if can_swap else [0]

    def _is_allowed(self, layout: ParallelLayout, options: Mapping[str, Any]) -> bool:
        """Whether training would accept the options on the layout; it depends on their names only."""
        key = layout.name, tuple(options)
        if key not in self._allowed:
            is_split = layout.dims.pp > 1 or layout.config.parallel.device_map is not None
            changed = self._finder.add_options(options) if options else self._finder
            is_sized = is_split and options.keys() & {*STORAGE_OPTIONS}  # derived for whole models and FSDP only
            self._allowed[key] = changed is not None and not is_sized and changed.allows(layout.name)
        return self._allowed[key]


def _swap_blocks(layout: ParallelLayout, blocks_to_swap: int) -> ParallelLayout:
    config = layout.config
    return replace(layout, config=replace(config, train=replace(config.train, blocks_to_swap=blocks_to_swap)))


def change_config(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with other options."""
    changed: RunConfig = build_config(RunConfig, {**flatten_config(config), **options})
    return changed


def change_layout(layout: ParallelLayout, options: Mapping[str, Any]) -> ParallelLayout:
    """Return the same layout with other options in its configuration."""
    return replace(layout, config=change_config(layout.config, options))


def select_candidates(candidates: Iterable[Candidate], limit: float) -> list[Candidate]:
    """Select the fastest that fits, and for each more exact format of the base weights the fastest with that.

    Of candidates that are as good as equally fast, the most exact is taken, and of those the one with fewest options.
    """
    fitting = [each for each in candidates if each.total <= limit]
    selected = list[Candidate]()
    while fitting:
        equal = _select_as_fast(fitting, SAME_SPEED)
        error = min(each.error for each in equal)
        exact = _select_as_fast([each for each in equal if each.error == error], FEWER_OPTIONS)
        best = min(exact, key=lambda each: (len(each.options), -each.images_per_second, each.total))
        selected.append(best)
        fitting = [each for each in fitting if each.error < best.error]
    return selected


def _select_as_fast(candidates: Sequence[Candidate], tolerance: float) -> list[Candidate]:
    fastest = max(each.images_per_second for each in candidates)
    return [each for each in candidates if each.images_per_second >= (1 - tolerance) * fastest]


def add_to_similar(candidates: Iterable[Candidate], similar: Candidate, num_bytes: int) -> list[Candidate]:
    """Add bytes to all candidates that differ from one in the number of swapped blocks only."""
    return [replace(each, total=each.total + num_bytes) if each.kind == similar.kind else each for each in candidates]


def add_bytes(estimate: LayoutEstimate, num_bytes: int) -> LayoutEstimate:
    """Add what a step of a similar candidate needed more than was derived."""
    memory = estimate.memory
    return replace(estimate, memory=replace(memory, activations=memory.activations + num_bytes))
