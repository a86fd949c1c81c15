"""What a model loses on fixed pictures at fixed times with fixed noise: equal to the bit whenever it is equal."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..adapters.lora import disable_adapters
from ..config.schema_data import ValidateConfig
from ..data.batch import Batch, PixelBatch
from ..data.loader import ReadBatch, ValidationBatches, prefetch_batches
from ..diffusion.losses import reduce_loss_per_sample
from ..models.sampling import use_eval_mode
from ..optim.optimizers import use_eval_weights
from .state import TrainingRun, is_interval_reached
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
    company = (
        [0]
        if strategy.has_collective_forward and len(mine) * strategy.data_parallel_size < len(batches.micro_batches)
        else []
    )
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
    losses = reduce_loss_per_sample(
        objective.compute_elementwise_loss(predicted, noised), batch.mask, normalize_by_area=task.normalize_masked_loss
    )
    return (losses * objective.compute_loss_weights(t)).float()


def _gather_losses(
    run: TrainingRun, batches: ValidationBatches, samples: list[Tensor], losses: list[Tensor]
) -> SampleLosses:
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
    everybody, values = strategy.comm.gather_for_metrics((numbers, rows))
    found = zip(everybody.tolist(), values.tolist(), strict=True)
    return {number: tuple(row) for number, row in sorted(found) if number >= 0}


_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile for 1 to 9 degrees of freedom."""


_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, and how far the true one may be from it; endless where a single number tells nothing of that."""

    value: float
    interval: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "MeanEstimate":
        """Of at least one number; the sum is exact, so it does not depend on their order."""
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
    """The 97.5 % quantile of Student's t; from 10 degrees on by its expansion around the normal one."""
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees_of_freedom + second / degrees_of_freedom**2 + third / degrees_of_freedom**3


@dataclass(frozen=True)
class ValidationResult:
    """What an evaluation says; each gain is a mean over the pictures' own gains."""

    loss: MeanEstimate
    gain: MeanEstimate  # by how much it is below the base model's

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
        """Than the base model, by more than chance explains."""
        return self.gain.value > self.gain.interval

    def __str__(self) -> str:
        loss, gain = self.loss, self.gain
        if not math.isfinite(loss.value):
            return "the loss is no number"
        if math.isinf(gain.interval):
            how = "one picture tells nothing of chance"
        elif self.is_better:
            how = "better than the base model by more than the interval"
        elif gain.value < -gain.interval:
            how = "worse than the base model by more than the interval"
        else:
            how = "not to be told from the base model"
        word = "above" if gain.value < 0 else "below"
        return f"loss {loss}, {MeanEstimate(abs(gain.value), gain.interval)} {word} the base model's: {how}"


class Validation:
    """Measures the base model once, and then the adapter when it is due."""

    is_deferrable = True

    def __init__(self, config: ValidateConfig, batches: ValidationBatches, read_batch: ReadBatch):
        self.config, self.batches, self.read_batch = config, batches, read_batch
        self.base_losses: SampleLosses = {}
        self.results: list[tuple[int, ValidationResult]] = []  # after so many steps

    def should_run(self, run: TrainingRun) -> bool:
        plan, step, config = run.plan, run.state.step, self.config
        every_epochs = config.validate_every_n_epochs
        if every_epochs is None and config.validate_every_n_steps is None:
            every_epochs = 1
        return (
            step >= plan.steps
            or is_interval_reached(plan, step, config.validate_every_n_steps, None)
            or (every_epochs is not None and is_interval_reached(plan, step, None, every_epochs))
        )

    def on_train_begin(self, run: TrainingRun) -> None:
        """Measure the model without what is learnt."""
        with disable_adapters(run.strategy.unwrap_model(run.model)):
            self.base_losses = compute_validation_losses(run, self.batches, self.read_batch)
        if not self.base_losses:
            logger.warning("validation: none of the pictures can be used")
            return
        mean = MeanEstimate.from_values([_compute_mean(values) for values in self.base_losses.values()])
        logger.info("validation: the base model's loss is %s on %d pictures", mean, len(self.base_losses))
        if not run.state.step:
            run.metric_logger.log_values(
                run, {"validation/base": mean.value, **self._break_down_losses(self.base_losses, "validation/base")}
            )

    def __call__(self, run: TrainingRun) -> None:
        averaged = nullcontext() if run.ema is None else run.ema.swap_parameters()
        with use_eval_weights(run.optimizer), averaged:
            now = compute_validation_losses(run, self.batches, self.read_batch)
        if not set(now) & set(self.base_losses):
            return
        verdict = ValidationResult.compare(self.base_losses, now)
        self.results.append((run.state.step, verdict))
        what = "validation" if run.ema is None else "validation of the averaged weights"
        logger.info("%s after step %d: %s", what, run.state.step, verdict)
        figures = {
            "validation/loss": verdict.loss.value,
            "validation/interval": verdict.loss.interval,
            "validation/gain": verdict.gain.value,
            "validation/gain_interval": verdict.gain.interval,
            "validation/base": verdict.loss.value + verdict.gain.value,
        }
        run.metric_logger.log_values(run, {**figures, **self._break_down_losses(now, "validation")})

    def _break_down_losses(self, losses: SampleLosses, name: str) -> dict[str, float]:
        """The means at each time and, of several, in each dataset."""
        found = {
            f"{name}/time/{u:.1f}": _compute_mean([row[place] for row in losses.values()])
            for place, u in enumerate(TIMESTEP_QUANTILES)
        }
        by_dataset = self._average_by_dataset(losses)
        if len(by_dataset) > 1:
            found |= {f"{name}/dataset/{number + 1}": mean for number, mean in by_dataset.items()}
        return found

    def _average_by_dataset(self, losses: SampleLosses) -> dict[int, float]:
        datasets = self.batches.dataset_numbers
        values: defaultdict[int, list[float]] = defaultdict(list)
        for number, row in losses.items():
            values[datasets[number]].append(_compute_mean(row))
        return {dataset: _compute_mean(values[dataset]) for dataset in sorted(values)}


def _compute_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
