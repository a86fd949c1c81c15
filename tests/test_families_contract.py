"""Every family keeps the contract of library.families.base; diffusers' own pipelines are the judge."""

from dataclasses import replace

import torch
from family_cases import SIZE, Recorder, Wrapped, case, generators, pixels, same_call
from tiny import HEIGHT, TINY, WIDTH
from torch import nn

from library.config.schema import ModelConfig
from library.data.prompts import Prompt
from library.families import FAMILIES
from library.families.base import Family
from library.families.known import FACTS

__all__ = ["case"]  # a fixture


def test_every_family_has_a_tiny_pipeline():
    assert {make().family for make in TINY.values()} == set(FAMILIES.names())


def test_a_family_is_a_direct_subclass_and_keeps_its_frozen_options_and_nothing_else(case):
    family, _ = case
    assert type(family).__bases__ == (Family,)
    assert vars(family) == {"options": ModelConfig()}


def test_the_facts_of_a_family_fit_its_class(case):
    family, tiny = case
    facts = family.facts
    assert facts is FACTS[tiny.family]
    assert facts.pipeline == type(tiny.pipe).__name__
    assert (facts.denoiser, sorted(facts.parts)) == (family.denoiser, sorted(family.parts))
    assert set(facts.files.values()) <= set(facts.parts)
    assert set(family.tokenizers) == {part for part in family.text_parts if part.startswith("tokenizer")}
    assert set(family.text_lora_prefixes) <= set(family.text_parts)
    for option in (*facts.files, *facts.options):
        assert hasattr(ModelConfig(), option)


@torch.no_grad()
def test_the_denoiser_is_called_as_the_diffusers_pipeline_calls_it(case):
    family, tiny = case
    pipe, batch = tiny.pipe, tiny.batch
    denoiser = getattr(pipe, family.denoiser)
    record, steps = Recorder(denoiser), []
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda out, t, *args, **kw: (steps.append((out, t)), step(out, t, *args, **kw))[1]
    pipe(**tiny.call, latents=tiny.packed(batch.latents), **SIZE, num_inference_steps=2, guidance_scale=1.0,
         output_type="latent")  # fmt: skip
    theirs, t = steps[0]

    wrapped = Wrapped(denoiser)
    noisy = batch.latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0)
    ours = family.predict(pipe, wrapped, noisy, torch.full((len(batch),), float(t)), batch)

    assert wrapped.calls == 1, "predict calls the denoiser it is given, once"
    same_call(record.calls[-1], record.calls[0])
    assert ours.shape == batch.latents.shape
    torch.testing.assert_close(tiny.packed(ours).double(), theirs.double())


@torch.no_grad()
def test_a_perfect_model_is_stepped_back_to_the_clean_latents(case):
    """The target is in the form that the model's own scheduler expects of the model."""
    family, tiny = case
    clean, noise = tiny.batch.latents, torch.randn(tiny.batch.latents.shape, generator=generators()[0])
    t, scheduler = 601.0, tiny.pipe.scheduler
    noisy, target = family.process(tiny.pipe).add_noise(clean, noise, torch.full((len(clean),), t))
    if hasattr(scheduler, "alphas_cumprod"):
        scheduler.set_timesteps(1000)
        recovered = scheduler.step(target, int(t), noisy).pred_original_sample
    else:  # of flow matching: one step from here to the end
        scheduler.set_shift(1.0)
        scheduler.set_timesteps(sigmas=[t / 1000], mu=0.0)
        recovered = scheduler.step(target, scheduler.timesteps[0], noisy).prev_sample
    torch.testing.assert_close(recovered, clean, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prompts_are_encoded_as_the_diffusers_pipeline_encodes_them(case):
    family, tiny = case
    pipe, latents, denoiser = tiny.pipe, tiny.batch.latents, getattr(tiny.pipe, family.denoiser)
    record = Recorder(denoiser)
    texts = ["a red circle on white ground", "Blau, 7"]
    pipe(texts, **tiny.sizes, latents=tiny.packed(latents), **SIZE, num_inference_steps=1, guidance_scale=1.0,
         output_type="latent")  # fmt: skip
    t = torch.full((len(texts),), float(pipe.scheduler.timesteps[0]))
    batch = replace(tiny.batch, cond=family.encode_prompts(pipe, texts))
    family.predict(pipe, denoiser, latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0), t, batch)
    same_call(record.calls[1], record.calls[0])
    for value in batch.cond.values():
        assert len(value) == len(texts)
    assert any(not torch.equal(value[0], value[1]) for value in batch.cond.values())


