"""Pictures that became unreadable during a run: told once each, the same on all ranks, and too many of them end it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..data.cutting import BadSample
from ..distributed.strategy import DataParallel
from .health import NoMore

logger = logging.getLogger(__name__)


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
        for bad in strategy.from_all(mine):
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
