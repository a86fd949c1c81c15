"""The batches of a rank depend only on data, seed and position, not on workers, resuming or other ranks."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import PixelBatch
from library.dataloader.images import resize_and_crop
from library.dataloader.loader import ImageLoader, MicroBatchDataset, StepBatches
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.image_decoding import load_rgb_image

pytestmark = pytest.mark.quick

SIZES = [(150, 100), (160, 90), (90, 150), (100, 100), (101, 99), (300, 100), (128, 128)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "train").mkdir()
    (folder / "reg").mkdir()
    random_state = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        image = Image.fromarray(random_state.integers(0, 256, (height, width, 3), np.uint8))
        image.save(folder / "train" / f"{number}.png")
        (folder / "train" / f"{number}.txt").write_text(f"number {number}, a, b, c, d", encoding="utf-8")
    Image.fromarray(random_state.integers(0, 256, (100, 100, 3), np.uint8)).save(folder / "reg" / "r.png")
    (folder / "set.toml").write_text("""
[general]
shuffle_caption = true
keep_tokens = 1
flip_aug = true
random_crop = true
enable_bucket = true
bucket_reso_steps = 32
min_bucket_reso = 32
[[datasets]]
resolution = 96
batch_size = 3
  [[datasets.subsets]]
  image_dir = 'train'
  num_repeats = 2
  [[datasets.subsets]]
  image_dir = 'reg'
  is_reg = true
