"""Noise offset, multires noise and input perturbation equal closed forms or a second implementation."""

import pytest
import torch
import torch.nn.functional as F

from library.config.schema_objective import NoiseConfig
from library.diffusion.noise import apply_input_perturbation, apply_noise_options
from library.randomness import derive_seed

SHAPE = (3, 4, 24, 40)


def make_generators(purpose, places=(0, 1, 2)):
    return [torch.Generator().manual_seed(derive_seed(7, purpose, place)) for place in places]


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


NOISE, LATENTS = randn(1, *SHAPE), randn(2, *SHAPE) * 2 + randn(3, 3, 4, 1, 1)


def test_without_options_the_noise_is_unchanged():
    assert apply_noise_options(NOISE, LATENTS, NoiseConfig(), make_generators) is NOISE
    assert apply_input_perturbation(NOISE, NoiseConfig(), make_generators) is NOISE


def test_a_noise_offset_shifts_each_channel_by_a_constant():
    moved = apply_noise_options(NOISE, LATENTS, NoiseConfig(noise_offset=0.1), make_generators) - NOISE
    expected = torch.stack([torch.randn(4, generator=each) for each in make_generators("noise offset")])
    torch.testing.assert_close(moved, 0.1 * expected[:, :, None, None].expand(SHAPE), rtol=0, atol=1e-6)


def test_a_random_strength_is_a_uniform_factor_for_each_sample():
    places = tuple(range(400))
    noise = torch.zeros(400, 4, 1, 1)
    settings = NoiseConfig(noise_offset=0.5, noise_offset_random_strength=True)
    moved = apply_noise_options(noise, noise, settings, lambda purpose: make_generators(purpose, places)).flatten(1)
    shares = []
    for row, generator in zip(moved, make_generators("noise offset", places), strict=True):
        torch.rand((), generator=generator)
        share = row / (0.5 * torch.randn(4, generator=generator))
        torch.testing.assert_close(share, share[:1].expand(4), rtol=1e-3, atol=1e-5)
        shares.append(float(share[0]))
    assert 0 <= min(shares) and max(shares) <= 1
    assert sum(shares) / 400 == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("scale", [0.7, -0.2])
def test_an_adaptive_offset_scales_with_the_mean_of_the_latents_and_never_changes_sign(scale):
    plain = apply_noise_options(NOISE, LATENTS, NoiseConfig(noise_offset=0.1), make_generators) - NOISE
    actual = (
        apply_noise_options(NOISE, LATENTS, NoiseConfig(noise_offset=0.1, adaptive_noise_scale=scale), make_generators)
        - NOISE
    )
    strength = (0.1 + scale * LATENTS.mean((2, 3), keepdim=True).abs()).clamp(min=0)
    torch.testing.assert_close(actual, plain * strength / 0.1, rtol=1e-4, atol=1e-5)
    assert (strength == 0).any() == (scale < 0)


def test_multires_noise_adds_lower_resolutions_and_has_standard_deviation_1():
    settings = NoiseConfig(multires_noise_iterations=6, multires_noise_discount=0.4)
    actual = apply_noise_options(NOISE, LATENTS, settings, make_generators)

    for row, generator in enumerate(make_generators("multires noise")):
        total = NOISE[row].double()
        for level in range(6):
            ratio = (torch.rand((), generator=generator).item() * 2 + 2) ** level
            high, wide = max(1, int(24 / ratio)), max(1, int(40 / ratio))
            layer = torch.randn(1, 4, high, wide, generator=generator)
            total = total + F.interpolate(layer, size=(24, 40), mode="bilinear")[0].double() * 0.4**level
            if high == 1 or wide == 1:
                break
        assert level >= 2, "the example has different layers"
        torch.testing.assert_close(actual[row].double(), total / total.std(), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.flatten(1).std(1), torch.ones(3))


def test_multires_noise_ends_with_the_first_layer_of_one_pixel():
    one, many = (
        apply_noise_options(NOISE, LATENTS, NoiseConfig(multires_noise_iterations=n), make_generators) for n in (6, 600)
    )
    assert torch.equal(one, many)


def test_input_perturbation_is_added_with_its_own_strength():
    actual = apply_input_perturbation(NOISE, NoiseConfig(ip_noise_gamma=0.1), make_generators) - NOISE
    expected = torch.stack([torch.randn(SHAPE[1:], generator=each) for each in make_generators("input noise")])
    torch.testing.assert_close(actual, 0.1 * expected, rtol=0, atol=1e-6)

    weaker = (
        apply_input_perturbation(
            NOISE, NoiseConfig(ip_noise_gamma=0.1, ip_noise_gamma_random_strength=True), make_generators
        )
        - NOISE
    )
    share = (weaker.flatten(1).std(1) / 0.1).tolist()
    assert len({round(value, 2) for value in share}) == 3
    assert all(0 < value < 1 for value in share)


def test_noise_offset_and_multires_noise_can_be_combined():
    both = NoiseConfig(noise_offset=0.3, multires_noise_iterations=3)
    moved = apply_noise_options(NOISE, LATENTS, NoiseConfig(noise_offset=0.3), make_generators)
    expected = apply_noise_options(moved, LATENTS, NoiseConfig(multires_noise_iterations=3), make_generators)
    assert torch.equal(apply_noise_options(NOISE, LATENTS, both, make_generators), expected)


def test_the_noise_of_a_sample_does_not_depend_on_its_batch():
    settings = NoiseConfig(
        noise_offset=0.3,
        noise_offset_random_strength=True,
        adaptive_noise_scale=0.2,
        multires_noise_iterations=4,
        ip_noise_gamma=0.2,
        ip_noise_gamma_random_strength=True,
    )

    def apply_all(places):
        rows = list(places)
        noise = apply_noise_options(
            NOISE[rows], LATENTS[rows], settings, lambda purpose: make_generators(purpose, places)
        )
        return apply_input_perturbation(noise, settings, lambda purpose: make_generators(purpose, places))

    torch.testing.assert_close(
        apply_all((0, 1, 2))[1:], torch.cat([apply_all((1,)), apply_all((2,))]), rtol=0, atol=1e-6
    )
