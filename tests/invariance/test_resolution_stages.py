"""Stages of a run: in each of them every picture counts alike, and a run through them is like any other."""

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
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library import tools
from library.config import parse_config
from library.config.schema import TrainConfig
from library.config.schema_data import CacheConfig, DataConfig, ValidateConfig
from library.data.batch_plan import BatchPlan, StagedBatchPlan
from library.data.buckets import build_bucket_assigner
from library.data.prepare import prepare_data
from library.data.run_plan import RunPlan
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.schema import collect_flag_defaults
from library.dataset.stages import build_stages, expand_resolution_schedule
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError, UserError
from library.training.state import is_interval_reached

FOLDER = Path(__file__).resolve().parents[2] / "dataset_configs" / "images" / "shapes" / "circles"


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
def test_in_each_stage_every_copy_is_seen_once_in_each_epoch_and_never_twice_in_one_that_is_cut_off(plan):
    for stage in plan.stages:
        end = stage.end_step or stage.first_step + 5
        seen: dict[int, Counter] = {}
        for step in range(stage.first_step, end):
            for batch in plan.get_step(step):
                assert plan.buckets[batch.bucket_index] in stage.batch_plan.buckets
                entries = zip(batch.sample_indices, batch.repeat_indices, batch.is_real, strict=True)
                real = [entry for entry in entries if entry[2]]
                seen.setdefault(batch.epoch, Counter()).update(real)
            assert plan.count_real_samples(step) == sum(sum(batch.is_real) for batch in plan.get_step(step))
        assert list(seen) == list(range(stage.first_epoch, stage.first_epoch + len(seen))), (
            "epochs are never used twice"
        )
        assert all(max(seen) < later.first_epoch for later in plan.stages if later.first_step > stage.first_step)
        *whole, cut = seen.values()
        for counts in whole:
            assert sum(counts.values()) == len(counts) == stage.batch_plan.samples_per_epoch
        assert max(cut.values()) == 1


@given(staged_plans(), st.integers(1, 12))
def test_epochs_end_where_they_are_complete_or_cut_off(plan, epochs):
    steps = plan.count_steps_for_epochs(epochs)
    assert plan.count_completed_epochs(steps) >= epochs > plan.count_completed_epochs(steps - 1)
    for stage in plan.stages[1:]:
        assert plan.count_completed_epochs(stage.first_step) == stage.first_epoch == plan.get_epoch(stage.first_step)
    for step in range(20):
        completed = plan.count_completed_epochs(step), plan.count_completed_epochs(step + 1) - 1
        assert plan.get_epoch(step) in completed


def read(path: Path, text: str, **flags):
    path.write_text(text, "utf-8")
    return parse_dataset_config(path, collect_flag_defaults(DataConfig(**flags)))


BUCKETS = "enable_bucket = true\nmin_bucket_reso = 256\nmax_bucket_reso = 1536\nbucket_reso_steps = 64\n"
SUBSET = f"[[datasets.subsets]]\nimage_dir = '{FOLDER}'\n"


def test_each_resolution_has_the_buckets_of_its_own_and_native_those_of_pictures_that_are_never_enlarged(tmp_path):
    def places(text: str) -> list:
        (dataset,) = read(tmp_path / "x.toml", "[[datasets]]\n" + text + SUBSET).require_valid()
        return [build_bucket_assigner(piece) for piece in expand_resolution_schedule(dataset)]

    small, middle, native = places(BUCKETS + "resolution_schedule = ['512:10', '1024x1024:20', 'native']\n")
    half = BUCKETS.replace("256", "128").replace("1536", "768")
    (as_small,), (as_middle,) = places(half + "resolution = 512\n"), places(BUCKETS + "resolution = 1024\n")
    (as_native,) = places(BUCKETS + "resolution = 1536\nbucket_no_upscale = true\n")
    for size in [(900, 900), (2000, 500), (333, 777), (5000, 4000), (640, 1600)]:
        assert small(*size) == as_small(*size) and middle(*size) == as_middle(*size)
        assert native(*size) == as_native(*size)
    assert native(900, 900).resized_size == (900, 900) and native(900, 900).bucket_resolution == (896, 896)


