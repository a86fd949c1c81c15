"""The page about a run, made anew whenever a LoRA file was saved."""

import logging
from collections.abc import Sequence
from pathlib import Path

from . import before_after
from .export import SaveAdapter
from .job import TrainingRun
from .report import ReportContext, write_report
from .track import collect_shareable_settings

logger = logging.getLogger(__name__)


class SaveReport:
    """Comes after ``export`` among the actions of a run."""

    is_deferrable = False

    def __init__(self, save_adapter: SaveAdapter, plan_text: str, prompts: Sequence[str], metrics_path: Path, started_at: float):
        self.save_adapter, self.prompts, self.metrics_path = save_adapter, prompts, metrics_path
        self.plan_text = plan_text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")  # the page may be shown around
        self.started_at = started_at
        self.path = metrics_path.with_name(f"{metrics_path.name.removesuffix('.metrics.jsonl')}.report.html")

    def should_run(self, run: TrainingRun) -> bool:
        return self.save_adapter.should_run(run)

    def __call__(self, run: TrainingRun) -> None:
        if not run.strategy.is_main:
            return
        save, strategy = run.config.save, run.strategy
        try:
            found = before_after.find_preview_files(Path(save.output_dir) / "sample", save.output_name, self.started_at)
            rows = [(self.prompts[number], found[number]) for number in sorted(found)]
            subject = ReportContext(save.output_name, run.plan.steps, self.plan_text, collect_shareable_settings(run.config), self.started_at,
                              strategy.data_parallel_size, strategy.mixed_precision, rows)  # fmt: skip
            write_report(subject, self.metrics_path, self.path)
        except OSError as error:  # a page that cannot be written does not spoil the run
            logger.warning("%s: cannot be written: %s", self.path, error)
