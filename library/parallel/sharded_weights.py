"""Trained weights of which each rank holds a part (FSDP or ZeRO 3 with ``--train full``): DTensors.

What computes on single elements works on the part of this rank; what needs a whole weight, such as a file, gathers one
at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..distributed.communicator import Communicator
from ..distributed.devices import HOST
from ..models.component_files import ReadWeight, read_whole

GatherWeight = Callable[[], Tensor]
"""Gathers a weight as a whole; all ranks call it."""

END = -1
"""What the main rank sends instead of the number of a weight when it needs no more."""


class PartialWeights(ABC):
    """Trained weights of which this rank holds a part as a plain tensor, or none of it."""

    def __init__(self, device: torch.device):
        """``device`` is the one to which whole weights are gathered."""
        self._device = device
        self._stand_ins = dict[Tensor, Tensor]()
        self._weights = dict[Tensor, Tensor]()
        """The weights by their stand-ins."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the weights together."""

    @abstractmethod
    def get_whole_shape(self, weight: Tensor) -> torch.Size | None:
        """Return the shape of a whole weight; None for weights that each rank has."""

    @abstractmethod
    def gather(self, weight: Tensor, values: Tensor) -> Tensor:
        """Gather values of the shape of this rank's part of a weight, and return others as they are; a collective."""

    @abstractmethod
    def take(self, weight: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the shape of the whole weight, or flat; others as they are."""

    @abstractmethod
    def list_positions(self, weight: Tensor) -> Tensor:
        """List the places of this rank's elements in the whole weight, flat, as int32."""

    def __contains__(self, weight: object) -> bool:
        return isinstance(weight, Tensor) and self.get_whole_shape(weight) is not None

    def get_stand_in(self, weight: Tensor) -> Tensor:
        """Return a meta tensor of the shape of a whole weight; a weight that each rank has is returned as it is."""
        shape = self.get_whole_shape(weight)
        if shape is None:
            return weight.detach()
        if weight not in self._stand_ins:
            stand_in = torch.empty(shape, dtype=weight.dtype, device="meta")
            self._stand_ins[weight], self._weights[stand_in] = stand_in, weight
        return self._stand_ins[weight]

    def find_weight(self, stand_in: Tensor) -> Tensor | None:
        """Return the weight that a meta tensor stands for."""
        return self._weights.get(stand_in)


def get_local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, which shares its memory; a plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local.detach()


def present_shard_like(local: Tensor, weight: Tensor) -> Tensor:
    """Present a tensor of the size of this rank's part of a weight as the weight is."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def list_shard_positions(tensor: Tensor, positions: Tensor | None = None) -> Tensor:
    """List the places of this rank's elements in the whole tensor, flat, as int32.

    ``positions`` are those of the tensor itself, if it is a part of another one, in its shape.
    """
    local = get_local_shard(tensor)
    if positions is None:
        positions = torch.arange(tensor.numel(), dtype=torch.int32, device=local.device).view(tensor.shape)
    if isinstance(tensor, DTensor):
        dim = next(index for index, placement in enumerate(tensor.placements) if placement.is_shard(0))
        rows = -(-tensor.shape[0] // tensor.device_mesh.size(dim))  # as torch.chunk has them
        first = min(rows * tensor.device_mesh.get_local_rank(dim), tensor.shape[0])
        positions = positions[first : first + local.shape[0]]
    return positions.reshape(-1)


def sum_over_group(values: Tensor, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Sum what each rank of a group computed of its part of the weights."""
    total = values.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return total.to(values.device)


@torch.no_grad()
def copy_to_shard(target: Tensor, value: Tensor) -> None:
    """Copy a whole value, which every rank has, to the part of ``target`` that this rank holds."""
    target.copy_(shard_like(value, target))


def shard_like(value: Tensor, model: Tensor) -> Tensor:
    """Shard a whole value, which every rank has, as ``model`` is; without communication."""
    if not isinstance(model, DTensor) or isinstance(value, DTensor):
        return value
    local = value.to(get_local_shard(model).device)
    return distribute_tensor(local, model.device_mesh, model.placements, src_data_rank=None)


def copy_shard_to_host(tensor: DTensor) -> DTensor:
    """Copy the part of a tensor on this rank to host memory."""
    local = get_local_shard(tensor).to(HOST, copy=True).contiguous()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def fit_shape(value: Tensor, model: Tensor) -> Tensor:
    """Give a whole value the shape of ``model``, where one of them is flat, as the weights of ZeRO 3 are."""
    if value.shape != model.shape and value.numel() == model.numel() and 1 in (value.dim(), model.dim()):
        return value.reshape(model.shape)
    return value


def replace_optimizer_parameters(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], sharded: Mapping[str, nn.Parameter]
) -> None:
    """Let an optimizer without state update the parameters that a strategy put in the place of others."""
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(names.get(each, ""), each) for each in group["params"]]


def run_on_main_with_whole_weights(
    comm: Communicator,
    weights: Sequence[Tensor],
    work: Callable[[ReadWeight], None],
    find_gather: "Callable[[Tensor], GatherWeight | None]",
) -> None:
    """Run ``work`` on the main rank with a function that gathers any of ``weights``; an error is raised on all ranks.

    The main rank asks for weights in the order in which it needs them, and holds one at a time; the other ranks take
    part in gathering until it has ended.  ``find_gather`` returns what gathers a weight; None if each rank has it.
    """
    gathers = [find_gather(weight) for weight in weights]
    if not any(gathers):
        comm.run_on_main(lambda: work(read_whole))
        return
    numbers = {id(weight): number for number, weight in enumerate(weights)}

    def read_weight(weight: Tensor) -> Tensor:
        number = numbers.get(id(weight))
        if number is None or (gather := gathers[number]) is None:
            return weight
        _broadcast_number(comm, number)
        return gather()

    def work_and_end() -> None:
        try:
            work(read_weight)
        finally:
            _broadcast_number(comm, END)

    if not comm.is_main:
        while (number := _broadcast_number(comm)) != END:
            if (gather := gathers[number]) is not None:
                gather()
    comm.run_on_main(work_and_end)


def _broadcast_number(comm: Communicator, number: int = END) -> int:
    value = torch.tensor(number, device=comm.device)
    dist.broadcast(value, 0)
    return int(value)


def gather_shards(weight: DTensor) -> Tensor:
    """All-gather a weight, on the device: a shard that is kept in host memory is copied there."""
    local, mesh = weight.to_local(), weight.device_mesh
    if local.device.type != mesh.device_type:
        moved = local.to(mesh.device_type)
        weight = DTensor.from_local(
            moved, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    whole: Tensor = weight.full_tensor()
    return whole.detach()