def test_datasets_come_and_go(tmp_path):
    text = (
        f"[[datasets]]\nresolution = 64\nweight = 3\n{SUBSET}"
        f"[[datasets]]\nresolution_schedule = '32:4,48:5,64'\nweight = 1\n{SUBSET}"
        f"[[datasets]]\nresolution = 80\nweight = 1\nfrom_step = 2\nto_step = 9\n{SUBSET}"
    )
    datasets = read(tmp_path / "x.toml", text).require_valid()
    stages = build_stages(datasets)
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 2), (2, 4), (4, 9), (9, None)]
    assert [[(each.dataset_index_in_file, each.resolution.width) for each in stage.datasets] for stage in stages] == [
        [(0, 64), (1, 32)],
        [(0, 64), (1, 32), (2, 80)],
        [(0, 64), (1, 48), (2, 80)],
        [(0, 64), (1, 64)],
    ]

    prepared = prepare_data(DataConfig(dataset_config=str(tmp_path / "x.toml")), 8, str(tmp_path))
    for stage in prepared.build_batch_plan(1, TrainConfig()).stages:
        shown = {bucket.dataset_index_in_file: sum(bucket.repeats) for bucket in stage.batch_plan.buckets}
        assert shown[0] == 3 * shown[1] and shown.get(2, shown[1]) == shown[1], "weights are shares of each stage"
    captions = prepared.list_first_epoch_captions(prepared.build_batch_plan(1, TrainConfig()), 10)
    assert len(captions) == 6, "two pictures of three datasets, however often they are there"
    assert prepared.images_per_epoch == (8, 0) and prepared.resolution == (64, 64)


