"""The objective of noise, timesteps, loss and weighting: every option has an effect, and samples are independent."""

import dataclasses
import logging
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import tiny_sd1
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler, PNDMScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from problem_lines import format_lines

from library.config.options import iter_options
from library.config.schema import RunConfig
from library.config.schema_objective import LossConfig, NoiseConfig
from library.config.unused_options import _SAMPLERS_WITHOUT_ZERO_SNR
from library.dataloader.sample_prompts import Prompt
from library.diffusion.loss_weighting import SNR_WEIGHTINGS
from library.diffusion.model_prediction import MODEL_PREDICTION_TYPES
from library.diffusion.objective import Objective
from library.diffusion.process import EpsilonProcess, FlowMatchingProcess, VPredictionProcess
from library.diffusion.timestep_sampling import draw_timestep_buckets
from library.diffusion.timestep_shift import FixedShift
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.families.sd1_sd2 import StableDiffusion1
from library.models.noise_schedulers import SAMPLERS, build_scheduler
from library.models.scheduler_overrides import override_scheduler
from library.randomness import derive_seed
from library.training.setup import build_objective

SD1 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TABLE = DDPMScheduler(**SD1).alphas_cumprod
PROCESSES = {
    "epsilon": EpsilonProcess(TABLE),
    "v": VPredictionProcess(TABLE),
    "flow": FlowMatchingProcess(FixedShift(3.0)),
}
LATENTS = torch.randn(5, 4, 12, 20, generator=torch.Generator().manual_seed(1))


def make_generators(places):
    def generators(purpose):
        return [torch.Generator().manual_seed(derive_seed(3, purpose, place)) for place in places]

    return generators


def build_groups(settings):
    """The noise and the loss group with these values."""
    return (
        kind(**{name: value for name, value in settings.items() if name in vars(kind())})
        for kind in (NoiseConfig, LossConfig)
    )


def run_objective(kind, settings, places=range(5)):
    """Noisy latents, target, timestep and loss of each sample, for a model that returns its input."""
    noise, loss = build_groups(settings)
    if kind == "flow":
        objective = Objective(PROCESSES[kind], noise, loss)
    else:
        predicts = {"epsilon": "epsilon", "v": "v_prediction"}[kind]
        scheduler = DDIMScheduler(**SD1, prediction_type=predicts)
        objective = build_objective(noise, loss, StableDiffusion1(), SimpleNamespace(scheduler=scheduler))
    count = noise.num_timestep_buckets or 1
    buckets = draw_timestep_buckets(3, count, places) if count > 1 else ()
    noised = objective.add_noise(LATENTS[list(places)], make_generators(places), buckets)
    losses = objective.compute_elementwise_loss(noised.latents, noised).flatten(1).mean(
        1
    ) * objective.compute_loss_weights(noised.timesteps)
    return noised.latents, noised.target, noised.timesteps, losses


