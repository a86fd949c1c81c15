"""What one stage of a pipeline, or one device of a map, has of a run, and what waits there."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .weightless import Footprint, Weightless, resting


@dataclass(frozen=True)
class Stage:
    """What the processes of one stage of a pipeline have, or one device of a map, or all where there is neither."""

    frozen: int
    """Bytes of weights that do not learn, before they are spread or divided."""
    chunks: tuple[Footprint, ...]
    """Of each of its parts of the model."""
    arriving: int
    """Bytes that come from other stages for a micro-batch."""
    waiting: int
    """So many chunks wait for their backward at once."""
    share: float = 1.0
    """Of all that learns."""
    encodes: bool = True
    """Whether it also turns pictures and captions into what the model is given, as every process does."""

    def activations(self, encoding: int) -> int:
        """In the worst moment of a step, which may be while pictures are encoded for the next micro-batch."""
        each = sum(chunk.kept for chunk in self.chunks) // len(self.chunks)
        computing = max(chunk.peak - chunk.kept for chunk in self.chunks)
        others = (self.waiting - 1) * each + encoding if self.encodes else 0
        return max(self.waiting * each + computing, others)

    @property
    def departing(self) -> int:
        return sum(chunk.flow for chunk in self.chunks)

    @property
    def flops(self) -> int:
        return sum(chunk.flops for chunk in self.chunks)


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
