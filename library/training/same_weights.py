"""Is what is trained still the same on every process?  Looked at before anything is saved, and as often as asked."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from ..distributed.roll_call import find_majority
from ..distributed.words import format_ranks
from ..errors import UserError
from .job import Callback, TrainingRun


class WeightsDiverged(UserError):
    """Processes hold different weights, so what they would save is what one of them has, and nobody's result."""


class WeightSyncCheck:
    """Comes first among the actions of a run, so that nothing is saved that not all processes have."""

    is_deferrable = False

    def __init__(self, every_n_steps: int | None, save_callbacks: Sequence[Callback]):
        self.every_n_steps, self.save_callbacks = every_n_steps, save_callbacks
        self.last_equal_step: int | None = None

    def on_train_begin(self, run: TrainingRun) -> None:
        """Before the first step, which may be one of a run that goes on."""
        if _is_needed(run):
            self(run)

    def should_run(self, run: TrainingRun) -> bool:
        asked = self.every_n_steps is not None and run.state.step % self.every_n_steps == 0
        return _is_needed(run) and (asked or any(save.should_run(run) for save in self.save_callbacks))

    def __call__(self, run: TrainingRun) -> None:
        average = run.ema.shadow_params if run.ema is not None else []
        hashes = run.strategy.all_gather_object(hash_tensors([*run.parameters, *average]))
        common = find_majority(hashes)
        if others := [rank for rank, value in enumerate(hashes) if value != common]:
            who = format_ranks(others, run.strategy.hostnames)
            rest = "rank 0" if len(hashes) == 2 else f"the other {len(hashes) - len(others)}"
            first, last = self.last_equal_step is None, self.last_equal_step
            since = "before the first step" if first else f"since the check after step {last}, where all were equal"
            raise WeightsDiverged(
                f"after step {run.state.step} {who} no longer has the same weights as {rest}; it happened {since}.\n"
                "Nothing is saved of it. It points to a device or memory that computes wrongly there; what was saved"
                " until then is good, and --auto_resume goes on from the last state. --check_sync_every_n_steps finds"
                " the step"
            )
        self.last_equal_step = run.state.step


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Every bit of all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_needed(run: TrainingRun) -> bool:
    return run.strategy.world_size > 1 and run.strategy.has_replicated_adapter
