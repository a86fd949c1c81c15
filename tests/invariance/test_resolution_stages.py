"""Resolution stages: every image counts equally in each stage; stages work with resume, caching and compile."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from bucket_strategies import bucket_lists, layouts, seeds
from compiled_runs import COMPILED
from compiled_runs import train_compiled as compiled
from hypothesis import given
from hypothesis import strategies as st
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library import tools
from library.config import parse_config
from library.config.schema import TrainConfig
from library.config.schema_data import CacheConfig, DataConfig
from library.dataloader.batch_plan import BatchPlan, StagedBatchPlan
from library.dataloader.buckets import build_bucket_assigner
from library.dataloader.prepare import prepare_data
from library.dataloader.run_plan import RunPlan
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.resolution_stages import build_stages, expand_resolution_schedule
from library.dataset.schema import collect_flag_defaults
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError, UserError
from library.training.state import is_interval_reached

FOLDER = Path(__file__).resolve().parents[2] / "dataset_configs" / "pictures" / "shapes" / "circles"


@st.composite
def staged_plans(draw) -> StagedBatchPlan:
    layout, seed, first = draw(layouts), draw(seeds), 0
    stages = []
    for length in [*draw(st.lists(st.integers(1, 9), max_size=3)), None]:
        end = None if length is None else first + length
        stages.append((first, end, BatchPlan(draw(bucket_lists()), *layout, seed + first)))
        first = end or first
    return StagedBatchPlan(stages)


@pytest.mark.quick
@given(staged_plans())
def test_each_stage_has_every_repeat_once_per_epoch_and_never_twice_in_a_truncated_epoch(plan):
    for stage in plan.stages:
        end = stage.end_step or stage.first_step + 5
        counts_by_epoch: dict[int, Counter] = {}
        for step in range(stage.first_step, end):
            for batch in plan.get_step(step):
                assert plan.buckets[batch.bucket_index] in stage.batch_plan.buckets
                entries = zip(batch.sample_indices, batch.repeat_indices, batch.is_real, strict=True)
                real_entries = [entry for entry in entries if entry[2]]
                counts_by_epoch.setdefault(batch.epoch, Counter()).update(real_entries)
            assert plan.count_real_samples(step) == sum(sum(batch.is_real) for batch in plan.get_step(step))
        assert list(counts_by_epoch) == list(range(stage.first_epoch, stage.first_epoch + len(counts_by_epoch))), (
            "epoch numbers are not reused"
        )
        assert all(
            max(counts_by_epoch) < later.first_epoch for later in plan.stages if later.first_step > stage.first_step
        )
        *complete, truncated = counts_by_epoch.values()
        for counts in complete:
            assert sum(counts.values()) == len(counts) == stage.batch_plan.samples_per_epoch
        assert max(truncated.values()) == 1


@given(staged_plans(), st.integers(1, 12))
def test_an_epoch_ends_when_it_is_complete_or_its_stage_ends(plan, epochs):
    steps = plan.count_steps_for_epochs(epochs)
    assert plan.count_completed_epochs(steps) >= epochs > plan.count_completed_epochs(steps - 1)
    for stage in plan.stages[1:]:
        assert plan.count_completed_epochs(stage.first_step) == stage.first_epoch == plan.get_epoch(stage.first_step)
    for step in range(20):
        completed = plan.count_completed_epochs(step), plan.count_completed_epochs(step + 1) - 1
        assert plan.get_epoch(step) in completed


def parse_text(path: Path, text: str, **flags):
    path.write_text(text, "utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig(**flags)))


BUCKETS = "enable_bucket = true\nmin_bucket_reso = 256\nmax_bucket_reso = 1536\nbucket_reso_steps = 64\n"
SUBSET = f"[[datasets.subsets]]\nimage_dir = '{FOLDER}'\n"


def test_each_resolution_scales_the_bucket_limits_and_native_means_bucket_no_upscale(tmp_path):
    def build_assigners(text: str) -> list:
        (dataset,) = parse_text(tmp_path / "x.toml", "[[datasets]]\n" + text + SUBSET).require_valid()
        return [build_bucket_assigner(piece) for piece in expand_resolution_schedule(dataset)]

    small, middle, native = build_assigners(BUCKETS + "resolution_schedule = ['512:10', '1024x1024:20', 'native']\n")
    half = BUCKETS.replace("256", "128").replace("1536", "768")
    (expected_small,), (expected_middle,) = (
        build_assigners(half + "resolution = 512\n"),
        build_assigners(BUCKETS + "resolution = 1024\n"),
    )
    (expected_native,) = build_assigners(BUCKETS + "resolution = 1536\nbucket_no_upscale = true\n")
    for size in [(900, 900), (2000, 500), (333, 777), (5000, 4000), (640, 1600)]:
        assert small(*size) == expected_small(*size) and middle(*size) == expected_middle(*size)
        assert native(*size) == expected_native(*size)
    assert native(900, 900).resized_size == (900, 900) and native(900, 900).bucket_resolution == (896, 896)


def test_datasets_are_active_from_from_step_to_to_step(tmp_path):
    text = (
        f"[[datasets]]\nresolution = 64\nweight = 3\n{SUBSET}"
        f"[[datasets]]\nresolution_schedule = '32:4,48:5,64'\nweight = 1\n{SUBSET}"
        f"[[datasets]]\nresolution = 80\nweight = 1\nfrom_step = 2\nto_step = 9\n{SUBSET}"
    )
    datasets = parse_text(tmp_path / "x.toml", text).require_valid()
    stages = build_stages(datasets)
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 2), (2, 4), (4, 9), (9, None)]
    assert [
        [(dataset.dataset_index_in_file, dataset.resolution.width) for dataset in stage.datasets] for stage in stages
    ] == [
        [(0, 64), (1, 32)],
        [(0, 64), (1, 32), (2, 80)],
        [(0, 64), (1, 48), (2, 80)],
        [(0, 64), (1, 64)],
    ]

    prepared = prepare_data(DataConfig(dataset_config=str(tmp_path / "x.toml")), 8, str(tmp_path))
    for stage in prepared.build_batch_plan(1, TrainConfig()).stages:
        counts = {bucket.dataset_index_in_file: sum(bucket.repeats) for bucket in stage.batch_plan.buckets}
        assert counts[0] == 3 * counts[1] and counts.get(2, counts[1]) == counts[1], (
            "dataset weights apply within each stage"
        )
    captions = prepared.list_first_epoch_captions(prepared.build_batch_plan(1, TrainConfig()), 10)
    assert len(captions) == 6, "two images of three datasets, each once"
    assert prepared.images_per_epoch == (8, 0) and prepared.resolution == (64, 64)


INVALID = {
    "resolution_schedule = '256,512'": "x.toml:2: resolution_schedule: 256 needs a number of steps, such as 256:1000",
    "resolution_schedule = '256:0'": "x.toml:2: resolution_schedule: expected SIZE:STEPS",
    "resolution_schedule = 'big:3'": "x.toml:2: resolution_schedule: expected SIZE:STEPS",
    "resolution_schedule = '64:9,native'": "x.toml:2: resolution_schedule: native needs buckets",
    "resolution_schedule = '64:9,96:90'": "the last stage ends at step 99, but the run has 100 steps",
    "resolution_schedule = '64:9,96:92'": "the last stage ends at step 101, but the run has only 100 steps",
    "resolution_schedule = '64:100,96'": "the last stage starts at step 100, but the run has only 100 steps",
    "resolution_schedule = '64:9,96'\nto_step = 3": "x.toml:3: to_step: resolution_schedule sets the steps already",
    "resolution_schedule = '32:9,512'\nenable_bucket = true": "32,32 is too small for a bucket with bucket_reso_steps",
    "resolution_schedule = '16:9,32'\nenable_bucket = true\nbucket_no_upscale = true": (
        "x.toml:2: resolution_schedule: 32,32 is too small for a bucket with bucket_reso_steps 64"
    ),
    "resolution_schedule = '200:9,native'\nenable_bucket = true": "min_bucket_reso: 256 is above the shorter side",
    "resolution = 64\nfrom_step = 5\nto_step = 5": "x.toml:4: to_step: 5 is not above from_step 5",
    "resolution = 64\nfrom_step = 5": "x.toml:3: from_step: no dataset to train on from step 0 to 5",
    "resolution = 64\nto_step = 5": "x.toml:3: to_step: the last stage ends at step 5, but the run has 100 steps",
    "resolution = 64\nfrom_step = -1": "x.toml:3: from_step: must be at least 0, got -1",
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_schedules_are_reported_with_file_line_and_key(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\n{text}\n{SUBSET}", "utf-8")
    problem, *others = format_lines(
        validate_dataset_config(DataConfig(dataset_config=str(path)), CacheConfig(), TrainConfig(max_train_steps=100))
    )
    assert INVALID[text] in problem and "x.toml" in problem
    assert all("resolution_schedule: 16,16 is too small" in other for other in others)


@pytest.mark.parametrize("flags", [("--resolution_schedule", "big"), ("--resolution_schedule",), ("--resolution", "0")])
def test_an_invalid_resolution_is_reported_once_and_not_as_missing(tmp_path, flags):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\n{SUBSET}", "utf-8")
    for command in ("plan", "cache build"):
        with pytest.raises(ConfigError) as error:
            tools.TOOLS[command.split()[0]][1]([*command.split()[1:], "--dataset_config", str(path), *flags])
        (problem,) = format_lines(error.value.problems)
        assert problem.startswith(flags[0])


def test_sizes_that_the_model_does_not_support_are_reported_with_their_key(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\nresolution_schedule = '36:9,48'\n{SUBSET}", "utf-8")
    with pytest.raises(ConfigError) as error:
        prepare_data(DataConfig(dataset_config=str(path)), 8, str(tmp_path))
    assert format_lines(error.value.problems) == [
        f"{path}:2: resolution_schedule: 36,36 is not a multiple of 8 on each side, which this model needs;"
        " set [32, 32]"
    ]


def test_precedence_of_resolution_options_and_dataset_keys(tmp_path):
    path = tmp_path / "x.toml"

    def resolve_sizes(lines: str, *flags: str) -> tuple[list[int], list[str]]:
        path.write_text(f"[[datasets]]\n{lines}\n{SUBSET}[[datasets]]\nresolution_schedule = '48'\n{SUBSET}", "utf-8")
        config = parse_config(["--dataset_config", str(path), *flags]).require_valid()
        manifest = prepare_data(config.data, 8, str(tmp_path)).manifest
        notes = [note for note in manifest.notes if "not used" in note]
        return [dataset.resolution.width for dataset in manifest.datasets if dataset.dataset_index_in_file == 0], notes

    assert resolve_sizes("resolution = 64", "--resolution_schedule", "32:4,40") == (
        [32, 40],
        [f"{path}:2: resolution: not used, because resolution_schedule is set"],
    )
    assert resolve_sizes("resolution_schedule = '64'", "--resolution_schedule", "32:4,40") == ([64], [])
    assert resolve_sizes("", "--resolution", "64") == ([64], [])
    assert resolve_sizes("resolution_schedule = '56'", "--resolution", "64") == (
        [56],
        ["--resolution: not used, because every dataset has a resolution_schedule"],
    )


def test_an_epoch_truncated_by_a_stage_counts_and_one_truncated_by_the_end_of_the_run_does_not(tmp_path):
    data = write_images(tmp_path, {(64, 64): 4})
    for last in ("64", "64:6"):
        config = parse_config(
            ["--dataset_config", str(data), "--max_train_steps", "12", "--resolution_schedule", f"32:6,{last}"]
        ).require_valid()
        plan = RunPlan.from_config(
            prepare_data(config.data, 8).build_batch_plan(1, config.train), config.train, config.optim
        )
        assert [step for step in range(1, 13) if is_interval_reached(plan, step, epochs=1)] == [4, 6, 10]
        assert (plan.num_epochs, plan.count_completed_epochs(12)) == (4, 3)


def test_a_stage_without_training_images_is_refused(tmp_path):
    text = f"[[datasets]]\nresolution = 64\nto_step = 5\n{SUBSET}[[datasets]]\nresolution = 64\nfrom_step = 5\n"
    text += f"validation_split = 1\n{SUBSET.replace('circles', 'squares')}"
    (tmp_path / "x.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="no images left to train on from step 5 on"):
        prepare_data(DataConfig(dataset_config=str(tmp_path / "x.toml")), 8, str(tmp_path))


def test_max_train_epochs_must_reach_the_last_stage(tmp_path):
    data = write_images(tmp_path, {(64, 64): 4})
    config = parse_config(
        ["--dataset_config", str(data), "--resolution_schedule", "32:6,64", "--max_train_epochs", "1"]
    ).require_valid()
    prepared = prepare_data(config.data, 8)
    with pytest.raises(ConfigError, match="starts at step 6, but the run has only 4 steps"):
        RunPlan.from_config(prepared.build_batch_plan(1, config.train), config.train, config.optim)


FLAGS = tuple(
    (
        "--max_train_steps 9 --resolution_schedule 32:4,48:3,native --network_dim 2 --learning_rate 1e-2 --flip_aug "
        "--shuffle_caption --train_batch_size 2 --optimizer_type SGD"
    ).split()
)


@pytest.fixture(scope="module")
def staged_run(tmp_path_factory) -> tuple[Path, Path]:
    """A run of three stages with a checkpoint at step 3: its dataset file and output folder."""
    folder = tmp_path_factory.mktemp("stages")
    data = write_images(folder, {(96, 64): 4, (64, 64): 4})  # divides evenly into steps
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder / "out"),
        *FLAGS,
        *"--gradient_accumulation_steps 2 --save_every_n_steps 3 --save_state".split(),
    )
    return data, folder / "out"


def test_resume_across_stages_gives_equal_weights(staged_run, tmp_path):
    data, out = staged_run
    folder = tmp_path / "out"
    shutil.copytree(out / "lora-step00000003-state", folder / "lora-step00000003-state")
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        *FLAGS,
        *"--gradient_accumulation_steps 2 --auto_resume".split(),
    )
    one, other = load_file(out / "lora.safetensors"), load_file(folder / "lora.safetensors")
    assert all(torch.equal(one[key], other[key]) for key in one)


def train_with_memory_limit(max_pixels: int, *flags: str) -> tuple[list[tuple[float, ...]], str]:
    """Train as on a device with memory for images of ``fits`` pixels; return the batches and the error message."""
    from library.distributed.step_phases import OutOfMemory
    from library.training import trial_steps
    from library.training.task import DiffusionTask

    call, batches = DiffusionTask.__call__, []
    trial_steps.has_device_memory = lambda device: True

    def record_batch(self, pixels, step):
        batches.append((step, len(pixels), *pixels.size_conditioning[0, 4:].tolist()))
        if pixels.size_conditioning[0, 4] * pixels.size_conditioning[0, 5] > max_pixels:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, pixels, step)

    DiffusionTask.__call__ = record_batch
    try:
        train(*flags)
    except (OutOfMemory, UserError) as error:
        return batches, str(error)
    return batches, ""


def test_the_largest_batch_shape_is_tried_before_the_first_step_without_training(staged_run, tmp_path):
    data, out = staged_run
    flags = ["--dataset_config", str(data), *FLAGS, "--gradient_accumulation_steps", "2", "--save_every_n_steps", "3"]
    first, second = tmp_path / "first", tmp_path / "other"
    ((batches, error),) = run_on_ranks(1, train_with_memory_limit, 128 * 128, *flags, "--output_dir", str(first))
    expected, actual = load_file(out / "lora.safetensors"), load_file(first / "lora.safetensors")
    assert (
        not error and batches[0] == (0, 2, 64, 96) and all(torch.equal(expected[key], actual[key]) for key in expected)
    )
    assert [batch for batch in batches if batch == batches[0]][1:] == [], "tried once, in the largest shape of the run"
    assert max(height * width for _, _, height, width in batches[1:]) == 64 * 96

    shutil.copytree(out / "lora-step00000003-state", second / "lora-step00000003-state")
    ((batches, error),) = run_on_ranks(
        1, train_with_memory_limit, 48 * 48, *flags, "--output_dir", str(second), "--auto_resume"
    )
    assert batches == [(3, 2, 64, 96)]
    assert "with 2 images of 96x64" in error
    assert "this batch shape comes from step 8 on and was tried in advance" in error

    recovery_flags = ("--auto_resume", "--on_oom", "recover")
    ((batches, _),) = run_on_ranks(
        1, train_with_memory_limit, 48 * 48, *flags, "--output_dir", str(second), *recovery_flags
    )
    (_, probed, *_), *batches = batches  # the gradient probe takes one image
    assert probed == 1 and {count for step, count, *_ in batches if step < 7} == {2}, (
        "OOM recovery splits a batch only when its step comes"
    )


def test_two_ranks_with_cached_latents_train_the_same(staged_run, tmp_path):
    data, out = staged_run
    paths = run_on_ranks(
        2, train, "--dataset_config", str(data), "--output_dir", str(tmp_path / "out"), *FLAGS, "--cache_latents"
    )
    assert max_relative_difference(load_file(paths[0]), load_file(out / "lora.safetensors")) < 1e-4


def test_the_metadata_contains_the_stages(staged_run):
    _, out = staged_run
    with safe_open(out / "lora.safetensors", "pt") as file:
        metadata = file.metadata()
    datasets = json.loads(metadata["ss_datasets"])
    assert [(dataset["resolution"], dataset["from_step"], dataset["to_step"]) for dataset in datasets] == [
        ([32, 32], 0, 4),
        ([48, 48], 4, 7),
        ([128, 128], 7, None),
    ]
    assert metadata["ss_resolution"] == "(128, 128)" and metadata["ss_bucket_info"] == json.dumps(
        datasets[-1]["bucket_info"]
    )
    assert metadata["modelspec.resolution"] == "128x128" and metadata["ss_num_train_images"] == "8"
    assert len(json.loads(metadata["ss_dataset_dirs"])) == len(json.loads(metadata["ss_tag_frequency"])) == 1


def test_all_sizes_of_all_stages_are_compiled_before_the_first_step(tmp_path):
    data = write_images(tmp_path, {(96, 64): 2, (64, 64): 1, (64, 112): 1})
    result = compiled(
        tmp_path / "out", "sd1", data, "--max_train_steps", "8", "--resolution_schedule", "32:3,48:2,native", *COMPILED
    )
    assert result.is_dynamic and max(result.graph_counts.values()) <= 2 and result.recompile_count == 0
    assert result.unique_graphs == sum(result.graph_counts.values())
