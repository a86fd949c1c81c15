"""Masked loss: normalized as in sd-scripts or by area, and resized to the latents."""

from dataclasses import replace

import pytest
import torch
from tiny_pipelines import TINY

from library.config.schema_objective import LossConfig, NoiseConfig
from library.dataloader.batch import PixelBatch, normalize_pixels
from library.diffusion.masked_loss import reduce_loss_per_sample, resize_mask_to_latents
from library.diffusion.objective import Objective
from library.models.families import FAMILIES
from library.parallel.async_copy import CopyStream
from library.training.task import DiffusionTask


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_mean_is_over_all_elements_as_in_sd_scripts():
    loss, mask = rand(3, 4, 5, 7), rand(3, 1, 5, 7, seed=1)
    expected = [sum((loss[b, c] * mask[b, 0]).sum() for c in range(4)) / (4 * 5 * 7) for b in range(3)]
    assert torch.allclose(reduce_loss_per_sample(loss, mask), torch.stack(expected))
    assert torch.equal(reduce_loss_per_sample(loss, None), loss.flatten(1).mean(1))
    assert torch.equal(reduce_loss_per_sample(loss, torch.ones_like(mask)), reduce_loss_per_sample(loss, None))


def test_normalized_by_area_a_constant_loss_is_that_constant_for_any_mask():
    mask = torch.cat([rand(1, 1, 5, 7), rand(1, 1, 5, 7, seed=1) * 0.01, torch.ones(1, 1, 5, 7)])
    assert torch.allclose(
        reduce_loss_per_sample(torch.full((3, 4, 5, 7), 2.5), mask, normalize_by_area=True), torch.full((3,), 2.5)
    )
    loss = rand(3, 4, 5, 7)
    expected = (loss * mask).sum((1, 2, 3)) / (4 * mask.sum((1, 2, 3)))
    assert torch.allclose(reduce_loss_per_sample(loss, mask, normalize_by_area=True), expected)


@pytest.mark.parametrize("by_area", [False, True])
def test_a_fully_masked_image_has_loss_zero_and_gradient_zero(by_area):
    loss = rand(2, 4, 3, 3).requires_grad_()
    mask = torch.stack([torch.zeros(1, 3, 3), torch.ones(1, 3, 3)])
    means = reduce_loss_per_sample(loss, mask, normalize_by_area=by_area)
    means.sum().backward()
    assert means[0] == 0 < means[1]
    assert (loss.grad[0] == 0).all() and torch.allclose(loss.grad[1], torch.full((4, 3, 3), 1 / 36))


def test_the_mask_of_a_latent_is_the_mean_of_its_pixels():
    mask = torch.zeros(1, 1, 16, 24, dtype=torch.uint8)
    mask[..., :8, :8] = 255
    mask[..., :4, 8:16] = 255
    mask[..., 0, 16] = 128
    expected = torch.tensor([[1, 0.5, 128 / 255 / 64], [0, 0, 0]])
    assert torch.allclose(resize_mask_to_latents(mask, (2, 3))[0, 0], expected)


def test_uint8_pixels_are_normalized_to_minus_one_to_one():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(normalize_pixels(every), every.float().div(127.5).sub(1))
    assert normalize_pixels(every).min() == -1 and normalize_pixels(every).max() == 1


def build_task(**options) -> DiffusionTask:
    family = FAMILIES.get("sd1")()
    pipe = TINY["sd1"]().pipe
    objective = Objective(family.build_noise_process(pipe), NoiseConfig(), LossConfig())
    return DiffusionTask(family, pipe, pipe.unet, objective, 5, CopyStream(torch.device("cpu")), **options)


def build_batch(mask: torch.Tensor | None) -> PixelBatch:
    pixels = (rand(2, 3, 64, 96) * 255).to(torch.uint8)
    frame = torch.tensor([[64.0, 96, 0, 0, 64, 96]] * 2)
    return PixelBatch(pixels, ("one", "two"), frame, torch.tensor([1.0, 0.5]), (0, 1), ("a", "b"), mask)


@torch.no_grad()
def test_the_losses_of_complementary_masks_add_up_to_the_unmasked_loss():
    left = torch.zeros(2, 1, 64, 96, dtype=torch.uint8)
    left[..., :24] = 255
    train = build_task()
    unmasked, one, other = (train(build_batch(mask), 3) for mask in (None, left, 255 - left))
    assert torch.allclose(one + other, unmasked, rtol=1e-5) and (one > 0).all() and (other > one).all()
    assert torch.equal(train(build_batch(torch.full_like(left, 255)), 3), unmasked)
    assert torch.equal(train(build_batch(torch.zeros_like(left)), 3), torch.zeros(2))
    assert torch.allclose(build_task(normalize_masked_loss=True)(build_batch(left), 3), one * 4, rtol=1e-5)
    assert torch.allclose(train(build_batch(torch.full_like(left, 51)), 3), unmasked * 0.2, rtol=1e-5)


@torch.no_grad()
def test_an_image_of_weight_zero_has_loss_zero_for_any_mask():
    half = torch.zeros(2, 1, 64, 96, dtype=torch.uint8)
    half[..., 32:, :] = 255
    losses = build_task(normalize_masked_loss=True)(
        replace(build_batch(half), loss_weights=torch.tensor([0.0, 1.0])), 3
    )
    assert losses[0] == 0 < losses[1]
