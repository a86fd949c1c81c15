"""The validation loss: the training loss at nine fixed timesteps, with fixed noise for each image."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_runs import write_images
from training_task import HEIGHT, WIDTH, make_pixel_batch, task

from library.cache.readers import build_validation_reader
from library.config.schema_data import DataConfig, ValidateConfig
from library.dataloader.batch_plan import BatchPlan, Bucket, MicroBatch
from library.dataloader.loader import ValidationBatches
from library.dataloader.prepare import prepare_data
from library.dataloader.run_plan import RunPlan
from library.training.validation_loss import (
    TIMESTEP_QUANTILES,
    VALIDATION_SEED,
    compute_validation_losses,
    is_validation_due,
)

__all__ = ["task"]  # a fixture


class SingleProcess:
    """The strategy of one process."""

    data_parallel_rank, data_parallel_size, has_collective_forward = 0, 1, False
    device = torch.device("cpu")
    accelerator = SimpleNamespace(autocast=nullcontext)
    comm = SimpleNamespace(all_gather_tensor=lambda tensor: tensor)

    def unwrap_model(self, model):
        return model

    def evaluate(self):
        return torch.no_grad()


def compute_losses(task, *batches):
    """Compute the validation losses of batches whose sample numbers begin at 5."""
    micro_batches, first = [], 5
    for batch in batches:
        count = len(batch)
        micro_batches.append(
            MicroBatch(0, 0, tuple(range(first, first + count)), (0,) * count, (True,) * count, batch.global_positions)
        )
        first += count
    validation_batches = ValidationBatches((Bucket((WIDTH, HEIGHT), (), (), 1),), tuple(micro_batches))
    run = SimpleNamespace(strategy=SingleProcess(), task=task, model=task.denoiser)
    return compute_validation_losses(run, validation_batches, lambda number: batches[number])


def test_each_image_is_evaluated_at_all_quantiles_with_its_own_noise(task):
    losses = compute_losses(task, make_pixel_batch((0, 1), [1.0, 1.0]), make_pixel_batch((2,), [1.0]))

    assert list(losses) == [5, 6, 7]
    for position, number in enumerate(losses):
        for index, u in enumerate(TIMESTEP_QUANTILES):
            (generator,) = replace(task, seed=VALIDATION_SEED).build_generators("measured", index, (position,))
            noise = torch.randn(4, HEIGHT // 8, WIDTH // 8, generator=generator)
            a = task.objective.process.alphas_cumprod[int(1000 * u)].item()
            weight = min(a / (1 - a), 2.0) / (a / (1 - a))
            assert losses[number][index] == pytest.approx(noise.abs().mean().item() * weight, rel=1e-5)


def test_validation_loss_depends_neither_on_the_seed_nor_on_earlier_evaluations(task):
    both = (make_pixel_batch((0, 1), [1.0, 1.0]), make_pixel_batch((2,), [1.0]))

    assert compute_losses(task, *both) == compute_losses(replace(task, seed=123), *both) == compute_losses(task, *both)


def test_masked_pixels_and_unreadable_images_do_not_count(task):
    mask = torch.full((2, 1, HEIGHT, WIDTH), 51, dtype=torch.uint8)
    plain = compute_losses(task, make_pixel_batch((0, 1), [1.0, 1.0]))

    assert compute_losses(task, make_pixel_batch((0, 1), [1.0, 1.0], mask))[6] == pytest.approx(
        [each / 5 for each in plain[6]], rel=1e-5
    )
    assert compute_losses(task, make_pixel_batch((0, 1), [0.0, 1.0])) == {6: plain[6]}
    by_area = compute_losses(replace(task, normalize_masked_loss=True), make_pixel_batch((0, 1), [1.0, 1.0], mask))
    assert by_area[5] == pytest.approx(plain[5], rel=1e-5)


def test_dropout_is_disabled_during_validation_only(task):
    task.denoiser.train()
    training_flags = []
    task.denoiser.register_forward_hook(lambda module, *_: training_flags.append(module.training))
    compute_losses(task, make_pixel_batch((0,), [1.0]))

    assert training_flags == [False] * len(TIMESTEP_QUANTILES) and task.denoiser.training


def test_max_validation_steps_selects_the_same_batches_each_time(tmp_path):
    data = str(write_images(tmp_path, {(96, 64): 9, (64, 96): 6}))
    prepared = prepare_data(DataConfig(dataset_config=data, validation_split=0.6, train_batch_size=2), 8)
    all_batches, _ = build_validation_reader(prepared, None, None, None)
    selected, _ = build_validation_reader(prepared, 3, None, None)
    samples = [sample for batch in all_batches.micro_batches for sample in batch.sample_indices]

    first, count = len(prepared.manifest.samples), len(prepared.validation.manifest.samples)
    assert sorted(samples) == list(range(first, first + count))
    assert len(selected.micro_batches) == 3 and set(selected.micro_batches) < set(all_batches.micro_batches)
    assert selected == build_validation_reader(prepared, 3, None, None)[0]
    assert {
        selected.dataset_indices_in_file[sample] for batch in selected.micro_batches for sample in batch.sample_indices
    } == {0}


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [(None, None, [4, 8, 10]), (3, None, [3, 6, 9, 10]), (None, 2, [8, 10]), (6, 2, [6, 8, 10]), (1000, None, [10])],
)
def test_validation_is_due_every_n_steps_or_epochs_and_at_the_end(steps, epochs, expected):
    config = ValidateConfig(validate_every_n_steps=steps, validate_every_n_epochs=epochs)
    batch_plan = BatchPlan(
        [Bucket((WIDTH, HEIGHT), tuple(range(4)), (1.0,) * 4, 1)], dp_size=1, accumulation_steps=1, seed=0
    )
    plan = RunPlan(batch_plan, steps=10)

    assert [step for step in range(1, 11) if is_validation_due(config, plan, step)] == expected
