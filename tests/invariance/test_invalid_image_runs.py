"""Whole runs with masks and with pictures that fail on the way: alike on any number of ranks, ended by all together."""

import os
from pathlib import Path

import pytest
from PIL import Image
from rank_processes import run_on_ranks
from training_runs import max_relative_difference, train, train_adapter, write_images

from library.training.step_guards import CHECK_INTERVAL_STEPS

SGD = ("--optimizer_type", "SGD")


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    """Two buckets with remainders; every second picture is half transparent."""
    path = write_images(tmp_path_factory.mktemp("masked"), {(96, 64): 5, (64, 96): 3})
    for number, file in enumerate(sorted((path.parent / "images").glob("*.png"))):
        if number % 2:
            picture = Image.open(file).convert("RGBA")
            picture.putalpha(Image.linear_gradient("L").resize(picture.size).point(lambda value: 3 * value - 255))
            picture.save(file)
    return path


def test_masked_pictures_train_alike_on_one_rank_and_two(masked, tmp_path):
    flags = (*SGD, "--alpha_mask", "--masked_loss")
    one = train_adapter(tmp_path / "one", 1, 4, 1, *flags, dataset=masked)
    two = train_adapter(tmp_path / "two", 2, 2, 1, *flags, dataset=masked)
    by_area = train_adapter(tmp_path / "area", 1, 4, 1, *flags, "--masked_loss_normalize", dataset=masked)

    assert max_relative_difference(one, two) < 1e-4
    assert max_relative_difference(one, by_area) > 1e-2


def losing(names: tuple[str, ...], *flags: str) -> tuple[int, str, bool]:
    """A rank of a run in which pictures become unreadable: its last step, what it said, whether others tell it."""
    from library.data import images
    from library.errors import UserError
    from library.training import loop

    honest, step_of, steps = images.load_image_and_mask, loop._run_step, []

    def read(image, mask):
        if image.name in names:
            raise OSError("the disk is gone")
        return honest(image, mask)

    def counted(run, work, waited):
        steps.append(run.state.step)
        return step_of(run, work, waited)

    images.load_image_and_mask, loop._run_step = read, counted
    try:
        train(*flags)
    except UserError as error:
        return steps[-1], str(error), error.is_reported
    return steps[-1], "", False


def run_of(tmp_path: Path, dataset: Path, ranks: int, batch: int, *flags: str) -> list[str]:
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


def test_a_lost_picture_trains_nothing_and_the_others_the_same_on_one_rank_and_two(masked, tmp_path):
    from safetensors.torch import load_file

    files = []
    for ranks, batch in ((1, 4), (2, 2)):
        flags = run_of(tmp_path, masked, ranks, batch, "--max_train_steps", "6")
        said = run_on_ranks(ranks, losing, ("03.png",), *flags)
        assert said == [(5, "", False)] * ranks
        files.append(load_file(tmp_path / f"r{ranks}.safetensors"))

    assert max_relative_difference(*files) < 1e-4


def test_too_many_lost_pictures_end_the_run_on_all_ranks_in_the_same_step(masked, tmp_path):
    flags = run_of(tmp_path, masked, 2, 1, "--max_train_steps", "40", "--max_invalid_images", "2")
    lost = ("02.png", "04.png", "07.png")
    (step, said, told), (other_step, other_said, other_told) = run_on_ranks(2, losing, lost, *flags)

    assert step == other_step < 30 and said == other_said and (told, other_told) == (False, True)
    first, *lines = said.splitlines()
    assert first == "3 of 8 images can no longer be read; max_invalid_images is 2:"
    folder = masked.parent / "images"
    assert sorted(lines) == [
        f"{folder / name}: was readable at the start of the run, cannot be read now: the disk is gone" for name in lost
    ]


@pytest.mark.parametrize(
    ("lost", "limit", "said"),
    [
        (("02.png",), "0", "1 of 8 images can no longer be read; max_invalid_images is 0:"),
        (("01.png", "02.png", "03.png", "04.png"), "10", "4 of 8 images can no longer be read; at least half of"),
    ],
)
def test_the_first_ends_the_run_when_none_is_allowed_and_half_of_all_in_any_case(masked, tmp_path, lost, limit, said):
    flags = run_of(tmp_path, masked, 1, 4, "--max_train_steps", "20", "--max_invalid_images", limit)
    ((step, found, _),) = run_on_ranks(1, losing, lost, *flags)

    assert found.startswith(said) and step <= CHECK_INTERVAL_STEPS


@pytest.mark.parametrize("lost", [("03.png",), tuple(f"{number:02d}.png" for number in range(1, 9))])
def test_what_was_learnt_is_kept_when_the_last_step_shows_that_too_many_are_lost(masked, tmp_path, lost):
    flags = run_of(tmp_path, masked, 1, 8, "--max_train_steps", "2", "--max_invalid_images", "0")
    ((step, found, _),) = run_on_ranks(1, losing, lost, *flags)

    assert step <= 1 and "images can no longer be read" in found
    kept = [f"r1-step{step + 1:08d}.safetensors"] if len(lost) == 1 else []  # of nothing nothing is learnt
    assert [path.name for path in tmp_path.glob("*.safetensors")] == kept


def losing_on(rank: int, *flags: str) -> tuple[int, str, bool]:
    return losing(("03.png",) if int(os.environ["RANK"]) == rank else (), *flags)


def test_a_picture_that_only_one_of_two_with_the_same_pictures_lost_ends_the_run(masked, tmp_path):
    """One computes with black and weight 0 what the other computes with the picture."""
    flags = run_of(tmp_path, masked, 2, 8, "--max_train_steps", "20", "--tp_size", "2")
    (_, said, told), (_, other_said, other_told) = run_on_ranks(2, losing_on, 1, *flags)

    assert other_said in said and "the checkpoint after step" in said
    assert (told, other_told) == (False, True)
    assert "03.png: was readable at the start" in said
    assert "only on rank 1; other ranks of its model-parallel group could read it" in said
    assert not [*tmp_path.glob("*.safetensors")]
