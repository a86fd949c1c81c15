"""Trials before the first step: compile all batch shapes, try the largest, check that all parameters get a gradient.

The model runs uncompiled on a few batch shapes first, which shows the sizes that change: they are marked as dynamic,
so that no other size compiles again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..dataloader.batch import PixelBatch, TextLength
from ..dataloader.batch_plan import MicroBatchSchedule, PlannedStage, get_planned_stages
from ..dataset.clip_windows import FrameRule
from ..distributed.device_memory import has_device_memory
from ..distributed.step_phases import OutOfMemory, record_phase
from ..errors import UserError
from ..log import ProgressBar
from ..parallel.sharded_weights import copy_to_shard, get_local_shard
from ..parallel.strategy import Strategy
from ..randomness import Purpose, derive_generator
from .state import TrainingRun

if TYPE_CHECKING:
    from ..parallel.compile import Compilation
    from .task import DiffusionTask


logger = logging.getLogger(__name__)
MAX_PARAMETERS_SHOWN = 5
PERTURBATION_STD = 1e-2
"""LoRA B starts at zero, which makes the gradient of A zero; the probe adds noise with this deviation."""


SumOverShards = Callable[[torch.Tensor], torch.Tensor]
"""Sums what each rank counted in its part of the weights (``Strategy.sum_over_shards``)."""

MAX_PROBE_SIZE = 128
"""Pixels; attention over a single token, as in smaller images, gives queries and keys no gradient."""


def probe_gradients(run: TrainingRun, batch: PixelBatch) -> None:
    """Run one forward and backward pass, warn of parameters without a gradient, and restore all parameters.

    One small image without dropout is enough, unless it would have to be compiled for.
    """
    task = run.task
    if run.compilation is None:
        batch = batch.crop_first_image(MAX_PROBE_SIZE, task.family.frame_rule)
        task = replace(task, dropout=None)
        if run.task.dropout is not None:
            run.task.dropout.sample_keys = None
    if run.config.adapter.trains_embedding:  # not all captions have the word, but all of a probe do
        batch = replace(batch, captions=(str(run.config.adapter.token_string),) * len(batch.captions))
    weights = dict(run.strategy.iter_trained_weights(run.model))
    sum_over_shards = run.strategy.sum_over_shards
    nonzero = _count_elements(list(weights.values()), torch.count_nonzero, sum_over_shards)
    zeros = [item for item, count in zip(weights.values(), nonzero, strict=True) if not count]
    generator = derive_generator(run.config.train.seed, Purpose.GRADIENT_PROBE)
    try:
        for item in zeros:
            copy_to_shard(item, torch.randn(item.shape, generator=generator) * PERTURBATION_STD)
        run.strategy.use_written_weights()
        loss = torch.stack([run_forward_backward(run, batch, each) for each in task.list_expert_tasks()]).sum()
        gradients = _take_gradients(run.strategy, weights)
        _refuse_decay_of_idle_weights(run.strategy, [name for name, each in gradients.items() if each is None])
        _check_gradients(float(loss), gradients, sum_over_shards, _list_modules_of_clips(run))
    finally:
        with torch.no_grad():
            for item in zeros:
                item.zero_()
            for item in weights.values():
                item.grad = None
        run.strategy.use_written_weights()


def _list_modules_of_clips(run: TrainingRun) -> Sequence[str]:
    """List the modules that the clips of the run train, but not the one frame of a trial."""
    shapes = list_batch_shapes(run.plan.batch_plan, run.task.family.frame_rule)
    return run.task.family.facts.lora.trained_by_clips if any(shape.num_frames > 1 for shape in shapes) else ()


def _take_gradients(strategy: Strategy, weights: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each weight, or its largest magnitude where all gradients are never held at once."""
    if strategy.fused_backward is None:
        return {name: weight.grad for name, weight in weights.items()}
    magnitudes = strategy.fused_backward.pop_trial_gradients()
    return {name: magnitudes.get(weight) for name, weight in weights.items()}


def _keep(values: torch.Tensor) -> torch.Tensor:
    return values


def _count_elements(
    tensors: Sequence[torch.Tensor], count: Callable[[torch.Tensor], torch.Tensor], sum_over_shards: SumOverShards
) -> list[int]:
    """Count elements of each tensor, of which each rank may hold a part."""
    counts = [int(count(get_local_shard(tensor.detach()))) for tensor in tensors]
    return [int(each) for each in sum_over_shards(torch.tensor(counts, dtype=torch.int64)).tolist()]


def _count_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isfinite().logical_not().sum()