HUBER, OFFSET, INPUT = {"loss_type": "huber"}, {"noise_offset": 0.3}, {"ip_noise_gamma": 0.2}
CASES = [
    ("epsilon", {}, {"v_parameterization": True}),
    ("v", {}, {"zero_terminal_snr": True}),
    ("v", {"zero_terminal_snr": True, "min_snr_gamma": 5.0}, {"objective_defaults": "kohya"}),
    *[("flow", {}, {"model_prediction_type": name}) for name in MODEL_PREDICTION_TYPES],
    *[(kind, {}, {"min_timestep": 600}) for kind in PROCESSES],
    *[(kind, {}, {"max_timestep": 400}) for kind in PROCESSES],
    *[(kind, {}, {"num_timestep_buckets": 5}) for kind in PROCESSES],
    ("flow", {"min_timestep": 600}, {"preserve_distribution_shape": True}),
    ("flow", {}, {"timestep_sampling": "flux_shift"}),
    ("flow", {"timestep_sampling": "logsnr"}, {"logit_mean": 0.5}),
    ("flow", {}, {"sigmoid_scale": 0.5}),
    ("flow", {}, {"discrete_flow_shift": 1.5}),
    ("flow", {"timestep_sampling": "sigma"}, {"weighting_scheme": "cosmap"}),
    ("flow", {"weighting_scheme": "logit_normal"}, {"logit_mean": 0.5}),
    ("flow", {"weighting_scheme": "logit_normal"}, {"logit_std": 0.5}),
    ("flow", {"weighting_scheme": "mode"}, {"mode_scale": 0.5}),
    ("epsilon", {}, OFFSET),
    ("v", OFFSET, {"noise_offset_random_strength": True}),
    ("epsilon", OFFSET, {"adaptive_noise_scale": 0.5}),
    ("epsilon", {}, {"multires_noise_iterations": 4}),
    ("epsilon", {"multires_noise_iterations": 4}, {"multires_noise_discount": 0.6}),
    *[(kind, {}, INPUT) for kind in PROCESSES],
    ("flow", INPUT, {"ip_noise_gamma_random_strength": True}),
    *[(kind, {}, HUBER) for kind in PROCESSES],
    ("epsilon", {}, {"min_snr_gamma": 5.0}),
    ("v", {}, {"min_snr_gamma": 5.0}),
    ("v", {}, {"debiased_estimation_loss": True}),
    ("v", {}, {"scale_v_pred_loss_like_noise_pred": True}),
    ("epsilon", {}, {"v_pred_like_loss": 0.5}),
]


@pytest.mark.parametrize(("kind", "base", "change"), CASES, ids=str)
def test_every_option_changes_what_is_trained(kind, base, change):
    before, after = run_objective(kind, base), run_objective(kind, {**base, **change})
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(tensor.isfinite().all() for tensor in after)


def test_every_option_of_noise_and_weighting_is_tested_above():
    """``test_losses.py`` tries the options of the loss functions."""
    tried = {name for _, _, change in CASES for name in change}
    noise = {option.name for option in iter_options(RunConfig) if option.group == "noise"}
    assert tried == {*noise, "loss_type", *SNR_WEIGHTINGS}


EVERYTHING = {
    **OFFSET,
    **INPUT,
    "noise_offset_random_strength": True,
    "adaptive_noise_scale": 0.2,
    "multires_noise_iterations": 3,
    "ip_noise_gamma_random_strength": True,
    "loss_type": "smooth_l1",
    "min_snr_gamma": 5.0,
}


@pytest.mark.parametrize("kind", PROCESSES)
def test_the_loss_of_a_sample_does_not_depend_on_its_batch(kind):
    settings = {**INPUT, "weighting_scheme": "cosmap"} if kind == "flow" else EVERYTHING
    batched = run_objective(kind, settings)
    for places in ((0,), (3, 1)):
        for single, all_of_them in zip(run_objective(kind, settings, places), batched, strict=True):
            torch.testing.assert_close(single, all_of_them[list(places)], rtol=1e-5, atol=1e-6)


def test_noise_options_change_neither_timesteps_nor_the_base_noise():
    plain, moved = run_objective("epsilon", {}), run_objective("epsilon", INPUT | {"loss_type": "l1"})
    assert torch.equal(plain[2], moved[2])
    assert torch.equal(plain[1], moved[1]), "the target has no input perturbation"
    assert not torch.equal(plain[0], moved[0])
    noise = run_objective("flow", {})[1] + LATENTS
    for sampling in ("uniform", "sigma", "sigmoid"):
        torch.testing.assert_close(run_objective("flow", {"timestep_sampling": sampling})[1] + LATENTS, noise)


@pytest.mark.parametrize("kind", PROCESSES)
def test_input_perturbation_is_added_to_the_noisy_latents_and_not_to_the_target(kind):
    noisy, target, t, _ = run_objective(kind, INPUT)
    plain, same, _, _ = run_objective(kind, {})
    extra = torch.stack([torch.randn(4, 12, 20, generator=each) for each in make_generators(range(5))("input noise")])
    process = PROCESSES[kind]
    share = process.sigma(t) if kind == "flow" else (1 - TABLE[t.long()]).sqrt()
    torch.testing.assert_close(noisy, plain + 0.2 * share.view(-1, 1, 1, 1) * extra, rtol=1e-4, atol=1e-5)
    assert torch.equal(target, same)


