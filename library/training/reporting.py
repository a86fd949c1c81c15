"""The page about a run, made anew whenever a LoRA file was saved."""

import logging
from collections.abc import Sequence
from pathlib import Path

from . import before_after
from .export import Export
from .job import Run
from .report import Subject, write_report
from .track import shareable

logger = logging.getLogger(__name__)


class Report:
    """Comes after ``export`` among the actions of a run."""

    can_wait = False

    def __init__(self, export: Export, plan: str, prompts: Sequence[str], metrics: Path, started_at: float):
        self.export, self.prompts, self.metrics = export, prompts, metrics
        self.plan = plan.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")  # the page may be shown around
        self.started_at = started_at
        self.path = metrics.with_name(f"{metrics.name.removesuffix('.metrics.jsonl')}.report.html")

    def is_due(self, run: Run) -> bool:
        return self.export.is_due(run)

    def __call__(self, run: Run) -> None:
        if not run.strategy.is_main:
            return
        save, strategy = run.config.save, run.strategy
        try:
            found = before_after.found(Path(save.output_dir) / "sample", save.output_name, self.started_at)
            rows = [(self.prompts[number], found[number]) for number in sorted(found)]
            subject = Subject(save.output_name, run.plan.steps, self.plan, shareable(run.config), self.started_at,
                              strategy.data_size, strategy.precision, rows)  # fmt: skip
            write_report(subject, self.metrics, self.path)
        except OSError as error:  # a page that cannot be written does not spoil the run
            logger.warning("%s: cannot be written: %s", self.path, error)
