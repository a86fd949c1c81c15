"""Runs with masks, and with images that become unreadable: equal on any number of ranks, and stopped on all."""

import os
from pathlib import Path

import pytest
from PIL import Image
from rank_processes import run_on_ranks
from training_runs import max_relative_difference, train, train_adapter, write_images

from library.training.nan_and_oom_handling import CHECK_INTERVAL_STEPS

SGD = ("--optimizer_type", "SGD")


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    """Two buckets with remainders; every second image is half transparent."""
    path = write_images(tmp_path_factory.mktemp("masked"), {(96, 64): 5, (64, 96): 3})
    for number, file in enumerate(sorted((path.parent / "images").glob("*.png"))):
        if number % 2:
            image = Image.open(file).convert("RGBA")
            image.putalpha(Image.linear_gradient("L").resize(image.size).point(lambda value: 3 * value - 255))
            image.save(file)
    return path


def test_masked_images_train_equally_on_one_rank_and_two(masked, tmp_path):
    flags = (*SGD, "--alpha_mask", "--masked_loss")
    one = train_adapter(tmp_path / "one", 1, 4, 1, *flags, dataset=masked)
    two = train_adapter(tmp_path / "two", 2, 2, 1, *flags, dataset=masked)
    by_area = train_adapter(tmp_path / "area", 1, 4, 1, *flags, "--masked_loss_normalize", dataset=masked)

    assert max_relative_difference(one, two) < 1e-4
    assert max_relative_difference(one, by_area) > 1e-2


def train_with_unreadable_images(names: tuple[str, ...], *flags: str) -> tuple[int, str, bool]:
    """Train while images become unreadable; return the last step, the error, and whether another rank reports it."""
    from library.dataloader import images
    from library.errors import UserError
    from library.training import loop

    load_image, run_step, steps = images.load_image_and_mask, loop._run_step, []

    def read(image, mask):
        if image.name in names:
            raise OSError("disk failure")
        return load_image(image, mask)

    def record_step(run, batches, wait_seconds):
        steps.append(run.state.step)
        return run_step(run, batches, wait_seconds)

    images.load_image_and_mask, loop._run_step = read, record_step
    try:
        train(*flags)
    except UserError as error:
        return steps[-1], str(error), error.is_reported
    return steps[-1], "", False


def build_flags(tmp_path: Path, dataset: Path, ranks: int, batch: int, *flags: str) -> list[str]:
    return [
        "--dataset_config",
        str(dataset),
        "--train_batch_size",
        str(batch),
        "--output_dir",
        str(tmp_path),
        "--output_name",
        f"r{ranks}",
        "--learning_rate",
        "0.5",
        *SGD,
        *flags,
    ]


def test_an_unreadable_image_has_weight_zero_on_one_rank_and_two(masked, tmp_path):
    from safetensors.torch import load_file

    files = []
    for ranks, batch in ((1, 4), (2, 2)):
        flags = build_flags(tmp_path, masked, ranks, batch, "--max_train_steps", "6")
        results = run_on_ranks(ranks, train_with_unreadable_images, ("03.png",), *flags)
        assert results == [(5, "", False)] * ranks
        files.append(load_file(tmp_path / f"r{ranks}.safetensors"))

    assert max_relative_difference(*files) < 1e-4


def test_too_many_unreadable_images_stop_all_ranks_in_the_same_step(masked, tmp_path):
    flags = build_flags(tmp_path, masked, 2, 1, "--max_train_steps", "40", "--max_invalid_images", "2")
    unreadable = ("02.png", "04.png", "07.png")
    (step, error, is_reported), (other_step, other_error, is_reported_by_other) = run_on_ranks(
        2, train_with_unreadable_images, unreadable, *flags
    )

    assert step == other_step < 30 and error == other_error and (is_reported, is_reported_by_other) == (False, True)
    first, *lines = error.splitlines()
    assert first == "3 of 8 images can no longer be read; max_invalid_images is 2:"
    folder = masked.parent / "images"
    assert sorted(lines) == [
        f"{folder / name}: was readable at the start of the run, cannot be read now: disk failure"
        for name in unreadable
    ]


@pytest.mark.parametrize(
    ("unreadable", "limit", "message"),
    [
        (("02.png",), "0", "1 of 8 images can no longer be read; max_invalid_images is 0:"),
        (("01.png", "02.png", "03.png", "04.png"), "10", "4 of 8 images can no longer be read; at least half of"),
    ],
)
def test_max_invalid_images_0_stops_at_the_first_and_half_of_all_always_stops(
    masked, tmp_path, unreadable, limit, message
):
    flags = build_flags(tmp_path, masked, 1, 4, "--max_train_steps", "20", "--max_invalid_images", limit)
    ((step, error, _),) = run_on_ranks(1, train_with_unreadable_images, unreadable, *flags)

    assert error.startswith(message) and step <= CHECK_INTERVAL_STEPS


@pytest.mark.parametrize("unreadable", [("03.png",), tuple(f"{number:02d}.png" for number in range(1, 9))])
def test_trained_weights_are_saved_when_too_many_images_are_unreadable_in_the_last_step(masked, tmp_path, unreadable):
    flags = build_flags(tmp_path, masked, 1, 8, "--max_train_steps", "2", "--max_invalid_images", "0")
    ((step, error, _),) = run_on_ranks(1, train_with_unreadable_images, unreadable, *flags)

    assert step <= 1 and "images can no longer be read" in error
    saved = (
        [f"r1-step{step + 1:08d}.safetensors"] if len(unreadable) == 1 else []
    )  # without a readable image nothing is trained
    assert [path.name for path in tmp_path.glob("*.safetensors")] == saved


def train_with_unreadable_image_on_rank(rank: int, *flags: str) -> tuple[int, str, bool]:
    return train_with_unreadable_images(("03.png",) if int(os.environ["RANK"]) == rank else (), *flags)


def test_an_image_unreadable_on_one_rank_of_a_tensor_parallel_group_stops_the_run(masked, tmp_path):
    """One rank would use a black image with weight 0 where the other uses the image."""
    flags = build_flags(tmp_path, masked, 2, 8, "--max_train_steps", "20", "--tp_size", "2")
    (_, error, is_reported), (_, other_error, is_reported_by_other) = run_on_ranks(
        2, train_with_unreadable_image_on_rank, 1, *flags
    )

    assert other_error in error and "the checkpoint after step" in error
    assert (is_reported, is_reported_by_other) == (False, True)
    assert "03.png: was readable at the start" in error
    assert "only on rank 1; other ranks of its model-parallel group could read it" in error
    assert not [*tmp_path.glob("*.safetensors")]
