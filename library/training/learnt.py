"""What a run changed in the end: how far each kind of layer moved, and which did not move at all."""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..adapters.update_norms import update_norms
from ..errors import UserError
from ..optim.optimizers import weights_as_used
from .job import Run

logger = logging.getLogger(__name__)

SHOWN_NAMES = 5
_UP_TO_THE_BLOCK = re.compile(r"^.*(?:blocks|layers|attentions|resnets)\.\d+\.")


class Learnt:
    """Looks once, after the last step."""

    can_wait = False

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    def is_due(self, run: Run) -> bool:
        return run.state.step >= run.plan.steps

    def __call__(self, run: Run) -> None:
        with weights_as_used(run.optimizer):
            self.norms = update_norms(run.strategy.unwrapped(run.adapter))
        kinds = by_kind(self.norms)
        said = ", ".join(f"{kind} {value:.3g}" for kind, value in kinds.items())
        logger.info("length of the update: %.4g; by kind of layer: %s", together(self.norms.values()), said)
        dead = [name for name, value in self.norms.items() if not value]
        if dead and len(dead) < len(self.norms):
            more = f" and {len(dead) - SHOWN_NAMES} more" if len(dead) > SHOWN_NAMES else ""
            logger.warning("%d of %d layers learnt nothing: %s%s", len(dead), len(self.norms),
                           ", ".join(dead[:SHOWN_NAMES]), more)  # fmt: skip
        run.teller.noted(run, {"update/dead_layers": len(dead), "update/layers": len(self.norms),
                               **{f"update/kind/{kind}": value for kind, value in kinds.items()}})  # fmt: skip

    def refuse_nothing(self, run: Run) -> None:
        """A LoRA that changes nothing is no success, however well the run went."""
        if any(self.norms.values()):
            return
        why = "a gradient of zero in every step" if run.state.has_learnt else "no step changed anything, because the" \
              " learning rate was 0 or every step was left out"  # fmt: skip
        error = UserError(f"the LoRA does nothing: its update is zero in all {len(self.norms)} layers after"
                          f" {run.state.step} steps ({why})")  # fmt: skip
        error.is_told = not run.strategy.is_main
        raise error


def by_kind(norms: Mapping[str, float]) -> dict[str, float]:
    """The norm of all layers together that have the same name inside their blocks."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in norms.items():
        found[_UP_TO_THE_BLOCK.sub("", name)].append(value)
    return {kind: together(values) for kind, values in sorted(found.items())}


def together(norms: Iterable[float]) -> float:
    """The norm of several updates as one."""
    return math.sqrt(math.fsum(value * value for value in norms))
