"""An optimizer whose memory DeepSpeed divides among the processes, told and taken as if it were whole.

DeepSpeed lays parameters end to end and gives every process a stretch of them, or a stretch of each.  Where which
number of a parameter is kept is the same for the numbers that an optimizer remembers of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterShard:
    """What this process keeps of a parameter: ``length`` numbers from ``start`` on, at ``place`` in ``flat``."""

    parameter: nn.Parameter
    start: int
    length: int
    flat: Tensor
    offset: int

    def slice(self, flat: Tensor) -> Tensor:
        """The numbers of this piece in something that lies as ``self.flat`` does."""
        return flat.narrow(0, self.offset, self.length)


def list_parameter_shards(
    zero_optimizer: Any, parameters: Sequence[nn.Parameter], stage: int, rank: int
) -> list[ParameterShard]:
    """What this process keeps of ``parameters``, from DeepSpeed's own books."""
    found = []
    for parameter in parameters:
        if stage < 3:
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                inside, place = mapping.lp_fragment_address, mapping.hp_fragment_address.start
                flat = zero_optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
                found.append(ParameterShard(parameter, inside.start, inside.numel, flat, place))
            continue
        subgroup, place, length = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
        start = rank * length  # the last ones may be filled up, or have nothing
        length = min(length, parameter.numel() - start)
        if length > 0:
            flat = zero_optimizer.fp32_partitioned_groups_flat[subgroup]
            found.append(ParameterShard(parameter, start, length, flat, place))
    return found


