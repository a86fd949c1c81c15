"""Timestep sampling: quantile functions in closed form, the sigmas of diffusers, and the valid range."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given
from hypothesis import strategies as st

from library.config.schema_objective import NoiseConfig
from library.diffusion import timestep_sampling
from library.diffusion.process import EpsilonProcess, FlowMatchingProcess
from library.diffusion.timestep_shift import FLUX_DEV_SHIFT, FixedShift

LATENTS = torch.Size((1, 16, 96, 160))
TOKENS = 48 * 80
U = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
FLOW = FlowMatchingProcess(FixedShift(2.5))
DISCRETE = EpsilonProcess(torch.linspace(0.99, 0.01, 1000))


def sample_sigmas(process=FLOW, latents=LATENTS, u=U, **settings):
    return timestep_sampling.compute_timesteps(u, NoiseConfig(**settings), process, latents).double() / 1000


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def logit(s):
    return torch.log(s / (1 - s))


def unshift(s, factor):
    """Invert a shift."""
    return s / (factor - (factor - 1) * s)


def test_uniform_timestep_sampling_is_uniform():
    torch.testing.assert_close(sample_sigmas(timestep_sampling="uniform"), U, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.8])
def test_the_quantile_function_of_each_sigmoid_sampling_is_the_inverse_of_its_distribution(scale):
    for sampling, factor in (("sigmoid", 1.0), ("shift", 2.5), ("flux_shift", FLUX_DEV_SHIFT.compute_factor(TOKENS))):
        s = unshift(sample_sigmas(timestep_sampling=sampling, sigmoid_scale=scale), factor)
        torch.testing.assert_close(normal_cdf(logit(s) / scale), U, rtol=0, atol=2e-4)


def test_timesteps_are_shifted_as_by_the_model_unless_an_option_overrides_it():
    growing = FlowMatchingProcess(FLUX_DEV_SHIFT)
    assert torch.equal(sample_sigmas(growing), sample_sigmas(growing, timestep_sampling="flux_shift"))
    small = torch.Size((1, 16, 32, 32))
    assert (sample_sigmas(growing) > sample_sigmas(growing, small)).all(), "more noise for larger images"
    fixed = FlowMatchingProcess(FixedShift(4.0))
    assert torch.equal(sample_sigmas(fixed), sample_sigmas(FLOW, discrete_flow_shift=4.0))
    assert torch.equal(sample_sigmas(growing, discrete_flow_shift=4.0), sample_sigmas(fixed))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigma_sampling_is_uniform_over_the_sigmas_of_diffusers(shift):
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    actual = timestep_sampling.compute_timesteps(
        U, NoiseConfig(timestep_sampling="sigma"), FlowMatchingProcess(FixedShift(shift)), LATENTS
    )
    torch.testing.assert_close(actual.flip(0), reference.timesteps)


def test_a_weighting_scheme_alone_implies_sigma_sampling():
    """As in sd-scripts; schemes that only weight the loss sample uniformly."""
    for scheme in ("none", "uniform", "sigma_sqrt", "cosmap"):
        assert torch.equal(sample_sigmas(weighting_scheme=scheme), sample_sigmas(timestep_sampling="sigma"))
    assert not torch.equal(sample_sigmas(weighting_scheme="mode"), sample_sigmas(timestep_sampling="sigma"))


def test_logit_normal_has_its_mean_and_standard_deviation_and_a_positive_mean_gives_more_noise():
    s = sample_sigmas(FlowMatchingProcess(), weighting_scheme="logit_normal", logit_mean=0.7, logit_std=0.6)
    torch.testing.assert_close(normal_cdf((logit(s - 0.0005) - 0.7) / 0.6), U, rtol=0, atol=5e-3)
    assert s.median() > 0.6


@pytest.mark.parametrize("scale", [-1.0, 0.5, 1.29, 1.75])
def test_mode_has_the_density_of_diffusers(scale):
    draw = torch.Generator().manual_seed(2)
    reference = compute_density_for_timestep_sampling("mode", 40_000, mode_scale=scale, generator=draw).double()
    ours = timestep_sampling.mode_quantile(U, NoiseConfig(mode_scale=scale))
    shares = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    torch.testing.assert_close(torch.quantile(ours, shares), torch.quantile(reference, shares), rtol=0, atol=0.01)


def test_timesteps_of_discrete_models_are_integers_of_equal_probability():
    actual = timestep_sampling.compute_timesteps(U, NoiseConfig(), DISCRETE, LATENTS)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, torch.arange(1000.0))
    actual = timestep_sampling.compute_timesteps(U, NoiseConfig(min_timestep=200, max_timestep=450), DISCRETE, LATENTS)
    assert torch.equal(actual, torch.arange(200.0, 450.0).repeat_interleave(4))


@given(
    st.sampled_from(sorted(timestep_sampling.TIMESTEP_SAMPLINGS)),
    st.integers(0, 999),
    st.integers(1, 1000),
    st.floats(0, 20),
    st.floats(0.01, 100),
)
def test_timesteps_are_in_range_and_increase_with_the_quantile(sampling, low, length, scale, factor):
    high = min(low + length, 1000)
    edge = torch.tensor([2.0**-35, 1 - 2.0**-35], dtype=torch.float64)
    u = torch.cat([edge[:1], U, edge[1:]])
    noise = NoiseConfig(
        timestep_sampling=sampling, min_timestep=low, max_timestep=high, sigmoid_scale=scale, discrete_flow_shift=factor
    )
    t = timestep_sampling.compute_timesteps(u, noise, FLOW, LATENTS)
    assert t.min() >= max(low, 1e-3) and t.max() <= high
    assert (t.diff() >= 0).all()
    t = timestep_sampling.compute_timesteps(u, noise, DISCRETE, LATENTS)
    assert t.min() == low and t.max() == high - 1


@given(
    st.sampled_from(sorted(timestep_sampling.WEIGHTING_SCHEME_QUANTILES)),
    st.floats(-3, 3),
    st.floats(0, 3),
    st.floats(-1, 1.75),
)
def test_quantile_functions_are_within_0_and_1_and_increase(scheme, mean, std, scale):
    noise = NoiseConfig(weighting_scheme=scheme, logit_mean=mean, logit_std=std, mode_scale=scale)
    s = timestep_sampling.WEIGHTING_SCHEME_QUANTILES[scheme](U, noise)
    assert s.min() >= 0 and s.max() <= 1
    assert (s.diff() >= -1e-12).all()


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_the_quantile_and_noise_of_a_sample_depend_on_its_generator_only():
    u, noise = timestep_sampling.sample_quantiles_and_noise(generators(3, 4, 5), torch.Size((4, 6, 10)))
    single, its_noise = timestep_sampling.sample_quantiles_and_noise(generators(4), torch.Size((4, 6, 10)))
    assert torch.equal(u[1:2], single) and torch.equal(noise[1:2], its_noise)
    assert len(set(u.tolist())) == 3


def test_the_timestep_and_the_noise_are_the_first_draws_of_a_generator():
    """This keeps the random numbers of earlier versions, and the noise independent of timestep sampling."""
    u, noise = timestep_sampling.sample_quantiles_and_noise(generators(*range(50)), torch.Size((2, 3)))
    for number, generator in enumerate(generators(*range(50))):
        whole = torch.randint(0, 1000, (1,), generator=generator)
        assert int(u[number] * 1000) == int(whole)
        assert torch.equal(noise[number], torch.randn(2, 3, generator=generator))
    assert torch.equal(
        timestep_sampling.compute_timesteps(u, NoiseConfig(), DISCRETE, LATENTS), (u * 1000).floor().float()
    )


def test_the_quantile_is_never_0_or_1_and_preserves_its_timestep():
    whole = torch.arange(1000)
    for rest in (0.0, 1 - 2.0**-24):
        u = timestep_sampling.combine_quantile(whole, torch.full((1000,), rest))
        assert 0 < u.min() and u.max() < 1
        assert torch.equal((u * 1000).floor().long(), whole)


def test_sigma_has_a_lower_bound():
    u = torch.tensor([1e-9], dtype=torch.float64)
    assert sample_sigmas(u=u, timestep_sampling="sigmoid", sigmoid_scale=30.0).item() == pytest.approx(
        timestep_sampling.MIN_SIGMA
    )


def test_the_quantile_is_uniform():
    u, _ = timestep_sampling.sample_quantiles_and_noise(generators(*range(4000)), torch.Size((1,)))
    assert (u.sort().values - (torch.arange(4000) + 0.5) / 4000).abs().max() < 1.63 / math.sqrt(4000)
    assert len(set(u.tolist())) == 4000, "finer than thousandths"


def test_every_value_of_timestep_sampling_has_a_function():
    hints = get_type_hints(NoiseConfig)
    sampling, scheme = (
        {name for choice in get_args(hints[option]) for name in get_args(choice)}
        for option in ("timestep_sampling", "weighting_scheme")
    )
    from library.diffusion.loss_weighting import FLOW_WEIGHTINGS

    assert sampling == set(timestep_sampling.TIMESTEP_SAMPLINGS)
    assert scheme == {*timestep_sampling.WEIGHTING_SCHEME_QUANTILES, *FLOW_WEIGHTINGS, "none", "uniform"}
