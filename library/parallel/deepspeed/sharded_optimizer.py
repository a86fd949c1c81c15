"""DeepSpeed's optimizer under ZeRO 3 where the model itself is trained: parameters and state are slices (DTensors)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..sharded_weights import get_local_shard
from .mapped_memory import MappedMemory
from .weight_shards import WeightShards
from .zero_optimizer import DeepSpeedOptimizer, ParameterShard


class ShardedDeepSpeedOptimizer(DeepSpeedOptimizer):
    """The optimizer that the training loop sees: its parameters and their state are the slices of this rank."""

    def __init__(
        self,
        engine: Any,
        groups: Sequence[Mapping[str, Any]],
        device: torch.device,
        shards: WeightShards,
        files: MappedMemory | None = None,
    ):
        """``groups`` have the partitioned parameters of the model, in the place of which come their slices.

        ``files`` are those in which the state is kept.
        """
        self._weight_shards, self._files = shards, files
        own = [{**group, "params": [shards.get_trained(each) for each in group["params"]]} for group in groups]
        super().__init__(engine, own, device, shards.list_trained())

    @property
    def state(self) -> dict[Any, Any]:
        """The state of each slice, in the memory of DeepSpeed's flat tensors; single numbers are copies."""
        return {shard.parameter: entry for shard in self._shards if (entry := self._get_state(shard))}

    def _get_state(self, shard: ParameterShard) -> dict[str, Any]:
        entry = dict[str, Any]()
        for name, value in self._get_flat_state(shard.flat).items():
            if isinstance(value, Tensor):
                entry[name] = self._weight_shards.build_like(shard, value) if value.dim() else value.clone()
            else:
                entry[name] = value
        return entry

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.parameters:
            parameter.grad = None

    def take_gradients(self, reached: set[nn.Parameter]) -> None:
        """Give the slices of the parameters that a trial reached their gradients, and drop those of DeepSpeed."""
        self._weight_shards.add_gradients(reached)
        self._has_gradients = True
        super().zero_grad()

    def copy_parameters_to_shards(self) -> None:
        self._weight_shards.update_model()

    def _gather_parameters(self) -> None:
        """Leave the parameters partitioned: the model gathers those of a layer when it runs."""

    def state_dict(self) -> dict[str, Any]:
        """Build torch's state dict with slices; no communication."""
        indices = {parameter: index for index, parameter in enumerate(self.parameters)}
        groups = [{**group, "params": [indices[each] for each in group["params"]]} for group in self.param_groups]
        return {"state": {indices[each]: entry for each, entry in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the slices of a state dict of any engine, which are sharded as the parameters are."""
        super().load_state_dict(state_dict)
        self._loaded_state = None

    def _build_flat_state(
        self, flat: Tensor, group: int, shard_states: Sequence[tuple[ParameterShard | None, Mapping[str, Any]]]
    ) -> dict[str, Any]:
        state = super()._build_flat_state(flat, group, shard_states)
        if self._files is not None:
            self._files.move(value for value in state.values() if isinstance(value, Tensor))
        return state

    def _slice_state(self, shard: ParameterShard, value: Tensor) -> Tensor:
        return get_local_shard(value)
