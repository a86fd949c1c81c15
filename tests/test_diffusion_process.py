"""The noise processes against diffusers' own schedulers and their closed forms."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler

from library.diffusion.process import from_table
from library.errors import ConfigError
from library.families.sd1 import StableDiffusion1

SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def process_of(**settings):
    """The process of a model whose folder has this scheduler."""
    return StableDiffusion1().process(SimpleNamespace(scheduler=DDIMScheduler(**{**SD1, **settings})))


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_the_noise_table_is_that_of_training_whatever_scheduler_draws_pictures(schedule):
    settings = {"beta_schedule": schedule, "beta_start": 0.001, "beta_end": 0.013}
    pipe = SimpleNamespace(scheduler=EulerDiscreteScheduler(**settings))

    assert torch.equal(StableDiffusion1().process(pipe).alphas_cumprod, DDPMScheduler(**settings).alphas_cumprod)


def test_a_table_without_terminal_signal_is_taken_as_it_is():
    assert process_of(rescale_betas_zero_snr=True).alphas_cumprod[-1] == 0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noising_and_target_are_diffusers_own(prediction):
    theirs = DDPMScheduler(**SD1, prediction_type=prediction)
    latents, noise = draws(4, 4, 8, 12), draws(4, 4, 8, 12, seed=1)
    t = torch.tensor([0, 1, 437, 999])
    noisy, target = from_table(theirs.alphas_cumprod, prediction).add_noise(latents, noise, t.float())
    torch.testing.assert_close(noisy, theirs.add_noise(latents, noise, t), rtol=0, atol=1e-6)
    expected = noise if prediction == "epsilon" else theirs.get_velocity(latents, noise, t)
    torch.testing.assert_close(target, expected, rtol=0, atol=1e-6)


def test_velocity_in_closed_form():
    process = process_of(prediction_type="v_prediction")
    a = process.alphas_cumprod[500].item()
    noisy, target = process.add_noise(
        torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 3.0), torch.tensor([500.0])
    )
    assert noisy.item() == pytest.approx(a**0.5 * 2 + (1 - a) ** 0.5 * 3)
    assert target.item() == pytest.approx(a**0.5 * 3 - (1 - a) ** 0.5 * 2, abs=1e-6)


def test_noising_keeps_the_dtype_and_its_factors_are_found_in_full_precision():
    """1 - a is 0.00085 at t = 0, and nothing at all when a is first rounded to bfloat16."""
    process, noise = process_of(), draws(1, 4, 2, 3)
    noisy, _ = process.add_noise(torch.zeros(1, 4, 2, 3).bfloat16(), noise.bfloat16(), torch.tensor([0.0]))
    assert noisy.dtype == torch.bfloat16
    torch.testing.assert_close(noisy.float(), noise * 0.00085**0.5, rtol=2e-2, atol=1e-5)


def test_timesteps_are_whole_numbers_over_the_full_range_and_follow_the_generator():
    process = process_of()
    drawn = process.sample_timesteps(20_000, torch.Generator().manual_seed(1))
    assert drawn.dtype == torch.float32
    assert torch.equal(drawn, drawn.round())
    assert (drawn.min(), drawn.max()) == (0, 999)
    assert abs(drawn.mean().item() - 499.5) < 5
    assert torch.equal(drawn, process.sample_timesteps(20_000, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("change", [{"prediction_type": "sample"}, {"num_train_timesteps": 50}])
def test_a_process_that_is_not_known_is_refused_by_name(change):
    ((name, value),) = change.items()
    with pytest.raises(ConfigError, match=f"{name} '?{value}"):
        process_of(**change)
