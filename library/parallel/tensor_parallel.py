"""Linear layers of the frozen model cut over processes, with adapters that are whole on each of them.

A layer that is cut by rows makes some of its outputs here; one that is cut by columns takes some of its inputs, and
the sum over processes is its output.  An adapter uses the same rows and columns of its matrices, so what a process
finds as the gradient of an adapter in such a layer is a part of it, and the sum over processes is the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError
from .blocks import TensorParallelPlan

Ranges = tuple[tuple[int, int], ...]
"""Where each begins, and how long it is.  Not a tensor of places, which on another device would be waited for."""


class TensorParallel:
    """This process's part of a model's layers."""

    def __init__(self, rank: int, size: int, all_reduce: Callable[[Tensor], object]):
        """``add`` puts the sum over all parts in the place of a tensor."""
        self.rank, self.size, self.all_reduce = rank, size, all_reduce
        self.partial_grad_parameters: set[nn.Parameter] = set()
        """Of these a process finds a part of the gradient; of others it finds the whole."""
        self._is_bypassed = False
        self._latest_input: tuple[Tensor, bool, Tensor] | None = None
        """What a layer that is cut by rows was given, whether gradients were wanted, and what it got in its place."""

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> "TensorParallel":
        """One part for each process of a group."""
        return cls(dist.get_rank(group), dist.get_world_size(group), partial(dist.all_reduce, group=group))

    def shard_layers(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        """Leave this process's part of each layer in ``model``."""
        self._shard_attention_heads(model, plan)
        for name, (kind, pieces) in plan.items():
            layer = model.get_submodule(name)
            places = self._compute_local_ranges(pieces)
            (self._shard_colwise if kind == "rows" else self._shard_rowwise)(layer, places)
            self.partial_grad_parameters |= {parameter for parameter in layer.parameters() if parameter.requires_grad}

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Inside, a layer is not cut, and nobody is asked; its frozen weights have to be given to it whole."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    def _compute_local_ranges(self, pieces: Sequence[int]) -> Ranges:
        found, before = [], 0
        for size in pieces:
            start, end = (size // self.size * rank + min(rank, size % self.size) for rank in (self.rank, self.rank + 1))
            found.append((before + start, end - start))
            before += size
        return tuple(found)

    def _shard_attention_heads(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        for name, module in model.named_modules():
            heads = getattr(module, "heads", None)
            if heads is None or f"{name}.to_q" not in plan:
                continue
            if heads % self.size:
                raise ConfigError(
                    [
                        f"--tp_size {self.size}: {name} has {heads} heads, which cannot be dealt out evenly;"
                        f" try {_find_largest_divisor(self.size, heads)}"
                    ]
                )
            for size in ("heads", "inner_dim", "inner_kv_dim"):  # from some of them processors find the size of a head
                if hasattr(module, size):
                    setattr(module, size, getattr(module, size) // self.size)

    def _shard_colwise(self, layer: nn.Module, ranges: Ranges) -> None:
        base = _get_base_layer(layer)
        _set_frozen_parameter(base, "weight", _take_ranges(base.weight, 0, ranges))
        if base.bias is not None:
            _set_frozen_parameter(base, "bias", _take_ranges(base.bias, 0, ranges))
        layer.register_forward_pre_hook(lambda _, given: self._copy_input(given))
        for up in _get_adapter_layers(layer, "lora_B"):
            up.register_forward_hook(
                lambda _, given, made: made if self._is_bypassed else _take_ranges(made, -1, ranges)
            )

    def _shard_rowwise(self, layer: nn.Module, ranges: Ranges) -> None:
        base = _get_base_layer(layer)
        _set_frozen_parameter(base, "weight", _take_ranges(base.weight, 1, ranges))
        if base.bias is not None and self.rank:  # it is added once
            _set_frozen_parameter(base, "bias", torch.zeros_like(base.bias))
        layer.register_forward_hook(lambda _, given, made: self._all_reduce_output(made))
        for down in _get_adapter_layers(layer, "lora_A"):
            whole = down.forward

            def forward_shard(input: Tensor, lora_a: Any = down, full_forward: Any = whole) -> Tensor:
                return (
                    full_forward(input)
                    if self._is_bypassed
                    else functional.linear(input, _take_ranges(lora_a.weight, 1, ranges))
                )

            down.forward = forward_shard

    def _copy_input(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._is_bypassed:
            return inputs
        wanted = torch.is_grad_enabled()
        if self._latest_input is None or self._latest_input[0] is not inputs[0] or self._latest_input[1] != wanted:
            share: Any = _CopyToTensorParallel.apply
            self._latest_input = inputs[0], wanted, share(inputs[0], self.all_reduce)
        return (
            self._latest_input[2],
            *inputs[1:],
        )  # layers that are given the same one have one sum of their gradients

    def _all_reduce_output(self, output: Tensor) -> Tensor:
        self._latest_input = None  # nothing is kept longer than layers of its kind are asked one after the other
        if self._is_bypassed:
            return output
        add: Any = _ReduceFromTensorParallel.apply
        total: Tensor = add(output, self.all_reduce)
        return total


class _CopyToTensorParallel(torch.autograd.Function):
    """The same on all processes, each of which does something of its own with it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_reduce: Any) -> Tensor:
        ctx.add = all_reduce
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.add(total)
        return total, None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """The sum of what the processes made, with which all of them do the same."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_reduce: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _get_base_layer(layer: nn.Module) -> Any:
    """The layer of the model itself, without an adapter around it."""
    return getattr(layer, "base_layer", layer)


def _get_adapter_layers(layer: nn.Module, name: str) -> list[Any]:
    """The matrices of an adapter; none where there is no adapter."""
    return list(getattr(layer, name, {}).values())


def _take_ranges(tensor: Tensor, dim: int, ranges: Ranges) -> Tensor:
    parts = [tensor.narrow(dim, start, length) for start, length in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _set_frozen_parameter(layer: nn.Module, name: str, shard: Tensor) -> None:
    setattr(layer, name, nn.Parameter(shard.detach().clone(memory_format=torch.contiguous_format), requires_grad=False))


def _find_largest_divisor(size: int, num_heads: int) -> int:
    return next(number for number in range(size, 0, -1) if not num_heads % number)
