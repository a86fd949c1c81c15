"""The noise processes equal the schedulers of diffusers and their closed forms."""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_snr

from library.diffusion.process import (
    EpsilonProcess,
    FlowMatchingProcess,
    VPredictionProcess,
    apply_shift,
    build_discrete_process,
)
from library.diffusion.timestep_shift import FLUX_DEV_SHIFT, DynamicShift, FixedShift, build_timestep_shift
from library.errors import UserError
from library.models.families.sd1_sd2 import StableDiffusion1

SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def make_generators(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build_process(**settings):
    """The noise process of a model with this scheduler."""
    return StableDiffusion1().build_noise_process(SimpleNamespace(scheduler=DDIMScheduler(**{**SD1, **settings})))


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_the_noise_schedule_is_that_of_training_for_any_sampling_scheduler(schedule):
    settings = {"beta_schedule": schedule, "beta_start": 0.001, "beta_end": 0.013}
    pipe = SimpleNamespace(scheduler=EulerDiscreteScheduler(**settings))

    assert torch.equal(
        StableDiffusion1().build_noise_process(pipe).alphas_cumprod, DDPMScheduler(**settings).alphas_cumprod
    )


def test_a_zero_terminal_snr_schedule_is_used_unchanged():
    assert build_process(rescale_betas_zero_snr=True).alphas_cumprod[-1] == 0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_target_are_those_of_diffusers(prediction):
    reference = DDPMScheduler(**SD1, prediction_type=prediction)
    latents, noise = make_generators(4, 4, 8, 12), make_generators(4, 4, 8, 12, seed=1)
    t = torch.tensor([0, 1, 437, 999])
    noisy, target = build_discrete_process(reference.alphas_cumprod, prediction).add_noise(latents, noise, t.float())
    torch.testing.assert_close(noisy, reference.add_noise(latents, noise, t), rtol=0, atol=1e-6)
    expected = noise if prediction == "epsilon" else reference.get_velocity(latents, noise, t)
    torch.testing.assert_close(target, expected, rtol=0, atol=1e-6)


def test_the_v_target_has_its_closed_form():
    process = build_process(prediction_type="v_prediction")
    a = process.alphas_cumprod[500].item()
    noisy, target = process.add_noise(
        torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 3.0), torch.tensor([500.0])
    )
    assert noisy.item() == pytest.approx(a**0.5 * 2 + (1 - a) ** 0.5 * 3)
    assert target.item() == pytest.approx(a**0.5 * 3 - (1 - a) ** 0.5 * 2, abs=1e-6)


def test_noisy_latents_have_the_dtype_of_the_latents_and_float32_coefficients():
    """1 - alpha_cumprod is 0.00085 at t = 0, and 0 if it is rounded to bfloat16 first."""
    process, noise = build_process(), make_generators(1, 4, 2, 3)
    noisy, _ = process.add_noise(torch.zeros(1, 4, 2, 3).bfloat16(), noise.bfloat16(), torch.tensor([0.0]))
    assert noisy.dtype == torch.bfloat16
    torch.testing.assert_close(noisy.float(), noise * 0.00085**0.5, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_latents_are_noised_as_by_diffusers_and_the_target_is_noise_minus_latents(shift):
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    t = reference.timesteps[[0, 1, 437, 998, 999]]
    latents, noise = make_generators(5, 16, 6, 10), make_generators(5, 16, 6, 10, seed=1)
    noisy, target = FlowMatchingProcess().add_noise(latents, noise, t)
    torch.testing.assert_close(noisy, reference.scale_noise(latents, t, noise), rtol=0, atol=1e-6)
    assert torch.equal(target, noise - latents)
    assert torch.equal(FlowMatchingProcess().sigma(t), reference.sigmas[[0, 1, 437, 998, 999]])


def test_diffusers_samples_the_clean_latents_with_a_perfect_flow_model():
    reference = FlowMatchEulerDiscreteScheduler(shift=3.0)
    reference.set_timesteps(7)
    latents, noise = make_generators(1, 4, 6, 10), make_generators(1, 4, 6, 10, seed=1)
    noisy, target = FlowMatchingProcess().add_noise(latents, noise, reference.timesteps[:1])
    for t in reference.timesteps:
        torch.testing.assert_close(
            FlowMatchingProcess().predict_clean_latents(noisy, target, t[None]), latents, rtol=1e-4, atol=1e-5
        )
        noisy = reference.step(target, t, noisy).prev_sample
    torch.testing.assert_close(noisy, latents, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [EpsilonProcess, VPredictionProcess, FlowMatchingProcess])
@pytest.mark.parametrize("shape", [(3, 4, 6, 10), (3, 16, 2, 6, 10)])
def test_the_clean_latents_are_recovered_from_noisy_latents_and_target(kind, shape):
    process = kind() if kind is FlowMatchingProcess else kind(DDPMScheduler(**SD1).alphas_cumprod)
    latents, noise, t = make_generators(*shape), make_generators(*shape, seed=1), torch.tensor([3.0, 500.0, 900.0])
    noisy, target = process.add_noise(latents, noise, t)
    torch.testing.assert_close(process.predict_clean_latents(noisy, target, t), latents, rtol=1e-3, atol=1e-4)


def test_the_snr_is_that_of_diffusers():
    reference, t = DDPMScheduler(**SD1), torch.tensor([0, 1, 437, 999])
    torch.testing.assert_close(build_process().snr(t.float()), compute_snr(reference, t), rtol=1e-4, atol=0)
    assert FlowMatchingProcess().snr(torch.tensor([250.0, 500.0, 1000.0])).tolist() == pytest.approx([9, 1, 0])


def test_an_unknown_prediction_type_is_rejected_by_name():
    with pytest.raises(UserError, match="prediction_type 'sample'"):
        build_process(prediction_type="sample")


FLUX_DEV = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
QWEN = FLUX_DEV | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}


