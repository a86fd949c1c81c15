"""Noise levels of training: the formulas of other trainers, shares in closed form, cut ranges and timestep buckets."""

import math

import pytest
import torch

from library.config.schema_objective import LossConfig, NoiseConfig
from library.diffusion import timestep_sampling
from library.diffusion.noise_level_distributions import NoiseDistribution
from library.diffusion.objective import Objective
from library.diffusion.process import FlowMatchingProcess
from library.diffusion.timestep_shift import FixedShift

LATENTS = torch.Size((1, 16, 96, 160))
TOKENS = 48 * 80
U = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
MODEL = FlowMatchingProcess(FixedShift(2.5))
SETTINGS = {"sigmoid_scale": 1.3, "logit_mean": 0.6, "logit_std": 1.7, "mode_scale": 0.8}


def sample_sigmas(u=U, **settings):
    return timestep_sampling.compute_timesteps(u, NoiseConfig(**settings), MODEL, LATENTS).double() / 1000


def shift_by_mu(t, mu):
    """BFL's ``time_shift``, which all these trainers use."""
    return math.exp(mu) / (math.exp(mu) + (1 / t - 1))


@pytest.mark.parametrize(
    ("sampling", "first", "last"),
    [
        ("flux_shift", (256, 0.5), (4096, 1.15)),
        ("flux2_shift", (256, 0.5), (4096, 1.15)),
        ("qwen_shift", (256, 0.5), (8192, 0.9)),
        ("krea2_shift", (256, 0.5), (6400, 1.15)),
        ("nextdit_shift", (256, 0.5), (4096, 1.15)),
    ],
)
def test_shifts_by_image_size_have_the_line_of_the_other_trainers(sampling, first, last):
    slope = (last[1] - first[1]) / (last[0] - first[0])
    mu = slope * TOKENS + first[1] - slope * first[0]
    plain = U if sampling == "nextdit_shift" else torch.sigmoid(1.3 * torch.special.ndtri(U))
    actual = sample_sigmas(timestep_sampling=sampling, sigmoid_scale=1.3)
    torch.testing.assert_close(actual, shift_by_mu(plain, mu), rtol=0, atol=1e-6)


def test_logsnr_has_the_signal_to_noise_ratio_that_its_options_say():
    s = sample_sigmas(timestep_sampling="logsnr", logit_mean=0.6, logit_std=1.7)
    log_snr = 2 * torch.log((1 - s) / s)
    torch.testing.assert_close(log_snr.flip(0), 0.6 + 1.7 * torch.special.ndtri(U), rtol=0, atol=2e-3)


