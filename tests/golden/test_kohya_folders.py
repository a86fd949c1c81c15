"""sd-scripts' ``train_data_dir``, ``reg_data_dir`` and ``in_json`` give the images, captions and counts they give there."""

import json
from collections import Counter
from pathlib import Path

import pytest
from kohya_cases import CASES, format_case, write_kohya_folders
from problem_lines import format_lines

from library.config import parse_config
from library.dataloader.dataset_metadata import build_dataset_metadata
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.dataset_config import convert_to_sd_scripts, load_dataset_config


@pytest.fixture(params=CASES, ids=format_case)
def case(request, tmp_path, monkeypatch) -> dict:
    monkeypatch.chdir(write_kohya_folders(tmp_path, request.param["folder"]))
    return request.param


def prepare(case: dict) -> tuple[PreparedData, object]:
    loaded = parse_config(case["cli"])
    assert format_lines(loaded.problems) == []
    return prepare_data(loaded.config.data, 8), loaded.config


def test_the_command_line_resolves_to_the_datasets_of_sd_scripts(case):
    (dataset,) = case["resolved"]
    used = {subset["image_dir"] for subset in case["subsets"]}  # it leaves out a folder without images later
    subsets = [subset for subset in dataset["subsets"] if subset["image_dir"] in used]
    parsed = load_dataset_config(parse_config(case["cli"]).config.data)
    assert convert_to_sd_scripts(parsed.require_valid()) == [{**dataset, "subsets": subsets}]


def test_images_captions_repeats_and_buckets_are_those_of_sd_scripts(case):
    ready, _ = prepare(case)
    actual = {
        str(sample.image.path): {
            "num_repeats": sample.repeats,
            "caption": sample.caption,
            "is_reg": sample.is_reg,
            "bucket": list(assignment.bucket_resolution),
        }
        for sample, assignment in zip(ready.manifest.samples, ready.assignments, strict=True)
    }
    assert actual == case["images"]
    weights = {sample.loss_weight for sample in ready.manifest.samples if sample.is_reg}
    assert weights <= {case["resolved"][0]["params"].get("prior_loss_weight")}


def test_an_epoch_has_as_many_images_and_batches_as_in_sd_scripts(case):
    ready, config = prepare(case)
    plan = ready.build_batch_plan(1, config.train)
    counts: Counter[str] = Counter()
    for bucket in ready.buckets:
        width, height = bucket.resolution
        counts[f"{width}x{height}"] += round(sum(bucket.repeats))
    assert counts == case["bucket_counts"]
    assert plan.micro_batches_per_epoch == plan.steps_per_epoch == case["batches"]
    assert ready.images_per_epoch[0] == case["num_train_images"]


def test_the_lora_file_lists_the_folders_as_in_sd_scripts(case):
    ready, _ = prepare(case)
    metadata = build_dataset_metadata(ready.manifest, ready.assignments, dp_size=1)
    resolved = {subset["image_dir"]: subset for subset in case["resolved"][0]["subsets"]}
    train, reg = {}, set()
    for subset in case["subsets"]:
        values = resolved[subset["image_dir"]]
        name = Path(values.get("metadata_file") or values["image_dir"]).name
        if values.get("is_reg"):
            reg.add(name)
        else:
            train[name] = {"n_repeats": subset["num_repeats"], "img_count": subset["img_count"]}
    assert json.loads(metadata["ss_dataset_dirs"]) == train
    assert json.loads(metadata["ss_reg_dataset_dirs"]).keys() == reg
