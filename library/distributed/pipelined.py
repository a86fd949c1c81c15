"""The blocks of the model spread over processes, through which micro-batches run one behind the other."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..data.batch import PixelBatch
from .chain import Chain, Flow, Passage, cuts
from .grouped import Grouped
from .handover import handed_over
from .layout import Layout
from .schedules import Schedules
from .strategy import LossFunction
from .structure import Structure

logger = logging.getLogger(__name__)


class Pipelined(Grouped):
    """Each process has the blocks of one stage, or of two, and everything that is no block."""

    def __init__(self, accelerator: Accelerator, layout: Layout, schedule: str):
        super().__init__(accelerator, layout)
        self.schedule = schedule
        self.group = self.mesh.get_group("stage")

    def _take_apart(self, model: nn.Module, denoiser: nn.Module, structure: Structure) -> None:
        chain = structure.chain
        self.passage = Passage(chain)
        self._cut(chain.weights())
        # Of blocks alone, without what goes on between processes; UNets do it inside of their blocks.
        if getattr(denoiser, "gradient_checkpointing", False):
            denoiser.gradient_checkpointing = False  # type: ignore[assignment]
            way: Any = denoiser._gradient_checkpointing_func
            self.passage.checkpoint = way
        self._put_away(chain)
        super()._take_apart(model, denoiser, structure)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.schedules = Schedules(self)
        self.in_one_go()

    def _cut(self, loads: Sequence[float]) -> None:
        """Which blocks are whose."""
        each = 2 if self.schedule == "interleaved" else 1
        stages = self.layout.stages
        self.cuts = cuts(loads, each * stages)
        self.parts = [number for number in range(len(self.cuts) - 1) if number % stages == self.stage]
        self._mine = {place for part in self.parts for place in range(self.cuts[part], self.cuts[part + 1])}
        self._ends = {end - 1: number for number, end in enumerate(self.cuts[1:])}

    def _put_away(self, chain: Chain) -> None:
        """Blocks of others lose their frozen weights."""
        for place, block in enumerate(chain.blocks):
            if place not in self._mine:
                for module in block.modules():
                    for name, weight in list(module.named_parameters(recurse=False)):
                        if not weight.requires_grad:
                            module.register_parameter(name, nn.Parameter(weight.to("meta"), requires_grad=False))
        here = sum(item.nbytes for block in chain.blocks for item in block.parameters() if not item.is_meta)
        logger.info("pipeline: stage %d of %d has blocks %s of %d, %.1f MiB", self.stage + 1, self.layout.stages,
                    " and ".join(f"{self.cuts[part] + 1} to {self.cuts[part + 1]}" for part in self.parts),
                    len(chain.blocks), here / 2**20)  # fmt: skip

    def in_one_go(self) -> None:
        """From now on a forward of the model is one of all stages together, one after the other."""
        self.passage.all_of(self._mine, self._next_stage)

    def _next_stage(self, place: int, flow: Flow) -> Flow:
        """Called after each block; where a stage ends, everybody gets what it made."""
        if place not in self._ends:
            return flow
        number, group = self._ends[place], self.layout.stage_group(self.rank)
        is_end = number == len(self.cuts) - 2
        consumer = None if is_end else group[(number + 1) % self.layout.stages]
        return handed_over(flow, self.group, group[number % self.layout.stages], consumer, self.anchor)

    def gradients(self, loss_function: LossFunction, work: Sequence[PixelBatch], samples: int, step: int) -> Tensor:
        """Forward and backward of one step, with as many micro-batches under way as there are stages."""
        scaler = self.accelerator.scaler  # of fp16; it has to be asked once on every stage, or it cannot scale back
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.device))

        def loss_of(batch: PixelBatch) -> Tensor:
            with self.accelerator.autocast():
                return loss_function(batch, step).sum() * (scale / samples)

        total = self.schedules.run(loss_of, lambda batch: self.recall(batch, step), work) / scale
        self.accelerator.sync_gradients = True
        self._exchange(1)
        return self._summed(total)