@pytest.mark.slow
def test_ideogram4_shift_is_the_density_whose_quantiles_are_the_steps_of_its_pipeline():
    from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu

    height, width = 16 * 24, 16 * (TOKENS // 24)
    u = torch.linspace(0, 1, 21, dtype=torch.float64)
    steps = _logit_normal_sigmas(20, _resolution_aware_mu(height, width, 0.0), std=1.5)
    noise = NoiseConfig(timestep_sampling="ideogram4_shift", sigmoid_scale=0.3)
    distribution = NoiseDistribution("ideogram4_shift", noise, FixedShift(5.0))
    drawn = timestep_sampling.TIMESTEP_SAMPLINGS["ideogram4_shift"](u.flip(0)[1:20], distribution, 24 * (TOKENS // 24))
    torch.testing.assert_close(drawn.float(), steps[1:], rtol=0, atol=1e-6)


def draw_qinglong(kind, count=200_000):
    """Draw as musubi-tuner: decide for each sample which of three distributions it is from."""
    generator = torch.Generator().manual_seed(3)
    z, decision = (draw(count, generator=generator, dtype=torch.float64) for draw in (torch.randn, torch.rand))
    mu = {"qinglong_flux": 0.5 + 0.65 * (TOKENS - 256) / 3840, "qinglong_qwen": 0.5 + 0.4 * (TOKENS - 256) / 7936}[kind]
    t = shift_by_mu(torch.sigmoid(1.3 * z), mu)
    if kind == "qinglong_flux":
        t = torch.where((decision >= 0.79) & (decision < 0.9), torch.sigmoid(-(0.6 + 1.7 * z) / 2), t)
    low = 0.9 if kind == "qinglong_flux" else 0.95
    return torch.where(decision >= low, torch.sigmoid(-(5.36 + z) / 2), t)


@pytest.mark.parametrize("kind", ["qinglong_flux", "qinglong_qwen"])
def test_qinglong_is_the_mixture_of_musubi_tuner(kind):
    ours = sample_sigmas(timestep_sampling=kind, sigmoid_scale=1.3, logit_mean=0.6, logit_std=1.7)
    drawn = draw_qinglong(kind)
    for level in (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        assert (ours < level).double().mean().item() == pytest.approx((drawn < level).double().mean().item(), abs=4e-3)
    assert (ours.diff() > 0).all(), "quantiles"


@pytest.mark.parametrize("bounds", [{}, {"min_timestep": 200, "max_timestep": 700}])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("sampling", "scheme"),
    [*((name, None) for name in timestep_sampling.TIMESTEP_SAMPLINGS), ("sigma", "logit_normal"), ("sigma", "mode")],
)
def test_shares_in_closed_form_are_those_of_the_sampled_noise_levels(sampling, scheme, bounds, is_cut):
    options = dict(timestep_sampling=sampling, weighting_scheme=scheme, preserve_distribution_shape=is_cut)
    noise = NoiseConfig(**SETTINGS, **bounds, **options)
    sigmas = timestep_sampling.compute_timesteps(U, noise, MODEL, LATENTS).double() / 1000
    distribution = NoiseDistribution(sampling, noise, MODEL.shift)
    for level in (0.1, 0.25, 0.5, 0.9):
        share = (sigmas < level).double().mean().item()
        assert distribution.compute_share_below(level, TOKENS) == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize("sampling", ["sigmoid", "shift", "logsnr", "qinglong_flux"])
def test_a_preserved_shape_is_that_of_samples_of_which_those_outside_the_range_are_rejected(sampling):
    whole = sample_sigmas(timestep_sampling=sampling)
    kept = whole[(whole >= 0.2) & (whole <= 0.7)]
    bounds = {"min_timestep": 200, "max_timestep": 700}
    cut = sample_sigmas(timestep_sampling=sampling, preserve_distribution_shape=True, **bounds)
    shares = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    torch.testing.assert_close(torch.quantile(cut, shares), torch.quantile(kept, shares), rtol=0, atol=3e-3)
    assert cut.min() >= 0.2 and cut.max() <= 0.7
    scaled = sample_sigmas(timestep_sampling=sampling, **bounds)
    assert not torch.allclose(cut, scaled, atol=1e-2), "scaled into the range without the option"


def test_of_as_many_samples_in_a_row_as_there_are_timestep_buckets_one_is_in_each():
    buckets = timestep_sampling.draw_timestep_buckets(7, 5, range(40))
    rows = [buckets[first : first + 5] for first in range(0, 40, 5)]
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in rows)
    assert len(set(map(tuple, rows))) > 1, "in another order each time"
    assert timestep_sampling.draw_timestep_buckets(7, 5, [33, 4]) == [buckets[33], buckets[4]]
    assert timestep_sampling.draw_timestep_buckets(8, 5, range(40)) != buckets


@pytest.mark.parametrize(
    "settings", [{}, {"sigmoid_scale": 0.0}, {"logit_std": 0.0}, {"logit_std": 0.1, "logit_mean": 6}]
)
@pytest.mark.parametrize("kind", ["qinglong_flux", "qinglong_qwen"])
def test_the_table_of_a_mixture_has_the_quantiles_that_bisection_finds(kind, settings):
    distribution = NoiseDistribution(kind, NoiseConfig(timestep_sampling=kind, **settings), MODEL.shift)
    ends = torch.tensor([2.0**-25 / 1000, 1 - 2.0**-25 / 1000], dtype=torch.float64)
    u = torch.cat(
        [ends[:1], torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), ends[1:]]
    )
    logits = timestep_sampling.bisect_mixture_logits(u, torch.special.ndtri(u), distribution.build_mixture(TOKENS))
    actual = timestep_sampling.mixture_quantile(u, distribution, TOKENS)
    torch.testing.assert_close(actual, torch.sigmoid(logits), rtol=0, atol=1e-6)


def test_quantiles_of_a_mixture_are_not_bisected_again_in_each_step(monkeypatch):
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    objective = Objective(MODEL, NoiseConfig(timestep_sampling="qinglong_flux"), LossConfig())
    first = objective.compute_timesteps(u, LATENTS)
    calls = []
    monkeypatch.setattr(timestep_sampling, "bisect_mixture_logits", lambda *call: calls.append(call) or call[1])
    assert torch.equal(objective.compute_timesteps(u, LATENTS), first) and not calls
