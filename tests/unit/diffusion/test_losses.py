"""Losses and weightings equal their closed forms in float64, and diffusers where it has them."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from data_paths import DATA
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from library.config import parse_config
from library.config.options import iter_options
from library.config.schema import RunConfig
from library.config.schema_objective import LossConfig, NoiseConfig
from library.diffusion import losses
from library.diffusion.loss_weighting import (
    FLOW_WEIGHTINGS,
    SNR_WEIGHTINGS,
    compute_loss_weights,
    find_unbounded_weightings,
)
from library.diffusion.process import EpsilonProcess, FlowMatchingProcess, VPredictionProcess

THEIRS = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
ZERO = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", rescale_betas_zero_snr=True)
T = torch.tensor([0, 1, 40, 437, 800, 999])
SNR = compute_snr(THEIRS, T).double()
EPSILON, VELOCITY, FLOW = (
    EpsilonProcess(THEIRS.alphas_cumprod),
    VPredictionProcess(THEIRS.alphas_cumprod),
    FlowMatchingProcess(),
)

TARGET = torch.randn(6, 4, 3, 5, generator=torch.Generator().manual_seed(1))
PREDICTED = TARGET + torch.logspace(-4, 2, 60).view(1, 4, 3, 5) * torch.tensor([1, -1.0]).repeat(30).view(1, 4, 3, 5)
D = PREDICTED.double() - TARGET.double()


def compute_loss(process=EPSILON, **settings):
    context = losses.LossContext(LossConfig(**settings), T.float().clamp(min=1), process)
    return losses.compute_elementwise_loss(PREDICTED, TARGET, context).double()


def test_l2_and_l1():
    torch.testing.assert_close(compute_loss(), D**2, rtol=1e-6, atol=0)
    torch.testing.assert_close(compute_loss(loss_type="l1"), D.abs(), rtol=1e-6, atol=0)


def compute_thresholds(process, schedule, c, scale):
    """The Huber thresholds of sd-scripts' three schedules, from their definitions."""
    t = T.double().clamp(min=1)
    if schedule == "constant":
        return torch.full_like(t, c * scale)
    if schedule == "exponential":
        return torch.exp(-(-math.log(c) / 1000) * t) * scale
    if process is FLOW:
        sigmas = (t / 1000) / (1 - t / 1000)
    else:
        a = THEIRS.alphas_cumprod[T.clamp(min=1)].double()
        sigmas = ((1 - a) / a) ** 0.5
    return ((1 - c) / (1 + sigmas) ** 2 + c) * scale


@pytest.mark.parametrize("process", [EPSILON, FLOW])
@pytest.mark.parametrize("schedule", losses.HUBER_SCHEDULES)
@pytest.mark.parametrize(("c", "scale"), [(0.1, 1.0), (0.3, 1.7)])
def test_huber_and_smooth_l1_have_the_closed_forms_of_sd_scripts(process, schedule, c, scale):
    settings = {"huber_schedule": schedule, "huber_c": c, "huber_scale": scale}
    limit = compute_thresholds(process, schedule, c, scale).view(-1, 1, 1, 1)
    rounded = 2 * ((D**2 + limit**2).sqrt() - limit)
    torch.testing.assert_close(compute_loss(process, loss_type="smooth_l1", **settings), rounded, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(
        compute_loss(process, loss_type="huber", **settings), limit * rounded, rtol=1e-4, atol=1e-12
    )


def test_huber_is_quadratic_for_small_errors_and_linear_for_large_ones():
    settings = {"loss_type": "huber", "huber_schedule": "constant", "huber_c": 0.5}
    small, large = D.abs() < 1e-3, D.abs() > 50
    assert small.any() and large.any()
    torch.testing.assert_close(compute_loss(**settings)[small], D[small] ** 2, rtol=1e-4, atol=0)
    torch.testing.assert_close(compute_loss(**settings)[large], 2 * 0.5 * D[large].abs(), rtol=2e-2, atol=0)


def test_losses_are_computed_in_float32_and_have_finite_gradients_at_zero_error():
    predicted = TARGET.bfloat16().requires_grad_()
    for name in losses.LOSSES:
        context = losses.LossContext(LossConfig(loss_type=name), T.float(), EPSILON)
        loss = losses.compute_elementwise_loss(predicted, TARGET.bfloat16(), context)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss.sum(), predicted)
        assert gradient.isfinite().all()


