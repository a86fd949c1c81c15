"""The blocks of the model spread over processes, through which micro-batches run one behind the other."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.parallel_dims import ParallelDims
from .blocks import Activations, BlockSequence, ParallelPlan
from .model_parallel import ModelParallelStrategy
from .pipeline_schedule import PipelineSchedules
from .pipeline_stages import StageRunner, broadcast_stage_output, partition_blocks
from .strategy import LossFunction

logger = logging.getLogger(__name__)


class PipelineStrategy(ModelParallelStrategy):
    """Each process has the blocks of one stage, or of two, and everything that is no block."""

    def __init__(self, comm: Communicator, dims: ParallelDims, schedule: str):
        super().__init__(comm, dims)
        self.schedule = schedule
        self.stage_group = self.mesh.get_group("stage")

    def _partition_model(self, model: nn.Module, denoiser: nn.Module, parallel_plan: ParallelPlan) -> None:
        chain = parallel_plan.block_sequence
        self.stage_runner = StageRunner(chain)
        self._assign_stages(chain.count_block_parameters())
        # Of blocks alone, without what goes on between processes; UNets do it inside of their blocks.
        if getattr(denoiser, "gradient_checkpointing", False):
            denoiser.gradient_checkpointing = False  # type: ignore[assignment]
            way: Any = denoiser._gradient_checkpointing_func
            self.stage_runner.checkpoint_function = way
        self._drop_remote_weights(chain)
        super()._partition_model(model, denoiser, parallel_plan)
        self.grad_anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.pipeline_schedules = PipelineSchedules(self)
        self.use_full_forward()

    def _assign_stages(self, block_costs: Sequence[float]) -> None:
        """Which blocks are whose."""
        each = 2 if self.schedule == "interleaved" else 1
        stages = self.dims.pp
        self.stage_bounds = partition_blocks(block_costs, each * stages)
        self.local_stages = [
            number for number in range(len(self.stage_bounds) - 1) if number % stages == self.pipeline_stage
        ]
        self._local_blocks = {
            place for part in self.local_stages for place in range(self.stage_bounds[part], self.stage_bounds[part + 1])
        }
        self._stage_ends = {end - 1: number for number, end in enumerate(self.stage_bounds[1:])}

    def _drop_remote_weights(self, block_sequence: BlockSequence) -> None:
        """Blocks of others lose their frozen weights."""
        for place, block in enumerate(block_sequence.blocks):
            if place not in self._local_blocks:
                for module in block.modules():
                    for name, weight in list(module.named_parameters(recurse=False)):
                        if not weight.requires_grad:
                            module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
        here = sum(item.nbytes for block in block_sequence.blocks for item in block.parameters() if not item.is_meta)
        logger.info(
            "pipeline: stage %d of %d has blocks %s of %d, %.1f MiB",
            self.pipeline_stage + 1,
            self.dims.pp,
            " and ".join(
                f"{self.stage_bounds[part] + 1} to {self.stage_bounds[part + 1]}" for part in self.local_stages
            ),
            len(block_sequence.blocks),
            here / 2**20,
        )

    def use_full_forward(self) -> None:
        """From now on a forward of the model is one of all stages together, one after the other."""
        self.stage_runner.run_all_stages(self._local_blocks, self._broadcast_stage_output)

    def _broadcast_stage_output(self, index: int, activations: Activations) -> Activations:
        """Called after each block; where a stage ends, everybody gets what it made."""
        if index not in self._stage_ends:
            return activations
        number, group = self._stage_ends[index], self.dims.get_pipeline_ranks(self.comm.rank)
        is_end = number == len(self.stage_bounds) - 2
        consumer = None if is_end else group[(number + 1) % self.dims.pp]
        return broadcast_stage_output(
            activations, self.stage_group, group[number % self.dims.pp], consumer, self.grad_anchor
        )

    def compute_gradients(
        self, loss_function: LossFunction, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        """Forward and backward of one step, with as many micro-batches under way as there are stages."""
        scaler = self.accelerator.scaler  # of fp16; it has to be asked once on every stage, or it cannot scale back
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.device))

        def compute_loss(batch: PixelBatch) -> Tensor:
            with self.accelerator.autocast():
                return loss_function(batch, step).sum() * (scale / num_samples)

        total = (
            self.pipeline_schedules.run(compute_loss, lambda batch: self.prepare_recompute(batch, step), batches)
            / scale
        )
        self.accelerator.sync_gradients = True
        self._all_reduce_gradients(1)
        return self._all_reduce_loss(total)
