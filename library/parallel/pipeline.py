"""Pipeline parallelism over ``torch.distributed.pipelining``: GPipe, 1F1B or interleaved 1F1B schedules of stages.

Each rank has the blocks of one stage (two if interleaved), and all modules that are no blocks.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from ..dataloader.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.step_phases import record_phase
from .device_mesh_strategy import DeviceMeshStrategy
from .gradient_accumulation import TrainingTask
from .parallel_plan import Activations, BlockSequence, ParallelPlan, name_experts
from .pipeline_stages import StageBoundary, StageRunner, broadcast_stage_output, partition_blocks
from .pipeline_weights import PipelineWeights, fill_missing_gradients
from .strategy import StrategySettings

logger = logging.getLogger(__name__)
MAX_CACHED_SCHEDULES = 64
"""Schedules, with their receive buffers, that are cached; the least recently used is dropped."""

IS_REPEATED_FORWARD: ContextVar[bool] = ContextVar("is_repeated_forward", default=False)
"""Whether the denoiser ran for this micro-batch before: for torch's shape inference, or on this rank's first stage."""


class PipelineStrategy(DeviceMeshStrategy):
    """Runs the micro-batches of a step through the stages by a schedule; other forwards run all stages in turn."""

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        self.schedule = settings.pp_schedule
        self.stage_group = self.mesh.get_group("pp")
        if self.trains_base:
            self.optimizer_sharding_engine = "a pipeline"
            ranks = self.dims.get_pipeline_ranks(comm.rank)
            self._sharded = PipelineWeights(self.stage_group, ranks, self.pipeline_stage, self.device)

    def _partition_model(self, model: nn.Module, plan: ParallelPlan) -> None:
        denoiser, sequence = plan.denoiser or model, plan.block_sequence
        self.sound_activations = {sequence.activation_args.index(name) for name in plan.sound_args}
        """The places of the activations that have no part in the result of a batch without sound."""
        self.stage_runner = StageRunner(sequence, _take_checkpoint_function(denoiser))
        self._assign_stages(sequence.count_block_parameters())
        self._drop_remote_weights(sequence)
        super()._partition_model(model, plan)
        self.grad_anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.pipeline_schedules = PipelineSchedules(self)
        self.use_full_forward()

    def _assign_stages(self, block_costs: Sequence[float]) -> None:
        num_ranks, stages_per_rank = self.dims.pp, 2 if self.schedule == "interleaved" else 1
        bounds = self.stage_bounds = partition_blocks(block_costs, stages_per_rank * num_ranks)
        self.local_stages = [stage for stage in range(len(bounds) - 1) if stage % num_ranks == self.pipeline_stage]
        self._local_blocks = {index for stage in self.local_stages for index in range(bounds[stage], bounds[stage + 1])}
        self._stage_ends = {end - 1: stage for stage, end in enumerate(bounds[1:])}

    def _drop_remote_weights(self, block_sequence: BlockSequence) -> None:
        """Move the frozen weights of other stages' blocks to the meta device."""
        for index, block in block_sequence.iter_places():
            if isinstance(self._sharded, PipelineWeights):
                self._sharded.add_block(block, self._find_owner(index))
            elif index not in self._local_blocks:
                for module in block.modules():
                    for name, weight in list(module.named_parameters(recurse=False)):
                        if not weight.requires_grad and not weight.is_meta:
                            module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
        blocks, bounds = [block for _, block in block_sequence.iter_places()], self.stage_bounds
        mib = sum(item.nbytes for block in blocks for item in block.parameters() if not item.is_meta) / 2**20
        ranges = " and ".join(f"{bounds[stage] + 1} to {bounds[stage + 1]}" for stage in self.local_stages)
        rank, experts = f"rank {self.pipeline_stage + 1} of {self.dims.pp}", len(block_sequence.other_experts) + 1
        of = f"{bounds[-1]} of each expert" if experts > 1 else f"{bounds[-1]}"
        logger.info("pipeline: %s has blocks %s of %s (%.1f MiB)", rank, ranges, of, mib)

    def _find_owner(self, index: int) -> int:
        """Find the rank in the pipeline that has a block."""
        stage = next(stage for stage, end in enumerate(self.stage_bounds[1:]) if index < end)
        return stage % self.dims.pp

    def _all_reduce_gradients(self, divisor: int) -> None:
        if self.keeps_missing_gradients:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            fill_missing_gradients(trained, self.stage_group, self.device)
        super()._all_reduce_gradients(divisor)

    def use_full_forward(self) -> None:
        """Make each forward of the model run all stages in turn, with the output of each broadcast to all."""
        self.stage_runner.set_full_forward(self._local_blocks, self._broadcast_stage_output)

    def _broadcast_stage_output(self, index: int, activations: Activations) -> Activations:
        """Broadcast the output of a block that is the last of its stage."""
        if index not in self._stage_ends:
            return activations
        stage, ranks = self._stage_ends[index], self.dims.get_pipeline_ranks(self.comm.rank)
        is_last = stage == len(self.stage_bounds) - 2
        next_rank = None if is_last else ranks[(stage + 1) % self.dims.pp]
        return broadcast_stage_output(
            activations, self.stage_group, ranks[stage % self.dims.pp], next_rank, self.grad_anchor
        )

    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        scaler = self.accelerator.scaler  # fp16's; it has to scale once on every stage, or it cannot unscale there
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.device))

        def compute_loss(batch: PixelBatch) -> Tensor:
            with self.accelerator.autocast():
                return task(batch, step).sum() * (scale / num_samples)

        def prepare_recompute(batch: PixelBatch) -> None:
            task.seed_dropout(batch, step)

        schedules, get_shape_key = self.pipeline_schedules, task.get_shape_key
        total = schedules.run(compute_loss, prepare_recompute, get_shape_key, batches) / scale
        self.accelerator.sync_gradients = True
        self._all_reduce_gradients(1)
        return self._all_reduce_loss(total)


