"""The run of a project: its settings as the form has them, their checks, and how fast earlier runs were."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...problems import Problem
from ...training.output_lock import has_final_output
from ..folders import format_setting_path
from ..run_form import CheckedForm
from .project import DATASET_KEYS, OUTPUT_FOLDER, PROMPTS_FILE, Project

if TYPE_CHECKING:
    from ..workbench import Workbench

MAX_SPEEDS, MAX_NAMES = 3, 5


def build_run_values(workbench: "Workbench", project: Project) -> dict[str, Any]:
    """Build the settings of the run, with a name that no earlier run of this LoRA has."""
    values = {"output_name": project.name, **project.values}
    if "max_train_steps" not in values and "max_train_epochs" not in values:
        values["max_train_steps"] = "1000"
    values["output_name"] = _find_free_name(workbench, project, str(values["output_name"]) or project.name)
    return values


def _find_free_name(workbench: "Workbench", project: Project, name: str) -> str:
    """Return the name, with a number if a run of that name is finished or in the queue."""
    output, number, free = project.folder / OUTPUT_FOLDER, 2, name
    while _is_taken(workbench, output, free):
        free, number = f"{name}-{number}", number + 1
    return free


def _is_taken(workbench: "Workbench", output: Path, name: str) -> bool:
    if not name or "/" in name or "\\" in name:
        return False
    job = workbench.queue.find_job(output.resolve(), name)
    return has_final_output(output, name) or (job is not None and job.is_active)


def check_run(workbench: "Workbench", project: Project, values: Mapping[str, Any]) -> CheckedForm:
    """Check the run with all checks that it passes when it starts; the dataset file is written first."""
    if not project.count_pictures():
        raise UserError("there are no pictures yet: go back to the first step")
    project.write_dataset()
    own: dict[str, Any] = {name: value for name, value in values.items() if name not in DATASET_KEYS}
    own["dataset_config"] = format_setting_path(project.dataset_path)
    own["output_dir"] = format_setting_path(project.folder / OUTPUT_FOLDER)
    if project.prompts.strip():
        own["sample_prompts"] = format_setting_path(project.folder / PROMPTS_FILE)
    else:
        own = {name: value for name, value in own.items() if not name.startswith("sample_")}
    if project.has_masks():
        own["masked_loss"] = True
    form = workbench.forms.check(own)
    problems = [*form.problems, *_find_broken_pictures(workbench, project)]
    return replace(form, problems=problems, notices=[*project.list_notices(), *form.notices])


def _find_broken_pictures(workbench: "Workbench", project: Project) -> Iterator[Problem]:
    """Find pictures that would stop the run, as far as they were looked at."""
    pictures = workbench.get_check(project).pictures
    names = [each.path.name for each in pictures if each.inspected.defect and each.path.exists()]
    if names:
        shown = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
        yield Problem("dataset_config", f"broken pictures would stop the run: {shown}", "remove them in the first step")


def list_speeds(workbench: "Workbench", project: Project) -> list[tuple[str, float]]:
    """List earlier runs of the same model with their steps per second, the last first."""
    model = project.values.get("pretrained_model_name_or_path") or None
    found = []
    for key, run in workbench.runs.find_runs().items():
        summary = workbench.runs.read_summary(run)
        if summary is None or (summary.all_settings.get("pretrained_model_name_or_path") or None) != model:
            continue
        overview = workbench.runs.describe(key, run)
        if overview.steps_per_second:
            found.append((overview.changed_at, overview.name, overview.steps_per_second))
    return [(name, speed) for _, name, speed in sorted(found, reverse=True)[:MAX_SPEEDS]]
