"""Training on texts alone: latents, targets, losses and gradients against a computation by hand with other models."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from tiny_pipelines import TINY

from library.adapters.injection import (
    get_adapter_state_dict,
    inject_into_model,
    load_adapter_state_dict,
    scale_adapters,
)
from library.config.schema import AdapterConfig, ModelConfig
from library.config.schema_objective import LossConfig, NoiseConfig, SliderConfig
from library.config.types import Resolution
from library.dataloader.batch import Batch, Moments, PixelBatch
from library.dataloader.slider_data import draw_size, draw_size_conditioning, get_prompt_key
from library.dataset.slider_prompts import SliderPrompt
from library.diffusion.process import FlowMatchingProcess
from library.models.families import FAMILIES
from library.parallel.async_copy import CopyStream
from library.randomness import Purpose, derive_generator
from library.training.setup import build_objective
from library.training.slider_task import DenoisingGuidance, SliderTask
from library.training.task import DiffusionTask

STEP, MAX_STEPS, SEED = 5, 10, 7
PROMPT = SliderPrompt("a fox", "an old fox", "a young fox", "a photo of a fox", "enhance", 1.5, multiplier=-1.0)
EMBEDDED = {"flux", "hunyuan_video"}
"""Models whose guidance is an input."""


def change_adapter(denoiser: torch.nn.Module, targets, factor: float) -> None:
    """Inject an adapter that changes what the model predicts, with its update multiplied by a factor."""
    inject_into_model(denoiser, AdapterConfig(network_dim=4), targets, seed=1)
    noise = torch.Generator().manual_seed(3)
    state = get_adapter_state_dict(denoiser)
    changed = {key: torch.randn(value.shape, generator=noise) * 0.2 for key, value in state.items()}
    with torch.no_grad():
        load_adapter_state_dict(
            denoiser, {key: value * (factor if "lora_B" in key else 1) for key, value in changed.items()}
        )


def build_task(name: str, factor: float | None = 1.0) -> DiffusionTask:
    """Build the task of images of a tiny model, with an adapter or without one (None)."""
    family, pipe = FAMILIES.get(name)(), TINY[name]().pipe
    denoiser = getattr(pipe, family.facts.denoiser_name).eval().requires_grad_(False)
    if factor is not None:
        change_adapter(denoiser, family.facts.lora.targets, factor)
    objective = build_objective(NoiseConfig(), LossConfig(), family, pipe)
    return DiffusionTask(family, pipe, denoiser, objective, SEED, CopyStream(torch.device("cpu")))


def build_slider_task(name: str, prompt: SliderPrompt, guidance: float | None = None) -> SliderTask:
    plain = build_task(name)
    config = SliderConfig(max_denoising_steps=MAX_STEPS, denoise_guidance_scale=guidance)
    return SliderTask(
        plain.family,
        plain.pipe,
        plain.denoiser,
        plain.objective,
        SEED,
        plain.to_device,
        prompts=(prompt,),
        base_model=plain.denoiser,
        guidance=DenoisingGuidance.choose(config, plain.family, plain.pipe, has_embedding=name in EMBEDDED),
        max_denoising_steps=MAX_STEPS,
    )


def build_batch(task: DiffusionTask, prompt: SliderPrompt, frames: int = 1, count: int = 2) -> PixelBatch:
    pixels = torch.zeros(1, 3, *((frames,) if frames > 1 else ()), 64, 96)
    shape = task.family.encode_moments(task.pipe, pixels).mean_and_std.shape[2:]
    size = torch.tensor([draw_size_conditioning(prompt, Resolution(96, 64), SEED, STEP, 0)] * count).float()
    names, positions = (get_prompt_key(0),) * count, tuple(range(3, 3 + count))
    moments = Moments(torch.zeros(count, 2, *shape))
    return PixelBatch(
        None,
        (prompt.target,) * count,
        size,
        torch.full((count,), prompt.weight),
        positions,
        names,
        moments=moments,
        network_multiplier=prompt.multiplier,
    )


@contextmanager
def use_multiplier(task: DiffusionTask, batch: PixelBatch) -> Iterator[None]:
    with task.scale_adapter(batch):
        yield


def encode(task: DiffusionTask, like: Batch, text: str, *, is_negative: bool = False) -> Batch:
    from dataclasses import replace

    return replace(like, cond=task.encode_text([text] * len(like), is_negative=is_negative))


def denoise_by_hand(
    task: DiffusionTask, batch: Batch, prompt: SliderPrompt, steps: int, guidance: float, embedded: bool
):
    """Denoise with diffusers' scheduler and the family's own forward, with an adapter whose weights are scaled."""
    noise = [
        torch.randn(batch.latents.shape[1:], generator=derive_generator(SEED, Purpose.NOISE, STEP, position))
        for position in batch.global_positions
    ]
    latents, process = torch.stack(noise), task.family.build_noise_process(task.pipe)
    if isinstance(process, FlowMatchingProcess):
        scheduler = FlowMatchEulerDiscreteScheduler(
            shift=process.shift.compute_factor(task.objective.count_tokens(latents.shape))
        )
        scheduler.set_timesteps(sigmas=[1 - number / MAX_STEPS for number in range(MAX_STEPS)])
    else:
        config = task.pipe.scheduler.config
        scheduler = DDIMScheduler.from_config(config, timestep_spacing="trailing", clip_sample=False)
        scheduler.set_timesteps(MAX_STEPS)
    family = type(task.family)(ModelConfig(guidance_scale=guidance)) if embedded else task.family
    conditional, plain = encode(task, batch, prompt.target), encode(task, batch, prompt.unconditional, is_negative=True)
    for t in scheduler.timesteps[:steps]:
        both = [
            family.predict(task.pipe, task.denoiser, latents, t.expand(len(batch)).float(), each)
            for each in (plain, conditional)
        ]
        guided = both[1] if embedded else both[0] + guidance * (both[1] - both[0])
        latents = scheduler.step(guided, t, latents).prev_sample
    return latents, scheduler.timesteps[steps].expand(len(batch)).float()


FAMILIES_BY_HAND = ["sd1", "sdxl", "flux", "z_image", "lumina2", "wan", "cogvideox"]


@pytest.mark.parametrize(
    "name", [FAMILIES_BY_HAND[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES_BY_HAND[1:])]
)
@torch.no_grad()
def test_latents_target_and_loss_are_those_of_a_computation_by_hand(name):
    frames = 5 if name in ("wan", "cogvideox") else 1
    task, frozen, scaled = build_slider_task(name, PROMPT), build_task(name, None), build_task(name, PROMPT.multiplier)
    pixel_batch = build_batch(task, PROMPT, frames)

    with use_multiplier(task, pixel_batch):
        inputs = task.prepare(pixel_batch, STEP)
        losses = task.compute_losses(inputs)

    steps, embedded = task.draw_num_steps(STEP), name in EMBEDDED
    scale = 1.0 if task.family.is_step_distilled(task.pipe) else 3.0
    latents, t = denoise_by_hand(scaled, inputs.batch, PROMPT, steps, scale, embedded)
    torch.testing.assert_close(inputs.noised.latents, latents, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(inputs.noised.timesteps, t, rtol=1e-5, atol=1e-3)
    noised, t = inputs.noised.latents, inputs.noised.timesteps
    outputs = {
        text: frozen.family.predict(frozen.pipe, frozen.denoiser, noised, t, encode(frozen, inputs.batch, text))
        for text in PROMPT.texts
    }
    target = outputs["a photo of a fox"] + 1.5 * (outputs["an old fox"] - outputs["a young fox"])
    torch.testing.assert_close(inputs.noised.target, target, rtol=1e-4, atol=1e-5)
    predicted = scaled.family.predict(scaled.pipe, scaled.denoiser, noised, t, encode(scaled, inputs.batch, "a fox"))
    expected = (predicted - target).square().flatten(1).mean(1)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)
    assert float(expected.min()) > 0


@pytest.mark.slow
def test_erasing_moves_the_other_way_and_a_kept_text_has_the_prediction_of_the_frozen_model():
    targets = []
    for action, scale in (("enhance", 1.5), ("erase", 1.5), ("enhance", 0.0)):
        prompt = SliderPrompt("a fox", "an old fox", "a young fox", "a photo of a fox", action, scale)
        task = build_slider_task("sd1", prompt)
        with use_multiplier(task, batch := build_batch(task, prompt)):
            targets.append(task.prepare(batch, STEP).noised.target)
    enhanced, erased, kept = targets
    torch.testing.assert_close(enhanced + erased, 2 * kept, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(enhanced, erased, atol=1e-3)


def compute_gradients(task: DiffusionTask, inputs, multiplier: float) -> dict[str, torch.Tensor]:
    task.denoiser.zero_grad()
    with scale_adapters(task.denoiser, multiplier):
        task.compute_losses(inputs).sum().backward()
    return {name: item.grad.clone() for name, item in task.denoiser.named_parameters() if item.grad is not None}


@pytest.mark.slow
def test_the_gradient_at_minus_one_is_that_of_an_adapter_with_the_opposite_update():
    task, opposite = build_slider_task("sd1", PROMPT), build_task("sd1", -1.0)
    with torch.no_grad(), use_multiplier(task, batch := build_batch(task, PROMPT)):
        inputs = task.prepare(batch, STEP)
    minus, other = compute_gradients(task, inputs, -1.0), compute_gradients(opposite, inputs, 1.0)
    plus = compute_gradients(task, inputs, 1.0)
    for name, grad in minus.items():
        sign = -1 if "lora_B" in name else 1
        torch.testing.assert_close(grad, sign * other[name], rtol=1e-4, atol=1e-7)
    assert any(not torch.allclose(plus[name], minus[name], rtol=0.1) for name in minus)
    scales = [layer.scaling["default"] for layer in task.denoiser.modules() if hasattr(layer, "scaling")]
    assert len(set(scales)) == 1 and scales[0] > 0  # as before


@pytest.mark.slow
def test_what_is_drawn_depends_on_step_and_position_alone():
    task = build_slider_task("sd1", PROMPT)
    whole = build_batch(task, PROMPT, count=2)
    with torch.no_grad(), use_multiplier(task, whole):
        together = task.prepare(whole, STEP).noised
        single = task.prepare(whole.split(1)[1], STEP).noised
    torch.testing.assert_close(single.latents, together.latents[1:], rtol=1e-3, atol=1e-3)
    drawn = {task.draw_num_steps(step) for step in range(200)}
    assert drawn == set(range(1, MAX_STEPS))


def test_sizes_and_crops_are_drawn_as_in_sd_scripts():
    prompt = SliderPrompt(
        "a", "a", "", "", resolution=Resolution(512, 512), dynamic_resolution=True, dynamic_crops=True
    )
    sizes = {draw_size(prompt, 1, step, 16) for step in range(300)}
    assert {size.width for size in sizes} == {size.height for size in sizes} == {256, 320, 384, 448, 512}
    for step in range(50):
        height, width, top, left, *target = draw_size_conditioning(prompt, Resolution(448, 320), 1, step, 0)
        assert target == [320, 448] and 320 <= height <= 960 and 448 <= width <= 1344
        assert 0 <= top <= height - 320 and 0 <= left <= width - 448
    fixed = SliderPrompt("a", "a", "", "", resolution=Resolution(448, 320), dynamic_resolution=True)
    assert {draw_size(fixed, 1, step, 16) for step in range(9)} == {Resolution(448, 320)}  # only squares, as there
