"""Previews of runs for the page: those of one run by prompt and step, and those of several runs side by side."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..report.page import RunSummary
from ..report.preview_grid import PreviewRow, format_column_label
from .folders import OpenedFolders
from .runs import Run


def export_previews(folders: OpenedFolders, run: Run, summary: RunSummary | None) -> dict[str, Any]:
    """Export the previews of a run: its steps or epochs, and the files of each prompt; clips also as MP4 files."""
    rows = _read_rows(run, summary)
    prompts = _list_prompts(rows, summary)
    exported = [{"prompt": prompts[number], **_export_row(folders, rows[number])} for number in sorted(rows)]
    return {"columns": _export_columns(rows.values()), "rows": exported}


def export_compared_previews(
    folders: OpenedFolders, runs: Mapping[str, tuple[Run, RunSummary | None]]
) -> dict[str, Any]:
    """Export the previews of several runs by prompt and run; the same prompt of two runs is one row."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    all_rows: list[PreviewRow] = []
    for key, (run, summary) in runs.items():
        rows = _read_rows(run, summary)
        prompts, counts = _list_prompts(rows, summary), Counter[str]()
        all_rows += rows.values()
        for number in sorted(rows):
            counts[prompts[number]] += 1  # a prompt may be there twice, with two seeds
            found.setdefault((prompts[number], counts[prompts[number]]), {})[key] = _export_row(folders, rows[number])
    exported = [{"prompt": prompt, "runs": by_run} for (prompt, _), by_run in found.items()]
    return {"columns": _export_columns(all_rows), "rows": exported}


def _read_rows(run: Run, summary: RunSummary | None) -> dict[int, PreviewRow]:
    return run.read_previews(summary.started_at if summary is not None else 0.0)


def _list_prompts(rows: Iterable[int], summary: RunSummary | None) -> dict[int, str]:
    prompts: Sequence[str] = summary.prompts if summary is not None else ()
    return {number: prompts[number] if number < len(prompts) else f"prompt {number + 1}" for number in rows}


def _export_columns(rows: Iterable[PreviewRow]) -> list[dict[str, str]]:
    columns = sorted({column for row in rows for column in row}, key=lambda name: (int(name.lstrip("e")), name))
    return [{"id": column, "label": format_column_label(column)} for column in columns]


def _export_row(folders: OpenedFolders, row: PreviewRow) -> dict[str, Any]:
    def make_url(path: Path) -> str:
        return f"/image/{quote(folders.make_key(path))}"

    clips = {column: path.with_suffix(".mp4") for column, path in row.items()}
    return {
        "images": {column: make_url(path) for column, path in row.items()},
        "clips": {column: make_url(clip) for column, clip in clips.items() if clip.is_file()},
    }
