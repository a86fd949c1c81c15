"""The part of each weight that this rank holds under ZeRO 3 where the model itself is trained.

DeepSpeed flattens a weight, pads it, and gives all ranks slices of equal length.  Without the padding those are what
torch calls ``Shard(0)`` of a flat tensor, so each is presented as a DTensor of one dimension, which shares the memory
of DeepSpeed's slice.  EMA, checkpoints and update norms need nothing else; what needs the shape of a weight, as a file
does, takes a tensor on the meta device that stands for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .zero_optimizer import ParameterShard


class WeightShards:
    """The slices of all weights of a model on this rank, trained and frozen."""

    def __init__(self, zero_optimizer: Any, trained: Sequence[nn.Parameter], mesh: DeviceMesh):
        self._zero, self._mesh = zero_optimizer, mesh
        self._share_memory()
        self._trained = {parameter: self._share_master_weights(parameter) for parameter in trained}
        self._stand_ins = dict[Tensor, Tensor]()
        self._parameters = dict[Tensor, Tensor]()
        """The weights by their stand-ins."""

    def _share_memory(self) -> None:
        """Let the optimizer update the slices that the model gathers, without a copy of its own.

        DeepSpeed 0.19 means to do so for weights in float32, but compares a device with its name.  Offloaded optimizer
        state keeps its copy in host memory.
        """
        if self._zero.offload_optimizer:
            return
        pairs = zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_partitioned_groups_flat, strict=True)
        for master, gathered in pairs:
            if gathered is not None and (master.dtype, master.device) == (gathered.dtype, gathered.device):
                master.data = gathered.detach()

    def get_trained(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the slice of a trained weight that the optimizer updates."""
        return self._trained[parameter].parameter

    def list_trained(self) -> list[ParameterShard]:
        """List the slices of all trained weights, with their places in DeepSpeed's flat tensors."""
        return list(self._trained.values())

    def _share_master_weights(self, parameter: nn.Parameter) -> ParameterShard:
        subgroup, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
        flat = self._zero.fp32_partitioned_groups_flat[subgroup]
        length = self._count_elements(parameter, padded)
        local = flat.detach().narrow(0, offset, length)
        return ParameterShard(nn.Parameter(self._build(local, parameter)), 0, length, flat, offset)

    def _count_elements(self, parameter: Any, padded: int) -> int:
        """Count the elements of a slice that are no padding; the last ranks may have none."""
        remaining: int = parameter.ds_numel - self._mesh.get_local_rank() * padded
        return max(0, min(padded, remaining))

    def _build(self, local: Tensor, parameter: Any) -> DTensor:
        size = torch.Size((parameter.ds_numel,))
        return DTensor.from_local(local, self._mesh, (Shard(0),), run_check=False, shape=size, stride=(1,))

    def build_like(self, shard: ParameterShard, flat: Tensor) -> DTensor:
        """Present the slice of another flat tensor of the same layout, such as one of optimizer state."""
        whole, local = shard.parameter, shard.slice(flat.detach())
        return DTensor.from_local(
            local, self._mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def get_stand_in(self, weight: Tensor) -> Tensor:
        """Return a meta tensor of the shape of a partitioned weight; anything else is returned as it is."""
        if not hasattr(weight, "ds_shape"):
            return weight.detach()
        if weight not in self._stand_ins:
            stand_in = torch.empty(weight.ds_shape, dtype=weight.dtype, device="meta")
            self._stand_ins[weight], self._parameters[stand_in] = stand_in, weight
        return self._stand_ins[weight]

    def find_shard(self, stand_in: Tensor) -> DTensor | None:
        """Return the slice of the weight that a meta tensor stands for, if it stands for one."""
        parameter: Any = self._parameters.get(stand_in)
        if parameter is None:
            return None
        if parameter in self._trained:
            trained: Any = self._trained[parameter].parameter.detach()
            return trained  # type: ignore[no-any-return]
        partition = parameter.ds_tensor.detach()
        return self._build(partition.narrow(0, 0, self._count_elements(parameter, partition.numel())), parameter)

    @contextmanager
    def record_gradients(self) -> Iterator[set[nn.Parameter]]:
        """Collect the trained weights that backward passes within the context give a gradient."""
        reached = set[nn.Parameter]()
        parameters: list[Any] = list(self._trained)
        hooks = [parameter.register_post_accumulate_grad_hook(reached.add) for parameter in parameters]
        try:
            yield reached
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def add_gradients(self, reached: set[nn.Parameter]) -> None:
        """Add this rank's slices of DeepSpeed's gradients to those of the slices; the others have none."""
        from deepspeed.utils import safe_get_local_grad

        for parameter in reached:
            shard = self._trained[parameter]
            gradient = safe_get_local_grad(parameter)[: shard.length].to(shard.flat.device, copy=True)
            own, new = shard.parameter, self._build(gradient, parameter)
            own.grad = new if own.grad is None else own.grad + new

    def update_model(self) -> None:
        """Let the model compute with the values of the slices, which may be another copy; a collective."""
        self._zero.empty_partition_cache()
        for subgroup in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(subgroup)
        if persistent := self._zero.persistent_parameters:
            persistent[0].all_gather(persistent)
