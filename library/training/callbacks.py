"""What a run changed in the end: how far each kind of layer moved, and which did not move at all."""

import hashlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ..adapters.regularization import compute_update_norms
from ..config.options import flatten_config
from ..distributed.config_agreement import find_majority
from ..distributed.trackers import collect_shareable_settings
from ..distributed.world import format_ranks
from ..errors import UserError
from ..optim.optimizers import use_eval_weights
from ..report import preview_grid
from ..report.page import ReportContext, write_report
from .export import SaveAdapter
from .state import Callback, TrainingRun

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
            logger.warning(
                "%d of %d layers learnt nothing: %s%s",
                len(dead),
                len(self.norms),
                ", ".join(dead[:MAX_LAYERS_SHOWN]),
                more,
            )
        run.metric_logger.log_values(
            run,
            {
                "update/dead_layers": len(dead),
                "update/layers": len(self.norms),
                **{f"update/kind/{kind}": value for kind, value in kinds.items()},
            },
        )

    def fail_if_zero(self, run: TrainingRun) -> None:
        """A LoRA that changes nothing is no success, however well the run went."""
        if any(self.norms.values()):
            return
        why = (
            "a gradient of zero in every step"
            if run.state.has_trained
            else "no step changed anything, because the learning rate was 0 or every step was left out"
        )
        error = UserError(
            f"the LoRA does nothing: its update is zero in all {len(self.norms)} layers after"
            f" {run.state.step} steps ({why})"
        )
        error.is_reported = not run.strategy.comm.is_main
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


class SaveReport:
    """Comes after ``export`` among the actions of a run."""

    is_deferrable = False

    def __init__(
        self, save_adapter: SaveAdapter, plan_text: str, prompts: Sequence[str], metrics_path: Path, started_at: float
    ):
        self.save_adapter, self.prompts, self.metrics_path = save_adapter, prompts, metrics_path
        self.plan_text = plan_text.replace(f"{Path.cwd()}/", "").replace(
            f"{Path.home()}/", "~/"
        )  # the page may be shown around
        self.started_at = started_at
        self.path = metrics_path.with_name(f"{metrics_path.name.removesuffix('.metrics.jsonl')}.report.html")

    def should_run(self, run: TrainingRun) -> bool:
        return self.save_adapter.should_run(run)

    def __call__(self, run: TrainingRun) -> None:
        if not run.strategy.comm.is_main:
            return
        save, strategy = run.config.save, run.strategy
        try:
            found = preview_grid.find_preview_files(Path(save.output_dir) / "sample", save.output_name, self.started_at)
            rows = [(self.prompts[number], found[number]) for number in sorted(found)]
            subject = ReportContext(
                save.output_name,
                run.plan.steps,
                self.plan_text,
                collect_shareable_settings(flatten_config(run.config)),
                self.started_at,
                strategy.data_parallel_size,
                strategy.mixed_precision,
                rows,
            )
            write_report(subject, self.metrics_path, self.path)
        except OSError as error:  # a page that cannot be written does not spoil the run
            logger.warning("%s: cannot be written: %s", self.path, error)


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
        hashes = run.strategy.comm.all_gather_object(hash_tensors([*run.parameters, *average]))
        common = find_majority(hashes)
        if others := [rank for rank, value in enumerate(hashes) if value != common]:
            who = format_ranks(others, run.strategy.comm.hostnames)
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
    return run.strategy.comm.world_size > 1 and run.strategy.has_replicated_adapter
