"""Dataset files mean what they mean to sd-scripts, and mistakes in them are told all at once with their lines."""

import json
from pathlib import Path

import pytest
from library.config import load_options
from library.config.schema import DataConfig
from library.config.values import Size
from library.data.dataset_config import read_datasets, resolved
from library.data.dataset_rules import missing_folders, not_yet
from library.data.dataset_schema import flags_of

GOLDEN = Path(__file__).parent / "data" / "dataset_configs"

NO_FLAGS_OF_OURS = {"--color_aug": {"color_aug": True}, "--masked_loss": {}}
"""Flags of sd-scripts that the trainer refuses; what they do to the resolved values stands here."""


def flags(argv: list[str]) -> dict:
    refused = {}
    for word in [word for word in argv if word in NO_FLAGS_OF_OURS]:
        refused.update(NO_FLAGS_OF_OURS[word])
    loaded = load_options([word for word in argv if word not in NO_FLAGS_OF_OURS])
    assert [problem for problem in loaded.problems if "--dataset_config: missing" not in problem] == []
    return {**flags_of(loaded.config.data), **refused}


def read(tmp_path: Path, text: str, **options):
    path = tmp_path / "set.toml"
    path.write_text(text, encoding="utf-8")
    return read_datasets(path, flags_of(DataConfig(**options)))


def problems(tmp_path: Path, text: str, **options) -> list[str]:
    return [problem.replace(f"{tmp_path}/", "") for problem in read(tmp_path, text, **options).problems]


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_file_resolves_to_the_values_of_sd_scripts_or_is_rejected_as_there(golden: Path):
    expected = json.loads(golden.read_text(encoding="utf-8"))
    reading = read_datasets(golden.with_suffix(".toml"), flags(expected["cli"]))
    assert (not reading.problems) == expected["ok"], reading.problems
    if expected["ok"]:
        assert resolved(reading.datasets) == expected["resolved"]
