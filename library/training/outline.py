"""What would be trained, in words or as data; told at the start of a run, by --dry_run, and by the plan tool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..data.prepare import Prepared, prepare
from ..data.staged_plan import PlannedStage, stages_in
from ..families.detect import Detected, detect, reader_of
from ..families.sizes import sizes
from .expected import Expected, expected
from .plan import RunPlan


@dataclass(frozen=True)
class Outlook:
    """A run before it begins: the pictures, and the plan for a number of processes."""

    detected: Detected
    prepared: Prepared
    plan: RunPlan
    kept: Sequence[Expected] = ()

    def text(self) -> str:
        """In words and a table."""
        said = outline(self.prepared, self.plan, self.plan.batches.ranks)
        lines = [f"model family {self.detected.family}: {self.detected.reason}", said]
        return "\n".join([*lines, *(item.text() for item in self.kept)])

    def record(self) -> dict[str, Any]:
        """As plain data; ``epochs`` counts those that the run touches, ``epochs_done`` those it completes.

        What an epoch is stands at the top where it is the same in the whole run, and in each of its stages.
        """
        batches = self.plan.batches
        stages = [_stage(stage, self.plan.steps) for stage in stages_in(batches)]
        epoch = {key: value for key, value in stages[0].items() if key in _OF_AN_EPOCH} if len(stages) == 1 else {}
        return {
            "model_family": self.detected.family,
            "ranks": batches.ranks,
            "gradient_accumulation_steps": batches.accumulation,
            **epoch,
            "stages": stages,
            "steps": self.plan.steps,
            "epochs": self.plan.epochs,
            "epochs_done": self.plan.epochs_done(self.plan.steps),
            "notes": list(self.prepared.manifest.notes),
            "kept": {item.what: item.record() for item in self.kept},
            "datasets": self.prepared.record(batches),
        }


_OF_AN_EPOCH = ("pictures_per_epoch", "samples_per_epoch", "micro_batches_per_epoch", "padding_per_epoch",
                "steps_per_epoch")  # fmt: skip


def _stage(stage: PlannedStage, steps: int) -> dict[str, Any]:
    plan = stage.plan
    return {
        "from_step": stage.first,
        "to_step": steps if stage.end is None else min(stage.end, steps),
        "pictures_per_epoch": sum(len(bucket.samples) for bucket in plan.buckets),
        "samples_per_epoch": plan.samples_per_epoch,
        "micro_batches_per_epoch": plan.batches_per_epoch,
        "padding_per_epoch": sum(map(plan.padding_per_epoch, range(len(plan.buckets)))),
        "steps_per_epoch": plan.steps_per_epoch,
    }


def look_ahead(config: RunConfig, ranks: int) -> Outlook:
    """Look at the pictures and make the plan for ``ranks`` processes, without loading a model."""
    detected = detect(config.model)
    prepared = prepare(config.data, detected.pixel_step, config.cache.cache_dir)
    plan = RunPlan.of(prepared.batch_plan(ranks, config.train), config.train, config.optim)
    return Outlook(detected, prepared, plan, expected(config, prepared, plan, sizes(reader_of(detected))))


def outline(prepared: Prepared, plan: RunPlan, ranks: int) -> str:
    """The text for a plan that is made."""
    return prepared.describe(plan.batches, plan.steps)


def outline_of(config: RunConfig, ranks: int) -> str:
    """The text of a run that is not started."""
    return look_ahead(config, ranks).text()
