"""Gradient accumulation: forward (in autocast) and backward of the micro-batches of a step; gradients are summed.

``dataloader.batch_plan`` decides how many micro-batches a step has (``--gradient_accumulation_steps``).  The loss of
each is divided by the samples of the whole step, of all ranks and micro-batches, so that gradients only have to be
summed; ``gradient_sync`` has the scale that cancels accelerate's own division.

With ``--fused_backward_pass`` the backward pass of the last micro-batch updates the weights (``optim.fused_backward``).

How gradients are kept from being all-reduced before the last micro-batch:

| strategy                             | between micro-batches                                            |
|--------------------------------------|------------------------------------------------------------------|
| DDP                                  | ``accelerator.accumulate``, all-reduce in the last backward      |
| DDP, --on_oom recover                | ``accelerator.no_sync``, all-reduce when all ranks are through   |
| FSDP, tensor and context parallelism | adapters are replicated: all-reduce after the last backward      |
| FSDP, --train full                   | reduce-scatter in each backward; HSDP: all-reduce in the last    |
| DeepSpeed                            | the engine's ``set_gradient_accumulation_boundary``              |
| pipeline                             | micro-batches overlap: torch's schedule sums, in ``pipeline.py`` |
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..dataloader.batch import PixelBatch
from ..distributed.step_phases import record_phase
from ..optim.fused_backward import FusedBackward
from .cuda_graphs import GraphedTask, StepGraphs


class TrainingTask(GraphedTask, Protocol):
    """The training task (``training.task.DiffusionTask``), as far as a strategy uses it."""

    def __call__(self, batch: PixelBatch, step: int, /) -> Tensor:
        """Return the weighted loss of each sample in optimizer step ``step``."""

    def get_shape_key(self, batch: PixelBatch, /) -> Hashable:
        """Return a value that is equal for batches with equal tensor shapes."""

    def scale_adapter(self, batch: PixelBatch, /) -> AbstractContextManager[None]:
        """Return a context for forward and backward in which the adapter has the strength of the batch."""

    def seed_dropout(self, batch: PixelBatch, step: int, /) -> None:
        """Make the next forward of the batch repeat its LoRA dropout; called before a recomputation."""


class GradientAccumulation:
    """Runs the micro-batches of an optimizer step one after the other; methods return this rank's part of the loss."""

    def __init__(
        self,
        accelerator: Accelerator,
        backward: Callable[[Tensor], None],
        graphs: StepGraphs | None = None,
        fused_backward: FusedBackward | None = None,
    ):
        """``backward`` scales the loss of a micro-batch as the engine needs it, and runs the engine's backward."""
        self._accelerator, self._backward, self._graphs = accelerator, backward, graphs
        self._fused_backward = fused_backward

    def accumulate(
        self, model: nn.Module, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Accumulate gradients as accelerate counts micro-batches: DDP all-reduces in the backward of the last."""
        accumulate = self._accelerator.accumulate
        total = self._run_micro_batches(lambda is_last: accumulate(model), task, batches, num_samples, step)
        if not self._accelerator.sync_gradients:
            raise AssertionError(f"step {step}: {len(batches)} micro-batches did not complete an optimizer step")
        return total

    def accumulate_without_sync(
        self, model: nn.Module, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Accumulate gradients without collectives; split batches are more than ``accumulate`` counts."""
        no_sync = self._accelerator.no_sync
        return self._run_micro_batches(lambda is_last: no_sync(model), task, batches, num_samples, step)

    def accumulate_in_shards(
        self,
        start_micro_batch: Callable[[bool], AbstractContextManager[Any]],
        task: TrainingTask,
        batches: Sequence[PixelBatch],
        num_samples: int,
        step: int,
    ) -> Tensor:
        """Accumulate gradients that FSDP reduces in each backward, so that no rank holds more than its part."""
        return self._run_micro_batches(start_micro_batch, task, batches, num_samples, step)

    def accumulate_in_deepspeed(
        self, engine: Any, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Accumulate gradients in DeepSpeed's engine, which reduces them in the backward of the last micro-batch."""

        def start_micro_batch(is_last: bool) -> AbstractContextManager[Any]:
            engine.set_gradient_accumulation_boundary(is_last)
            return nullcontext()

        return self._run_micro_batches(start_micro_batch, task, batches, num_samples, step)

    def _run_micro_batches(
        self,
        start_micro_batch: Callable[[bool], AbstractContextManager[Any]],
        task: TrainingTask,
        batches: Sequence[PixelBatch],
        num_samples: int,
        step: int,
    ) -> Tensor:
        """``start_micro_batch`` gets whether it is the last, and returns the context of its forward and backward."""
        losses = []
        if self._fused_backward is not None:
            self._fused_backward.start_step(step)
        for index, batch in enumerate(batches, start=1):
            is_last = index == len(batches)
            with start_micro_batch(is_last):
                losses.append(self._run_micro_batch(task, batch, num_samples, step, is_last=is_last))
        return functools.reduce(torch.add, losses)

    def _run_micro_batch(
        self, task: TrainingTask, batch: PixelBatch, num_samples: int, step: int, *, is_last: bool
    ) -> Tensor:
        if self._graphs is not None:
            return self._graphs.run_micro_batch(task, batch, step, num_samples, self._backward)
        with task.scale_adapter(batch):
            with record_phase("forward", batch), self._accelerator.autocast():
                loss = task(batch, step).sum() / num_samples
            with record_phase("backward", batch), self._update_weights(loss, is_last=is_last):
                self._backward(loss)
        return loss.detach()

    def _update_weights(self, loss: Tensor, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward pass that may update weights as their gradients are complete."""
        return (
            nullcontext()
            if self._fused_backward is None
            else self._fused_backward.run_micro_batch(loss, is_last=is_last)
        )
