"""What a model loses on fixed pictures at fixed times with fixed noise: equal to the bit whenever it is equal."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..data.batch import Batch, PixelBatch
from ..data.fixed_batches import ValidationBatches, ReadBatch, prefetch_batches
from ..diffusion.masking import reduce_loss_per_sample
from ..families.sampling import use_eval_mode
from .job import TrainingRun
from .task import DiffusionTask

logger = logging.getLogger(__name__)

TIMESTEP_QUANTILES = tuple(number / 10 for number in range(1, 10))
"""Of the times that the model is trained at."""
VALIDATION_SEED = 0
"""The noise does not depend on the seed of the run, so that runs can be compared."""

SampleLosses = Mapping[int, tuple[float, ...]]
"""Number of a sample -> its loss at each quantile."""


@torch.no_grad()
def compute_validation_losses(run: TrainingRun, batches: ValidationBatches, read_batch: ReadBatch) -> SampleLosses:
    """The losses of all samples, on every process; each works on every n-th batch, and all have to call this."""
    strategy = run.strategy
    model = strategy.unwrap_model(run.model)  # nothing is exchanged and nothing new is compiled
    task = replace(run.task, denoiser=model, seed=VALIDATION_SEED)
    mine = range(strategy.data_parallel_rank, len(batches.micro_batches), strategy.data_parallel_size)
    # Where others have one more and need this process to compute theirs, it does any batch once more.
    company = [0] if strategy.has_collective_forward and len(mine) * strategy.data_parallel_size < len(batches.micro_batches) else []
    samples, losses = list[Tensor](), list[Tensor]()
    with use_eval_mode(model):
        for number, pixels in zip([*mine, *company], prefetch_batches(read_batch, [*mine, *company]), strict=True):
            with strategy.accelerator.autocast():
                measured = _compute_quantile_losses(task, pixels)
            if len(losses) < len(mine):
                samples.append(_mask_unusable_samples(batches.micro_batches[number].sample_indices, pixels))
                losses.append(measured)
    return _gather_losses(run, batches, samples, losses)


def _mask_unusable_samples(samples: Sequence[int], pixel_batch: PixelBatch) -> Tensor:
    """Their numbers; -1 for what cannot be measured."""
    for problem in pixel_batch.bad_samples:
        logger.warning("%s: %s; it is not measured", problem.name, problem.problem)
    return torch.tensor(samples).where(pixel_batch.loss_weights > 0, torch.tensor(-1))


def _compute_quantile_losses(task: DiffusionTask, pixel_batch: PixelBatch) -> Tensor:
    """(B, quantiles)."""
    batch = task.encode(pixel_batch, 0)
    return torch.stack([_compute_losses(task, batch, number) for number in range(len(TIMESTEP_QUANTILES))], dim=1)


def _compute_losses(task: DiffusionTask, batch: Batch, quantile_index: int) -> Tensor:
    """As in training, but for noise that is only random, and for time and noise that never change."""
    latents, objective = batch.latents, task.objective
    u = torch.full((len(batch),), TIMESTEP_QUANTILES[quantile_index], dtype=torch.float64)
    t = objective.compute_timesteps(u, latents.shape).to(latents.device)
    draws = task.build_generators("measured", quantile_index, batch.global_positions)
    noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(latents)
    noised = objective.add_noise_at(latents, noise, t)
    predicted = task.family.predict(task.pipe, task.denoiser, noised.latents, noised.timesteps, batch)
    losses = reduce_loss_per_sample(objective.compute_elementwise_loss(predicted, noised), batch.mask, normalize_by_area=task.normalize_masked_loss)
    return (losses * objective.compute_loss_weights(t)).float()


def _gather_losses(run: TrainingRun, batches: ValidationBatches, samples: list[Tensor], losses: list[Tensor]) -> SampleLosses:
    """Every process hands over equally many rows; those that only fill up are of no sample."""
    strategy = run.strategy
    shares = [batches.micro_batches[rank :: strategy.data_parallel_size] for rank in range(strategy.data_parallel_size)]
    most = max(sum(len(batch.sample_indices) for batch in share) for share in shares)
    numbers = torch.full((most,), -1, device=strategy.device)
    rows = torch.zeros(most, len(TIMESTEP_QUANTILES), device=strategy.device)
    if samples:
        mine = torch.cat(samples)
        numbers[: len(mine)] = mine.to(strategy.device)
        rows[: len(mine)] = torch.cat(losses)
    everybody, values = strategy.gather_for_metrics((numbers, rows))
    found = zip(everybody.tolist(), values.tolist(), strict=True)
    return {number: tuple(row) for number, row in sorted(found) if number >= 0}
