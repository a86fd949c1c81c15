"""The validation split is never trained on, and validation losses are reproducible and change nothing in training."""

import json
import math
import re
from pathlib import Path

import pytest
from problem_lines import format_unused
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.cache.readers import build_validation_reader
from library.config.schema_data import DataConfig
from library.dataloader.prepare import prepare_data
from library.errors import ConfigError
from library.training.preflight import find_settings_problems, load_settings
from library.training.validation_loss import MeanEstimate, student_t_quantile


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), {(96, 64): 9, (64, 96): 6, (64, 64): 2})


def split_hashes(dataset: Path, **options) -> tuple[set[str], set[str]]:
    """The content hashes of the training images and of the validation images."""
    prepared = prepare_data(DataConfig(dataset_config=str(dataset), **options), 8)
    validation_samples = prepared.validation.manifest.samples if prepared.validation else ()
    return {sample.content_hash for sample in prepared.manifest.samples}, {
        sample.content_hash for sample in validation_samples
    }


def read_metrics(folder: Path, name: str = "lora") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.metrics.jsonl").read_text().splitlines()]


def read_losses(folder: Path) -> list[float]:
    return [line["loss/current"] for line in read_metrics(folder) if "loss/current" in line]


def build_flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        *(
            "--max_train_steps 4 --train_batch_size 2 --learning_rate 0.02 --network_dim 4 --validation_split 0.4 "
            "--validate_every_n_steps 2"
        ).split(),
        *more,
    ]


def read_validation_metrics(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if name == "step" or name.startswith("validation/")}
        for line in read_metrics(folder)
        if any(name.startswith("validation/") for name in line)
    ]


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run_on_ranks(1, train, *build_flags(data, folder))
    return folder


def test_every_image_is_either_for_training_or_for_validation(data):
    training, held_out = split_hashes(data, validation_split=0.4)

    assert not training & held_out and len(held_out) in range(3, 12)
    assert training | held_out == split_hashes(data)[0]


def test_the_split_does_not_change_when_images_are_added_or_renamed(data, tmp_path):
    _, validation_before = split_hashes(data, validation_split=0.4)
    larger_data = write_images(tmp_path, {(96, 64): 9, (64, 96): 6, (64, 64): 6})
    for path in (tmp_path / "images").glob("*"):
        path.rename(path.with_name(f"x{int(path.stem) * 7 % 31}-{path.name}"))
    training, validation_after = split_hashes(larger_data, validation_split=0.4)

    assert (
        validation_before <= validation_after
        and not validation_before & training
        and len(training) + len(validation_after) == 21
    )


def test_a_larger_split_contains_the_smaller_and_another_seed_selects_other_images(data):
    small, large = split_hashes(data, validation_split=0.2)[1], split_hashes(data, validation_split=0.6)[1]

    assert small < large
    assert split_hashes(data, validation_split=0.6, validation_seed=1)[1] != large


def append_lines(data: Path, target: Path, lines: str) -> Path:
    """Copy the dataset file and append lines."""
    target.write_text(data.read_text() + lines)
    return target


def test_copies_of_validation_images_in_other_subsets_are_not_trained_on(data, tmp_path):
    folder = data.parent / "images"
    dataset_file = append_lines(
        data,
        tmp_path / "both.toml",
        f"""validation_split = 0.4
[[datasets]]
resolution = 64
min_bucket_reso = 32
bucket_reso_steps = 16
[[datasets.subsets]]
image_dir = '{folder}'
include = ["0*"]
[[datasets.subsets]]
image_dir = '{folder}'
include = ["1*"]
is_reg = true
""",
    )
    prepared = prepare_data(DataConfig(dataset_config=str(dataset_file)), 8)
    validation_hashes = {sample.content_hash for sample in prepared.validation.manifest.samples}

    assert {sample.dataset_index for sample in prepared.validation.manifest.samples} == {0}
    assert not [sample for sample in prepared.manifest.samples if sample.content_hash in validation_hashes]
    assert any("used for validation in another dataset" in note for note in prepared.manifest.notes)


