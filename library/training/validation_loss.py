"""Validation loss, as a callback: validation images at fixed timesteps with fixed noise, next to the base model."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..adapters.injection import disable_adapters
from ..config.schema_data import ValidateConfig
from ..dataloader.batch import Batch, PixelBatch
from ..dataloader.loader import ReadBatch, ValidationBatches, prefetch_batches
from ..dataloader.run_plan import RunPlan
from ..models.sampling import use_eval_mode
from ..optim.optimizers import use_eval_weights
from ..randomness import Purpose
from .state import TrainingRun, is_interval_reached
from .task import DiffusionTask

logger = logging.getLogger(__name__)
TIMESTEP_QUANTILES = tuple(number / 10 for number in range(1, 10))
"""Quantiles of the training timestep distribution."""

SECTION_STRIDE = 4 / len(TIMESTEP_QUANTILES)
"""The draws of sections at one quantile and the next: all are measured, and none at high or low noise alone."""

VALIDATION_SEED = 0
"""The seed of validation noise, which does not depend on the run's seed, so that runs can be compared."""

SampleLosses = Mapping[int, tuple[float, ...]]
"""The loss of each sample at each quantile, by sample index."""


def compute_validation_losses(run: TrainingRun, batches: ValidationBatches, read_batch: ReadBatch) -> SampleLosses:
    """Compute the losses of all validation samples, distributed over the ranks; collective, same result on all."""
    strategy = run.strategy
    model = strategy.unwrap_model(run.model)  # without DDP's collectives and without compiling new shapes
    task = replace(run.task, denoiser=model, seed=VALIDATION_SEED)
    mine = range(strategy.data_parallel_rank, len(batches.micro_batches), strategy.data_parallel_size)
    # Where the forward pass is collective, a rank with one batch less repeats a batch to keep the others going.
    is_short = len(mine) * strategy.data_parallel_size < len(batches.micro_batches)
    extra = [0] if strategy.has_collective_forward and is_short else []
    samples, losses = list[Tensor](), list[Tensor]()
    with strategy.evaluate(), use_eval_mode(model):
        for number, pixel_batch in zip([*mine, *extra], prefetch_batches(read_batch, [*mine, *extra]), strict=True):
            with task.scale_adapter(pixel_batch), strategy.accelerator.autocast():
                quantile_losses = _compute_quantile_losses(task, pixel_batch)
            if len(losses) < len(mine):
                samples.append(_mask_unusable_samples(batches.micro_batches[number].sample_indices, pixel_batch))
                losses.append(quantile_losses)
    return _gather_losses(run, batches, samples, losses)


def _mask_unusable_samples(samples: Sequence[int], pixel_batch: PixelBatch) -> Tensor:
    """Return the sample indices, with -1 for images that could not be read."""
    for problem in pixel_batch.bad_samples:
        logger.warning("%s: %s; excluded from this validation", problem.name, problem.problem)
    return torch.tensor(samples).where(pixel_batch.loss_weights > 0, torch.tensor(-1))


def _compute_quantile_losses(task: DiffusionTask, pixel_batch: PixelBatch) -> Tensor:
    """Compute the losses (B, quantiles) of a batch."""
    batch = task.encode(pixel_batch, 0)
    return torch.stack(
        [compute_losses_at_quantile(task, batch, number) for number in range(len(TIMESTEP_QUANTILES))], dim=1
    )


def compute_losses_at_quantile(task: DiffusionTask, batch: Batch, quantile_index: int) -> Tensor:
    """Compute the training loss at a fixed timestep with fixed plain noise."""
    batch = task.family.select_section(batch, quantile_index * SECTION_STRIDE % 1)
    latents, objective = batch.latents, task.objective
    quantile, experts = TIMESTEP_QUANTILES[quantile_index], task.family.experts
    if experts is not None and objective.distribution is not None:
        num_tokens = objective.count_tokens(latents.shape)
        if experts.trained != "both":  # the levels of one expert
            low, high = experts.get_quantiles(experts.trained, objective.distribution, num_tokens)
            quantile = low + (high - low) * quantile
        batch = replace(batch, expert=experts.find_expert(quantile, objective.distribution, num_tokens))
    u = torch.full((len(batch),), quantile, dtype=torch.float64)
    t = objective.compute_timesteps(u, latents.shape).to(latents.device)
    draws = task.build_generators(Purpose.VALIDATION_NOISE, quantile_index, batch.global_positions)
    noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(latents)
    noised = objective.add_noise_at(latents, noise, t)
    sound_draws = task.build_generators(Purpose.VALIDATION_SOUND_NOISE, quantile_index, batch.global_positions)
    batch, noised = task.add_noise_to_sound(batch, noised, sound_draws)
    losses = task.compute_prediction_losses(task.denoiser, batch, noised)
    return (losses * objective.compute_loss_weights(t)).float()


