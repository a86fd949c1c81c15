"""Find what lets full training (``--train full``) fit into a memory: weights and optimizer are most of it.

Where checkpointing is not enough, the fused backward pass, bf16 weights and smaller optimizers are tried in the order
of how much they change the training.  The first that fits is advised first, then those after it that need less.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..optim.optimizer_names import find_missing_package
from .advice import Candidate, GridSearch, LayoutEstimate
from .meta_run_cache import MetaRuns
from .parallel_layouts import LayoutFinder, ParallelLayout
from .step_time import Devices

FULL_OPTIONS = ("fused_backward_pass", "full_bf16")
"""Options of full training that ``--gpu_memory`` of a run may choose; the optimizer is the user's choice."""
FUSED, BF16 = {"fused_backward_pass": True}, {"full_bf16": True}
ADAFACTOR = {"optimizer_type": "Adafactor", "optimizer_args": ("relative_step=False", "scale_parameter=False")}
CHANGES: tuple[Mapping[str, Any], ...] = (
    {},
    FUSED,
    BF16,
    {**FUSED, **BF16},
    {**FUSED, "optimizer_type": "AdamW8bit"},
    {**FUSED, **BF16, "optimizer_type": "AdamW8bit"},
    {**FUSED, **ADAFACTOR},
    {**FUSED, **BF16, **ADAFACTOR},
)
"""What is changed where checkpointing is not enough, the smallest change first."""
MAX_ADVICE = 3


class FullSearch:
    """A grid search for each set of changes; those with weights of the same dtype share their steps."""

    def __init__(
        self,
        finder: LayoutFinder,
        runs: MetaRuns,
        devices: Devices,
        allows: Callable[[ParallelLayout], bool] = lambda _: True,
        *,
        may_change_optimizer: bool = True,
    ):
        self._finder, self._runs, self._devices, self._allows = finder, runs, devices, allows
        self._may_change_optimizer = may_change_optimizer

    def advise(self, limit: float, slowest: float = 0.0) -> list[LayoutEstimate]:
        """Return what changes least of all that fits into ``limit``, then what changes more and needs less.

        If it fits without a change, changes are not tried.
        """
        found = list[LayoutEstimate]()
        for options, search in self._iter_searches():
            first = next(iter(search.advise(limit, 0.0 if found or options else slowest)), None)
            if first is not None and (not found or first.memory.total < found[-1].memory.total):
                found.append(_add_options(first, options))
            if len(found) == MAX_ADVICE or (found and not options):
                break
        return found

    def find_smallest(self) -> LayoutEstimate | None:
        """Return what needs least memory; None if no layout can be estimated."""
        found = [(options, search.find_smallest()) for options, search in self._iter_searches()]
        smallest = [_add_options(each, options) for options, each in found if each is not None]
        return min(smallest, key=lambda each: (each.memory.total, len(each.options)), default=None)

    @property
    def candidates(self) -> list[Candidate]:
        """Every combination that training would accept."""
        return [each for _, search in self._iter_searches() for each in search.candidates]

    def _iter_searches(self) -> Iterator[tuple[Mapping[str, Any], GridSearch]]:
        for number, options in enumerate(CHANGES):
            if (search := self._searches.get(number) or self._build_search(number)) is not None:
                yield options, search

    @cached_property
    def _searches(self) -> dict[int, GridSearch]:
        return {}

    def _build_search(self, number: int) -> GridSearch | None:
        """Build the search with a set of changes; None if the run does not allow them."""
        options = CHANGES[number]
        optimizer = str(options.get("optimizer_type", ""))
        if options.keys() & self._finder.explicit or (optimizer and not self._may_change_optimizer):
            return None
        if optimizer and find_missing_package(optimizer):
            return None
        finder = self._finder.add_options(options) if options else self._finder
        if finder is None:
            return None
        # Layouts that the changes rule out are no reason to keep options of the user from the others.
        finder = replace(finder, explicit=self._finder.explicit)
        is_bf16 = finder.config.distributed.full_bf16
        alike = (each for each in self._searches.values() if each.has_bf16_weights == is_bf16)
        search = GridSearch(finder, self._runs, self._devices, self._allows, same_steps=next(alike, None))
        self._searches[number] = search
        return search


def _add_options(estimate: LayoutEstimate, options: Mapping[str, Any]) -> LayoutEstimate:
    return replace(estimate, savings={**options, **estimate.savings})


def build_search(
    finder: LayoutFinder,
    runs: MetaRuns,
    devices: Devices,
    allows: Callable[[ParallelLayout], bool] = lambda _: True,
    *,
    may_change_optimizer: bool = True,
) -> GridSearch | FullSearch:
    """Build the search for what the run trains: adapters on frozen weights, or the weights themselves."""
    if finder.config.adapter.is_full:
        return FullSearch(finder, runs, devices, allows, may_change_optimizer=may_change_optimizer)
    return GridSearch(finder, runs, devices, allows)
