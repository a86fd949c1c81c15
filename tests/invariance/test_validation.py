"""Pictures that are kept for validation are never trained on, and what is measured on them is always the same."""

import json
import math
import re
from pathlib import Path

import pytest
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.cache.readers import build_validation_reader
from library.config import parse_config
from library.config.schema_data import DataConfig
from library.data.prepare import prepare_data
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError
from library.training.validation import MeanEstimate, student_t_quantile


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), {(96, 64): 9, (64, 96): 6, (64, 64): 2})


def held(dataset: Path, **options) -> tuple[set[str], set[str]]:
    """Contents of the pictures to train on, and of those to validate on."""
    prepared = prepare_data(DataConfig(dataset_config=str(dataset), **options), 8)
    others = prepared.validation.manifest.samples if prepared.validation else ()
    return {sample.content_hash for sample in prepared.manifest.samples}, {sample.content_hash for sample in others}


def run_lines(folder: Path, name: str = "lora") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss/current"] for line in run_lines(folder) if "loss/current" in line]


def flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        "--max_train_steps",
        "4",
        "--train_batch_size",
        "2",
        "--learning_rate",
        "0.02",
        "--network_dim",
        "4",
        "--validation_split",
        "0.4",
        "--validate_every_n_steps",
        "2",
        *more,
    ]


def validated(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if name == "step" or name.startswith("validation/")}
        for line in run_lines(folder)
        if any(name.startswith("validation/") for name in line)
    ]


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run_on_ranks(1, train, *flags(data, folder))
    return folder


def test_no_picture_is_trained_and_measured_and_none_is_lost(data):
    training, held_out = held(data, validation_split=0.4)

    assert not training & held_out and len(held_out) in range(3, 12)
    assert training | held_out == held(data)[0]


def test_pictures_that_come_later_and_other_names_change_no_lot(data, tmp_path):
    _, before = held(data, validation_split=0.4)
    more = write_images(tmp_path, {(96, 64): 9, (64, 96): 6, (64, 64): 6})
    for path in (tmp_path / "images").glob("*"):
        path.rename(path.with_name(f"x{int(path.stem) * 7 % 31}-{path.name}"))
    training, after = held(more, validation_split=0.4)

    assert before <= after and not before & training and len(training) + len(after) == 21


def test_a_larger_split_keeps_those_of_the_smaller_and_another_seed_keeps_others(data):
    small, large = held(data, validation_split=0.2)[1], held(data, validation_split=0.6)[1]

    assert small < large
    assert held(data, validation_split=0.6, validation_seed=1)[1] != large


def with_lines(data: Path, target: Path, lines: str) -> Path:
    """The same dataset file with more at its end."""
    target.write_text(data.read_text() + lines)
    return target