def _gather_losses(
    run: TrainingRun, batches: ValidationBatches, samples: list[Tensor], losses: list[Tensor]
) -> SampleLosses:
    """All-gather the losses; ranks pad to the same number of rows with sample index -1."""
    strategy = run.strategy
    shards = [batches.micro_batches[rank :: strategy.data_parallel_size] for rank in range(strategy.data_parallel_size)]
    most = max(sum(len(batch.sample_indices) for batch in shard) for shard in shards)
    numbers = torch.full((most,), -1, device=strategy.device)
    rows = torch.zeros(most, len(TIMESTEP_QUANTILES), device=strategy.device)
    if samples:
        mine = torch.cat(samples)
        numbers[: len(mine)] = mine.to(strategy.device)
        rows[: len(mine)] = torch.cat(losses)
    everybody, values = strategy.comm.all_gather_tensor(numbers), strategy.comm.all_gather_tensor(rows)
    found = zip(everybody.tolist(), values.tolist(), strict=True)
    return {number: tuple(row) for number, row in sorted(found) if number >= 0}


_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t for 1 to 9 degrees of freedom."""

_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class MeanEstimate:
    """A mean and the half-width of its 95 % confidence interval, which is infinite for a single value."""

    value: float
    interval: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "MeanEstimate":
        """Estimate from at least one value; ``fsum`` is exact, so the order does not matter."""
        count = len(values)
        mean = math.fsum(values) / count
        if count == 1:
            return cls(mean, math.inf)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, student_t_quantile(count - 1) * math.sqrt(variance / count))

    def __str__(self) -> str:
        if not 0 < self.interval < math.inf:
            return f"{self.value:.5g}"
        places = max(0, 1 - math.floor(math.log10(self.interval)))  # two of the interval's digits are meaningful
        return f"{self.value:.{places}f} +- {self.interval:.{places}f}"


def student_t_quantile(degrees_of_freedom: int) -> float:
    """Compute the 97.5 % quantile of Student's t; from 10 degrees on by its Cornish-Fisher expansion."""
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees_of_freedom + second / degrees_of_freedom**2 + third / degrees_of_freedom**3


@dataclass(frozen=True)
class ValidationResult:
    """Mean validation loss, and the mean over images of the reduction against the base model."""

    loss: MeanEstimate
    gain: MeanEstimate  # loss of the base model minus loss with the LoRA

    @classmethod
    def compare(cls, base_losses: SampleLosses, losses: SampleLosses) -> "ValidationResult":
        both = [number for number in losses if number in base_losses]
        means = {number: (_compute_mean(base_losses[number]), _compute_mean(losses[number])) for number in both}
        return cls(
            MeanEstimate.from_values([after for _, after in means.values()]),
            MeanEstimate.from_values([before - after for before, after in means.values()]),
        )

    @property
    def is_better(self) -> bool:
        """Whether the gain is significant."""
        return self.gain.value > self.gain.interval

    def __str__(self) -> str:
        loss, gain = self.loss, self.gain
        if not math.isfinite(loss.value):
            return "the loss is NaN or Inf"
        if math.isinf(gain.interval):
            how = "one image gives no confidence interval"
        elif self.is_better:
            how = "significantly better than the base model"
        elif gain.value < -gain.interval:
            how = "significantly worse than the base model"
        else:
            how = "no significant difference"
        word = "above" if gain.value < 0 else "below"
        return f"loss {loss}, {MeanEstimate(abs(gain.value), gain.interval)} {word} the base model's: {how}"


def is_validation_due(config: ValidateConfig, plan: RunPlan, step: int) -> bool:
    """Whether the LoRA is validated after step ``step``, counted from 1: every n steps or epochs, and at the end."""
    every_steps, every_epochs = config.validate_every_n_steps, config.validate_every_n_epochs
    if every_steps is None and every_epochs is None:
        every_epochs = 1
    return (
        step >= plan.steps
        or is_interval_reached(plan, step, steps=every_steps)
        or is_interval_reached(plan, step, epochs=every_epochs)
    )