def test_a_whole_dataset_can_be_for_validation(data, tmp_path):
    dataset_file = append_lines(
        data,
        tmp_path / "apart.toml",
        f"""include = ["0*"]
[[datasets]]
resolution = 64
min_bucket_reso = 32
bucket_reso_steps = 16
validation_split = 1
[[datasets.subsets]]
image_dir = '{data.parent / "images"}'
include = ["1*"]
""",
    )
    prepared = prepare_data(DataConfig(dataset_config=str(dataset_file)), 8)

    assert {sample.dataset_index for sample in prepared.manifest.samples} == {0}
    assert len(prepared.manifest.samples) == 9 and len(prepared.validation.manifest.samples) == 8
    with pytest.raises(ConfigError, match="validation_split takes all of them"):
        prepare_data(DataConfig(dataset_config=str(data), validation_split=1.0), 8)


@pytest.mark.parametrize("split", [0.01, 0.99])
def test_a_small_dataset_has_at_least_one_image_on_each_side(split, tmp_path):
    data = write_images(tmp_path, {(64, 64): 2})

    assert [len(side) for side in split_hashes(data, validation_split=split)] == [1, 1]


def test_validation_images_are_not_augmented_and_captions_not_randomized(data, tmp_path):
    augmented = append_lines(
        data,
        tmp_path / "lively.toml",
        """validation_split = 0.5
flip_aug = true
random_crop = true
color_aug = true
shuffle_caption = true
caption_dropout_rate = 0.9
caption_tag_dropout_rate = 0.5
caption_prefix = "{a|b|c} photo of"
enable_wildcard = true
token_warmup_step = 100
""",
    )
    prepared = prepare_data(DataConfig(dataset_config=str(augmented)), 8)
    batches, read = build_validation_reader(prepared, None, None, None)
    plain = prepare_data(DataConfig(dataset_config=str(data), validation_split=0.5), 8)
    _, read_plain = build_validation_reader(plain, None, None, None)
    for number in range(len(batches.micro_batches)):
        augmented_batch, plain_batch = read(number), read_plain(number)
        assert (
            augmented_batch.pixels == plain_batch.pixels
        ).all() and augmented_batch.global_positions == plain_batch.global_positions
        assert [
            re.fullmatch(r"[abc] photo of picture \d+, a \d+ b", caption) is not None
            for caption in augmented_batch.captions
        ]
        assert [caption[len("a photo of ") :] for caption in augmented_batch.captions] == list(plain_batch.captions)


def test_the_base_model_is_validated_first_and_each_validation_logs_its_timesteps(reference):
    lines = read_validation_metrics(reference)

    assert [line["step"] for line in lines] == [0, 2, 4]
    assert len([name for name in lines[1] if name.startswith("validation/timestep/")]) == 9
    base = pytest.approx(lines[0]["validation/base"], rel=1e-12)  # later values are computed as loss + gain
    assert all(line["validation/base"] == base for line in lines)
    assert lines[1]["validation/loss"] != lines[2]["validation/loss"]
    for line in lines[1:]:
        assert line["validation/gain"] == pytest.approx(line["validation/base"] - line["validation/loss"])
        parts = [value for name, value in line.items() if name.startswith("validation/timestep/")]
        assert sum(parts) / 9 == pytest.approx(line["validation/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ()),
        (2, ("--train_batch_size", "1")),
        (1, ("--cache_latents", "--cache_text_encoder_outputs")),
    ],
    ids=["rerun", "two ranks", "cached"],
)
def test_the_base_loss_is_equal_for_reruns_two_ranks_and_cached_latents(ranks, options, data, reference, tmp_path):
    dataset = append_lines(data, tmp_path / "set.toml", "")
    dataset.write_text(dataset.read_text().replace("[[datasets]]", "[[datasets]]\nbatch_size = 2"))
    run_on_ranks(ranks, train, *build_flags(dataset, tmp_path, *options, "--max_train_steps", "1"))

    assert read_validation_metrics(tmp_path)[0] == read_validation_metrics(reference)[0]