def _check_gradients(
    loss: float,
    gradients: dict[str, torch.Tensor | None],
    sum_over_shards: SumOverShards = _keep,
    modules_of_clips: Sequence[str] = (),
) -> None:
    """Raise if the loss or a gradient is not finite or all are zero; warn of those that are, but for some modules."""
    given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    nonzero = _count_elements(list(given.values()), torch.count_nonzero, sum_over_shards)
    reached = [name for name, count in zip(given, nonzero, strict=True) if count]
    non_finite = _count_elements([given[name] for name in reached], _count_non_finite, sum_over_shards)
    broken = [name for name, count in zip(reached, non_finite, strict=True) if count]
    if not torch.isfinite(torch.tensor(loss)) or broken:
        raise UserError(
            f"before the first step: the loss is {loss:g} and {len(broken)} of {len(gradients)} gradients have NaN or"
            " Inf. Cause: the model, its VAE or the precision. Try mixed_precision bf16 or"
            f" no.{_format_names(broken)}"
        )
    known, excused = set(reached), set(modules_of_clips)
    idle = [name for name in gradients if name not in known and excused.isdisjoint(name.split("."))]
    if idle and not reached:
        raise UserError("before the first step: no trainable parameter gets a gradient")
    if idle:
        logger.warning(
            "%d of %d trainable parameters get no gradient and will not be trained:%s",
            len(idle),
            len(gradients),
            _format_names(idle),
        )


def _refuse_decay_of_idle_weights(strategy: Strategy, idle: Sequence[str]) -> None:
    """DeepSpeed takes missing gradients for zeros, so that its optimizer would decay weights without a gradient."""
    is_deepspeed = strategy.trains_base and strategy.optimizer_sharding_engine == "DeepSpeed"
    if idle and is_deepspeed and any(group.get("weight_decay") for group in strategy.optimizer.param_groups):
        raise UserError(
            f"before the first step: {len(idle)} weights have no part in the result, and DeepSpeed would apply"
            f" weight decay to them; use --fsdp, or --optimizer_args weight_decay=0.{_format_names(idle)}"
        )


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_PARAMETERS_SHOWN} more" if len(names) > MAX_PARAMETERS_SHOWN else ""
    return f" {', '.join(names[:MAX_PARAMETERS_SHOWN])}{more}" if names else ""


class BatchShape(NamedTuple):
    """The shape of a batch, which is all that ``build_dummy_batch`` needs."""

    size: tuple[int, int]
    batch_size: int
    control_sizes: tuple[tuple[int, int], ...] = ()
    num_frames: int = 1
    frame_rule: FrameRule | None = None
    num_references: int = 0

    @property
    def num_pixels(self) -> int:
        area = sum(width * height for width, height in (self.size, *self.control_sizes))
        return area * self.batch_size * self.num_frames

    def can_be_built_from(self, batch: PixelBatch) -> bool:
        """Whether ``batch`` tells the channels of all cached latents of control images."""
        return batch.can_build_controls(len(self.control_sizes) - self.num_references)


BatchShapes = list[BatchShape]


def list_batch_shapes(plan: MicroBatchSchedule, frame_rule: FrameRule | None = None) -> BatchShapes:
    """List the batch shapes of a plan, the largest first, so that out of memory shows at once.

    ``frame_rule`` is that of the model.
    """
    shapes = {
        BatchShape(
            size=bucket.resolution,
            batch_size=bucket.batch_size,
            control_sizes=bucket.control_resolutions,
            num_frames=bucket.num_frames,
            frame_rule=frame_rule and frame_rule.select_sound(has_sound=bucket.has_sound),
            num_references=bucket.num_references,
        )
        for bucket in plan.buckets
    }
    return sorted(shapes, key=lambda each: (each.num_pixels, each), reverse=True)


def run_forward_backward(run: TrainingRun, batch: PixelBatch, task: "DiffusionTask | None" = None) -> torch.Tensor:
    """Run forward and backward with all loss weights at 1; return the loss."""
    # An engine that shards the trained weights has to see each forward; DDP must not, which would expect a step.
    model = run.model if run.strategy.shard_group is not None else run.strategy.unwrap_model(run.model)
    task = replace(task or run.task, denoiser=model, micro_batch_stats=[])
    if run.compilation is not None:
        run.compilation.mark_step_begin()
    with task.scale_adapter(batch):
        with record_phase("forward", batch), run.strategy.accelerator.autocast():
            unweighted = replace(batch, loss_weights=torch.ones_like(batch.loss_weights), mask=None)
            loss = task(unweighted, run.state.step).mean()
        with record_phase("backward", batch):
            run.strategy.backward(loss)
    return loss.detach()


def run_trial_step(run: TrainingRun, batch: PixelBatch) -> None:
    """Run forward and backward with OOM recovery, and drop the gradients."""
    run.oom_recovery.run_until_fits(run.strategy, batch, run.state.step, partial(run_forward_backward, run))
    run.optimizer.zero_grad(set_to_none=True)