@pytest.mark.parametrize("kind", PROCESSES)
def test_the_objective_never_synchronizes_with_the_device(kind):
    """Meta tensors have no values, so any synchronization fails."""
    settings = {**INPUT, "weighting_scheme": "cosmap"} if kind == "flow" else EVERYTHING
    latents = LATENTS.to("meta")
    objective = Objective(PROCESSES[kind], *build_groups(settings))
    noised = objective.add_noise(latents, make_generators(range(5)))
    loss = objective.compute_elementwise_loss(noised.latents, noised).flatten(1).mean(
        1
    ) * objective.compute_loss_weights(noised.timesteps)
    assert loss.device.type == noised.target.device.type == "meta"


def test_explicit_timesteps_and_noise_are_used_unchanged():
    objective = Objective(PROCESSES["flow"], NoiseConfig(ip_noise_gamma=0.3), LossConfig())
    noise, t = torch.ones_like(LATENTS), torch.tensor([100.0, 200, 300, 400, 500])
    noised = objective.add_noise_at(LATENTS, noise, t)
    expected = PROCESSES["flow"].add_noise(LATENTS, noise, t)
    assert torch.equal(noised.latents, expected[0]) and torch.equal(noised.target, expected[1])
    u = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    assert (objective.compute_timesteps(u, LATENTS.shape).diff() > 0).all(), "quantiles"


@pytest.mark.parametrize("kind", [DDIMScheduler, PNDMScheduler, EulerDiscreteScheduler, DDPMScheduler])
def test_training_and_every_sampler_follow_the_options(kind, caplog):
    """diffusers ignores settings that the scheduler config lists in ``_use_default_values``."""
    noise = NoiseConfig(v_parameterization=True, zero_terminal_snr=True)
    with caplog.at_level(logging.WARNING):
        scheduler = override_scheduler(kind(**SD1), noise)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("library")] == [
        "v_parameterization overrides prediction_type epsilon of the scheduler config: v_prediction"
    ]
    assert type(scheduler) is kind
    process = StableDiffusion1().build_noise_process(SimpleNamespace(scheduler=scheduler))
    assert process.prediction_type == "v"
    reference = torch.cumprod(1 - rescale_zero_terminal_snr(DDPMScheduler(**SD1).betas), 0)
    torch.testing.assert_close(process.alphas_cumprod, reference)
    assert process.snr(torch.tensor([999.0])) == 0
    for name in SAMPLERS:
        artist = build_scheduler(name, scheduler)
        assert isinstance(artist, DDIMScheduler) or name.removeprefix("k_") not in ("ddim", *_SAMPLERS_WITHOUT_ZERO_SNR)
        assert artist.config.prediction_type == "v_prediction"
        assert artist.config.rescale_betas_zero_snr
        artist.set_timesteps(5)
        assert artist.timesteps[0] == 999


@pytest.mark.slow
@torch.no_grad()
def test_previews_are_sampled_with_every_sampler_of_sd_scripts():
    (names,) = (option.value_type for option in iter_options(RunConfig) if option.name == "sample_sampler")
    assert set(names) == set(SAMPLERS) and len(names) == 17
    family, pipe = StableDiffusion1(), StableDiffusion1().load("random:sd1:tiny", torch.float32)
    cond, prompt = (
        family.encode_prompts(pipe, ["a red circle"]),
        Prompt("a", width=32, height=32, num_inference_steps=5),
    )
    images = {}
    for name in names:
        images[name] = family.generate_image(pipe, prompt, cond, cond, torch.Generator().manual_seed(0), name).tobytes()
    others = {name: data for name, data in images.items() if not name.startswith("k_") and name != "lms"}
    assert len(set(others.values())) == len(others), "each is another sampler"
    assert all(images[name.removeprefix("k_")] == data for name, data in images.items())
    assert (images["lms"] == images["ddim"]) == (find_spec("scipy") is None)


