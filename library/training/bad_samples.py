"""Pictures that became unreadable during a run: told once each, the same on all ranks, and too many of them end it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..data.cutting import BadSample
from ..distributed.strategy import DataParallel
from ..errors import UserError

logger = logging.getLogger(__name__)


class NoMore(UserError):
    """Too many pictures or steps went wrong; the weights are still those of the last good step."""


@dataclass
class BadSamples:
    """What could not be read so far, by name."""

    most: int  # --max_bad_samples
    pictures: int  # that the run has
    found: dict[str, str] = field(default_factory=dict)
    unsettled: list[BadSample] = field(default_factory=list)  # of this rank, since the last time all talked about it

    def note(self, here: Sequence[BadSample]) -> None:
        """Take in what this rank met with in a step."""
        self.unsettled += here

    def settle(self, strategy: DataParallel) -> None:
        """Every rank calls this at the same steps: all learn what any of them met with, and all stop together."""
        mine, self.unsettled = self.unsettled, []
        if not strategy.total(len(mine)):
            return
        by_rank = strategy.gather(mine)
        if (half := _read_by_some(by_rank, strategy.together)) is not None:
            error = UserError(half)
            error.is_told = not strategy.is_main
            raise error
        for bad in chain(*by_rank):
            if bad.name not in self.found:
                self.found[bad.name] = bad.problem
                logger.warning("%s: %s; what stands in its place weighs nothing", bad.name, bad.problem)
        if len(self.found) > self.most or 2 * len(self.found) >= self.pictures:
            error = NoMore(self._too_many())
            error.is_told = not strategy.is_main
            raise error

    def tell_all(self) -> None:
        """At the end of a run, once more."""
        if self.found:
            said = "%d pictures became unreadable and were not trained from then on: %s"
            logger.warning(said, len(self.found), ", ".join(self.found))

    def _too_many(self) -> str:
        lines = "".join(f"\n{name}: {problem}" for name, problem in self.found.items())
        limit = f"max_bad_samples is {self.most}" if len(self.found) > self.most else "that is half of them or more"
        return f"{len(self.found)} of {self.pictures} pictures cannot be read any more; {limit}:{lines}"


def _read_by_some(by_rank: Sequence[Sequence[BadSample]], together: int) -> str | None:
    """What is to be told when not all processes that work on a picture missed it: each saw another one."""
    for first in range(0, len(by_rank), together):
        # Machines may have their pictures under other folders.
        group = [{Path(bad.name).parts[-2:]: bad for bad in problems} for problems in by_rank[first : first + together]]
        for number, missed in enumerate(group):
            for name, bad in missed.items():
                if not all(name in others for others in group):
                    return (f"{bad.name}: {bad.problem}. That is so for rank {first + number}, while others that work"
                            " on the same picture could read it. What was learnt of it is taken back; look at that"
                            " machine's disk, and go on")  # fmt: skip
    return None
