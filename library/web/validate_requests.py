"""Checks of what the page is asked to do: settings with paths, names of outputs, the program that trains."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.schema_data import DataConfig
from ..dataset.dataset_config import can_load_datasets, load_dataset_config
from ..errors import ConfigError
from ..problems import Problem, report_file
from .folders import OpenedFolders, OutsideFolders
from .pictures import check_folders

TRAINING_SCRIPT = Path(__file__).resolve().parents[2] / "train_lora.py"
HEADER = "# Written by python -m library web\n"


def find_path_problems(folders: OpenedFolders, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Find settings that name files outside of the opened folders, whatever they are for."""
    for name, value in settings.items():
        words = value if isinstance(value, (list, tuple)) else [] if name == "output_name" else [value]
        for word in (word for word in words if isinstance(word, str) and _is_path(word)):
            try:
                folders.resolve(word)
            except OutsideFolders as error:
                yield Problem(name, str(error))
    output_dir, output_name = settings.get("output_dir"), settings.get("output_name")
    if isinstance(output_dir, str) and not _is_path(output_dir) and not folders.contains(output_dir):
        yield Problem("output_dir", f"{output_dir}: outside of the opened folders")
    if isinstance(output_name, str) and output_name.startswith(".") and "/" not in output_name:
        yield Problem("output_name", f"{output_name!r}: begins with a dot, so this page would not list the run")


def find_dataset_path_problems(folders: OpenedFolders, config: DataConfig) -> Iterator[Problem]:
    """Find folders of the run's datasets outside of the opened ones; a dataset file that cannot be read has none."""
    for dataset in load_dataset_config(config).datasets if can_load_datasets(config) else ():
        try:
            check_folders(folders, dataset)
        except OutsideFolders as error:
            yield Problem("dataset_config", str(error))


def _is_path(word: str) -> bool:
    """Whether a text leads to a file, or would if it existed; ids of the hub and texts do not."""
    value = word.rpartition("=")[2]
    if not value:
        return False
    if value.startswith(("/", "~", "../", "./", "..\\")) or "/../" in value or re.match(r"[A-Za-z]:[\\/]", value):
        return len(value) < 4096 and "\n" not in value
    return len(value) < 1024 and "\0" not in value and "\n" not in value and _exists(value)


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except OSError:
        return False


def check_can_start(settings_file: Path) -> None:
    """Raise unless training can be started and its settings written."""
    problems = []
    if not TRAINING_SCRIPT.is_file():
        problems.append(
            report_file(TRAINING_SCRIPT, "missing", "install the package from a checkout: pip install -e '.[web]'")
        )
    if settings_file.exists() and not settings_file.read_text("utf-8", "replace").startswith(HEADER):
        problems.append(
            Problem("output_name", f"{settings_file} exists and was not written by this page", "use another name")
        )
    if problems:
        raise ConfigError(problems)
