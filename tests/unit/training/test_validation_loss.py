"""The validation loss: the training loss at nine fixed timesteps, with fixed noise for each image."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_runs import write_images
from training_task import HEIGHT, WIDTH, make_pixel_batch, task

from library.cache.readers import build_validation_reader
from library.config.schema_data import DataConfig
from library.data.batch_plan import Bucket, MicroBatch
from library.data.loader import ValidationBatches
from library.data.prepare import prepare_data
from library.training.validation import TIMESTEP_QUANTILES, VALIDATION_SEED, compute_validation_losses

__all__ = ["task"]  # a fixture


class SingleProcess:
    """The strategy of one process."""

    data_parallel_rank, data_parallel_size, has_collective_forward = 0, 1, False
    device = torch.device("cpu")
    accelerator = SimpleNamespace(autocast=nullcontext)
    comm = SimpleNamespace(gather_for_metrics=lambda tensors: tensors)

    def unwrap_model(self, model):
        return model


def measured(task, *batches):
    """The losses of batches, whose samples are numbered from 5 on."""
    micro, first = [], 5
    for batch in batches:
        count = len(batch)
        micro.append(
            MicroBatch(0, 0, tuple(range(first, first + count)), (0,) * count, (True,) * count, batch.global_positions)
        )
        first += count
    fixed = ValidationBatches((Bucket((WIDTH, HEIGHT), (), (), 1),), tuple(micro))
    run = SimpleNamespace(strategy=SingleProcess(), task=task, model=task.denoiser)
    return compute_validation_losses(run, fixed, lambda number: batches[number])


def test_each_image_is_evaluated_at_all_quantiles_with_its_own_noise(task):
    found = measured(task, make_pixel_batch((0, 1), [1.0, 1.0]), make_pixel_batch((2,), [1.0]))

    assert list(found) == [5, 6, 7]
    for place, number in enumerate(found):
        for at, u in enumerate(TIMESTEP_QUANTILES):
            (draw,) = replace(task, seed=VALIDATION_SEED).build_generators("measured", at, (place,))
            noise = torch.randn(4, HEIGHT // 8, WIDTH // 8, generator=draw)
            a = task.objective.process.alphas_cumprod[int(1000 * u)].item()
            weight = min(a / (1 - a), 2.0) / (a / (1 - a))
            assert found[number][at] == pytest.approx(noise.abs().mean().item() * weight, rel=1e-5)


def test_validation_loss_depends_neither_on_the_seed_nor_on_earlier_evaluations(task):
    both = (make_pixel_batch((0, 1), [1.0, 1.0]), make_pixel_batch((2,), [1.0]))

    assert measured(task, *both) == measured(replace(task, seed=123), *both) == measured(task, *both)


def test_masked_pixels_and_unreadable_images_do_not_count(task):
    mask = torch.full((2, 1, HEIGHT, WIDTH), 51, dtype=torch.uint8)
    plain = measured(task, make_pixel_batch((0, 1), [1.0, 1.0]))

    assert measured(task, make_pixel_batch((0, 1), [1.0, 1.0], mask))[6] == pytest.approx(
        [each / 5 for each in plain[6]], rel=1e-5
    )
    assert measured(task, make_pixel_batch((0, 1), [0.0, 1.0])) == {6: plain[6]}
    by_area = measured(replace(task, normalize_masked_loss=True), make_pixel_batch((0, 1), [1.0, 1.0], mask))
    assert by_area[5] == pytest.approx(plain[5], rel=1e-5)


def test_dropout_is_disabled_during_validation_only(task):
    task.denoiser.train()
    seen = []
    task.denoiser.register_forward_hook(lambda module, *_: seen.append(module.training))
    measured(task, make_pixel_batch((0,), [1.0]))

    assert seen == [False] * len(TIMESTEP_QUANTILES) and task.denoiser.training


def test_max_validation_steps_selects_the_same_batches_each_time(tmp_path):
    data = str(write_images(tmp_path, {(96, 64): 9, (64, 96): 6}))
    prepared = prepare_data(DataConfig(dataset_config=data, validation_split=0.6, train_batch_size=2), 8)
    whole, _ = build_validation_reader(prepared, None, None, None)
    some, _ = build_validation_reader(prepared, 3, None, None)
    samples = [sample for batch in whole.micro_batches for sample in batch.sample_indices]

    first, count = len(prepared.manifest.samples), len(prepared.validation.manifest.samples)
    assert sorted(samples) == list(range(first, first + count))
    assert len(some.micro_batches) == 3 and set(some.micro_batches) < set(whole.micro_batches)
    assert some == build_validation_reader(prepared, 3, None, None)[0]
    assert {
        some.dataset_indices_in_file[sample] for batch in some.micro_batches for sample in batch.sample_indices
    } == {0}
