"""An image that becomes unreadable is replaced by a neighbor with weight 0; other samples do not change."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import PixelBatch
from library.dataloader.loader import ImageLoader, MicroBatchDataset, StepBatches
from library.dataloader.prepare import PreparedData, prepare_data


@pytest.fixture
def prepared(tmp_path) -> PreparedData:
    """Five images of one size and two of another, all but one with a mask, in batches of three."""
    (tmp_path / "a").mkdir()
    for number, size in enumerate([(64, 64)] * 5 + [(80, 48)] * 2):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 4), np.uint8)
        image = Image.fromarray(pixels, "RGBA")
        (image.convert("RGB") if number == 4 else image).save(tmp_path / "a" / f"{number}.png")
        (tmp_path / "a" / f"{number}.txt").write_text(f"picture {number}")
    (tmp_path / "set.toml").write_text(
        "[[datasets]]\nresolution = 64\nbatch_size = 3\nenable_bucket = true\nmin_bucket_reso = 32\n"
        "bucket_reso_steps = 16\n[[datasets.subsets]]\nimage_dir = 'a'\nalpha_mask = true\ncaption_extension = '.txt'\n"
    )
    return prepare_data(DataConfig(dataset_config=str(tmp_path / "set.toml")), 8)


def reader(prepared: PreparedData, rank: int = 0, ranks: int = 1) -> MicroBatchDataset:
    plan = prepared.build_batch_plan(ranks, TrainConfig(seed=2))
    return MicroBatchDataset(prepared.manifest, prepared.assignments, plan, rank, 2, 100)


def unreadable(path: Path) -> str:
    path.unlink()
    return "No such file or directory"


def truncated(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-900])
    return "truncated"


def of_another_size(path: Path) -> str:
    Image.open(path).resize((64, 65)).save(path)
    return "was (64, 64) at the start of the run, is (64, 65) now"


def no_picture(path: Path) -> str:
    path.write_text("now a text")
    return "cannot identify image file"


def without_its_alpha(path: Path) -> str:
    Image.open(path).convert("RGB").resize((64, 65)).save(path)
    return "is (64, 65) now"


@pytest.mark.parametrize(
    ("harm", "victim"),
    [
        (unreadable, "2.png"),
        (truncated, "2.png"),
        (of_another_size, "2.png"),
        (of_another_size, "4.png"),
        (no_picture, "2.png"),
        (without_its_alpha, "2.png"),
    ],
)
def test_a_bad_image_is_replaced_by_its_nearest_neighbor_with_weight_zero(prepared, tmp_path, harm, victim):
    before = [reader(prepared)[position] for position in range(9)]
    why = harm(tmp_path / "a" / victim)
    actual = 0
    for old, new in zip(before, (reader(prepared)[position] for position in range(9)), strict=True):
        rows = [row for row, name in enumerate(old.sample_keys) if name == f"a/{victim}"]
        assert [bad.name for bad in new.bad_samples] == [str(tmp_path / "a" / victim)] * len(rows)
        assert all(why in bad.problem and "\n" not in bad.problem for bad in new.bad_samples)
        assert new.global_positions == old.global_positions
        for row in range(len(old)):
            if row not in rows:
                assert all(
                    torch.equal(getattr(old, name)[row], getattr(new, name)[row])
                    for name in ("pixels", "mask", "size_conditioning", "loss_weights")
                )
                assert (old.captions[row], old.sample_keys[row]) == (new.captions[row], new.sample_keys[row])
                continue
            good = [other for other in range(len(old)) if other not in rows]
            near = min(good, key=lambda other: abs(other - row))
            assert new.loss_weights[row] == 0
            assert all(
                torch.equal(new.__dict__[name][row], old.__dict__[name][near])
                for name in ("pixels", "mask", "size_conditioning")
            )
            assert (new.captions[row], new.sample_keys[row]) == (old.captions[near], old.sample_keys[near])
            actual += 1
    assert actual >= 3


def test_a_batch_of_bad_images_becomes_black_images_of_the_bucket_size(prepared, tmp_path):
    before = reader(prepared)
    position = next(position for position in range(9) if before[position].pixels.shape[-1] == 80)
    old = before[position]
    for number in (5, 6):
        (tmp_path / "a" / f"{number}.png").unlink()
    new = reader(prepared)[position]
    assert new.loss_weights.tolist() == [0, 0, 0] and new.mask is None and len(new.bad_samples) == 3  # one is padding
    assert new.pixels.shape == old.pixels.shape and new.pixels.dtype == torch.uint8 and not new.pixels.any()
    assert (new.captions, new.sample_keys, new.global_positions) == (
        old.captions,
        old.sample_keys,
        old.global_positions,
    )
    assert torch.equal(new.size_conditioning, old.size_conditioning)


def test_the_loss_divisor_stays_as_planned_without_communication(prepared, tmp_path):
    (tmp_path / "a" / "2.png").unlink()
    for ranks in (1, 3):
        plan = reader(prepared, 0, ranks).batch_plan
        for step in range(4):
            works = [
                next(ImageLoader(reader(prepared, rank, ranks), plan, num_workers=0).iter_steps(step))
                for rank in range(ranks)
            ]
            assert {work.num_global_samples for work in works} == {plan.count_real_samples(step)}
            lost = sum(len(work.bad_samples) for work in works)
            padded = sum(
                plan.buckets[batch.bucket_index].batch_size * ranks - sum(batch.is_real)
                for batch in plan.get_step(step)
            )
            weights = torch.cat([batch.loss_weights for work in works for batch in work.micro_batches])
            assert lost <= int((weights == 0).sum()) <= lost + padded


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_return_bad_samples_with_the_batch(prepared, tmp_path, workers):
    (tmp_path / "a" / "2.png").unlink()
    plan = reader(prepared).batch_plan
    steps = ImageLoader(reader(prepared), plan, num_workers=workers).iter_steps(0)
    works: list[StepBatches] = [next(steps) for _ in range(plan.micro_batches_per_epoch)]
    steps.close()
    assert {bad.name for work in works for bad in work.bad_samples} == {str(tmp_path / "a" / "2.png")}


def test_all_tensors_of_a_batch_are_pinned_and_shared(prepared, monkeypatch):
    """Pinning needs a device, so calls of ``pin_memory`` are recorded; torch's pin thread calls it, too."""
    from torch.utils.data._utils.pin_memory import pin_memory

    batch = reader(prepared)[0]
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(id(tensor)) or tensor.clone())
    copy = pin_memory(batch)
    tensors = [item.name for item in fields(PixelBatch) if isinstance(getattr(batch, item.name), torch.Tensor)]
    assert tensors == ["pixels", "size_conditioning", "loss_weights", "mask"]
    assert sorted(pinned) == sorted(id(getattr(batch, name)) for name in tensors)
    assert all(torch.equal(getattr(copy, name), getattr(batch, name)) for name in tensors)
    assert replace(copy, **{name: getattr(batch, name) for name in tensors}) == batch
    assert not any(getattr(batch, name).is_shared() for name in tensors)
    batch.share_memory()
    assert all(getattr(batch, name).is_shared() for name in tensors)