@dataclass
class PipelineStep:
    """Micro-batches of one shape, and what every stage does with them."""

    compute_loss: Callable[[PixelBatch], Tensor]
    prepare_recompute: Callable[[PixelBatch], None]
    batches: Sequence[PixelBatch]
    started: set[int] = field(default_factory=set)

    @contextmanager
    def start_micro_batch(self, index: int) -> Iterator[PixelBatch]:
        """Yield the micro-batch for one forward through a stage."""
        token = IS_REPEATED_FORWARD.set(index in self.started)
        self.started.add(index)
        try:
            yield self.batches[index]
        finally:
            IS_REPEATED_FORWARD.reset(token)


class PipelineSchedules:
    """Runs micro-batches through a schedule for their shape and number, for which torch allocates buffers once."""

    def __init__(self, pipeline: PipelineStrategy):
        self.pipeline = pipeline
        self.step: PipelineStep | None = None
        self._cache: dict[Hashable, Any] = {}

    def run(
        self,
        compute_loss: Callable[[PixelBatch], Tensor],
        prepare_recompute: Callable[[PixelBatch], None],
        get_shape_key: Callable[[PixelBatch], Hashable],
        micro_batches: Sequence[PixelBatch],
    ) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of the losses on the last stage, else 0.

        ``prepare_recompute`` is called before each backward: the latest forward was of another micro-batch.
        """
        groups: dict[Hashable, list[PixelBatch]] = {}
        for batch in micro_batches:
            groups.setdefault(get_shape_key(batch), []).append(batch)
        total = torch.zeros((), device=self.pipeline.device)
        try:
            for shape, batches in groups.items():
                total += self._run_schedule(shape, PipelineStep(compute_loss, prepare_recompute, batches))
        finally:
            self.step = None
            self.pipeline.use_full_forward()
        return total

    def _run_schedule(self, shape: Hashable, step: PipelineStep) -> Tensor:
        self.step, count = step, len(step.batches)
        schedule = self._get_schedule((shape, count), count)
        indices, losses = torch.arange(count), list[Tensor]()
        inputs = (indices,) if 0 in self.pipeline.local_stages else ()  # torch needs an argument for the first stage
        targets = {"target": indices, "losses": losses} if self.pipeline.is_last_stage else {}
        schedule.step(*inputs, index=indices, **targets)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.pipeline.device)

    def _get_schedule(self, key: Hashable, count: int) -> Any:
        if key in self._cache:
            self._cache[key] = self._cache.pop(key)  # the most recently used is last
            return self._cache[key]
        while len(self._cache) >= MAX_CACHED_SCHEDULES:
            del self._cache[next(iter(self._cache))]
        schedule = self._cache[key] = self._build_schedule(count)
        return schedule

    def _build_schedule(self, count: int) -> Any:
        pipeline, num_stages = self.pipeline, len(self.pipeline.stage_bounds) - 1
        stages = [
            RecomputingPipelineStage(
                StageModule(self, index), index, num_stages, pipeline.device, group=pipeline.stage_group
            )
            for index in pipeline.local_stages
        ]
        settings: dict[str, Any] = {"n_microbatches": count, "loss_fn": _sum_loss, "scale_grads": False}
        if len(stages) > 1:  # torch runs micro-batches in rounds of equal size
            is_even = not count % max(1, count // pipeline.dims.pp)
            schedule_class: Any = ScheduleInterleaved1F1B if is_even else ScheduleLoopedBFS
            return schedule_class(stages, **settings)
        if pipeline.schedule == "1f1b" and count >= num_stages:
            return Schedule1F1B(stages[0], **settings)
        return ScheduleGPipe(stages[0], **settings)


def _take_checkpoint_function(denoiser: nn.Module) -> Callable[..., Any] | None:
    """Switch activation checkpointing of a denoiser off, and return the function that checkpoints single blocks.

    Stages checkpoint blocks without the communication between them; UNets do so themselves, inside of blocks.
    """
    function: Callable[..., Any] | None = None
    experts: list[Any] = [*name_experts(denoiser).values()]
    for expert in experts:
        if getattr(expert, "gradient_checkpointing", False):
            expert.gradient_checkpointing = False
            function = expert._gradient_checkpointing_func
    return function


def _sum_loss(loss: Tensor, target: Tensor) -> Tensor:
    """The output of the last stage is the loss; ``target`` is unused."""
    return loss.sum()


class StageModule(nn.Module):
    """Runs the model's forward over the blocks of one stage."""

    def __init__(self, schedules: PipelineSchedules, stage_index: int):
        super().__init__()
        pipeline = schedules.pipeline
        self._schedules, self._stage_runner = schedules, pipeline.stage_runner
        self._first, self._end = pipeline.stage_bounds[stage_index], pipeline.stage_bounds[stage_index + 1]
        self._is_first, self._is_last = stage_index == 0, stage_index == len(pipeline.stage_bounds) - 2

    def forward(self, *received: Tensor, index: Tensor) -> Activations | Tensor:
        """Return the stage's output activations, or the loss on the last stage."""
        step = self._schedules.step
        assert step is not None
        inputs = None if self._is_first else tuple(map(_ContiguousGradient.apply, received))
        self._stage_runner.set_stage_forward(self._first, self._end, inputs)
        try:
            with step.start_micro_batch(int(index)) as batch, record_phase("forward", batch):
                loss = step.compute_loss(batch)
        except StageBoundary as boundary:
            apply: Any = _StageOutput.apply
            pipeline, is_silent = self._schedules.pipeline, step.batches[int(index)].sound is None
            idle = pipeline.sound_activations if is_silent else ()
            return tuple(
                apply(tensor, pipeline.grad_anchor, place not in idle)
                for place, tensor in enumerate(boundary.activations)
            )
        if not self._is_last:
            raise AssertionError("a stage that is not the last ran to the end of the model")
        return loss[None]

    def prepare_backward(self, index: int) -> PixelBatch:
        """Set up the recomputation of a micro-batch and return it."""
        step = self._schedules.step
        assert step is not None
        step.prepare_recompute(step.batches[index])
        return step.batches[index]


class RecomputingPipelineStage(PipelineStage):
    """Restores the random state of a micro-batch before its backward, which may recompute its forward."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.submod
        with record_phase("backward", module.prepare_backward(bwd_chunk_id)):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous, as torch's send operations require."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].contiguous()


class _StageOutput(torch.autograd.Function):
    """Contiguous copy that requires grad through ``anchor``, also where a stage has no trainable parameters.

    For an output without a part in the result, torch's stages send a gradient of zeros, which is none on one process.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, has_part: bool) -> Tensor:
        ctx.has_part = has_part
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.has_part else None, None, None
