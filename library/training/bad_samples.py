"""Pictures that became unreadable during a run: told once each, the same on all ranks, and too many of them end it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from ..data.cutting import BadSample
from ..distributed.strategy import Strategy
from ..errors import UserError

logger = logging.getLogger(__name__)


class TooManyFailures(UserError):
    """Too many pictures or steps went wrong; the weights are still those of the last good step."""


@dataclass
class BadSamples:
    """What could not be read so far, by name."""

    max_bad_samples: int  # --max_bad_samples
    num_images: int  # that the run has
    problems: dict[str, str] = field(default_factory=dict)
    unreported: list[BadSample] = field(default_factory=list)  # of this rank, since the last time all talked about it

    def add(self, problems: Sequence[BadSample]) -> None:
        """Take in what this rank met with in a step."""
        self.unreported += problems

    def sync_across_ranks(self, strategy: Strategy) -> None:
        """Every rank calls this at the same steps: all learn what any of them met with, and all stop together."""
        mine, self.unreported = self.unreported, []
        if not strategy.all_reduce_sum(len(mine)):
            return
        by_rank = strategy.all_gather_object(mine)
        if (half := _find_partial_failure(by_rank, strategy.model_parallel_size)) is not None:
            error = UserError(half)
            error.is_reported = not strategy.is_main
            raise error
        for bad in chain(*by_rank):
            if bad.name not in self.problems:
                self.problems[bad.name] = bad.problem
                logger.warning("%s: %s; what stands in its place weighs nothing", bad.name, bad.problem)
        if len(self.problems) > self.max_bad_samples or 2 * len(self.problems) >= self.num_images:
            error = TooManyFailures(self._format_limit_error())
            error.is_reported = not strategy.is_main
            raise error

    def log_summary(self) -> None:
        """At the end of a run, once more."""
        if self.problems:
            said = "%d pictures became unreadable and were not trained from then on: %s"
            logger.warning(said, len(self.problems), ", ".join(self.problems))

    def _format_limit_error(self) -> str:
        lines = "".join(f"\n{name}: {problem}" for name, problem in self.problems.items())
        limit = f"max_bad_samples is {self.max_bad_samples}" if len(self.problems) > self.max_bad_samples else "that is half of them or more"
        return f"{len(self.problems)} of {self.num_images} pictures cannot be read any more; {limit}:{lines}"


def _find_partial_failure(by_rank: Sequence[Sequence[BadSample]], model_parallel_size: int) -> str | None:
    """What is to be told when not all processes that work on a picture missed it: each saw another one."""
    for first in range(0, len(by_rank), model_parallel_size):
        # Machines may have their pictures under other folders.
        group = [{Path(bad.name).parts[-2:]: bad for bad in problems} for problems in by_rank[first : first + model_parallel_size]]
        for number, missed in enumerate(group):
            for name, bad in missed.items():
                if not all(name in others for others in group):
                    return (f"{bad.name}: {bad.problem}. That is so for rank {first + number}, while others that work"
                            " on the same picture could read it. What was learnt of it is taken back; look at that"
                            " machine's disk, and go on")  # fmt: skip
    return None
