"""The model as the processes of a layout have it: cut by the code that cuts it in training."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ...config import RunConfig
from ...distributed.chain import cuts
from ...distributed.layout import Layout
from ...distributed.tensor_cut import TensorCut
from ...families.detect import Detected
from ...families.tensor_cuts import tensor_cuts
from .weightless import Footprint, Heaviest, Weightless, resting


@dataclass(frozen=True)
class Stage:
    """What the processes of one stage of a pipeline have, or all processes where there is none."""

    elsewhere: tuple[nn.Module, ...]
    """Blocks that are elsewhere."""
    chunks: tuple[Footprint, ...]
    """Of each of its parts of the model."""
    arriving: int
    """Bytes that come from other stages for a micro-batch."""
    waiting: int
    """So many chunks wait for their backward at once."""

    def activations(self, encoding: int) -> int:
        """In the worst moment of a step, which may be while pictures are encoded for the next micro-batch."""
        each = sum(chunk.kept for chunk in self.chunks) // len(self.chunks)
        computing = max(chunk.peak - chunk.kept for chunk in self.chunks)
        return max(self.waiting * each + computing, (self.waiting - 1) * each + encoding)

    @property
    def departing(self) -> int:
        return sum(chunk.flow for chunk in self.chunks)

    @property
    def flops(self) -> int:
        return sum(chunk.flops for chunk in self.chunks)


class Cut:
    """One for each pair of sizes; how it is spread or divided besides changes nothing in it."""

    def __init__(self, config: RunConfig, model: Detected, heaviest: Heaviest, layout: Layout):
        self.summed = 0
        """Bytes that processes of one layer have to add up in a micro-batch."""
        self.run = run = Weightless(config, model, heaviest)
        if layout.parts > 1:
            TensorCut(0, layout.parts, self._add).cut(run.denoiser, tensor_cuts(run.denoiser))
        if layout.stages > 1:
            self.stages = self._pipeline(layout, config)
            self.summed //= layout.stages
        else:
            self.stages = [Stage((), (run.step(),), 0, 1)]

    def _add(self, tensor: Tensor) -> None:
        self.summed += tensor.nbytes

    def _pipeline(self, layout: Layout, config: RunConfig) -> list[Stage]:
        each = 2 if config.parallel.pp_schedule == "interleaved" else 1
        blocks, total = self.run.chain.blocks, each * layout.stages
        ends = cuts(self.run.chain.weights(), total)
        chunks = self.run.stages(ends)
        found = []
        for stage in range(layout.stages):
            mine = range(stage, total, layout.stages)
            here = {place for part in mine for place in range(ends[part], ends[part + 1])}
            others = tuple(block for place, block in enumerate(blocks) if place not in here)
            arriving = sum(chunks[part - 1].flow for part in mine if part)
            found.append(Stage(others, tuple(chunks[part] for part in mine), arriving,
                               waiting(config.parallel.pp_schedule, layout.stages, stage,
                                       config.train.gradient_accumulation_steps)))  # fmt: skip
        return found


def waiting(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """How many chunks have gone forward and not yet backward at most, in torch's schedules."""
    if schedule == "interleaved":
        rounds = max(1, micro_batches // stages)
        if micro_batches % rounds:
            return 2 * micro_batches  # another schedule, with all forwards first
        return min(2 * micro_batches, micro_batches // rounds + 2 * (stages - 1 - stage) + 1)
    return min(micro_batches, stages - stage) if schedule == "1f1b" and micro_batches >= stages else micro_batches


def frozen_bytes(run: Weightless, without: Iterable[nn.Module] = ()) -> int:
    """Of weights that do not learn, as they rest on the device, and of buffers."""
    gone = {id(tensor) for module in without for tensor in (*module.parameters(), *module.buffers())}
    models = [run.trained, *run.bystanders]
    tensors = {id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    here = sum(tensor.nbytes for key, tensor in tensors.items() if not tensor.requires_grad and key not in gone)
    return here + sum(packed.nbytes for packed in resting(run.trained))
