"""Before the first step: every size that the run will see is compiled, so that no step waits for a compiler."""

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..data.batch import Length, PixelBatch
from ..log import Progress
from .rehearsal import Sizes, sizes_of, try_out

if TYPE_CHECKING:
    from ..distributed.compiling import Compilation
    from .loop import Run

logger = logging.getLogger(__name__)

LOOKED_AT = 2
"""Pictures in a batch that is only looked at: with two of them, texts of two lengths meet."""
LENGTHS: tuple[Length, ...] = ("same", "longer", "shorter")


def warm_up(run: "Run", compilation: "Compilation", first: PixelBatch) -> None:
    """Forward and backward of black pictures of every size; nothing is learnt, and nothing drawn but by place."""
    started, sizes = time.perf_counter(), sizes_of(run.plan.batches)
    texts_vary = _look(run, compilation, first, sizes)
    batches = [batch for size, count in sizes for batch in _with_texts(first.of_size(size, count), texts_vary)]
    with Progress(len(batches), 0, "compiling", wanted=run.strategy.is_main, unit="size", ends=False) as progress:
        for batch in batches:
            try_out(run, batch)
            progress.advance({"graphs": str(compilation.graphs)})
    compilation.end_warm_up()
    seconds = time.perf_counter() - started
    run.teller.noted(run, {"compile/seconds": seconds, "compile/graphs": compilation.graphs})
    logger.info("compiled for %d sizes in %.1f s: %s", len(sizes), seconds, compilation)


def _look(run: "Run", compilation: "Compilation", first: PixelBatch, sizes: Sizes) -> bool:
    """See what changes with the text and what with the size, before anything is compiled for it; whether texts do."""
    count = min(len(first), LOOKED_AT)
    with torch.no_grad(), run.strategy.accelerator.autocast(), compilation.watching():
        task = replace(run.task, denoiser=run.strategy.unwrapped(run.adapter), seen=[])
        small = first.of_size(sizes[-1][0], count)
        texts_vary = any(isinstance(value, list) for value in task.encode(small, run.state.step).cond.values())
        batches = [batch for size in _extremes([size for size, _ in sizes])
                   for batch in _with_texts(first.of_size(size, count), texts_vary)]  # fmt: skip
        batches += [small.with_texts([length] * count) for length in LENGTHS if texts_vary]
        for batch in batches:
            task(batch, run.state.step)
    compilation.decide(len(sizes), texts_vary)
    return texts_vary


def _with_texts(batch: PixelBatch, texts_vary: bool) -> list[PixelBatch]:
    """The batch; where texts differ in length, with texts of one length, and with longer and shorter ones beside it."""
    if not texts_vary:
        return [batch]
    ways: list[list[Length]] = [["same"] * len(batch)]
    if len(batch) > 1:
        ways += [["same", other] + ["same"] * (len(batch) - 2) for other in LENGTHS[1:]]
    return [batch.with_texts(lengths) for lengths in ways]


def _extremes(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The smallest and the largest in every way: between them, whatever changes has changed."""
    ways = (lambda size: size[0], lambda size: size[1], lambda size: size[0] * size[1])
    return sorted({most(sizes, key=way) for way in ways for most in (min, max)})
