"""Fitting into memory while the run goes on: batches are cut in parts, then activations are computed twice.

The plan stays as it is: the same pictures with the same noise in the same step, and a loss that is divided by the
pictures of the whole step.  So a step that was cut gives the same gradient as one that was not.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..data.batch import PixelBatch
from ..data.loader import StepWork
from ..distributed.memory import OutOfMemory
from ..distributed.strategy import DataParallel
from .task import Task

logger = logging.getLogger(__name__)


class Ladder:
    """How far a run went down to fit; all processes go down together, since all have batches of the same sizes."""

    def __init__(self, is_wanted: bool, compute_twice: Callable[[], None] | None):
        """``compute_twice`` switches gradient checkpointing on; without it, it is on already."""
        self.is_wanted, self._compute_twice = is_wanted, compute_twice
        self.parts = 1
        """So many make up a micro-batch."""

    def gradients(self, strategy: DataParallel, task: Task, work: StepWork, step: int) -> Tensor:
        """Those of one step; return its loss."""
        if not self.is_wanted:
            return strategy.gradients(task, work.batches, work.samples, step)
        while True:
            found = strategy.gradients_that_fit(task, self._cut(work.batches), work.samples, step)
            if not isinstance(found, OutOfMemory):
                return found
            task.forget()
            self._go_down(found, work.batches, step)

    def try_out(self, strategy: DataParallel, batch: PixelBatch, step: int, work: Callable[[PixelBatch], Any]) -> None:
        """``work`` with as many of the pictures as fit."""
        if not self.is_wanted:
            work(batch)
            return
        while (found := strategy.if_it_fits(lambda: _done(self._cut([batch])[0], work))) is not None:
            self._go_down(found, [batch], step)

    def _cut(self, batches: Sequence[PixelBatch]) -> list[PixelBatch]:
        return [part for batch in batches for part in batch.cut(-(-len(batch) // self.parts))]

    def _go_down(self, found: OutOfMemory, batches: Sequence[PixelBatch], step: int) -> None:
        if self.parts < max(len(batch) for batch in batches):
            self.parts *= 2
            change = f"micro-batches are cut in {self.parts} parts from now on, which changes nothing in the result"
        elif self._compute_twice is not None:
            self._compute_twice()
            self._compute_twice = None
            change = "gradient_checkpointing is switched on, which takes more time and changes nothing in the result"
        else:
            raise found
        logger.warning("step %d ran out of memory (%s); --on_oom ladder: %s, and the step comes again", step + 1,
                       found.phase, change)  # fmt: skip


def _done(batch: PixelBatch, work: Callable[[PixelBatch], Any]) -> None:
    work(batch)
