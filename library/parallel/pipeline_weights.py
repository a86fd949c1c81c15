"""The weights of a pipeline that trains them (``--train full``): those of its blocks belong to one stage each.

The ranks of other stages have an empty weight in their place, whose gradient, moments and average are empty as well, so
that optimizer, clipping and EMA need to know nothing of stages.  Weights outside of the blocks are whole on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .sharded_weights import PartialWeights


@dataclass(frozen=True)
class StageWeight:
    """The stage to which a weight belongs, and its shape there."""

    stage: int
    shape: torch.Size


class PipelineWeights(PartialWeights):
    """The weights that belong to single stages of this rank's pipeline."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], stage: int, device: torch.device):
        """``ranks`` are those of the pipeline, by stage; ``stage`` is this rank's."""
        super().__init__(device)
        self._group, self._ranks, self._stage = group, ranks, stage
        self._owners = dict[Tensor, StageWeight]()

    def add_block(self, block: nn.Module, stage: int) -> None:
        """Remember the weights of a block; those of another stage are replaced by empty ones, frozen ones by meta ones.

        A single number that is trained stays whole on all ranks.
        """
        for module in block.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.requires_grad and not weight.dim():
                    continue
                owner = StageWeight(stage, weight.shape)
                if stage != self._stage:
                    is_trained = weight.requires_grad
                    own = torch.empty(0, dtype=weight.dtype) if is_trained else weight.to("meta")
                    weight = nn.Parameter(own, requires_grad=is_trained)
                    module.register_parameter(name, weight)
                self._owners[weight] = owner

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    def get_whole_shape(self, weight: Tensor) -> torch.Size | None:
        owner = self._owners.get(weight)
        return None if owner is None else owner.shape

    @torch.no_grad()
    def gather(self, weight: Tensor, values: Tensor) -> Tensor:
        """Send values of the shape of a weight from its stage to the others; a collective of the pipeline."""
        owner = self._owners.get(weight)
        if owner is None or values.shape != weight.shape:
            return values
        if owner.stage == self._stage:
            whole = values.detach().to(self._device).contiguous()
        else:
            whole = torch.empty(owner.shape, dtype=values.dtype, device=self._device)
        dist.broadcast(whole, self._ranks[owner.stage], group=self.group)
        return whole

    def take(self, weight: Tensor, whole: Tensor) -> Tensor:
        """Return a tensor of the shape of the whole weight, or flat, on its own stage, and an empty one elsewhere."""
        owner = self._owners.get(weight)
        if owner is None or whole.shape not in (owner.shape, (owner.shape.numel(),)):
            return whole
        return whole.reshape(owner.shape) if owner.stage == self._stage else whole.new_empty(0)

    def list_positions(self, weight: Tensor) -> Tensor:
        """List the places of this rank's elements in the whole weight, flat, as int32: all or none."""
        return torch.arange(weight.numel(), dtype=torch.int32, device=weight.device)


@torch.no_grad()
def fill_missing_gradients(weights: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Give weights a gradient of zeros where another rank of the pipeline has one; those without any keep none."""
    flags = torch.tensor([float(weight.grad is not None) for weight in weights], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    for weight, flag in zip(weights, flags.tolist(), strict=True):
        if flag and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
