"""Training runs in which the loss of chosen steps is NaN, and the log of a run."""

from pathlib import Path

import torch
from training_runs import train

from library.training import nan_and_oom_handling
from library.training.task import DiffusionTask


def train_with_nan_loss(rank: int, step: int | tuple[int, ...], check_each_step: bool, *flags: str) -> str:
    """As ``train``, but the loss of some steps is NaN on one rank.

    ``step`` is one step, several steps, or with a negative number all from that step on.
    """
    call, init = DiffusionTask.__call__, nan_and_oom_handling.NanGuard.__init__

    def return_nan(self: DiffusionTask, batch, current_step: int):
        is_this_rank = torch.distributed.get_rank() == rank if _is_distributed() else True
        is_bad = (
            current_step in step
            if isinstance(step, tuple)
            else current_step == step
            if step >= 0
            else current_step >= -step
        )
        return call(self, batch, current_step) * (float("nan") if is_this_rank and is_bad else 1.0)

    def init_guard(self, *arguments, **options):
        init(self, *arguments, **options)
        self.check_each_step_until = 10**9 if check_each_step else 0

    DiffusionTask.__call__, nan_and_oom_handling.NanGuard.__init__ = return_nan, init_guard
    try:
        return train(*flags)
    finally:
        DiffusionTask.__call__, nan_and_oom_handling.NanGuard.__init__ = call, init


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def train_and_read_log(folder: Path, *flags: str, work=train) -> str:
    """Run ``work`` and return the text of its log file."""
    from library.log import configure_logging

    configure_logging(simple=True, file=str(folder / "log"))
    work(*flags)
    return (folder / "log").read_text("utf-8")
