"""What would be trained, in words and a table; printed at the start of a run, by --dry_run, and by the plan tool."""

from ..config import RunConfig
from ..data.prepare import Prepared, prepare
from ..families.detect import detect
from .plan import RunPlan


def outline(prepared: Prepared, plan: RunPlan, ranks: int) -> str:
    """The text for a plan that is made."""
    return prepared.describe(plan.batches, plan.steps)


def outline_of(config: RunConfig, ranks: int) -> str:
    """Look at the pictures and make the plan for ``ranks`` processes, without loading a model."""
    detected = detect(config.model.pretrained_model_name_or_path)
    prepared = prepare(config.data, detected.pixel_step)
    plan = RunPlan.of(prepared.batch_plan(ranks, config.train), config.train)
    return f"model family {detected.family}: {detected.reason}\n{outline(prepared, plan, ranks)}"
