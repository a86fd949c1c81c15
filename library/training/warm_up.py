"""Before the first step: every size that the run will see is compiled, so that no step waits for a compiler."""

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..data.batch import TextLength, PixelBatch
from ..log import ProgressBar
from .job import TrainingRun
from .rehearsal import BatchShapes, list_batch_shapes, run_trial_step

if TYPE_CHECKING:
    from ..distributed.compiling import Compilation

logger = logging.getLogger(__name__)

RECORDING_BATCH_SIZE = 2
"""Pictures in a batch that is only looked at: with two of them, texts of two lengths meet."""
TEXT_LENGTHS: tuple[TextLength, ...] = ("same", "longer", "shorter")


def warm_up_compilation(run: TrainingRun, compilation: "Compilation", first_batch: PixelBatch) -> None:
    """Forward and backward of black pictures of every size; nothing is learnt, and nothing drawn but by place."""
    started, sizes = time.perf_counter(), list_batch_shapes(run.plan.batch_plan)
    texts_vary = _record_input_shapes(run, compilation, first_batch, sizes)
    batches = [batch for size, count in sizes for batch in _vary_text_lengths(first_batch.build_dummy_batch(size, count), texts_vary)]
    with ProgressBar(len(batches), 0, "compiling", enabled=run.strategy.is_main, unit="size", log_first_and_last=False) as progress:
        for batch in batches:
            run_trial_step(run, batch)
            progress.update({"graphs": str(compilation.graph_count)})
    compilation.finish_warmup()
    seconds = time.perf_counter() - started
    run.metric_logger.log_values(run, {"compile/seconds": seconds, "compile/graphs": compilation.graph_count})
    logger.info("compiled for %d sizes in %.1f s: %s", len(sizes), seconds, compilation)


def _record_input_shapes(run: TrainingRun, compilation: "Compilation", first_batch: PixelBatch, shapes: BatchShapes) -> bool:
    """See what changes with the text and what with the size, before anything is compiled for it; whether texts do."""
    count = min(len(first_batch), RECORDING_BATCH_SIZE)
    with torch.no_grad(), run.strategy.accelerator.autocast(), compilation.record_shapes():
        task = replace(run.task, denoiser=run.strategy.unwrap_model(run.model), micro_batch_stats=[])
        small = first_batch.build_dummy_batch(shapes[-1][0], count)
        texts_vary = any(isinstance(value, list) for value in task.encode(small, run.state.step).cond.values())
        batches = [batch for size in _select_extreme_sizes([size for size, _ in shapes])
                   for batch in _vary_text_lengths(first_batch.build_dummy_batch(size, count), texts_vary)]  # fmt: skip
        batches += [small.vary_text_lengths([length] * count) for length in TEXT_LENGTHS if texts_vary]
        for batch in batches:
            task(batch, run.state.step)
    compilation.choose_dynamic_shapes(len(shapes), texts_vary)
    return texts_vary


def _vary_text_lengths(batch: PixelBatch, texts_vary: bool) -> list[PixelBatch]:
    """The batch; where texts differ in length, with texts of one length, and with longer and shorter ones beside it."""
    if not texts_vary:
        return [batch]
    ways: list[list[TextLength]] = [["same"] * len(batch)]
    if len(batch) > 1:
        ways += [["same", other] + ["same"] * (len(batch) - 2) for other in TEXT_LENGTHS[1:]]
    return [batch.vary_text_lengths(lengths) for lengths in ways]


def _select_extreme_sizes(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The smallest and the largest in every way: between them, whatever changes has changed."""
    ways = (lambda size: size[0], lambda size: size[1], lambda size: size[0] * size[1])
    return sorted({most(sizes, key=way) for way in ways for most in (min, max)})