def test_validation_does_not_change_losses_and_files(data, reference, tmp_path):
    run_on_ranks(1, train, *build_flags(data, tmp_path, "--validate_every_n_steps", "1000"))

    assert read_losses(tmp_path) == read_losses(reference)
    assert read_validation_metrics(tmp_path)[-1] == read_validation_metrics(reference)[-1]
    assert (
        max_relative_difference(load_file(tmp_path / "lora.safetensors"), load_file(reference / "lora.safetensors"))
        == 0.0
    )


def find_unused(*build_flags: str) -> dict[str, str]:
    loaded = load_settings(build_flags)
    assert find_settings_problems(loaded) == []
    return dict(format_unused(loaded.unused))


@pytest.mark.parametrize(
    "option", ["validation_seed", "validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps"]
)
def test_validation_options_without_a_validation_split_are_named(option, data, tmp_path):
    flags = ["--dataset_config", str(data), f"--{option}", "3"]

    assert find_unused(*flags) == {f"--{option}": "validation_split is 0"}
    assert find_unused(*flags, "--validation_split", "0.5") == {}


def train_and_measure_swaps(*build_flags: str) -> list[float]:
    """Train; return for each validation how far its weights are from those of the first validation."""
    from library.training import validation_loss

    compute_losses, distances = validation_loss.compute_validation_losses, []

    def evaluate(run, *args):
        weights = [parameter.detach().clone() for parameter in run.parameters]
        distances.append(
            max(float((first - second).abs().max()) for first, second in zip(weights, first_weights, strict=True))
            if first_weights
            else 0
        )
        first_weights[:] = first_weights or weights
        return compute_losses(run, *args)

    first_weights: list = []
    validation_loss.compute_validation_losses = evaluate
    train(*build_flags)
    return distances


def test_the_weights_of_both_files_are_validated_if_there_is_an_ema(data, tmp_path):
    ((base, plain, _),) = run_on_ranks(1, train_and_measure_swaps, *build_flags(data, tmp_path / "plain"))
    ((_, averaged, trained, *_),) = run_on_ranks(
        1, train_and_measure_swaps, *build_flags(data, tmp_path / "ema", "--ema_decay", "0.999")
    )
    plain_losses, ema_losses = (read_validation_metrics(tmp_path / name)[-1] for name in ("plain", "ema"))

    assert base == 0 and 0 < averaged < plain == trained
    assert ema_losses["validation/without_ema/loss"] == plain_losses["validation/loss"]
    assert ema_losses["validation/loss"] != plain_losses["validation/loss"]
    assert read_losses(tmp_path / "plain") == read_losses(tmp_path / "ema")


def test_validation_does_not_change_a_schedule_free_run(data, tmp_path):
    options = ("--optimizer_type", "AdamWScheduleFree")
    run_on_ranks(1, train, *build_flags(data, tmp_path / "often", *options, "--validate_every_n_steps", "1"))
    run_on_ranks(1, train, *build_flags(data, tmp_path / "never", *options, "--validate_every_n_steps", "1000"))
    often, never = (load_file(tmp_path / name / "lora.safetensors") for name in ("often", "never"))

    assert max_relative_difference(often, never) == 0.0


@pytest.mark.parametrize(("values", "interval"), [([1.0, 2.0, 3.0], 4.3027 / 3**0.5), ([5.0] * 40, 0.0)])
def test_the_confidence_interval_is_students_t_interval(values, interval):
    mean = MeanEstimate.from_values(values)

    assert mean.value == sum(values) / len(values) and mean.interval == pytest.approx(interval, rel=1e-4)


@pytest.mark.parametrize(
    ("degrees_of_freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984)]
)
def test_students_t_quantiles_equal_published_tables(degrees_of_freedom, quantile):
    assert student_t_quantile(degrees_of_freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(
    ("mean", "text"),
    [
        (MeanEstimate(0.96548, 0.0823), "0.965 +- 0.082"),
        (MeanEstimate(12.3456, 1.04), "12.3 +- 1.0"),
        (MeanEstimate(1234.5, 260), "1234 +- 260"),
        (MeanEstimate(0.5, math.inf), "0.5"),
        (MeanEstimate(0.25, 0.0), "0.25"),
    ],
)
def test_a_mean_is_formatted_to_the_digits_of_its_interval(mean, text):
    assert str(mean) == text
