"""Pipeline parallelism: each rank has the blocks of one stage (two if interleaved), and all that is not a block."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import PixelBatch
from ..distributed.communicator import Communicator
from .blocks import Activations, BlockSequence, ParallelPlan
from .model_parallel import ModelParallelStrategy
from .pipeline_schedule import PipelineSchedules
from .pipeline_stages import StageRunner, broadcast_stage_output, partition_blocks
from .strategy import LossFunction, StrategySettings

logger = logging.getLogger(__name__)


class PipelineStrategy(ModelParallelStrategy):
    """Runs the micro-batches of a step through the stages by a schedule; other forwards run all stages in turn."""

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        self.schedule = settings.pp_schedule
        self.stage_group = self.mesh.get_group("pp")

    def _partition_model(self, model: nn.Module, denoiser: nn.Module, parallel_plan: ParallelPlan) -> None:
        sequence = parallel_plan.block_sequence
        checkpoint_function: Any = None
        # Checkpoint single blocks, without the communication between them; UNets do so themselves, inside of blocks.
        if getattr(denoiser, "gradient_checkpointing", False):
            denoiser.gradient_checkpointing = False  # type: ignore[assignment]
            checkpoint_function = denoiser._gradient_checkpointing_func
        self.stage_runner = StageRunner(sequence, checkpoint_function)
        self._assign_stages(sequence.count_block_parameters())
        self._drop_remote_weights(sequence)
        super()._partition_model(model, denoiser, parallel_plan)
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
        for index, block in enumerate(block_sequence.blocks):
            if index not in self._local_blocks:
                for module in block.modules():
                    for name, weight in list(module.named_parameters(recurse=False)):
                        if not weight.requires_grad:
                            module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
        blocks, bounds = block_sequence.blocks, self.stage_bounds
        mib = sum(item.nbytes for block in blocks for item in block.parameters() if not item.is_meta) / 2**20
        ranges = " and ".join(f"{bounds[stage] + 1} to {bounds[stage + 1]}" for stage in self.local_stages)
        rank = f"rank {self.pipeline_stage + 1} of {self.dims.pp}"
        logger.info("pipeline: %s has blocks %s of %d (%.1f MiB)", rank, ranges, len(blocks), mib)

    def use_full_forward(self) -> None:
        """Make each forward of the model run all stages in turn, with the output of each broadcast to all."""
        self.stage_runner.run_all_stages(self._local_blocks, self._broadcast_stage_output)

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
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        scaler = self.accelerator.scaler  # fp16's; it has to scale once on every stage, or it cannot unscale there
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.device))

        def compute_loss(batch: PixelBatch) -> Tensor:
            with self.accelerator.autocast():
                return loss_function(batch, step).sum() * (scale / num_samples)

        def prepare_recompute(batch: PixelBatch) -> None:
            loss_function.seed_dropout(batch, step)

        schedules, get_shape_key = self.pipeline_schedules, loss_function.get_shape_key
        total = schedules.run(compute_loss, prepare_recompute, get_shape_key, batches) / scale
        self.accelerator.sync_gradients = True
        self._all_reduce_gradients(1)
        return self._all_reduce_loss(total)
