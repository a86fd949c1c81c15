"""Is what is trained still the same on every process?  Looked at before anything is saved, and as often as asked."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from ..distributed.roll_call import most_common
from ..distributed.words import ranks_in_words
from ..errors import UserError
from .job import Action, Run


class Diverged(UserError):
    """Processes hold different weights, so what they would save is what one of them has, and nobody's result."""


class SameWeights:
    """Comes first among the actions of a run, so that nothing is saved that not all processes have."""

    can_wait = False

    def __init__(self, every: int | None, saves: Sequence[Action]):
        self.every, self.saves = every, saves
        self.same_until: int | None = None

    def begin(self, run: Run) -> None:
        """Before the first step, which may be one of a run that goes on."""
        if _is_wanted(run):
            self(run)

    def is_due(self, run: Run) -> bool:
        asked = self.every is not None and run.state.step % self.every == 0
        return _is_wanted(run) and (asked or any(save.is_due(run) for save in self.saves))

    def __call__(self, run: Run) -> None:
        average = run.average.values if run.average is not None else []
        hashes = run.strategy.gather(fingerprint([*run.parameters, *average]))
        common = most_common(hashes)
        if others := [rank for rank, value in enumerate(hashes) if value != common]:
            who = ranks_in_words(others, run.strategy.hosts)
            rest = "rank 0" if len(hashes) == 2 else f"the other {len(hashes) - len(others)}"
            first, last = self.same_until is None, self.same_until
            since = "before the first step" if first else f"since the check after step {last}, where all were equal"
            raise Diverged(
                f"after step {run.state.step} {who} no longer has the same weights as {rest}; it happened {since}.\n"
                "Nothing is saved of it. It points to a device or memory that computes wrongly there; what was saved"
                " until then is good, and --auto_resume goes on from the last state. --check_sync_every_n_steps finds"
                " the step"
            )
        self.same_until = run.state.step


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Every bit of all of them."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_wanted(run: Run) -> bool:
    return run.strategy.size > 1 and run.strategy.is_replicated
