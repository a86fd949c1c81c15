"""The blocks of the model spread over processes, through which micro-batches run one behind the other."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from ..data.batch import PixelBatch
from .chain import Chain, Flow, Passage, cuts
from .flat import FlatGradients
from .handover import handed_over
from .layout import Layout
from .schedules import Schedules
from .strategy import DataParallel, LossFunction

logger = logging.getLogger(__name__)


class Pipelined(DataParallel):
    """Each process has the blocks of one stage, or of two, and everything that is no block; adapters are whole.

    A process gets gradients for what it computed, and their sum over all stages is the gradient.  So all of them keep
    all adapters the same, and optimizers, states and files are what they are on one process.
    """

    computes_together = True

    def __init__(self, accelerator: Accelerator, layout: Layout, schedule: str):
        super().__init__(accelerator)
        self.layout, self.schedule = layout, schedule
        self.data_rank, self.data_size = layout.data_rank(self.rank), layout.data
        self.tellers = layout.tellers()
        self.frozen_home = torch.device("cpu")  # no device ever holds the whole model
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (layout.data, layout.stages),
                                                 mesh_dim_names=("data", "stage"))  # fmt: skip
        self.group = self.mesh.get_group("stage")
        self.stage = layout.stage(self.rank)
        self.tells = self.stage == layout.stages - 1
        """Whether this process computes the loss that counts."""

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        chain: Chain | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        """Put away blocks of other stages, and take the rest to the device."""
        if denoiser is None or chain is None:
            raise AssertionError("a pipeline is made of the blocks of a denoiser")
        self.passage = Passage(chain)
        self._cut(chain)
        if denoiser.gradient_checkpointing:  # of blocks alone, without what goes on between processes
            denoiser.gradient_checkpointing = False  # type: ignore[assignment]
            self.passage.checkpoint = partial(checkpoint, use_reentrant=False)
        self._put_away(chain)
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        with self._compiling_left_to_us():
            self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.schedules = Schedules(self)
        self.in_one_go()
        return self.model, self.optimizer

    def _cut(self, chain: Chain) -> None:
        """Which blocks are whose."""
        each = 2 if self.schedule == "interleaved" else 1
        self.cuts = cuts(chain.weights(), each * self.layout.stages)
        self.parts = [number for number in range(len(self.cuts) - 1) if number % self.layout.stages == self.stage]
        self._mine = {place for part in self.parts for place in range(self.cuts[part], self.cuts[part + 1])}
        self._owners = {end - 1: (number, number % self.layout.stages) for number, end in enumerate(self.cuts[1:])}

    def _put_away(self, chain: Chain) -> None:
        """Blocks of others lose their frozen weights."""
        for place, block in enumerate(chain.blocks):
            if place not in self._mine:
                for module in block.modules():
                    for name, weight in module.named_parameters(recurse=False):
                        if not weight.requires_grad:
                            module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
        here = sum(item.numel() * item.element_size() for block in chain.blocks for item in block.parameters()
                   if not item.is_meta)  # fmt: skip
        logger.info("pipeline: stage %d of %d has blocks %s of %d: %.1f MiB", self.stage + 1, self.layout.stages,
                    ", ".join(f"{self.cuts[part] + 1}-{self.cuts[part + 1]}" for part in self.parts),
                    len(chain.blocks), here / 2**20)  # fmt: skip

    def in_one_go(self) -> None:
        """From now on a forward of the model is one of all stages together, one after the other."""
        self.passage.all_of(self._mine, self._next_stage)

    def _next_stage(self, place: int, flow: Flow) -> Flow:
        """Called after each block; where a stage ends, everybody gets what it made."""
        if place in self._owners:
            number, owner = self._owners[place]
            group, last = self.layout.stage_group(self.rank), len(self.cuts) - 2
            consumer = None if number == last else group[(number + 1) % self.layout.stages]
            flow = handed_over(flow, self.group, group[owner], consumer, self.anchor)
        return flow

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss that all stages computed together, on all of them."""
        (loss * float(self.tells)).backward()  # type: ignore[no-untyped-call]
        FlatGradients(self.model, of_all=True).become_the_mean(self.layout.data)

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        """Forward and backward of one step, with as many micro-batches under way as there are stages."""
        scaler = self.accelerator.scaler  # of fp16
        scale = 1.0 if scaler is None else scaler.get_scale()

        def loss_of(batch: PixelBatch) -> Tensor:
            with self.accelerator.autocast():
                return loss_function(batch, step).sum() * (scale / samples)

        total = self.schedules.run(loss_of, work) / scale
        self.accelerator.sync_gradients = True
        FlatGradients(self.model, of_all=True).become_the_sum()
        return self._summed(total)
