"""Callbacks: update norms of the LoRA layers, the HTML report, and the check that all ranks hold equal weights.

Further callbacks are in ``save_adapter``, ``save_model``, ``save_embedding``, ``full_weights``, ``checkpoint``,
``preview`` and ``validation_loss``.
"""

import hashlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ..adapters.update_norms import compute_update_norms
from ..config.help import collect_changed_settings
from ..config.options import flatten_config
from ..distributed.config_agreement import find_majority
from ..distributed.world import format_ranks
from ..errors import UserError
from ..optim.optimizers import use_eval_weights
from ..parallel.sharded_weights import get_local_shard
from ..report import preview_grid
from ..report.page import RunSummary, write_report
from ..trackers import collect_shareable_settings
from .save_weights import SaveWeights
from .state import Callback, TrainingRun

logger = logging.getLogger(__name__)
MAX_LAYERS_SHOWN = 5
_BLOCK_PREFIX = re.compile(r"^.*(?:blocks|layers|attentions|resnets)\.\d+\.")


class UpdateNorms:
    """Log the update norm of the LoRA by layer type after the last step, and warn of layers that were not updated."""

    id = "update_norms"
    is_deferrable = False

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    def should_run(self, run: TrainingRun) -> bool:
        return run.state.step >= run.plan.steps

    def on_train_begin(self, run: TrainingRun) -> None: ...

    def __call__(self, run: TrainingRun) -> None:
        with use_eval_weights(run.optimizer):
            self.norms = compute_update_norms(run.strategy.unwrap_model(run.model))
        by_type = group_norms_by_layer_type(self.norms)
        logger.info("LoRA update norm: %.4g (by layer type: see the report)", combine_norms(self.norms.values()))
        dead = [name for name, value in self.norms.items() if not value]
        if dead and len(dead) < len(self.norms):
            more = f" and {len(dead) - MAX_LAYERS_SHOWN} more" if len(dead) > MAX_LAYERS_SHOWN else ""
            shown = ", ".join(dead[:MAX_LAYERS_SHOWN])
            logger.warning("%d of %d LoRA layers were not updated: %s%s", len(dead), len(self.norms), shown, more)
        values = {"update/dead_layers": len(dead), "update/layers": len(self.norms)}
        run.metric_logger.log_values(run, values | {f"update/kind/{name}": value for name, value in by_type.items()})

    def fail_if_zero(self, run: TrainingRun) -> None:
        """Raise if the LoRA changes nothing, however smoothly the run went."""
        if any(self.norms.values()):
            return
        cause = "the learning rate was 0 or every step was skipped"
        if run.state.has_trained:
            cause = "the gradient was zero in every step"
        error = UserError(
            f"the LoRA has no effect: its update is zero in all {len(self.norms)} layers after"
            f" {run.state.step} steps ({cause})"
        )
        error.is_reported = not run.strategy.comm.is_main
        raise error


