"""One process, or DDP: every rank holds the whole model and trains on its own part of each global batch."""

import warnings
from collections.abc import Sequence
from typing import Any

from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dataloader.batch import PixelBatch
from ..distributed.step_phases import OutOfMemory, record_phase
from .gradient_accumulation import TrainingTask
from .gradient_sync import FlatGradients, exclude_frozen_from_ddp, register_ddp_comm_hook
from .parallel_plan import ParallelPlan
from .strategy import Strategy


class DDPStrategy(Strategy):
    """Wraps the model with accelerate, which means DDP where there are several processes.

    With CUDA graphs nothing is wrapped: the hooks of DDP do not run in a graph, and the nodes of autograd that they
    hold belong to another stream.  Gradients are then all-reduced after the last backward; so they are where a step
    trains a part of the model only, for whose other gradients DDP would wait.
    """

    syncs_after_backward = False
    """Whether gradients are all-reduced together, after the last backward of a step."""

    supports_cuda_graphs = True

    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        with self._disable_accelerate_compile(), warnings.catch_warnings():
            # accelerate passes broadcast_buffers, which torch 2.13 deprecates; it still has its effect.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.* is deprecated", category=FutureWarning)
            self.syncs_after_backward = self.uses_cuda_graphs or getattr(model, "is_partly_idle", False)
            if self.syncs_after_backward:
                self.model = self.accelerator.prepare_model(model, evaluation_mode=True)
                self.optimizer = self.accelerator.prepare_optimizer(optimizer)
                return self.model, self.optimizer
            if self.comm.world_size > 1:
                exclude_frozen_from_ddp(model)
                self.accelerator.ddp_handler.find_unused_parameters = self.trains_base
            # accelerate passes the local rank as the device, and SLURM may show each process its own device only.
            with patch_environment(ACCELERATE_BYPASS_DEVICE_MAP="true"):
                self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        register_ddp_comm_hook(self.model, self.straggler_monitor.mark_gradients_ready)
        return self.model, self.optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def compute_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor:
        if not self.syncs_after_backward:
            return self._all_reduce_loss(self._accumulate_gradients(task, batches, num_samples, step))
        total, gradients = self._compute_local_gradients(task, batches, num_samples, step)
        return self._all_reduce_gradients(total, gradients)

    def compute_gradients_catching_oom(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> Tensor | OutOfMemory:
        """Compute gradients without collectives, and all-reduce them when no rank ran out of memory.

        A rank that fails in the middle of DDP's all-reduces would leave the others waiting in them.
        """

        result = self.run_catching_oom(lambda: self._compute_local_gradients(task, batches, num_samples, step))
        return result if isinstance(result, OutOfMemory) else self._all_reduce_gradients(*result)

    def _compute_local_gradients(
        self, task: TrainingTask, batches: Sequence[PixelBatch], num_samples: int, step: int
    ) -> tuple[Tensor, FlatGradients | None]:
        total = self.gradient_accumulation.accumulate_without_sync(self.model, task, batches, num_samples, step)
        self.straggler_monitor.mark_gradients_ready()
        with record_phase("communication"):
            return total, FlatGradients(self.model.parameters()) if self.comm.world_size > 1 else None

    def _all_reduce_gradients(self, total: Tensor, gradients: FlatGradients | None) -> Tensor:
        if gradients is not None:
            with record_phase("communication"):
                gradients.all_reduce_mean(self.comm.world_size)
        self.accelerator.sync_gradients = True
        return self._all_reduce_loss(total)
