"""Shared by tests: nan runs."""

from pathlib import Path

import torch
from training_runs import train

from library.training import step_guards
from library.training.task import DiffusionTask


def train_with_a_spoilt_step(rank: int, step: int | tuple[int, ...], careful: bool, *flags: str) -> str:
    """As ``train``, but the loss of a step or several, or with a negative number of all from there on, is none on one
    rank.
    """
    whole, start = DiffusionTask.__call__, step_guards.NanGuard.__init__

    def spoilt(self: DiffusionTask, batch, at: int):
        here = torch.distributed.get_rank() == rank if _several() else True
        is_bad = at in step if isinstance(step, tuple) else at == step if step >= 0 else at >= -step
        return whole(self, batch, at) * (float("nan") if here and is_bad else 1.0)

    def watch(self, most):
        start(self, most)
        self.check_each_step_until = 10**9 if careful else 0

    DiffusionTask.__call__, step_guards.NanGuard.__init__ = spoilt, watch
    try:
        return train(*flags)
    finally:
        DiffusionTask.__call__, step_guards.NanGuard.__init__ = whole, start


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def told(folder: Path, *flags: str, work=train) -> str:
    """The messages of a run."""
    from library.log import configure_logging

    configure_logging(simple=True, file=str(folder / "log"))
    work(*flags)
    return (folder / "log").read_text("utf-8")
