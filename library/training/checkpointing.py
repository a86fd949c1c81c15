"""Activations that are computed twice: of which blocks, and where what they are computed from is kept meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..config.schema import TrainConfig
from ..distributed.compiled_block import is_compiled
from ..distributed.host_copy import on_host
from .selective import Selection


def compute_twice(models: Iterable[nn.Module], denoiser: nn.Module, train: TrainConfig) -> None:
    """Gradient checkpointing in all of them; which blocks is a question of the denoiser's alone."""
    for model in models:
        if model is denoiser:
            way = Checkpoints(train.gradient_checkpointing_every, to_host=train.cpu_offload_checkpointing,
                              budget=train.gradient_checkpointing_budget)  # fmt: skip
            model.enable_gradient_checkpointing(way)  # type: ignore[operator]
            continue
        # newer versions of transformers have another word for it
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


class Checkpoints:
    """How diffusers is told to call a block whose activations may be forgotten."""

    def __init__(self, every: int, *, to_host: bool, budget: float = 0.0):
        self.every, self._kept = every, _host_memory if to_host else nullcontext
        self._selection = Selection(budget) if budget else None
        self._numbers: dict[Any, int] = {}

    def __call__(self, block: Any, *arguments: Any, **named: Any) -> Any:
        """Blocks are counted in the order in which they are first called."""
        if self._numbers.setdefault(block, len(self._numbers)) % self.every:
            return block(*arguments, **named)
        if self._selection is not None:
            if is_compiled(block):  # the compiler has the same budget
                return block(*arguments, **named)
            named["context_fn"] = self._selection.contexts(block, (arguments, named))
        with self._kept():
            return checkpoint(block.__call__, *arguments, use_reentrant=False, **named)


@contextmanager
def _host_memory() -> Iterator[None]:
    """What is kept for the backward pass waits in host memory; nobody waits for the copies."""

    def away(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, on_host(tensor)

    def back(kept: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = kept
        return tensor.to(device, non_blocking=True)

    with saved_tensors_hooks(away, back):
        yield