def test_a_copy_in_another_dataset_and_regularisation_pictures_are_not_trained_on_either(data, tmp_path):
    folder = data.parent / "images"
    both = with_lines(
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
    prepared = prepare_data(DataConfig(dataset_config=str(both)), 8)
    kept = {sample.content_hash for sample in prepared.validation.manifest.samples}

    assert {sample.dataset_index for sample in prepared.validation.manifest.samples} == {0}
    assert not [sample for sample in prepared.manifest.samples if sample.content_hash in kept]
    assert any("used for validation in another dataset" in note for note in prepared.manifest.notes)


def test_a_dataset_of_its_own_is_one_that_is_kept_as_a_whole(data, tmp_path):
    apart = with_lines(
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
    prepared = prepare_data(DataConfig(dataset_config=str(apart)), 8)

    assert {sample.dataset_index for sample in prepared.manifest.samples} == {0}
    assert len(prepared.manifest.samples) == 9 and len(prepared.validation.manifest.samples) == 8
    with pytest.raises(ConfigError, match="validation_split takes all of them"):
        prepare_data(DataConfig(dataset_config=str(data), validation_split=1.0), 8)


@pytest.mark.parametrize("split", [0.01, 0.99])
def test_a_small_dataset_gives_each_side_a_picture(split, tmp_path):
    data = write_images(tmp_path, {(64, 64): 2})

    assert [len(side) for side in held(data, validation_split=split)] == [1, 1]


def test_what_is_measured_is_shown_in_one_way_only(data, tmp_path):
    lively = with_lines(
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
    prepared = prepare_data(DataConfig(dataset_config=str(lively)), 8)
    batches, read = build_validation_reader(prepared, None, None, None)
    plain = prepare_data(DataConfig(dataset_config=str(data), validation_split=0.5), 8)
    _, read_plain = build_validation_reader(plain, None, None, None)
    for number in range(len(batches.micro_batches)):
        one, other = read(number), read_plain(number)
        assert (one.pixels == other.pixels).all() and one.global_positions == other.global_positions
        assert [re.fullmatch(r"[abc] photo of picture \d+, a \d+ b", caption) is not None for caption in one.captions]
        assert [caption[len("a photo of ") :] for caption in one.captions] == list(other.captions)


def test_the_base_comes_first_then_each_evaluation_with_its_parts(reference):
    lines = validated(reference)

    assert [line["step"] for line in lines] == [0, 2, 4]
    assert len([name for name in lines[1] if name.startswith("validation/time/")]) == 9
    base = pytest.approx(lines[0]["validation/base"], rel=1e-12)  # later ones are the sum of loss and gain
    assert all(line["validation/base"] == base for line in lines)
    assert lines[1]["validation/loss"] != lines[2]["validation/loss"]
    for line in lines[1:]:
        assert line["validation/gain"] == pytest.approx(line["validation/base"] - line["validation/loss"])
        parts = [value for name, value in line.items() if name.startswith("validation/time/")]
        assert sum(parts) / 9 == pytest.approx(line["validation/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ()),
        (2, ("--train_batch_size", "1")),
        (1, ("--cache_latents", "--cache_text_encoder_outputs")),
    ],
    ids=["again", "two ranks", "kept"],
)
def test_the_base_is_measured_alike_again_on_any_number_of_ranks_and_from_a_cache(
    ranks, more, data, reference, tmp_path
):
    dataset = with_lines(data, tmp_path / "set.toml", "")
    dataset.write_text(dataset.read_text().replace("[[datasets]]", "[[datasets]]\nbatch_size = 2"))
    run_on_ranks(ranks, train, *flags(dataset, tmp_path, *more, "--max_train_steps", "1"))

    assert validated(tmp_path)[0] == validated(reference)[0]


@pytest.mark.quick
def test_losses_and_files_are_the_same_to_the_bit_with_and_without_evaluations(data, reference, tmp_path):
    run_on_ranks(1, train, *flags(data, tmp_path, "--validate_every_n_steps", "1000"))

    assert losses(tmp_path) == losses(reference)
    assert validated(tmp_path)[-1] == validated(reference)[-1]
    assert (
        max_relative_difference(load_file(tmp_path / "lora.safetensors"), load_file(reference / "lora.safetensors"))
        == 0.0
    )


def unasked(*flags: str) -> list[str]:
    config = parse_config(flags).config
    return validate_dataset_config(config.data, config.cache, config.validate)


@pytest.mark.parametrize(
    "option", ["validation_seed", "validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps"]
)
def test_an_option_that_nothing_is_kept_for_is_refused(option, data, tmp_path):
    problems = unasked("--dataset_config", str(data), f"--{option}", "3")

    assert [problem.partition(":")[0] for problem in problems] == [f"--{option}"]
    assert unasked("--dataset_config", str(data), f"--{option}", "3", "--validation_split", "0.5") == []


def watched(*flags: str) -> list[float]:
    """A run that lets the optimizer or the average have other weights; how far the adapter moved in evaluations."""
    from library.training import validation

    honest, moved = validation.compute_validation_losses, []

    def evaluate(run, *rest):
        used = [parameter.detach().clone() for parameter in run.parameters]
        moved.append(max(float((one - two).abs().max()) for one, two in zip(used, begun, strict=True)) if begun else 0)
        begun[:] = begun or used
        return honest(run, *rest)

    begun: list = []
    validation.compute_validation_losses = evaluate
    train(*flags)
    return moved


def test_what_is_measured_is_the_average_where_there_is_one(data, tmp_path):
    ((base, plain, _),) = run_on_ranks(1, watched, *flags(data, tmp_path / "plain"))
    ((_, averaged, _),) = run_on_ranks(1, watched, *flags(data, tmp_path / "ema", "--ema_decay", "0.999"))

    assert base == 0 and 0 < averaged < plain
    assert losses(tmp_path / "plain") == losses(tmp_path / "ema")


def test_a_schedule_free_optimizer_goes_on_as_if_nobody_had_looked(data, tmp_path):
    more = ("--optimizer_type", "AdamWScheduleFree")
    run_on_ranks(1, train, *flags(data, tmp_path / "often", *more, "--validate_every_n_steps", "1"))
    run_on_ranks(1, train, *flags(data, tmp_path / "never", *more, "--validate_every_n_steps", "1000"))
    often, never = (load_file(tmp_path / name / "lora.safetensors") for name in ("often", "never"))

    assert max_relative_difference(often, never) == 0.0


@pytest.mark.parametrize(("values", "interval"), [([1.0, 2.0, 3.0], 4.3027 / 3**0.5), ([5.0] * 40, 0.0)])
def test_an_interval_is_that_of_student(values, interval):
    mean = MeanEstimate.from_values(values)

    assert mean.value == sum(values) / len(values) and mean.interval == pytest.approx(interval, rel=1e-4)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984)])
def test_the_quantile_of_student_is_that_of_the_tables(freedom, quantile):
    assert student_t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        (MeanEstimate(0.96548, 0.0823), "0.965 +- 0.082"),
        (MeanEstimate(12.3456, 1.04), "12.3 +- 1.0"),
        (MeanEstimate(1234.5, 260), "1234 +- 260"),
        (MeanEstimate(0.5, math.inf), "0.5"),
        (MeanEstimate(0.25, 0.0), "0.25"),
    ],
)
def test_a_mean_is_told_as_exactly_as_it_is_known(mean, said):
    assert str(mean) == said