@pytest.mark.parametrize("settings", [FLUX_DEV, QWEN, FLUX_DEV | {"time_shift_type": "linear"}])
@pytest.mark.parametrize("tokens", [256, 1500, 4096, 6000])
def test_the_dynamic_shift_is_that_of_the_pipeline(settings, tokens):
    reference = FlowMatchEulerDiscreteScheduler(**settings)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = calculate_shift(tokens, *(settings[name] for name in names))
    s = torch.linspace(0.01, 1, 23, dtype=torch.float64)
    actual = apply_shift(s, build_timestep_shift(reference.config).compute_factor(tokens))
    torch.testing.assert_close(actual, reference.time_shift(mu, 1.0, s))


def test_the_fixed_shift_is_that_of_the_schedulers_sigmas():
    reference = FlowMatchEulerDiscreteScheduler(shift=3.0)
    levels = torch.arange(1000, 0, -1) / 1000
    torch.testing.assert_close(
        apply_shift(levels, build_timestep_shift(reference.config).compute_factor(4096)), reference.sigmas
    )


def test_the_shift_is_read_from_the_scheduler_config():
    flux = FlowMatchingProcess.from_scheduler(FlowMatchEulerDiscreteScheduler(**FLUX_DEV).config)
    assert flux.shift == FLUX_DEV_SHIFT == DynamicShift((256, 0.5), (4096, 1.15))
    assert FlowMatchingProcess.from_scheduler(FlowMatchEulerDiscreteScheduler(shift=3.0).config).shift == FixedShift(
        3.0
    )
    assert FLUX_DEV_SHIFT.compute_factor(4096) == pytest.approx(math.exp(1.15))


def test_the_number_of_tokens_is_that_of_the_latent_patches():
    assert FlowMatchingProcess().count_tokens(torch.Size((7, 16, 128, 96))) == 64 * 48
    assert FlowMatchingProcess(patch_size=1).count_tokens(torch.Size((7, 16, 3, 12, 10))) == 3 * 12 * 10


def test_a_model_of_clean_pixels_has_noise_of_its_deviation_and_a_bound_of_its_velocity():
    process = FlowMatchingProcess(noise_scale=2.0, min_sigma=0.05)
    generator = torch.Generator().manual_seed(4)
    clean, noise = (torch.randn(2, 3, 4, 4, generator=generator) for _ in range(2))
    timesteps, sigmas = torch.tensor([600.0, 20.0]), torch.tensor([0.6, 0.02]).view(2, 1, 1, 1)
    noisy, target = process.add_noise(clean, noise, timesteps)
    torch.testing.assert_close(noisy, (1 - sigmas) * clean + 2 * sigmas * noise)
    torch.testing.assert_close(target, (noisy - clean) / sigmas.clamp(min=0.05))
    torch.testing.assert_close(process.predict_clean_latents(noisy, target, timesteps), clean)
    torch.testing.assert_close(process.snr(timesteps), ((1 - sigmas) / (2 * sigmas)).flatten() ** 2)
