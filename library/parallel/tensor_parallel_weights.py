"""The trained weights that tensor parallelism shards (``--train full``): gathered as a whole, and taken apart again.

Each rank has a plain tensor with its rows or columns, which optimizer and EMA take as any other.  A file or checkpoint
needs whole weights, one at a time.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .parallel_plan import TensorParallelPlan
from .quantize import Ranges, take_ranges
from .sharded_weights import PartialWeights, gather_shards, get_local_shard, list_shard_positions

HEAD_NORM_PATTERN = re.compile(r"\.(norm_(added_)?[qk]|(added_|img_attn_|txt_attn_)?[qk]_norm)\.")
"""Norms of the heads of an attention layer: their weights are whole on each rank, which applies them to its heads."""


@dataclass(frozen=True)
class WeightLayout:
    """The rows (0) or columns (1) of a weight that this rank holds."""

    dim: int
    ranges: Ranges
    shape: torch.Size
    """The shape of the whole weight."""

    def take(self, whole: Tensor) -> Tensor:
        """Copy this rank's part of a whole weight, or of a tensor of its shape."""
        return take_ranges(whole.detach(), self.dim, self.ranges).clone(memory_format=torch.contiguous_format)

    def place(self, part: Tensor) -> Tensor:
        """Return a tensor of the whole shape with this part, and zeros elsewhere."""
        whole, start = torch.zeros(self.shape, dtype=part.dtype, device=part.device), 0
        for offset, length in self.ranges:
            whole.narrow(self.dim, offset, length).copy_(part.narrow(self.dim, start, length))
            start += length
        return whole


class TensorParallelWeights(PartialWeights):
    """The layouts of the sharded weights of a model."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        """``group`` gathers weights; without one they are only taken apart."""
        super().__init__(device)
        self._group = group
        self._layouts = dict[Tensor, WeightLayout]()

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel ranks."""
        assert self._group is not None
        return self._group

    def add(self, weight: nn.Parameter, layout: WeightLayout) -> None:
        """Remember the layout of a weight."""
        self._layouts[weight] = layout

    def replace(self, parameters: Mapping[Tensor, Tensor]) -> None:
        """Take over the layouts for the parameters that FSDP put in the place of others."""
        self._layouts = {parameters.get(weight, weight): layout for weight, layout in self._layouts.items()}

    def get_whole_shape(self, weight: Tensor) -> torch.Size | None:
        layout = self._layouts.get(weight)
        return None if layout is None else layout.shape

    def list_positions(self, weight: Tensor) -> Tensor:
        """List the places of this rank's elements in a whole weight, flat, as int32; FSDP may shard its part again."""
        layout = self._layouts.get(weight)
        device = get_local_shard(weight).device
        return list_shard_positions(weight, None if layout is None else list_part_positions(layout, device))

    @torch.no_grad()
    def gather(self, weight: Tensor, values: Tensor) -> Tensor:
        """Gather values of the shape of this rank's part of ``weight``, which FSDP may shard; a collective."""
        if isinstance(values, DTensor):
            values = gather_shards(values)
        layout = self._layouts.get(weight)
        if layout is None or values.shape != weight.shape:
            return values
        whole = layout.place(values.detach().to(self._device))
        dist.all_reduce(whole, group=self.group)
        return whole

    def take(self, weight: Tensor, whole: Tensor) -> Tensor:
        """Copy this rank's part of a tensor of the shape of the whole weight, or flat; another is returned as it is."""
        layout = self._layouts.get(weight)
        if layout is None or whole.shape not in (layout.shape, (layout.shape.numel(),)):
            return whole
        return layout.take(whole.reshape(layout.shape))


def list_part_positions(layout: WeightLayout, device: torch.device) -> Tensor:
    """List the places of this rank's elements in the whole weight, as int32, in the shape of the part."""
    places = torch.arange(layout.shape.numel(), dtype=torch.int32, device=device)
    return layout.take(places.view(layout.shape))


def iter_head_norms(model: nn.Module, plan: TensorParallelPlan) -> Iterator[nn.Parameter]:
    """Yield the weights of norms of single heads, whose gradient on a rank is that of its heads."""
    attentions = {name.rpartition(".")[0] for name in plan}  # fused layers have no to_q
    for name, parameter in model.named_parameters():
        norm = HEAD_NORM_PATTERN.search(f".{name}")
        if norm and name[: max(norm.start() - 1, 0)] in attentions:
            yield parameter
