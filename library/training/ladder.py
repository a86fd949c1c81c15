"""Fitting into memory while the run goes on: batches are cut in parts, then activations are computed twice.

The plan stays as it is: the same pictures with the same noise in the same step, and a loss that is divided by the
pictures of the whole step.  So a step that was cut gives the same gradient as one that was not.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..data.batch import PixelBatch
from ..data.loader import StepBatches
from ..distributed.memory import OutOfMemory
from ..distributed.strategy import Strategy
from .task import DiffusionTask

logger = logging.getLogger(__name__)


class OomRecovery:
    """How far a run went down to fit; all processes go down together, since all have batches of the same sizes."""

    def __init__(self, is_enabled: bool, enable_checkpointing: Callable[[], None] | None):
        """``compute_twice`` switches gradient checkpointing on; without it, it is on already."""
        self.is_enabled, self._enable_checkpointing = is_enabled, enable_checkpointing
        self.num_splits = 1
        """So many make up a micro-batch."""

    def compute_gradients(self, strategy: Strategy, task: DiffusionTask, step_batches: StepBatches, step: int) -> Tensor:
        """Those of one step; return its loss."""
        if not self.is_enabled:
            return strategy.compute_gradients(task, step_batches.micro_batches, step_batches.num_global_samples, step)
        while True:
            found = strategy.compute_gradients_catching_oom(task, self._split_batches(step_batches.micro_batches), step_batches.num_global_samples, step)
            if not isinstance(found, OutOfMemory):
                return found
            task.reset_stats()
            self._reduce_memory(found, step_batches.micro_batches, step)

    def run_until_fits(self, strategy: Strategy, batch: PixelBatch, step: int, function: Callable[[PixelBatch], Any]) -> None:
        """``work`` with as many of the pictures as fit."""
        if not self.is_enabled:
            function(batch)
            return
        while (found := strategy.run_catching_oom(lambda: _run_and_discard(self._split_batches([batch])[0], function))) is not None:
            self._reduce_memory(found, [batch], step)

    def _split_batches(self, batches: Sequence[PixelBatch]) -> list[PixelBatch]:
        return [part for batch in batches for part in batch.split(-(-len(batch) // self.num_splits))]

    def _reduce_memory(self, error: OutOfMemory, batches: Sequence[PixelBatch], step: int) -> None:
        if self.num_splits < max(len(batch) for batch in batches):
            self.num_splits *= 2
            change = f"micro-batches are cut in {self.num_splits} parts from now on, which changes nothing in the result"
        elif self._enable_checkpointing is not None:
            self._enable_checkpointing()
            self._enable_checkpointing = None
            change = "gradient_checkpointing is switched on, which takes more time and changes nothing in the result"
        else:
            raise error
        logger.warning("step %d ran out of memory (%s); --on_oom ladder: %s, and the step comes again", step + 1,
                       error.phase, change)  # fmt: skip


def _run_and_discard(batch: PixelBatch, function: Callable[[PixelBatch], Any]) -> None:
    function(batch)
