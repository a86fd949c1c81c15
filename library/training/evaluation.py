"""What a model loses on fixed pictures at fixed times with fixed noise: equal to the bit whenever it is equal."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..data.batch import Batch, PixelBatch
from ..data.fixed_batches import FixedBatches, Read, ahead
from ..diffusion.masking import mean_loss
from ..families.sampling import evaluating
from .job import Run
from .task import Task

logger = logging.getLogger(__name__)

QUANTILES = tuple(number / 10 for number in range(1, 10))
"""Of the times that the model is trained at."""
SEED = 0
"""The noise does not depend on the seed of the run, so that runs can be compared."""

Losses = Mapping[int, tuple[float, ...]]
"""Number of a sample -> its loss at each quantile."""


@torch.no_grad()
def evaluate(run: Run, batches: FixedBatches, read: Read) -> Losses:
    """The losses of all samples, on every process; each works on every n-th batch, and all have to call this."""
    strategy = run.strategy
    model = strategy.unwrapped(run.adapter)  # nothing is exchanged and nothing new is compiled
    task = replace(run.task, denoiser=model, seed=SEED)
    mine = range(strategy.data_rank, len(batches.batches), strategy.data_size)
    # Where others have one more and need this process to compute theirs, it does any batch once more.
    company = [0] if strategy.computes_together and len(mine) * strategy.data_size < len(batches.batches) else []
    samples, losses = list[Tensor](), list[Tensor]()
    with evaluating(model):
        for number, pixels in zip([*mine, *company], ahead(read, [*mine, *company]), strict=True):
            with strategy.accelerator.autocast():
                measured = _at_quantiles(task, pixels)
            if len(losses) < len(mine):
                samples.append(_usable(batches.batches[number].samples, pixels))
                losses.append(measured)
    return _of_all(run, batches, samples, losses)


def _usable(samples: Sequence[int], pixels: PixelBatch) -> Tensor:
    """Their numbers; -1 for what cannot be measured."""
    for problem in pixels.problems:
        logger.warning("%s: %s; it is not measured", problem.name, problem.problem)
    return torch.tensor(samples).where(pixels.weight > 0, torch.tensor(-1))


def _at_quantiles(task: Task, pixels: PixelBatch) -> Tensor:
    """(B, quantiles)."""
    batch = task.encode(pixels, 0)
    return torch.stack([_losses(task, batch, number) for number in range(len(QUANTILES))], dim=1)


def _losses(task: Task, batch: Batch, number: int) -> Tensor:
    """As in training, but for noise that is only random, and for time and noise that never change."""
    latents, objective = batch.latents, task.objective
    u = torch.full((len(batch),), QUANTILES[number], dtype=torch.float64)
    t = objective.times(u, latents.shape).to(latents.device)
    draws = task.generators("measured", number, batch.places)
    noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(latents)
    noised = objective.at(latents, noise, t)
    predicted = task.family.predict(task.pipe, task.denoiser, noised.latents, noised.t, batch)
    losses = mean_loss(objective.elementwise(predicted, noised), batch.mask, by_area=task.masks_by_area)
    return (losses * objective.weights(t)).float()


def _of_all(run: Run, batches: FixedBatches, samples: list[Tensor], losses: list[Tensor]) -> Losses:
    """Every process hands over equally many rows; those that only fill up are of no sample."""
    strategy = run.strategy
    shares = [batches.batches[rank :: strategy.data_size] for rank in range(strategy.data_size)]
    most = max(sum(len(batch.samples) for batch in share) for share in shares)
    numbers = torch.full((most,), -1, device=strategy.device)
    rows = torch.zeros(most, len(QUANTILES), device=strategy.device)
    if samples:
        mine = torch.cat(samples)
        numbers[: len(mine)] = mine.to(strategy.device)
        rows[: len(mine)] = torch.cat(losses)
    everybody, values = strategy.measured((numbers, rows))
    found = zip(everybody.tolist(), values.tolist(), strict=True)
    return {number: tuple(row) for number, row in sorted(found) if number >= 0}