def check_later_stages_fit(run: TrainingRun, first_batch: PixelBatch) -> None:
    """Try the largest batch of later resolution stages, if it is larger than those of the current stage.

    Not on CPUs, where out of memory kills the process, nor with OOM recovery, which would slow down all earlier steps
    and recovers by itself when the shape comes.
    """
    if run.oom_recovery.is_enabled:
        return
    now, *later = [
        stage
        for stage in get_planned_stages(run.plan.batch_plan)
        if stage.end_step is None or stage.end_step > run.state.step
    ]
    largest = max(later, key=_count_pixels, default=now)
    if _count_pixels(largest) <= _count_pixels(now) or not has_device_memory(run.strategy.device):
        return
    shape = list_batch_shapes(largest.batch_plan, run.task.family.frame_rule)[0]
    if not shape.can_be_built_from(first_batch):
        return
    try:
        run_trial_step(run, first_batch.build_dummy_batch(*shape))
    except OutOfMemory as error:
        when = f"{error.reason}; this batch shape comes from step {largest.first_step + 1} on and was tried in advance"
        raise OutOfMemory(error.phase, error.batch, when.removeprefix("; ")) from None


def _count_pixels(stage: PlannedStage) -> int:
    return list_batch_shapes(stage.batch_plan)[0].num_pixels


RECORDING_BATCH_SIZE = 2
"""Batch size when recording shapes: two images can have texts of two lengths."""

TEXT_LENGTHS: tuple[TextLength, ...] = ("same", "longer", "shorter")


def warm_up_compilation(run: TrainingRun, compilation: "Compilation", first_batch: PixelBatch) -> None:
    """Compile by running forward and backward on black images of every batch shape; no parameter changes.

    Shapes with more control images than the first batch, whose cached latents are unknown, are compiled in their step.
    """
    started, shapes = time.perf_counter(), list_batch_shapes(run.plan.batch_plan, run.task.family.frame_rule)
    sizes = [shape for shape in shapes if shape.can_be_built_from(first_batch)]
    texts_vary = _record_input_shapes(run, compilation, first_batch, sizes)
    batches = [
        batch for shape in sizes for batch in _vary_text_lengths(first_batch.build_dummy_batch(*shape), texts_vary)
    ]
    with ProgressBar(
        len(batches), 0, "compiling", enabled=run.strategy.comm.is_main, unit="size", log_first_and_last=False
    ) as progress:
        for batch in batches:
            run_trial_step(run, batch)
            progress.update({"graphs": str(compilation.graph_count)})
    compilation.finish_warmup()
    seconds = time.perf_counter() - started
    run.metric_logger.log_values(run, {"compile/seconds": seconds, "compile/graphs": compilation.graph_count})
    logger.info("compiled %d batch shapes in %.1f s: %s", len(sizes), seconds, compilation)


def _record_input_shapes(
    run: TrainingRun, compilation: "Compilation", first_batch: PixelBatch, shapes: BatchShapes
) -> bool:
    """Record which dimensions vary with the text and with the image size; return whether text lengths vary."""
    count = min(len(first_batch), RECORDING_BATCH_SIZE)
    with run.strategy.evaluate(), run.strategy.accelerator.autocast(), compilation.record_shapes():
        task = replace(run.task, denoiser=run.strategy.unwrap_model(run.model), micro_batch_stats=[])
        by_size = {(*shape.size, shape.num_frames): shape._replace(batch_size=count) for shape in shapes}
        small = first_batch.build_dummy_batch(*shapes[-1]._replace(batch_size=count))
        texts_vary = any(isinstance(value, list) for value in task.encode(small, run.state.step).cond.values())
        batches = [
            batch
            for size in _select_extreme_sizes(list(by_size))
            for batch in _vary_text_lengths(first_batch.build_dummy_batch(*by_size[size]), texts_vary)
        ]
        batches += [small.vary_text_lengths([length] * count) for length in TEXT_LENGTHS if texts_vary]
        for batch in batches:
            task(batch, run.state.step)
    compilation.choose_dynamic_shapes(len(shapes), texts_vary)
    return texts_vary


def _vary_text_lengths(batch: PixelBatch, texts_vary: bool) -> list[PixelBatch]:
    """Return the batch, or copies of it with texts of equal, longer and shorter lengths if text lengths vary."""
    if not texts_vary:
        return [batch]
    ways: list[list[TextLength]] = [["same"] * len(batch)]
    if len(batch) > 1:
        ways += [["same", other] + ["same"] * (len(batch) - 2) for other in TEXT_LENGTHS[1:]]
    return [batch.vary_text_lengths(lengths) for lengths in ways]


def _select_extreme_sizes(sizes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Select the smallest and largest sizes by width, height, frames and area, so that every dimension varies."""
    ways = (lambda size: size[0], lambda size: size[1], lambda size: size[2], lambda size: size[0] * size[1])
    return sorted({most(sizes, key=way) for way in ways for most in (min, max)})