WRONG = {
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


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_with_its_place(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\n{text}\n{SUBSET}", "utf-8")
    problem, *others = validate_dataset_config(
        DataConfig(dataset_config=str(path)), CacheConfig(), ValidateConfig(), TrainConfig(max_train_steps=100)
    )
    assert WRONG[text] in problem and "x.toml" in problem
    assert all("resolution_schedule: 16,16 is too small" in other for other in others)


@pytest.mark.parametrize("words", [("--resolution_schedule", "big"), ("--resolution_schedule",), ("--resolution", "0")])
def test_what_could_not_be_read_is_not_missing_as_well(tmp_path, words):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\n{SUBSET}", "utf-8")
    for command in ("plan", "cache build"):
        with pytest.raises(ConfigError) as error:
            tools.TOOLS[command.split()[0]][1]([*command.split()[1:], "--dataset_config", str(path), *words])
        (problem,) = error.value.problems
        assert problem.startswith(words[0])


def test_sizes_that_a_model_cannot_take_are_told_with_the_key_that_says_them(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(f"[[datasets]]\nresolution_schedule = '36:9,48'\n{SUBSET}", "utf-8")
    with pytest.raises(ConfigError) as error:
        prepare_data(DataConfig(dataset_config=str(path)), 8, str(tmp_path))
    assert error.value.problems == [
        f"{path}:2: resolution_schedule: 36,36 is not a multiple of 8 on each side, which this model needs;"
        " set [32, 32]"
    ]


def test_who_says_at_which_size_a_dataset_is_trained(tmp_path):
    path = tmp_path / "x.toml"

    def sizes(own: str, *words: str) -> tuple[list[int], list[str]]:
        path.write_text(f"[[datasets]]\n{own}\n{SUBSET}[[datasets]]\nresolution_schedule = '48'\n{SUBSET}", "utf-8")
        config = parse_config(["--dataset_config", str(path), *words]).require_valid()
        manifest = prepare_data(config.data, 8, str(tmp_path)).manifest
        notes = [note for note in manifest.notes if "not used" in note]
        return [each.resolution.width for each in manifest.datasets if each.dataset_index_in_file == 0], notes

    assert sizes("resolution = 64", "--resolution_schedule", "32:4,40") == (
        [32, 40],
        [f"{path}:2: resolution: not used, because --resolution_schedule is set"],
    )
    assert sizes("resolution_schedule = '64'", "--resolution_schedule", "32:4,40") == ([64], [])
    assert sizes("", "--resolution", "64") == ([64], [])
    assert sizes("resolution_schedule = '56'", "--resolution", "64") == (
        [56],
        ["--resolution: not used, because every dataset has a resolution_schedule"],
    )


def test_an_epoch_that_the_end_of_the_run_cuts_off_does_not_count_and_one_that_a_stage_cuts_off_does(tmp_path):
    data = write_images(tmp_path, {(64, 64): 4})
    for last in ("64", "64:6"):
        config = parse_config(
            ["--dataset_config", str(data), "--max_train_steps", "12", "--resolution_schedule", f"32:6,{last}"]
        ).require_valid()
        plan = RunPlan.from_config(
            prepare_data(config.data, 8).build_batch_plan(1, config.train), config.train, config.optim
        )
        assert [step for step in range(1, 13) if is_interval_reached(plan, step, None, 1)] == [4, 6, 10]
        assert (plan.num_epochs, plan.count_completed_epochs(12)) == (4, 3)


def test_a_stage_whose_pictures_are_all_kept_for_validation_is_refused(tmp_path):
    text = f"[[datasets]]\nresolution = 64\nto_step = 5\n{SUBSET}[[datasets]]\nresolution = 64\nfrom_step = 5\n"
    text += f"validation_split = 1\n{SUBSET.replace('circles', 'squares')}"
    (tmp_path / "x.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="no images left to train on from step 5 on"):
        prepare_data(DataConfig(dataset_config=str(tmp_path / "x.toml")), 8, str(tmp_path))


def test_a_run_counted_in_epochs_has_to_reach_the_last_stage(tmp_path):
    data = write_images(tmp_path, {(64, 64): 4})
    config = parse_config(
        ["--dataset_config", str(data), "--resolution_schedule", "32:6,64", "--max_train_epochs", "1"]
    ).require_valid()
    prepared = prepare_data(config.data, 8)
    with pytest.raises(ConfigError, match="starts at step 6, but the run has only 4 steps"):
        RunPlan.from_config(prepared.build_batch_plan(1, config.train), config.train, config.optim)


FLAGS = (
    "--max_train_steps",
    "9",
    "--resolution_schedule",
    "32:4,48:3,native",
    "--network_dim",
    "2",
    "--learning_rate",
    "1e-2",
    "--flip_aug",
    "--shuffle_caption",
    "--train_batch_size",
    "2",
    "--optimizer_type",
    "SGD",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A run of three stages with a state at its third step, and its pictures."""
    folder = tmp_path_factory.mktemp("stages")
    data = write_images(folder, {(96, 64): 4, (64, 64): 4})  # even, however a step is split
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder / "out"),
        *FLAGS,
        "--gradient_accumulation_steps",
        "2",
        "--save_every_n_steps",
        "3",
        "--save_state",
    )
    return data, folder / "out"


def test_a_run_that_goes_on_crosses_the_borders_of_stages_as_the_whole_one(whole, tmp_path):
    data, out = whole
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
        "--gradient_accumulation_steps",
        "2",
        "--auto_resume",
    )
    one, other = load_file(out / "lora.safetensors"), load_file(folder / "lora.safetensors")
    assert all(torch.equal(one[key], other[key]) for key in one)


def tried(fits: int, *flags: str) -> tuple[list[tuple[float, ...]], str]:
    """A run as on a device with memory of its own, for so many pixels; what was computed, and what was told."""
    from library.distributed.step_phases import OutOfMemory
    from library.training import warmup
    from library.training.task import DiffusionTask

    call, seen = DiffusionTask.__call__, []
    warmup.has_device_memory = lambda device: True

    def counted(self, pixels, step):
        seen.append((step, len(pixels), *pixels.size_conditioning[0, 4:].tolist()))
        if pixels.size_conditioning[0, 4] * pixels.size_conditioning[0, 5] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, pixels, step)

    DiffusionTask.__call__ = counted
    try:
        train(*flags)
    except (OutOfMemory, UserError) as error:
        return seen, str(error)
    return seen, ""


def test_the_largest_size_to_come_is_tried_before_the_first_step_and_nothing_is_learnt_from_it(whole, tmp_path):
    data, out = whole
    words = ["--dataset_config", str(data), *FLAGS, "--gradient_accumulation_steps", "2", "--save_every_n_steps", "3"]
    first, other = tmp_path / "first", tmp_path / "other"
    ((seen, told),) = run_on_ranks(1, tried, 128 * 128, *words, "--output_dir", str(first))
    one, same = load_file(out / "lora.safetensors"), load_file(first / "lora.safetensors")
    assert not told and seen[0] == (0, 2, 64, 96) and all(torch.equal(one[key], same[key]) for key in one)
    assert [each for each in seen if each == seen[0]][1:] == [], "once, and as large as any that comes"
    assert max(height * width for _, _, height, width in seen[1:]) == 64 * 96

    shutil.copytree(out / "lora-step00000003-state", other / "lora-step00000003-state")
    ((seen, told),) = run_on_ranks(1, tried, 48 * 48, *words, "--output_dir", str(other), "--auto_resume")
    assert seen == [(3, 2, 64, 96)]
    assert "with 2 images of 96x64" in told
    assert "this batch shape comes from step 8 on and was tried in advance" in told

    ladder = ("--auto_resume", "--on_oom", "recover")
    ((seen, _),) = run_on_ranks(1, tried, 48 * 48, *words, "--output_dir", str(other), *ladder)
    assert {count for step, count, *_ in seen if step < 7} == {2}, "a ladder goes down when the size comes"


def test_two_processes_with_latents_kept_train_the_same(whole, tmp_path):
    data, out = whole
    paths = run_on_ranks(
        2, train, "--dataset_config", str(data), "--output_dir", str(tmp_path / "out"), *FLAGS, "--cache_latents"
    )
    assert max_relative_difference(load_file(paths[0]), load_file(out / "lora.safetensors")) < 1e-4


def test_files_tell_the_stages(whole):
    _, out = whole
    with safe_open(out / "lora.safetensors", "pt") as file:
        told = file.metadata()
    datasets = json.loads(told["ss_datasets"])
    assert [(each["resolution"], each["from_step"], each["to_step"]) for each in datasets] == [
        ([32, 32], 0, 4),
        ([48, 48], 4, 7),
        ([128, 128], 7, None),
    ]
    assert told["ss_resolution"] == "(128, 128)" and told["ss_bucket_info"] == json.dumps(datasets[-1]["bucket_info"])
    assert told["modelspec.resolution"] == "128x128" and told["ss_num_train_images"] == "8"
    assert len(json.loads(told["ss_dataset_dirs"])) == len(json.loads(told["ss_tag_frequency"])) == 1


def test_all_sizes_of_all_stages_are_compiled_before_the_first_step(tmp_path):
    data = write_images(tmp_path, {(96, 64): 2, (64, 64): 1, (64, 112): 1})
    found = compiled(
        tmp_path / "out", "sd1", data, "--max_train_steps", "8", "--resolution_schedule", "32:3,48:2,native", *COMPILED
    )
    assert found.is_dynamic and max(found.graph_counts.values()) <= 2 and found.recompile_count == 0
    assert found.unique_graphs == sum(found.graph_counts.values())
