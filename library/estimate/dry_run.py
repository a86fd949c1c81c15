"""What would be trained, in words or as data; told at the start of a run, by --dry_run, and by the plan tool."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.precompute import CacheEstimate, estimate_caches
from ..config import RunConfig
from ..data.batch_plan import PlannedStage, get_planned_stages
from ..data.prepare import PreparedData, prepare_data
from ..data.prompts import load_preview_prompts
from ..data.run_plan import RunPlan
from ..models.detect import DetectedModel, detect_model, get_config_reader
from ..models.model_configs import read_encoded_sizes


@dataclass(frozen=True)
class DryRun:
    """A run before it begins: the pictures, and the plan for a number of processes."""

    detected: DetectedModel
    prepared: PreparedData
    plan: RunPlan
    cache_estimates: Sequence[CacheEstimate] = ()

    def format_summary(self) -> str:
        """In words and a table."""
        said = format_plan(self.prepared, self.plan, self.plan.batch_plan.dp_size)
        lines = [f"model family {self.detected.family}: {self.detected.reason}", said]
        return "\n".join([*lines, *(item.format_text() for item in self.cache_estimates)])

    def export_json(self) -> dict[str, Any]:
        """As plain data; ``epochs`` counts those that the run touches, ``epochs_done`` those it completes.

        What an epoch is stands at the top where it is the same in the whole run, and in each of its stages.
        """
        batches = self.plan.batch_plan
        stages = [_summarize_stage(stage, self.plan.steps) for stage in get_planned_stages(batches)]
        epoch = {key: value for key, value in stages[0].items() if key in _EPOCH_KEYS} if len(stages) == 1 else {}
        return {
            "model_family": self.detected.family,
            "ranks": batches.dp_size,
            "gradient_accumulation_steps": batches.accumulation_steps,
            **epoch,
            "stages": stages,
            "steps": self.plan.steps,
            "epochs": self.plan.num_epochs,
            "epochs_done": self.plan.count_completed_epochs(self.plan.steps),
            "notes": list(self.prepared.manifest.notes),
            "kept": {item.name: item.to_json() for item in self.cache_estimates},
            "datasets": self.prepared.to_json(batches),
        }


_EPOCH_KEYS = (
    "pictures_per_epoch",
    "samples_per_epoch",
    "micro_batches_per_epoch",
    "padding_per_epoch",
    "steps_per_epoch",
)


def _summarize_stage(stage: PlannedStage, steps: int) -> dict[str, Any]:
    plan = stage.batch_plan
    return {
        "from_step": stage.first_step,
        "to_step": steps if stage.end_step is None else min(stage.end_step, steps),
        "pictures_per_epoch": sum(len(bucket.sample_indices) for bucket in plan.buckets),
        "samples_per_epoch": plan.samples_per_epoch,
        "micro_batches_per_epoch": plan.micro_batches_per_epoch,
        "padding_per_epoch": sum(map(plan.count_padding, range(len(plan.buckets)))),
        "steps_per_epoch": plan.steps_per_epoch,
    }


def build_dry_run(config: RunConfig, data_parallel_size: int) -> DryRun:
    """Look at the pictures and make the plan for ``ranks`` processes, without loading a model."""
    detected = detect_model(config.model)
    prepared = prepare_data(config.data, detected.size_multiple, config.cache.cache_dir)
    plan = RunPlan.from_config(prepared.build_batch_plan(data_parallel_size, config.train), config.train, config.optim)
    return DryRun(
        detected,
        prepared,
        plan,
        _estimate_caches(config, detected, prepared, plan),
    )


def _estimate_caches(
    config: RunConfig, detected: DetectedModel, prepared: PreparedData, plan: RunPlan
) -> list[CacheEstimate]:
    precision = config.distributed.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    prompts = load_preview_prompts(config.preview) if config.cache.caches_text_outputs else []
    sizes = read_encoded_sizes(get_config_reader(detected))
    return estimate_caches(config.cache, prepared, plan, prompts, sizes, 4 if precision == "no" else 2)


def format_plan(prepared: PreparedData, plan: RunPlan, ranks: int) -> str:
    """The text for a plan that is made."""
    return prepared.format_summary(plan.batch_plan, plan.steps)


def format_dry_run(config: RunConfig, data_parallel_size: int) -> str:
    """The text of a run that is not started."""
    return build_dry_run(config, data_parallel_size).format_summary()