class DeepSpeedOptimizer:
    """What the loop sees of it: groups of whole parameters, and a memory of whole tensors."""

    def __init__(self, engine: Any, groups: Sequence[Mapping[str, Any]], device: torch.device):
        self._engine, self._zero, self._device = engine, engine.optimizer, device
        self.param_groups: list[dict[str, Any]] = [dict(group) for group in groups]
        self.defaults: dict[str, Any] = self._local_optimizer.defaults
        self.state: dict[Any, Any] = {}  # nothing of it is whole
        stage = int(engine.zero_optimization_stage())
        self._shards = list_parameter_shards(self._zero, self.parameters, stage, engine.global_rank)
        self._has_full_parameters = stage < 3
        self._loaded_state: Mapping[str, Any] | None = None
        """What was given to this optimizer, for as long as nothing was learnt since."""
        self._grad_norm = torch.zeros(())
        self._has_gradients = False
        self._compute_grad_norm = self._replace_norm_function(stage)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _local_optimizer(self) -> Any:
        """The optimizer that each process has for what it keeps."""
        return self._zero.optimizer

    def _replace_norm_function(self, stage: int) -> Any:
        """DeepSpeed looks at the gradient's length in its step; here the step before it already has."""
        if stage < 3:
            own, self._zero.scaled_global_norm = self._zero.scaled_global_norm, lambda norm_type=2: self._grad_norm
            return own
        from deepspeed.runtime.utils import combine_grad_norm_groups

        groups, self._zero._get_norm_groups = self._zero._get_norm_groups, lambda: [self._grad_norm]
        return lambda: combine_grad_norm_groups(groups())

    def compute_grad_norm(self, max_norm: float) -> Tensor:
        """Of all processes together, infinite where it is no number; the step will shorten it to ``longest``."""
        self._zero.clip_grad = max_norm
        self._has_gradients = True
        if wait := getattr(self._zero, "_wait_for_offload_copies", None):
            wait()
        # DeepSpeed multiplies gradients by what it makes of the length, so that is to stay where they are.
        self._grad_norm = torch.as_tensor(self._compute_grad_norm())
        return self._grad_norm.to(self._device)

    def step(self) -> None:
        """Every process moves what it keeps, and all get to know the whole."""
        for mine, theirs in zip(self.param_groups, self._local_optimizer.param_groups, strict=True):
            theirs.update({name: value for name, value in mine.items() if name != "params"})
        self._engine.step()
        self._loaded_state, self._has_gradients = None, False
        self._gather_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step was made with: DeepSpeed leaves a step with a gradient of no number out."""
        if self._has_gradients:
            self._grad_norm = torch.full_like(self._grad_norm, float("inf"))
            self._engine.step()
            self._has_gradients = False
            self._gather_parameters()

    def _gather_parameters(self) -> None:
        """DeepSpeed takes parameters away in a step, and does not give them back where it leaves the step out."""
        if not self._has_full_parameters:
            gone = [item for item in self.parameters if not item.numel()]
            if gone:
                gone[0].all_gather(gone)  # type: ignore[attr-defined]

    @torch.no_grad()
    def copy_parameters_to_shards(self) -> None:
        """What stands in the parameters counts from now on; they were written to, on all processes alike."""
        for piece in self._shards:
            value = piece.parameter.detach().reshape(-1).narrow(0, piece.start, piece.length)
            piece.slice(piece.flat).copy_(value)
            if not self._has_full_parameters:
                kept: Tensor = piece.parameter.ds_tensor  # type: ignore[attr-defined]
                kept.narrow(0, 0, piece.length).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """As torch tells it; all processes have to ask, but for one that was just given what it is to tell."""
        if self._loaded_state is not None:
            return dict(self._loaded_state)
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        state: dict[int, dict[str, Any]] = {number: {} for number in numbers.values()}
        for name in self._list_state_names():
            whole = self._gather_state(name)
            for parameter, number in numbers.items():
                state[number][name] = whole[parameter] if whole is not None else self._get_shared_value(name)
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in self.param_groups
        ]
        return {"state": {number: own for number, own in state.items() if own}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep this process's part of what ``state_dict`` told, here or elsewhere; nothing is exchanged."""
        numbers = {
            parameter: number
            for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True)
            for parameter, number in zip(mine["params"], theirs["params"], strict=True)
        }
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        for flat, group in {id(flat): (flat, group) for flat, group in self._list_flat_groups()}.values():
            own = [
                (piece, state_dict["state"].get(numbers[piece.parameter], {}))
                for piece in self._shards
                if piece.flat is flat
            ]
            self._local_optimizer.state.pop(flat, None)
            if any(state_dict["state"].values()):
                self._local_optimizer.state[flat] = self._build_flat_state(
                    flat, group, own or self._get_example_state(state_dict)
                )
        self._loaded_state, self._has_gradients = state_dict, False

    def _get_example_state(
        self, state_dict: Mapping[str, Any]
    ) -> list[tuple[ParameterShard | None, Mapping[str, Any]]]:
        """For a process that has nothing of a group: what kinds of memory there are."""
        return [(None, next(iter(state_dict["state"].values())))]

    def _build_flat_state(
        self, flat: Tensor, group: int, shard_states: Iterable[tuple[ParameterShard | None, Mapping[str, Any]]]
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        on_device = any(self.param_groups[group].get(name) for name in ("fused", "capturable"))
        for piece, memory in shard_states:
            for name, value in memory.items():
                if not isinstance(value, Tensor) or not value.dim():
                    home = flat.device if on_device else torch.device("cpu")
                    state[name] = value.to(home, copy=True) if isinstance(value, Tensor) else value
                    continue
                kept = state.setdefault(name, torch.zeros_like(flat))
                if piece is not None:
                    piece.slice(kept).copy_(value.reshape(-1).narrow(0, piece.start, piece.length))
        return state

    def _list_flat_groups(self) -> list[tuple[Tensor, int]]:
        """All that this process keeps, with the group that it belongs to."""
        if self._has_full_parameters:
            return [(flat, group) for group, flat in enumerate(self._zero.single_partition_of_fp32_groups)]
        return [
            (flat, self._zero.sub_group_to_group_id[number])
            for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat)
        ]

    def _list_state_names(self) -> list[str]:
        """What an optimizer remembers, by name; the same on all processes."""
        return sorted(
            {name for flat, _ in self._list_flat_groups() for name in self._local_optimizer.state.get(flat, {})}
        )

    def _get_shared_value(self, name: str) -> Any:
        """What is remembered once for all that a process keeps, such as the number of steps."""
        value = next(
            state[name]
            for flat, _ in self._list_flat_groups()
            if name in (state := self._local_optimizer.state.get(flat, {}))
        )
        return value.clone() if isinstance(value, Tensor) else value

    def _gather_state(self, name: str) -> dict[nn.Parameter, Tensor] | None:
        """What all processes together remember of each parameter; ``None`` for what is remembered once for all."""
        states = {id(flat): self._local_optimizer.state.get(flat, {}).get(name) for flat, _ in self._list_flat_groups()}
        if not any(isinstance(value, Tensor) and value.dim() for value in states.values()):
            return None
        sizes = [parameter.numel() for parameter in self.parameters]
        whole = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        parts = dict(zip(self.parameters, torch.split(whole, sizes), strict=True))
        for piece in self._shards:
            kept = states[id(piece.flat)]
            if kept is not None:
                parts[piece.parameter].narrow(0, piece.start, piece.length).copy_(piece.slice(kept))
        dist.all_reduce(whole)
        return {parameter: part.view_as(parameter) for parameter, part in parts.items()}
