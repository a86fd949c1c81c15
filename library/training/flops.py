"""How many floating-point operations the denoiser needs for a step, counted on a copy of it without weights."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from ..distributed.schedules import IS_AGAIN
from ..families.empty import empty

META = torch.device("meta")


class Calls:
    """Which calls of the denoiser there were, told apart by the shapes they came with."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.examples: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def of(self, denoiser: nn.Module) -> Iterator[None]:
        """As long as this lasts they are counted."""
        hook = denoiser.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, denoiser: nn.Module, *call: Any) -> None:
        if IS_AGAIN.get():
            return
        shapes = tuple(item.shape if isinstance(item, Tensor) else None for item in tree_flatten(call)[0])
        self.counts[shapes] += 1
        if shapes not in self.examples:
            self.examples[shapes] = tree_map(_without_numbers, call)

    def flops(self, denoiser: nn.Module) -> int:
        """Of all calls; what gradient checkpointing computes twice counts once, adapters do not count."""
        model = _without_weights(denoiser)
        return sum(count * _counted(model, *self.examples[shapes]) for shapes, count in self.counts.items())


def _counted(model: nn.Module, arguments: Any, named: Any) -> int:
    """Forward, and backward to what went in: frozen weights need no gradient."""
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        said = model(*arguments, **named)[0]
        (said if isinstance(said, Tensor) else torch.cat([each.flatten() for each in said])).sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _without_weights(denoiser: nn.Module) -> nn.Module:
    own: Any = denoiser
    kind = next(cls for cls in type(denoiser).__mro__ if cls.__module__.startswith("diffusers."))  # beneath FSDP's
    model: nn.Module = empty(kind, own.config)
    return model.requires_grad_(False).to(META)


def _without_numbers(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    if not item.is_floating_point():
        return torch.empty_like(item, device=META)
    has_gradient = item.ndim > 2  # latents and texts; times and what is beside them come from nothing that learns
    return torch.empty_like(item, device=META, dtype=torch.float32, requires_grad=has_gradient)
