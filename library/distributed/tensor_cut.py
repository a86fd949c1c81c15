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
from .structure import Cuts

Stretches = tuple[tuple[int, int], ...]
"""Where each begins, and how long it is.  Not a tensor of places, which on another device would be waited for."""


class TensorCut:
    """This process's part of a model's layers."""

    def __init__(self, rank: int, size: int, add: Callable[[Tensor], object]):
        """``add`` puts the sum over all parts in the place of a tensor."""
        self.rank, self.size, self.add = rank, size, add
        self.learnt: set[nn.Parameter] = set()
        """Of these a process finds a part of the gradient; of others it finds the whole."""
        self._is_alone = False
        self._latest: tuple[Tensor, bool, Tensor] | None = None
        """What a layer that is cut by rows was given, whether gradients were wanted, and what it got in its place."""

    @classmethod
    def among(cls, group: dist.ProcessGroup) -> "TensorCut":
        """One part for each process of a group."""
        return cls(dist.get_rank(group), dist.get_world_size(group), partial(dist.all_reduce, group=group))

    def cut(self, model: nn.Module, cuts: Cuts) -> None:
        """Leave this process's part of each layer in ``model``."""
        self._cut_heads(model, cuts)
        for name, (kind, pieces) in cuts.items():
            layer = model.get_submodule(name)
            places = self._mine(pieces)
            (self._cut_rows if kind == "rows" else self._cut_columns)(layer, places)
            self.learnt |= {parameter for parameter in layer.parameters() if parameter.requires_grad}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, a layer is not cut, and nobody is asked; its frozen weights have to be given to it whole."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def _mine(self, pieces: Sequence[int]) -> Stretches:
        found, before = [], 0
        for size in pieces:
            start, end = (size // self.size * rank + min(rank, size % self.size) for rank in (self.rank, self.rank + 1))
            found.append((before + start, end - start))
            before += size
        return tuple(found)

    def _cut_heads(self, model: nn.Module, cuts: Cuts) -> None:
        for name, module in model.named_modules():
            heads = getattr(module, "heads", None)
            if heads is None or f"{name}.to_q" not in cuts:
                continue
            if heads % self.size:
                raise ConfigError([f"--tp_size {self.size}: {name} has {heads} heads, which cannot be dealt out evenly;"
                                   f" try {_largest_below(self.size, heads)}"])  # fmt: skip
            for size in ("heads", "inner_dim", "inner_kv_dim"):  # from some of them processors find the size of a head
                if hasattr(module, size):
                    setattr(module, size, getattr(module, size) // self.size)

    def _cut_rows(self, layer: nn.Module, places: Stretches) -> None:
        base = _base(layer)
        _keep(base, "weight", _taken(base.weight, 0, places))
        if base.bias is not None:
            _keep(base, "bias", _taken(base.bias, 0, places))
        layer.register_forward_pre_hook(lambda _, given: self._shared(given))
        for up in _halves(layer, "lora_B"):
            up.register_forward_hook(lambda _, given, made: made if self._is_alone else _taken(made, -1, places))

    def _cut_columns(self, layer: nn.Module, places: Stretches) -> None:
        base = _base(layer)
        _keep(base, "weight", _taken(base.weight, 1, places))
        if base.bias is not None and self.rank:  # it is added once
            _keep(base, "bias", torch.zeros_like(base.bias))
        layer.register_forward_hook(lambda _, given, made: self._added(made))
        for down in _halves(layer, "lora_A"):
            whole = down.forward

            def part(given: Tensor, down: Any = down, whole: Any = whole) -> Tensor:
                return whole(given) if self._is_alone else functional.linear(given, _taken(down.weight, 1, places))

            down.forward = part

    def _shared(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._is_alone:
            return given
        wanted = torch.is_grad_enabled()
        if self._latest is None or self._latest[0] is not given[0] or self._latest[1] != wanted:
            share: Any = _Shared.apply
            self._latest = given[0], wanted, share(given[0], self.add)
        return (self._latest[2], *given[1:])  # layers that are given the same one have one sum of their gradients

    def _added(self, made: Tensor) -> Tensor:
        self._latest = None  # nothing is kept longer than layers of its kind are asked one after the other
        if self._is_alone:
            return made
        add: Any = _Added.apply
        total: Tensor = add(made, self.add)
        return total


class _Shared(torch.autograd.Function):
    """The same on all processes, each of which does something of its own with it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, add: Any) -> Tensor:
        ctx.add = add
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.add(total)
        return total, None


class _Added(torch.autograd.Function):
    """The sum of what the processes made, with which all of them do the same."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, add: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        add(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _base(layer: nn.Module) -> Any:
    """The layer of the model itself, without an adapter around it."""
    return getattr(layer, "base_layer", layer)


def _halves(layer: nn.Module, name: str) -> list[Any]:
    """The matrices of an adapter; none where there is no adapter."""
    return list(getattr(layer, name, {}).values())


def _taken(tensor: Tensor, axis: int, places: Stretches) -> Tensor:
    parts = [tensor.narrow(axis, start, length) for start, length in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _keep(layer: nn.Module, name: str, part: Tensor) -> None:
    setattr(layer, name, nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False))


def _largest_below(size: int, heads: int) -> int:
    return next(number for number in range(size, 0, -1) if not heads % number)