""")
    return folder


@pytest.fixture(scope="module")
def prepared(folder: Path) -> PreparedData:
    return prepare_data(DataConfig(dataset_config=str(folder / "set.toml"), prior_loss_weight=0.25), 8)


def build_loader(
    prepared: PreparedData, rank: int = 0, ranks: int = 1, workers: int = 0, accumulation: int = 2
) -> ImageLoader:
    plan = prepared.build_batch_plan(ranks, TrainConfig(gradient_accumulation_steps=accumulation, seed=7))
    return ImageLoader(
        MicroBatchDataset(prepared.manifest, prepared.assignments, plan, rank, 7, 50), plan, num_workers=workers
    )


def take_steps(build_loader: ImageLoader, count: int, first: int = 0) -> list[StepBatches]:
    return list(itertools.islice(build_loader.iter_steps(first), count))


def are_equal(one: PixelBatch, other: PixelBatch) -> bool:
    fields, tensors = ("captions", "global_positions", "sample_keys"), ("pixels", "size_conditioning", "loss_weights")
    return all(getattr(one, name) == getattr(other, name) for name in fields) and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in tensors
    )


def assert_equal(one: list[StepBatches], other: list[StepBatches]) -> None:
    assert [work.num_global_samples for work in one] == [work.num_global_samples for work in other]
    for first, second in zip(one, other, strict=True):
        assert all(are_equal(*pair) for pair in zip(first.micro_batches, second.micro_batches, strict=True))


def test_batches_do_not_depend_on_workers_or_resuming(prepared):
    expected = take_steps(build_loader(prepared), 9)
    assert_equal(expected, take_steps(build_loader(prepared, workers=2), 9))
    assert_equal(expected[5:], take_steps(build_loader(prepared, workers=2), 4, first=5))
    assert not are_equal(expected[0].micro_batches[0], expected[-1].micro_batches[0])


def test_the_ranks_together_have_the_samples_of_one_process(prepared):
    def group_by_position(steps_by_rank: list[list[StepBatches]], step: int) -> dict:
        batches = [batch for work in steps_by_rank for batch in work[step].micro_batches]
        return {
            position: (
                batch.captions[row],
                batch.sample_keys[row],
                batch.loss_weights[row].item(),
                batch.size_conditioning[row].tolist(),
                batch.pixels[row].sum().item(),
            )
            for batch in batches
            for row, position in enumerate(batch.global_positions)
        }

    three_ranks = [take_steps(build_loader(prepared, rank, 3), 3) for rank in range(3)]
    plan = build_loader(prepared, 0, 3).batch_plan
    for step in range(3):
        assert {work[step].num_global_samples for work in three_ranks} == {plan.count_real_samples(step)}
        assert sorted(group_by_position(three_ranks, step)) == list(range(18))
    one_rank_plan = type(plan)([replace(bucket, batch_size=9) for bucket in plan.buckets], 1, 2, 7)
    single = ImageLoader(
        MicroBatchDataset(prepared.manifest, prepared.assignments, one_rank_plan, 0, 7, 50),
        one_rank_plan,
        num_workers=0,
    )
    one_rank = [take_steps(single, 3)]
    assert all(group_by_position(three_ranks, step) == group_by_position(one_rank, step) for step in range(3))


def test_size_conditioning_and_captions_describe_the_pixels_of_a_batch(prepared, folder):
    """The crop of the source image at the size conditioning equals the pixels."""
    flips, padded, names = set(), 0, set()
    for work in take_steps(build_loader(prepared), 12):
        assert work.num_global_samples == sum(int((batch.loss_weights > 0).sum()) for batch in work.micro_batches)
        for batch in work.micro_batches:
            assert batch.pixels.dtype == torch.uint8 and len(batch.captions) == len(batch) == 3
            for row in range(len(batch)):
                height, width, top, left, target_height, target_width = map(int, batch.size_conditioning[row])
                name = batch.sample_keys[row]
                sample = next(sample for sample in prepared.manifest.samples if sample.key == name)
                placement = prepared.assignments[prepared.manifest.samples.index(sample)]
                image = load_rgb_image(folder / name)
                assert (width, height) == image.size == sample.size
                assert tuple(batch.pixels.shape[1:]) == (3, target_height, target_width)
                pixels = batch.pixels[row].permute(1, 2, 0).numpy()
                cropped = resize_and_crop(image, placement, (left, top), None)
                resized = resize_and_crop(
                    image, type(placement)(placement.resized_size, placement.resized_size, (0, 0)), (0, 0), None
                )
                mirrored = resized[:, ::-1][top : top + target_height, left : left + target_width]
                flips.add((bool((pixels == cropped).all()), bool((pixels == mirrored).all())))
                padded += float(batch.loss_weights[row]) == 0
                names.add(name)
                assert float(batch.loss_weights[row]) in (0.0, 0.25 if name == "reg/r.png" else 1.0)
                if name != "reg/r.png":
                    assert batch.captions[row].startswith(f"number {Path(name).stem}, ")
                    assert sorted(batch.captions[row].split(", ")[1:]) == ["a", "b", "c", "d"]
    assert flips == {(True, False), (False, True)}
    assert padded > 0 and len(names) == 8


def test_crops_and_captions_differ_between_repeats(prepared):
    views_by_name: dict[str, set] = {}
    for work in take_steps(build_loader(prepared), 40):
        for batch in work.micro_batches:
            for name, caption, frame in zip(
                batch.sample_keys, batch.captions, batch.size_conditioning.tolist(), strict=True
            ):
                views_by_name.setdefault(name, set()).add((caption, *frame))
    assert all(len(views) > 5 for name, views in views_by_name.items() if name in ("train/0.png", "train/5.png"))
    assert all(max(len({view[axis] for view in views}) for views in views_by_name.values()) > 3 for axis in (3, 4))


@pytest.mark.parametrize(
    "get_indices", [lambda number: (number, 0), lambda number: (0, number)], ids=["epoch", "repeat"]
)
def test_every_epoch_and_every_repeat_has_its_own_crop_flip_and_caption(prepared, get_indices):
    reader = build_loader(prepared).dataset
    index = next(i for i, sample in enumerate(prepared.manifest.samples) if sample.key == "train/5.png")
    views = [reader.load_image(get_indices(n)[0], index, get_indices(n)[1]) for n in range(24)]
    assert len({view.size_conditioning for view in views}) > 6
    captions = {reader.get_caption(get_indices(n)[0], 0, index, get_indices(n)[1]) for n in range(24)}
    assert len(captions) > 6
    placement = prepared.assignments[index]
    resized = resize_and_crop(
        load_rgb_image(prepared.manifest.samples[index].image),
        type(placement)(placement.resized_size, placement.resized_size, (0, 0)),
        (0, 0),
        None,
    )
    unflipped_count = 0
    for view in views:
        _, _, top, left, height, width = view.size_conditioning
        unflipped_count += bool((view.pixels == resized[top : top + height, left : left + width]).all())
    assert 4 < unflipped_count < 20
