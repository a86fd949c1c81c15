"""What would be trained, in words or as data; told at the start of a run, by --dry_run, and by the plan tool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..data.prepare import Prepared, prepare
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
        """As plain data; ``epochs`` counts those that the run touches, ``epochs_done`` those it completes."""
        batches = self.plan.batches
        return {
            "model_family": self.detected.family,
            "ranks": batches.ranks,
            "gradient_accumulation_steps": batches.accumulation,
            "pictures_per_epoch": sum(len(bucket.samples) for bucket in batches.buckets),
            "samples_per_epoch": batches.samples_per_epoch,
            "micro_batches_per_epoch": batches.batches_per_epoch,
            "padding_per_epoch": sum(map(batches.padding_per_epoch, range(len(batches.buckets)))),
            "steps_per_epoch": batches.steps_per_epoch,
            "steps": self.plan.steps,
            "epochs": self.plan.epochs,
            "epochs_done": self.plan.epochs_done(self.plan.steps),
            "notes": list(self.prepared.manifest.notes),
            "kept": {item.what: item.record() for item in self.kept},
            "datasets": self.prepared.record(batches),
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