def compute_weights(process, noise=None, t=T, **settings):
    return compute_loss_weights(process, t.float(), noise or NoiseConfig(), LossConfig(**settings)).double()


def test_without_options_every_timestep_has_weight_one():
    for process in (EPSILON, VELOCITY, FLOW):
        assert torch.equal(compute_weights(process), torch.ones(6, dtype=torch.float64))


def test_min_snr():
    torch.testing.assert_close(compute_weights(EPSILON, min_snr_gamma=5), SNR.clamp(max=5) / SNR, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        compute_weights(VELOCITY, min_snr_gamma=5), SNR.clamp(max=5) / (SNR + 1), rtol=1e-5, atol=0
    )


def test_debiased_estimation():
    limited = SNR.clamp(max=1000)
    assert (limited < SNR).any()
    torch.testing.assert_close(
        compute_weights(EPSILON, debiased_estimation_loss=True), limited**-0.5, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        compute_weights(VELOCITY, debiased_estimation_loss=True), 1 / (limited + 1), rtol=1e-5, atol=0
    )


def test_epsilon_and_v_losses_can_be_scaled_to_each_other():
    scale = SNR.clamp(max=1000) / (SNR.clamp(max=1000) + 1)
    like_noise = compute_weights(VELOCITY, scale_v_pred_loss_like_noise_pred=True)
    torch.testing.assert_close(like_noise, scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(compute_weights(EPSILON, v_pred_like_loss=0.3), 1 + 0.3 / scale, rtol=1e-5, atol=0)


def test_the_scaled_v_loss_equals_the_epsilon_loss_for_the_same_image():
    """Both are errors of the clean image; the factor of sd-scripts converts one to the other."""
    generator, shape = torch.Generator().manual_seed(4), (4, 4, 3, 5)
    latents, noise, off = (torch.randn(shape, generator=generator) for _ in range(3))
    t = torch.tensor([100.0, 300.0, 500.0, 900.0])
    errors = []
    for process in (EPSILON, VELOCITY):
        noisy, target = process.add_noise(latents, noise, t)
        signal, std = process.compute_coefficients(t, latents)
        wrong = latents + off  # a model with this error of the clean image
        predicted = (noisy - signal * wrong) / std if process is EPSILON else (signal * noisy - wrong) / std
        errors.append(((predicted - target) ** 2).flatten(1).mean(1).double())
    scale = compute_weights(VELOCITY, t=t, scale_v_pred_loss_like_noise_pred=True)
    torch.testing.assert_close(errors[1] * scale, errors[0], rtol=1e-3, atol=0)


def test_several_weights_are_multiplied():
    both = compute_weights(VELOCITY, min_snr_gamma=5, debiased_estimation_loss=True)
    expected = compute_weights(VELOCITY, min_snr_gamma=5) * compute_weights(VELOCITY, debiased_estimation_loss=True)
    torch.testing.assert_close(both, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [EpsilonProcess, VPredictionProcess])
def test_weights_are_finite_at_zero_snr(kind):
    process, last = kind(ZERO.alphas_cumprod), torch.tensor([999.0])
    assert process.snr(last) == 0
    assert compute_weights(process, t=last, min_snr_gamma=5).item() == (1 if kind is EpsilonProcess else 0)
    if kind is VPredictionProcess:
        assert compute_weights(process, t=last, debiased_estimation_loss=True).item() == 1
        assert compute_weights(process, t=last, scale_v_pred_loss_like_noise_pred=True).item() == 0
    for schedule in losses.HUBER_SCHEDULES:
        settings = LossConfig(loss_type="huber", huber_schedule=schedule, huber_c=0.2)
        context = losses.LossContext(settings, last, process)
        loss = losses.compute_elementwise_loss(torch.ones(1, 1), torch.zeros(1, 1), context)
        assert loss.item() == pytest.approx(2 * 0.2 * (1.04**0.5 - 0.2), rel=2e-3)


def test_unbounded_weightings_are_found_before_training():
    loss_config = LossConfig(debiased_estimation_loss=True, v_pred_like_loss=0.5, min_snr_gamma=5)
    assert find_unbounded_weightings(EPSILON, loss_config) == find_unbounded_weightings(VELOCITY, loss_config) == []
    assert find_unbounded_weightings(EpsilonProcess(ZERO.alphas_cumprod), loss_config) == [
        "debiased_estimation_loss",
        "v_pred_like_loss",
    ]
    assert find_unbounded_weightings(EpsilonProcess(ZERO.alphas_cumprod), LossConfig(min_snr_gamma=5)) == []


def test_weights_use_the_rescaled_noise_schedule():
    """sd-scripts uses the SNR before rescaling."""
    snr = compute_snr(ZERO, T[:-1]).double()
    weights = compute_weights(VPredictionProcess(ZERO.alphas_cumprod), t=T[:-1], min_snr_gamma=5)
    torch.testing.assert_close(weights, snr.clamp(max=5) / (snr + 1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scheme", FLOW_WEIGHTINGS)
def test_weights_of_flow_models_are_those_of_diffusers(scheme):
    t = torch.tensor([1.0, 250.0, 500.0, 1000.0])
    weights = compute_weights(FLOW, NoiseConfig(weighting_scheme=scheme), t)
    torch.testing.assert_close(
        weights, compute_loss_weighting_for_sd3(scheme, t.double() / 1000), rtol=1e-5, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("scheme", ["none", "uniform", "logit_normal", "mode"])
def test_weighting_schemes_that_sample_timesteps_have_weight_one(scheme):
    assert torch.equal(compute_weights(FLOW, NoiseConfig(weighting_scheme=scheme)), torch.ones(6, dtype=torch.float64))


def test_every_value_of_the_loss_options_has_a_function():
    hints = get_type_hints(LossConfig)
    assert set(losses.LOSSES) == set(get_args(hints["loss_type"]))
    assert set(losses.HUBER_SCHEDULES) == set(get_args(hints["huber_schedule"]))


LOSS_OPTIONS = [
    option
    for option in iter_options(RunConfig)
    if option.group == "loss" and option.name not in ("loss_type", "audio_loss_weight", *SNR_WEIGHTINGS)
]
"""The options of the loss functions: those that are neither their name nor a weighting, of timesteps or of sound."""


def change_value(option):
    """A value of the option that is not its default."""
    if isinstance(option.value_type, tuple):
        return next(value for value in option.value_type if value != option.default)
    return not option.default if option.value_type is bool else 1.5 * (option.default or 1)


@pytest.mark.parametrize("loss_type", losses.LOSSES)
@pytest.mark.parametrize("option", LOSS_OPTIONS, ids=lambda option: option.name)
def test_an_option_changes_the_losses_that_read_it_and_the_others_name_it_as_unused(option, loss_type):
    value = change_value(option)
    is_read = not torch.equal(
        compute_loss(loss_type=loss_type), compute_loss(loss_type=loss_type, **{option.name: value})
    )
    parsed = parse_config([*DATA, "--loss_type", loss_type, f"--{option.name}", str(value)])
    assert parsed.problems == []
    assert [str(place) for place, _ in parsed.unused] == ([] if is_read else [f"--{option.name}"])


@pytest.mark.parametrize("option", LOSS_OPTIONS, ids=lambda option: option.name)
def test_every_option_of_the_losses_changes_one_of_them(option):
    changed = {option.name: change_value(option)}
    assert any(
        not torch.equal(compute_loss(loss_type=name), compute_loss(loss_type=name, **changed)) for name in losses.LOSSES
    )
