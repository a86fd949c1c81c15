"""A part of a denoising takes the steps of diffusers' schedulers, and ends at the noise level that is asked for."""

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from library.diffusion.partial_denoising import denoise, list_timesteps
from library.diffusion.process import FlowMatchingProcess, build_discrete_process
from library.diffusion.timestep_shift import FixedShift

NOISE = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))


def predict(latents: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Any function of latents and timestep."""
    return torch.sin(3 * latents) * (0.2 + t.view(-1, 1, 1, 1) / 1500)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [1, 7, 19])
def test_models_of_noise_and_v_take_the_steps_of_ddim(prediction_type, steps):
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        timestep_spacing="trailing",
        prediction_type=prediction_type,
    )
    scheduler.set_timesteps(20)
    expected = NOISE
    for t in scheduler.timesteps[:steps]:
        expected = scheduler.step(predict(expected, t.expand(2).float()), t, expected).prev_sample
    process = build_discrete_process(scheduler.alphas_cumprod, prediction_type)
    timesteps = list_timesteps(process, 20, 12)

    latents, last = denoise(process, NOISE, timesteps[: steps + 1], predict)

    assert timesteps[:20] == scheduler.timesteps.tolist()
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    assert last.tolist() == [999 - 50 * steps] * 2  # the timestep at which train_leco.py compares predictions


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_takes_the_steps_of_euler_with_the_shift_of_the_model(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - number / 20 for number in range(20)])
    expected = NOISE
    for t in scheduler.timesteps[:9]:
        expected = scheduler.step(predict(expected, t.expand(2)), t, expected).prev_sample
    process = FlowMatchingProcess(FixedShift(shift))
    timesteps = list_timesteps(process, 20, 12)

    latents, last = denoise(process, NOISE, timesteps[:10], predict)

    torch.testing.assert_close(torch.tensor(timesteps[:20]), scheduler.timesteps, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, scheduler.timesteps[9].expand(2), rtol=1e-5, atol=1e-3)


def test_a_perfect_prediction_brings_the_latents_to_its_own_noise_level():
    clean = torch.full_like(NOISE, 0.7)
    alphas = DDIMScheduler().alphas_cumprod
    for process in (build_discrete_process(alphas, "v_prediction"), FlowMatchingProcess(FixedShift(2.0))):
        timesteps = list_timesteps(process, 10, 12)

        def predict_truth(latents, t, process=process):
            return process.add_noise(clean, NOISE, t)[1]

        first = process.add_noise(clean, NOISE, torch.full((2,), timesteps[0]))[0]
        latents, last = denoise(process, first, timesteps[:7], predict_truth)
        torch.testing.assert_close(latents, process.add_noise(clean, NOISE, last)[0], rtol=1e-4, atol=1e-5)
