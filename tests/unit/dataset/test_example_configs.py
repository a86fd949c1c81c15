"""Every example in dataset_configs can be planned, and docs/datasets.md documents every example and every key."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from problem_lines import format_lines

from library.config import parse_config
from library.config.schema import TrainConfig
from library.config.toml_positions import read_toml_with_lines
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.musubi_format import MUSUBI_SUBSET_KEYS
from library.dataset.schema import DATASET_KEYS
from library.dataset.validate import validate_dataset_config
from library.models.families import FAMILY_FACTS
from library.tools import TOOLS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "dataset_configs"
SLIDER = FOLDER / "demo_slider.toml"
"""A file of texts, which has no images."""
VIDEO = FOLDER / "demo_video.toml"
"""A file of clips, which only a model of videos is trained on."""
PAGE = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
RUNS = {
    "sdxl_run.toml": ("sdxl.toml", "random:sdxl"),
    "flux_run.toml": ("flux.toml", "random:flux"),
    "several_machines_run.toml": ("sdxl.toml", "random:sdxl"),
}
"""Run files, each with its dataset and model."""


def examples() -> list[Path]:
    return sorted(
        path
        for path in FOLDER.iterdir()
        if path.suffix in (".toml", ".json") and not path.stem.endswith("_run") and path != SLIDER
    )


def prepare_example(path: Path) -> PreparedData:
    if "parquet" in path.read_text(encoding="utf-8") and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("needs pyarrow")
    words = ["--dataset_config", str(path)]
    command = re.search(r"python -m library plan --dataset_config \S+(.*)", path.read_text(encoding="utf-8"))
    more = command[1].replace("dataset_configs/", f"{FOLDER}/").split() if command else []
    config = parse_config([*words, *more]).require_valid()
    assert format_lines(validate_dataset_config(config.data)) == []
    frame_rule = FAMILY_FACTS["wan22_ti2v"].pipeline.frames if config.data.dataset_config == str(VIDEO) else None
    return prepare_data(config.data, 16, frame_rule=frame_rule)


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_an_example_can_be_planned_from_any_working_directory(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare_example(path)
    plan = prepared.build_batch_plan(2, TrainConfig())
    assert prepared.format_summary(plan, 10).startswith("dataset 1, ")
    samples = prepared.manifest.samples
    assert all(sample.caption for sample in samples if "drafts" not in sample.image.file)
    assert json.loads(json.dumps(prepared.to_json(plan)))[0]["samples"]


EXPECTED = {
    "folder.toml": {"circles/blue.png": 10, "circles/red.png": 10},
    "folder.json": {"circles/blue.png": 10, "circles/red.png": 10},
    "class_tokens.toml": {"drafts/cross.png": 4, "regularization/cross.png": 4},
    "captions.toml": {"circles/blue.png": 1, "circles/red.png": 1, "squares/green.png": 2, "squares/yellow.png": 2},
    "recursive.toml": {"circles/red.png": 1, "squares/green.png": 1, "squares/yellow.png": 1},
    "resolutions.toml": {"circles/blue.png": 1, "circles/red.png": 1, "circles/blue.png#2": 1, "circles/red.png#2": 1},
    "weights.toml": {
        "circles/blue.png": 1,
        "circles/red.png": 1,
        "drafts/cross.png": 1,
        "squares/green.png": 1,
        "squares/yellow.png": 1,
        "table/1.png": 1.25,
        "table/2.png": 1.25,
    },
    "symmetric.toml": {"circles/blue.png": 1, "circles/red.png": 1, "table/1.png": 1, "table/2.png": 1},
    "metadata.toml": {"circles/red.png": 1, "squares/green.png": 1},
    "hf_folder.toml": {"table/1.png": 1, "table/2.png": 1},
    "parquet.toml": {"shapes.parquet/0": 1, "shapes.parquet/1": 1},
    "webdataset.toml": {"000.tar/00.png": 1, "000.tar/01.png": 1, "001.tar/10.png": 1, "001.tar/11.png": 1},
    "character.toml": {"circles/blue.png": 10, "circles/red.png": 10, "regularization/cross.png": 20},
    "style.toml": {"circles/blue.png": 1, "circles/red.png": 1, "squares/green.png": 1, "squares/yellow.png": 1},
    "masked.toml": {"circles/blue.png": 1, "circles/red.png": 1},
    "sdxl.toml": {"circles/blue.png": 10, "circles/red.png": 10},
    "flux.toml": {"circles/blue.png": 1, "circles/red.png": 1, "circles/blue.png#2": 1, "circles/red.png#2": 1},
    "musubi.toml": {"circles/blue.png": 2, "circles/red.png": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_has_the_expected_images_and_repeats(name: str):
    assert {sample.key: sample.repeats for sample in prepare_example(FOLDER / name).manifest.samples} == EXPECTED[name]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_file_fits_its_dataset_and_model(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    data, model = RUNS[name]
    words = [
        "--dataset_config",
        f"dataset_configs/{data}",
        "--config_file",
        f"dataset_configs/{name}",
        "--pretrained_model_name_or_path",
        model,
        "--world_size",
        "24",
        "--cache_dir",
        str(tmp_path),
        "--json",
    ]
    text, code = TOOLS["plan"][1](words)
    assert code == 0 and json.loads(text)["steps"] > 0
    others = {f"demo{name}_run.toml" for name in ("", "_control", "_evaluate", "_slider", "_video")}
    assert {path.name for path in FOLDER.glob("*_run.toml")} == {*RUNS, *others}


def test_accelerate_reads_the_launch_config_for_several_machines():
    launcher = pytest.importorskip("accelerate.commands.config.config_args")
    config = launcher.load_config_from_file(str(FOLDER / "several_machines.yaml"))
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (3, 24, "bf16")
    assert config.dynamo_config["dynamo_use_regional_compilation"] is True


def test_the_documentation_lists_every_key_and_every_example():
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    written = {key.name for key in DATASET_KEYS.values() if key.tables}
    assert written - named == set() and set(MUSUBI_SUBSET_KEYS) - named == set()
    assert [path.name for path in examples() if path.name not in PAGE] == []


def test_the_toml_examples_of_the_documentation_have_valid_keys(tmp_path):
    texts = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert len(texts) > 5
    for text in texts:
        (tmp_path / "x.toml").write_text(text, encoding="utf-8")
        data, _ = read_toml_with_lines(tmp_path / "x.toml")
        tables = [data.get("general", {}), *data.get("datasets", [])]
        tables += [subset for table in tables for subset in table.get("subsets", [])]
        assert {name for table in tables for name in table} <= {*DATASET_KEYS, *MUSUBI_SUBSET_KEYS, "subsets"}, text