class Validation:
    """Compute the validation loss of the base model once, and of the LoRA every n steps or epochs and at the end."""

    id = "validation"
    is_deferrable = True

    def __init__(self, config: ValidateConfig, batches: ValidationBatches, read_batch: ReadBatch):
        self.config, self.batches, self.read_batch = config, batches, read_batch
        self.base_losses: SampleLosses = {}
        self.results: list[tuple[int, ValidationResult]] = []  # each result with the number of steps before it

    def should_run(self, run: TrainingRun) -> bool:
        return is_validation_due(self.config, run.plan, run.state.step)

    def compute_base_losses(self, run: TrainingRun) -> None:
        """Compute the losses of the base model, with the adapters disabled; call it before training changes it."""
        with disable_adapters(run.strategy.unwrap_model(run.model)):
            self.base_losses = compute_validation_losses(run, self.batches, self.read_batch)

    def on_train_begin(self, run: TrainingRun) -> None:
        if not run.config.adapter.changes_base:
            self.compute_base_losses(run)
        if not self.base_losses:
            logger.warning("validation: none of the images can be read")
            return
        mean = MeanEstimate.from_values([_compute_mean(values) for values in self.base_losses.values()])
        logger.info("validation loss of the base model: %s (%d images)", mean, len(self.base_losses))
        if not run.state.samples:
            run.metric_logger.log_values(
                run, {"validation/base": mean.value, **self._break_down_losses(self.base_losses, "validation/base")}
            )

    def __call__(self, run: TrainingRun) -> None:
        averaged = nullcontext() if run.ema is None else run.ema.swap_parameters()
        with use_eval_weights(run.optimizer), averaged:
            losses = compute_validation_losses(run, self.batches, self.read_batch)
        if not set(losses) & set(self.base_losses):
            return
        result = ValidationResult.compare(self.base_losses, losses)
        self.results.append((run.state.step, result))
        what = "validation" if run.ema is None else f"validation of the EMA weights ({run.config.save.output_name}-ema)"
        logger.info("%s after step %d: %s", what, run.state.step, result)
        values = {
            "validation/loss": result.loss.value,
            "validation/interval": result.loss.interval,
            "validation/gain": result.gain.value,
            "validation/gain_interval": result.gain.interval,
            "validation/base": result.loss.value + result.gain.value,
        }
        values |= {} if run.ema is None else self._validate_without_ema(run)
        run.metric_logger.log_values(run, values | self._break_down_losses(losses, "validation"))

    def _validate_without_ema(self, run: TrainingRun) -> dict[str, float]:
        """Compute the loss of the trained weights, which are in files of their own beside those of the EMA."""
        with use_eval_weights(run.optimizer):
            losses = compute_validation_losses(run, self.batches, self.read_batch)
        if not set(losses) & set(self.base_losses):
            return {}
        result = ValidationResult.compare(self.base_losses, losses)
        name = run.config.save.output_name
        logger.info("validation without EMA (%s) after step %d: %s", name, run.state.step, result)
        prefix = "validation/without_ema"
        return {
            f"{prefix}/loss": result.loss.value,
            f"{prefix}/interval": result.loss.interval,
            f"{prefix}/gain": result.gain.value,
            f"{prefix}/gain_interval": result.gain.interval,
        }

    def _break_down_losses(self, losses: SampleLosses, name: str) -> dict[str, float]:
        """Compute the mean loss per timestep quantile and, with several datasets, per dataset."""
        values = {
            f"{name}/timestep/{u:.1f}": _compute_mean([row[place] for row in losses.values()])
            for place, u in enumerate(TIMESTEP_QUANTILES)
        }
        by_dataset = self._average_by_dataset(losses)
        if len(by_dataset) > 1:
            values |= {f"{name}/dataset/{number + 1}": mean for number, mean in by_dataset.items()}
        return values

    def _average_by_dataset(self, losses: SampleLosses) -> dict[int, float]:
        datasets = self.batches.dataset_indices_in_file
        values: defaultdict[int, list[float]] = defaultdict(list)
        for number, row in losses.items():
            values[datasets[number]].append(_compute_mean(row))
        return {dataset: _compute_mean(values[dataset]) for dataset in sorted(values)}


def _compute_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