def test_a_run_trains_and_previews_with_the_prediction_type_of_the_options():
    family, pipe = StableDiffusion1(), tiny_sd1.build_pipeline(())
    config = RunConfig(
        noise=NoiseConfig(v_parameterization=True, zero_terminal_snr=True, noise_offset=0.1),
        loss=LossConfig(min_snr_gamma=5.0),
    )
    objective = build_objective(config.noise, config.loss, family, pipe)
    assert objective.process.prediction_type == "v" and objective.process.snr(torch.tensor([999])) == 0
    assert (objective.noise_config, objective.loss_config) == (config.noise, config.loss)
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_conflicts_with_the_loaded_scheduler_are_rejected_after_loading():
    family, pipe = StableDiffusion1(), tiny_sd1.build_pipeline(())
    pipe.scheduler = DDIMScheduler(**SD1, rescale_betas_zero_snr=True)
    wrong = LossConfig(debiased_estimation_loss=True, scale_v_pred_loss_like_noise_pred=True)
    with pytest.raises(ConfigError) as caught:
        build_objective(NoiseConfig(), wrong, family, pipe)
    first, second = format_lines(caught.value.problems)
    assert first == (
        "--scale_v_pred_loss_like_noise_pred: not applicable to Stable Diffusion 1, the model predicts the noise;"
        " v_parameterization is not set; remove it"
    )
    assert second == (
        "--debiased_estimation_loss: the model's last timestep has zero SNR, so its loss weight is infinite;"
        " remove the option"
    )


@pytest.mark.parametrize(
    ("source", "factor"),
    [
        ("random:sd3:tiny", 1.0),
        ("random:flux:tiny", None),
        ("random:z_image:tiny", 2.0),
        ("random:qwen_image:tiny", None),
    ],
)
def test_flow_models_are_trained_with_the_shift_of_their_facts_or_else_of_their_scheduler(source, factor):
    model = detect_model(source)
    family = FAMILIES.get(model.family)()
    pipe = family.load(model, torch.float32, ())
    objective, settings = build_objective(NoiseConfig(), LossConfig(), family, pipe), pipe.scheduler.config
    u, shape, tokens = torch.linspace(0.1, 0.9, 9, dtype=torch.float64), torch.Size((1, 16, 64, 96)), 32 * 48
    plain = torch.sigmoid(torch.special.ndtri(u))
    if factor is not None:
        expected = factor * plain / (1 + (factor - 1) * plain)
    else:
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        expected = pipe.scheduler.time_shift(calculate_shift(tokens, *(settings[n] for n in names)), 1.0, plain)
    torch.testing.assert_close(objective.compute_timesteps(u, shape).double() / 1000, expected, rtol=0, atol=1e-6)

    uniform = build_objective(NoiseConfig(timestep_sampling="uniform"), LossConfig(), family, pipe)
    torch.testing.assert_close(uniform.compute_timesteps(u, shape).double() / 1000, u, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match=f"min_snr_gamma: not applicable to {family.facts.title}"):
        build_objective(NoiseConfig(), LossConfig(min_snr_gamma=5.0), family, pipe)


def test_a_scheduler_with_the_same_settings_is_not_rebuilt(caplog):
    scheduler = DDIMScheduler(**SD1, prediction_type="v_prediction", rescale_betas_zero_snr=True)
    with caplog.at_level(logging.WARNING):
        assert override_scheduler(scheduler, NoiseConfig(v_parameterization=True, zero_terminal_snr=True)) is scheduler
        assert override_scheduler(scheduler, NoiseConfig()) is scheduler
    assert not [record for record in caplog.records if record.name.startswith("library")]
    restored = override_scheduler(scheduler, dataclasses.replace(NoiseConfig(), v_parameterization=False))
    assert StableDiffusion1().build_noise_process(SimpleNamespace(scheduler=restored)).prediction_type == "epsilon"