def test_a_text_encoder_can_be_trained_through_the_prompts(case):
    family, tiny = case
    sum(value.float().square().sum() for value in family.encode_prompts(tiny.pipe, ["a red circle"]).values()
        if value.requires_grad).backward()  # fmt: skip
    for name in family.text_lora_prefixes:
        encoder = getattr(tiny.pipe, name)
        assert any(bool(p.grad.abs().sum() > 0) for p in encoder.parameters() if p.grad is not None), name


@torch.no_grad()
def test_pixels_are_encoded_as_diffusers_own_inpainting_encodes_them(case):
    family, tiny = case
    theirs = tiny.encode(tiny.pipe, pixels(), generators())
    ours = family.encode_pixels(tiny.pipe, pixels(), generators())
    torch.testing.assert_close(ours, theirs)
    assert ours.shape == tiny.batch.latents.shape


@torch.no_grad()
def test_latents_are_decoded_as_the_diffusers_pipeline_decodes_them(case):
    family, tiny = case
    options = dict(latents=tiny.packed(tiny.batch.latents), num_inference_steps=1, guidance_scale=1.0, **SIZE)
    theirs = tiny.pipe(**tiny.call, **options, output_type="pt").images
    latents = tiny.pipe(**tiny.call, **options, output_type="latent").images
    ours = family.decode_latents(tiny.pipe, tiny.unpacked(latents))
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), theirs)


@torch.no_grad()
def test_decoding_undoes_encoding_as_far_as_the_vae_can(case):
    family, tiny = case
    back = family.decode_latents(tiny.pipe, family.encode_pixels(tiny.pipe, pixels(1), generators(1)))
    alone = tiny.pipe.vae.decode(tiny.pipe.vae.encode(pixels(1)).latent_dist.sample(generators(1)[0])).sample
    torch.testing.assert_close(back, alone)


def test_latents_of_a_sample_do_not_depend_on_the_others_in_the_batch(case):
    family, tiny = case
    together = family.encode_pixels(tiny.pipe, pixels(), generators())
    alone = family.encode_pixels(tiny.pipe, pixels()[1:], generators()[1:])
    torch.testing.assert_close(together[1:], alone)
    assert not torch.allclose(together[:1], family.encode_pixels(tiny.pipe, pixels()[:1], generators()[1:]))


@torch.no_grad()
def draw(family, pipe, sampler="ddim", **options):
    prompt = Prompt("a red circle", "blue", width=WIDTH, height=HEIGHT, **{"steps": 3, "scale": 3.0, **options})
    cond, negative = (family.encode_prompts(pipe, [text]) for text in (prompt.text, prompt.negative))
    return family.draw(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), sampler)


def test_a_preview_is_the_picture_that_the_diffusers_pipeline_draws(case):
    family, tiny = case
    theirs = tiny.pipe("a red circle", negative_prompt="blue", **SIZE, num_inference_steps=3, guidance_scale=3.0,
                       generator=torch.Generator().manual_seed(1)).images[0]  # fmt: skip
    ours = draw(family, tiny.pipe)
    assert ours.size == (WIDTH, HEIGHT)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.tobytes() != draw(family, tiny.pipe, scale=5.0).tobytes()


def test_a_preview_leaves_no_trace(case):
    """Neither the global generator, nor the pipeline's scheduler, nor who is in training mode changes."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.denoiser).train()
    resting = next(module for module in denoiser.modules() if isinstance(module, nn.GroupNorm)).eval()
    before, scheduler = torch.random.get_rng_state(), tiny.pipe.scheduler
    table = dict(vars(scheduler))
    draw(family, tiny.pipe, "euler_a")
    assert torch.equal(before, torch.random.get_rng_state())
    assert tiny.pipe.scheduler is scheduler and vars(scheduler) == table
    assert denoiser.training and not resting.training


def test_a_preview_needs_no_text_encoder_and_draws_in_bfloat16(case):
    family, tiny = case
    pipe = family.load(tiny.source, torch.bfloat16)
    prompt = Prompt("a", width=WIDTH, height=HEIGHT, steps=2)
    with torch.no_grad():
        cond, negative = (family.encode_prompts(pipe, [text]) for text in ("a", ""))
    for part in family.text_parts:
        setattr(pipe, part, None)
    picture = family.draw(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), "ddim")
    assert picture.size == (WIDTH, HEIGHT)


def test_lora_targets_are_the_layers_that_sd_scripts_trains(case):
    """Linear layers and 1x1 convolutions inside blocks of the classes that networks/lora.py names."""
    from library.adapters.lora import matching

    family, tiny = case
    denoiser = getattr(tiny.pipe, family.denoiser)
    blocks = [name for name, module in denoiser.named_modules() if type(module).__name__ == "Transformer2DModel"]
    expected = {
        name
        for name, module in denoiser.named_modules()
        if any(name.startswith(f"{block}.") for block in blocks)
        and (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)))
    }
    assert set(matching(denoiser, family.lora_targets)) == expected