def group_norms_by_layer_type(norms: Mapping[str, float]) -> dict[str, float]:
    """Combine the norms of layers that have the same name inside their blocks."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in norms.items():
        groups[_BLOCK_PREFIX.sub("", name)].append(value)
    return {name: combine_norms(values) for name, values in sorted(groups.items())}


def combine_norms(norms: Iterable[float]) -> float:
    """Compute the norm of several updates taken together."""
    return math.sqrt(math.fsum(value * value for value in norms))


class SaveReport:
    """Write the HTML report, with the previews so far, whenever a LoRA file was saved."""

    id = "save_report"
    is_deferrable = False

    def __init__(
        self, save_adapter: SaveWeights, plan_text: str, prompts: Sequence[str], metrics_path: Path, started_at: float
    ):
        self.save_adapter, self.prompts, self.metrics_path = save_adapter, prompts, metrics_path
        # Users share the page, so it must not show where their home directory is.
        self.plan_text = plan_text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
        self.started_at = started_at
        stem = metrics_path.name.removesuffix(".metrics.jsonl")
        self.path, self.facts_path = (metrics_path.with_name(f"{stem}.{end}") for end in ("report.html", "run.json"))

    def should_run(self, run: TrainingRun) -> bool:
        return self.save_adapter.should_run(run)

    def on_train_begin(self, run: TrainingRun) -> None:
        """Write what the web page needs to know of a run before its first file."""
        if run.strategy.comm.is_main:
            try:
                self._collect_facts(run).write(self.facts_path)
            except OSError as error:
                logger.warning("%s: cannot be written: %s", self.facts_path, error)

    def __call__(self, run: TrainingRun) -> None:
        if not run.strategy.comm.is_main:
            return
        save = run.config.save
        try:
            rows = preview_grid.find_preview_files(Path(save.output_dir) / "sample", save.output_name, self.started_at)
            write_report(self._collect_facts(run), rows, self.metrics_path, self.path)
        except OSError as error:  # a missing report is no reason to end a run
            logger.warning("%s: cannot be written: %s", self.path, error)

    def _collect_facts(self, run: TrainingRun) -> RunSummary:
        config, strategy = run.config, run.strategy
        settings = flatten_config(config)
        return RunSummary(
            name=config.save.output_name,
            steps=run.plan.steps,
            plan=self.plan_text,
            settings=collect_shareable_settings(settings),
            started_at=self.started_at,
            num_processes=strategy.data_parallel_size,
            mixed_precision=strategy.mixed_precision,
            prompts=self.prompts,
            all_settings=collect_changed_settings(settings),
        )


class WeightsDiverged(UserError):
    """The ranks hold different weights; whatever would be saved is the result of one rank only."""


class WeightSyncCheck:
    """Compare a hash of the trainable parameters across ranks before anything is saved; the first callback of a run."""

    id = "weight_sync_check"
    is_deferrable = False

    def __init__(self, every_n_steps: int | None, save_callbacks: Sequence[Callback]):
        self.every_n_steps, self.save_callbacks = every_n_steps, save_callbacks
        self.last_equal_step: int | None = None

    def on_train_begin(self, run: TrainingRun) -> None:
        self.check(run)

    def should_run(self, run: TrainingRun) -> bool:
        is_interval = self.every_n_steps is not None and run.state.step % self.every_n_steps == 0
        return run.strategy.comm.world_size > 1 and (
            is_interval or any(callback.should_run(run) for callback in self.save_callbacks)
        )

    def __call__(self, run: TrainingRun) -> None:
        self.check(run)

    def check(self, run: TrainingRun) -> None:
        """Raise ``WeightsDiverged`` on all ranks if ranks that should hold the same weights hold others."""
        strategy = run.strategy
        if strategy.comm.world_size == 1:
            return
        ema_params = run.ema.shadow_params if run.ema is not None else []
        tensors = [get_local_shard(tensor) for tensor in (*run.parameters, *ema_params)]
        found = strategy.comm.all_gather_object((strategy.shard_rank, hash_tensors(tensors)))
        hashes = [value for _, value in found]
        common = {part: find_majority([value for other, value in found if other == part]) for part, _ in found}
        if others := [rank for rank, (part, value) in enumerate(found) if value != common[part]]:
            who = format_ranks(others, run.strategy.comm.hostnames)
            rest = "rank 0" if len(hashes) == 2 else f"the other {len(hashes) - len(others)} ranks"
            if len(common) > 1:
                rest = "ranks that hold the same part"
            since = f"after the check at step {self.last_equal_step}, where all ranks were equal"
            if self.last_equal_step is None:
                since = "before the first step"
            raise WeightsDiverged(
                f"after step {run.state.step} the weights of {who} differ from those of {rest}; they diverged {since}."
                "\nNothing was saved at this step. Probable cause: a faulty device or memory on that machine. Earlier"
                " checkpoints are good: resume with --auto_resume; --check_sync_every_n_steps finds the step"
            )
        self.last_equal_step = run.state.step


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Hash every bit of all tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
