"""What a run changed in the end: how far each kind of layer moved, and which did not move at all."""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..adapters.update_norms import compute_update_norms
from ..errors import UserError
from ..optim.optimizers import use_eval_weights
from .job import TrainingRun

logger = logging.getLogger(__name__)

MAX_LAYERS_SHOWN = 5
_BLOCK_PREFIX = re.compile(r"^.*(?:blocks|layers|attentions|resnets)\.\d+\.")


class UpdateNorms:
    """Looks once, after the last step."""

    is_deferrable = False

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    def should_run(self, run: TrainingRun) -> bool:
        return run.state.step >= run.plan.steps

    def __call__(self, run: TrainingRun) -> None:
        with use_eval_weights(run.optimizer):
            self.norms = compute_update_norms(run.strategy.unwrap_model(run.model))
        kinds = group_norms_by_layer_type(self.norms)
        said = ", ".join(f"{kind} {value:.3g}" for kind, value in kinds.items())
        logger.info("length of the update: %.4g; by kind of layer: %s", combine_norms(self.norms.values()), said)
        dead = [name for name, value in self.norms.items() if not value]
        if dead and len(dead) < len(self.norms):
            more = f" and {len(dead) - MAX_LAYERS_SHOWN} more" if len(dead) > MAX_LAYERS_SHOWN else ""
            logger.warning("%d of %d layers learnt nothing: %s%s", len(dead), len(self.norms),
                           ", ".join(dead[:MAX_LAYERS_SHOWN]), more)  # fmt: skip
        run.metric_logger.log_values(run, {"update/dead_layers": len(dead), "update/layers": len(self.norms),
                               **{f"update/kind/{kind}": value for kind, value in kinds.items()}})  # fmt: skip

    def fail_if_zero(self, run: TrainingRun) -> None:
        """A LoRA that changes nothing is no success, however well the run went."""
        if any(self.norms.values()):
            return
        why = "a gradient of zero in every step" if run.state.has_trained else "no step changed anything, because the" \
              " learning rate was 0 or every step was left out"  # fmt: skip
        error = UserError(f"the LoRA does nothing: its update is zero in all {len(self.norms)} layers after"
                          f" {run.state.step} steps ({why})")  # fmt: skip
        error.is_reported = not run.strategy.is_main
        raise error


def group_norms_by_layer_type(norms: Mapping[str, float]) -> dict[str, float]:
    """The norm of all layers together that have the same name inside their blocks."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in norms.items():
        found[_BLOCK_PREFIX.sub("", name)].append(value)
    return {kind: combine_norms(values) for kind, values in sorted(found.items())}


def combine_norms(norms: Iterable[float]) -> float:
    """The norm of several updates as one."""
    return math.sqrt(math.fsum(value * value for value in norms))
