"""Every family fulfils the contract of library.models.base, compared with the pipelines of diffusers."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_cases import (
    SIZE,
    ForwardOnlyWrapper,
    Recorder,
    assert_same_call,
    build_case,
    case,
    make_generators,
    make_pixels,
    take_rows,
)
from PIL import Image, ImageChops
from tiny_pipelines import HEIGHT, TINY, WIDTH, TinyCase
from torch import nn

from library.adapters import injection
from library.config.schema import AdapterConfig, ModelConfig, RunConfig
from library.dataloader.sample_prompts import Prompt
from library.models.base import ControlTextFamily, Family, T5Family
from library.models.detect import detect_model
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.loading import load_pipeline_on_meta
from library.models.model_configs import build_bundled_reader, is_tokenizer, load_bundled_config
from library.models.recomputed_activations import recompute_activations
from library.models.text_encoding import encode_text_on_meta
from library.parallel.activation_checkpointing import BlockCheckpointing
from library.parallel.fuse_lora import fuse_lora_layers
from library.parallel.lora_linear import FusedLoraForward
from library.training.trainable_modules import build_lora_dropout, build_trainable_modules

__all__ = ["build_case", "case"]  # fixtures


@torch.no_grad()
def draw_lora_up_weights(denoiser):
    """Draw the up matrices of an adapter, which are zero at first."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in injection.iter_adapter_parameters(denoiser):
        if "lora_B" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator))


@pytest.mark.slow
def test_every_family_has_a_tiny_pipeline():
    assert {make().family for make in TINY.values()} == set(FAMILIES.list_names())


def test_the_only_attribute_of_a_family_is_its_frozen_model_config(case):
    family, _ = case
    assert isinstance(family, Family)
    assert vars(family) == {"model_config": ModelConfig()}


def test_the_facts_of_a_family_match_its_class(case):
    family, tiny = case
    facts = family.facts
    assert facts is FAMILY_FACTS[tiny.family]
    assert facts.pipeline.class_name == type(tiny.pipe).__name__
    assert set(facts.options.components.values()) <= set(facts.components)
    assert set(facts.text.tokenizer_repo_ids) == set(filter(is_tokenizer, facts.text.components))
    assert {*facts.lora.text_encoders} <= {*facts.text.components}
    assert (facts.text.t5_encoder in facts.lora.text_encoders) == isinstance(family, T5Family)
    assert (facts.control.text_tokens_per_image > 0) == isinstance(family, ControlTextFamily)
    has_negative_encoding = type(family).encode_negative_prompts is not Family.encode_negative_prompts
    assert facts.text.has_negative_encoding == has_negative_encoding
    for option in (*facts.options.components, *facts.options.extra):
        assert hasattr(ModelConfig(), option)


def disable_guidance(tiny):
    """Return the argument that disables classifier-free guidance."""
    return {tiny.scale: tiny.guidance_off}


@torch.no_grad()
def test_the_denoiser_is_called_as_the_diffusers_pipeline_calls_it(case):
    family, tiny = case
    pipe, batch = tiny.pipe, take_rows(tiny.batch, tiny.max_rows)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    record, steps = Recorder(denoiser), []
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda out, t, *args, **kw: (steps.append((out, t)), step(out, t, *args, **kw))[1]
    pipe(
        **tiny.call,
        **disable_guidance(tiny),
        latents=tiny.pack_latents(batch.latents),
        **SIZE,
        num_inference_steps=2,
        output_type="latent",
    )
    reference, t = steps[0]

    wrapped = ForwardOnlyWrapper(denoiser)
    noisy = batch.latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0)
    ours = family.predict(pipe, wrapped, noisy, torch.full((len(batch),), float(t)), batch)

    assert wrapped.calls == 1, "predict calls the given denoiser once"
    assert_same_call(tiny.simplify_call(record.calls[-1]), tiny.simplify_call(record.calls[0]))
    assert ours.shape == batch.latents.shape
    pack = tiny.pack_prediction or tiny.pack_latents
    torch.testing.assert_close(pack(ours).double(), reference.double(), **tiny.tolerances)


@torch.no_grad()
def test_the_scheduler_samples_the_clean_latents_with_a_perfect_model(case):
    """The target is what the model's scheduler expects as the model output."""
    family, tiny = case
    clean, noise = tiny.batch.latents, torch.randn(tiny.batch.latents.shape, generator=make_generators()[0])
    t, scheduler = 601.0, tiny.pipe.scheduler
    noisy, target = family.build_noise_process(tiny.pipe).add_noise(clean, noise, torch.full((len(clean),), t))
    if "flow_shift" in scheduler.config:  # a solver of several steps
        scheduler = type(scheduler).from_config(scheduler.config, flow_shift=1.0, final_sigmas_type="zero")
        scheduler.set_timesteps(1)
        scheduler.sigmas[0] = t / 1000
        recovered = scheduler.step(target, scheduler.timesteps[0], noisy).prev_sample
    elif hasattr(scheduler, "alphas_cumprod"):
        scheduler.set_timesteps(1000)
        recovered = scheduler.step(target, int(t), noisy).pred_original_sample
    else:  # of flow matching: one step from here to the end
        scheduler = type(scheduler).from_config(
            scheduler.config, shift=1.0, use_dynamic_shifting=False, shift_terminal=None
        )
        scheduler.set_timesteps(sigmas=[t / 1000])
        recovered = scheduler.step(target, scheduler.timesteps[0], noisy).prev_sample
    torch.testing.assert_close(recovered, clean, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prompts_are_encoded_as_the_diffusers_pipeline_encodes_them(case):
    family, tiny = case
    pipe, denoiser = tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name)
    texts = ["a red circle on white ground", "Blau, 7"][: tiny.max_rows]
    for group in [[text] for text in texts] if tiny.encodes_prompts_alone else [texts]:
        record, rows = Recorder(denoiser), take_rows(tiny.batch, len(group))
        pipe(
            prompt=list(group),
            **{**tiny.sizes, **tiny.texts},
            **disable_guidance(tiny),
            latents=tiny.pack_latents(rows.latents),
            **SIZE,
            num_inference_steps=2,
            output_type="latent",
        )
        t = torch.full((len(group),), float(pipe.scheduler.timesteps[0]))
        batch = replace(rows, cond=tiny.encode_prompts(family, pipe, group))
        family.predict(pipe, denoiser, rows.latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0), t, batch)
        assert_same_call(tiny.simplify_call(record.calls[-1]), tiny.simplify_call(record.calls[0]))
        for value in batch.cond.values():
            assert len(value) == len(group)
    pair = tiny.encode_prompts(family, pipe, ["a red circle on white ground", "Blau, 7"])
    assert any(not torch.equal(value[0], value[1]) for value in pair.values())


@torch.no_grad()
def test_a_sample_does_not_depend_on_the_other_prompts_of_its_batch(case):
    """Prompts of different lengths in one batch give the same conditioning and prediction as alone."""
    family, tiny = case
    pipe, denoiser, batch = tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name), tiny.batch
    texts, t = ["a red circle on white ground", "Blau, 7"], torch.tensor([700.0, 250.0])
    batched = tiny.encode_prompts(family, pipe, texts)
    pair = family.predict(pipe, denoiser, batch.latents, t, replace(batch, cond=batched))
    for number, text in enumerate(texts):
        row = slice(number, number + 1)
        alone = tiny.encode_prompts(family, pipe, [text])
        for name, value in alone.items():
            torch.testing.assert_close(value[0], batched[name][number], rtol=1e-4, atol=1e-5)
        controls = tuple(latents[row] for latents in batch.control_latents)
        single = replace(batch, cond=alone, size_conditioning=batch.size_conditioning[row], control_latents=controls)
        predicted = family.predict(pipe, denoiser, batch.latents[row], t[row], single)
        torch.testing.assert_close(predicted, pair[row], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network_args", [(), ("rank_dropout=0.3", "module_dropout=0.3")])
@torch.no_grad()
def test_the_dropout_of_a_sample_depends_neither_on_its_batch_nor_on_the_padding_of_its_text(case, network_args):
    family, tiny = case
    denoiser, batch = getattr(tiny.pipe, family.facts.denoiser_name), tiny.batch
    rates = AdapterConfig(network_train_unet_only=True, network_dropout=0.3, network_args=network_args)
    config = RunConfig(adapter=rates)
    trained, adapter = build_trainable_modules(config, family, tiny.pipe)
    dropout = build_lora_dropout(config.adapter, family, trained, adapter)
    draw_lora_up_weights(denoiser)
    t, keys = torch.tensor([700.0, 250.0]), torch.tensor([5, 6])
    cond = tiny.encode_prompts(family, tiny.pipe, ['"GLYPHS"' + " in a red circle" * 40, "Blau, 7"])

    def predict(rows, text_pad_multiple=1):
        dropout.sample_keys = keys[rows]
        each = replace(
            batch,
            cond={name: value[rows] for name, value in cond.items()},
            size_conditioning=batch.size_conditioning[rows],
            control_latents=tuple(latents[rows] for latents in batch.control_latents),
            text_pad_multiple=text_pad_multiple,
        )
        return family.predict(tiny.pipe, denoiser, batch.latents[rows], t[rows], each)

    both = slice(0, 2)
    pair = predict(both)
    for row in (slice(0, 1), slice(1, 2)):
        torch.testing.assert_close(predict(row), pair[row], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(predict(both, family.facts.text.pad_multiple), pair, rtol=1e-3, atol=1e-4)
    dropout.sample_keys = None
    assert not torch.allclose(
        pair, family.predict(tiny.pipe, denoiser.eval(), batch.latents, t, replace(batch, cond=cond))
    )


@torch.no_grad()
def test_memory_estimates_see_the_shapes_of_a_real_step(case):
    """On the meta device, where nothing may look at values."""
    family, tiny = case
    pipe = load_pipeline_on_meta(family, detect_model(tiny.source), torch.float32)
    texts = ["a red circle on white ground", "Blau, 7"]
    sizes = [image.size for image in tiny.controls]
    cond = encode_text_on_meta(family, pipe, texts, sizes)
    real = tiny.encode_prompts(family, tiny.pipe, texts)
    assert {name: [row.shape for row in rows] for name, rows in cond.items()} == {
        name: [row.shape for row in rows] for name, rows in real.items()
    }
    sizes, latents = tiny.batch.size_conditioning.to("meta"), tiny.batch.latents.to("meta")
    controls = tuple(each.to("meta") for each in tiny.batch.control_latents)
    batch = replace(tiny.batch, latents=latents, cond=cond, size_conditioning=sizes, control_latents=controls)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    assert family.predict(pipe, denoiser, latents, torch.empty(2, device="meta"), batch).shape == latents.shape


@torch.no_grad()
def test_the_size_multiple_is_the_smallest_that_the_model_supports(case):
    family, tiny = case
    match = family.facts.detection.match_configs(build_bundled_reader(load_bundled_config(get_config_name(tiny))))
    step = match.size_multiple // tiny.latent_factor
    pipe, denoiser, batch = tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name), tiny.batch
    t, channels, frames = torch.tensor([700.0, 250.0]), batch.latents.shape[1], batch.latents.shape[2:-2]
    for height, width in ((step, 3 * step), (5 * step, 2 * step)):
        noisy = torch.zeros(2, channels, *frames, height, width)
        assert family.predict(pipe, denoiser, noisy, t, batch).shape == noisy.shape
    if family.build_noise_process(pipe).prediction_type == "flow" and step > 1:
        with pytest.raises((RuntimeError, AssertionError)):
            noisy = torch.zeros(2, channels, *frames, step, 3 * step // 2)
            assert family.predict(pipe, denoiser, noisy, t, batch).shape == noisy.shape


def get_config_name(tiny):
    return tiny.source.removeprefix("random:").replace(":", "_")


def test_a_text_encoder_can_be_trained_through_the_prompts(case):
    family, tiny = case
    if not family.facts.lora.text_encoders:
        return
    cond = family.encode_prompts(tiny.pipe, ["a red circle"])
    sum(value.float().square().sum() for row in cond.values() for value in row if value.requires_grad).backward()
    for name in family.facts.lora.text_encoders:
        encoder = getattr(tiny.pipe, name)
        assert any(bool(p.grad.abs().sum() > 0) for p in encoder.parameters() if p.grad is not None), name


@torch.no_grad()
def test_pixels_are_encoded_as_by_the_inpainting_pipeline_of_diffusers(case):
    family, tiny = case
    reference = tiny.encode(tiny.pipe, make_pixels(), make_generators())
    ours = family.encode_moments(tiny.pipe, make_pixels()).sample(make_generators())
    torch.testing.assert_close(ours, reference)
    assert ours.shape == tiny.batch.latents.shape


def get_images(output):
    """Return the images of a pipeline's output, or its clips."""
    return output.images if hasattr(output, "images") else output.frames


@torch.no_grad()
def test_latents_are_decoded_as_the_diffusers_pipeline_decodes_them(case):
    family, tiny = case
    rows = take_rows(tiny.batch, tiny.max_rows)
    options = dict(latents=tiny.pack_latents(rows.latents), num_inference_steps=2, **disable_guidance(tiny), **SIZE)
    reference = get_images(tiny.pipe(**tiny.call, **options, output_type="pt"))
    latents = get_images(tiny.pipe(**tiny.call, **options, output_type="latent"))
    ours = family.decode_latents(tiny.pipe, tiny.unpack_latents(latents))
    ours = ours.transpose(1, 2) if ours.ndim == 5 else ours  # diffusers' clips have their frames before the channels
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), reference, rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_decoding_inverts_encoding_up_to_the_error_of_the_vae(case):
    family, tiny = case
    vae = tiny.pipe.vae
    restored = family.decode_latents(
        tiny.pipe, family.encode_moments(tiny.pipe, make_pixels(1)).sample(make_generators(1))
    )
    is_video_vae = hasattr(vae, "temporal_compression_ratio") or "temperal_downsample" in vae.config
    vae_input = tiny.add_channels(make_pixels(1))
    vae_input = vae_input.unsqueeze(2) if is_video_vae else vae_input
    encoded, std = (
        vae.encode(vae_input),
        family.encode_moments(tiny.pipe, make_pixels(1)).mean_and_std[0, 1],
    )
    if hasattr(encoded, "latent"):
        latents = encoded.latent
    else:
        latents = encoded.latent_dist.sample(make_generators(1)[0]) if std.any() else encoded.latent_dist.mode()
    levels = [torch.zeros(1)] if vae.config.get("timestep_conditioning") else []
    single = vae.decode(latents, *levels).sample
    restored = restored.squeeze(2) if is_video_vae and restored.ndim == 5 else restored
    torch.testing.assert_close(restored, single.squeeze(2) if is_video_vae else single, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_conditioning_of_a_prompt_does_not_depend_on_the_others(case):
    family, tiny = case
    texts = ["a red circle on white ground", "", "Blau, 7"]
    batched = tiny.encode_prompts(family, tiny.pipe, texts)
    for row, text in enumerate(texts):
        single = tiny.encode_prompts(family, tiny.pipe, [text])
        assert single.keys() == batched.keys()
        for name, value in single.items():
            assert isinstance(value, list) == isinstance(batched[name], list)
            torch.testing.assert_close(value[0], batched[name][row])


@torch.no_grad()
def test_latents_are_sampled_with_their_mean_and_standard_deviation(case):
    family, tiny = case
    corner = make_pixels(1)[:, :, :32, :48]
    moments = family.encode_moments(tiny.pipe, corner)
    if not moments.mean_and_std[0, 1].any():  # the model was trained on the mean
        torch.testing.assert_close(
            family.encode_moments(tiny.pipe, corner).sample(make_generators(1))[0], moments.mean_and_std[0, 0]
        )
        return
    draws = family.encode_moments(tiny.pipe, corner.expand(400, -1, -1, -1)).sample(make_generators(400))
    mean, std = moments.mean_and_std[0]
    assert float(std.min()) > 0
    assert float(((draws.mean(0) - mean) / std).abs().max()) < 0.35  # 400 draws: 7 standard errors
    assert float((draws.std(0) / std - 1).abs().max()) < 0.25


def test_latents_of_a_sample_do_not_depend_on_the_others_in_the_batch(case):
    family, tiny = case
    batched = family.encode_moments(tiny.pipe, make_pixels()).sample(make_generators())
    single = family.encode_moments(tiny.pipe, make_pixels()[1:]).sample(make_generators()[1:])
    torch.testing.assert_close(batched[1:], single)
    assert not torch.allclose(
        batched[:1], family.encode_moments(tiny.pipe, make_pixels()[:1]).sample(make_generators()[1:])
    )


def build_preview_prompt(tiny, text, negative="", **options):
    """A prompt in the size of the case, with files of its control images."""
    paths = [Path(tempfile.mkdtemp(), "control.png") for _ in tiny.controls]
    for path, image in zip(paths, tiny.controls, strict=True):
        image.save(path)
    return Prompt(text, negative, **{"width": WIDTH, "height": HEIGHT, "control_images": tuple(paths), **options})


@torch.no_grad()
def generate(family, tiny, sampler=None, **options):
    pipe = tiny.pipe
    prompt = build_preview_prompt(
        tiny, "a red circle", "blue", **{"num_inference_steps": 3, "cfg_scale": 3.0, **options}
    )
    cond = tiny.encode_prompts(family, pipe, [prompt.text])
    negative = tiny.encode_negative_prompts(family, pipe, [prompt.negative_prompt])
    return family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), sampler)


def test_a_preview_is_the_image_that_the_diffusers_pipeline_samples(case):
    family, tiny = case
    texts = {"prompt": "a red circle", **tiny.build_negative(tiny.pipe, "blue")}
    if tiny.build_prompt is not None:
        texts = tiny.build_prompt(tiny.pipe, "a red circle", "blue")
    reference = get_images(
        tiny.pipe(
            **texts,
            **SIZE,
            **tiny.texts,
            num_inference_steps=3,
            **{tiny.scale: 3.0},
            generator=torch.Generator().manual_seed(1),
            output_type="pil",
        )
    )[0]
    reference = reference[0] if isinstance(reference, list) else reference  # of a clip, its only frame
    ours = generate(family, tiny)
    assert ours.size == (WIDTH, HEIGHT)
    # Sums over other padding are rounded in another way.
    tolerance = 0 if tiny.simplify_call is TinyCase.simplify_call else 1
    assert max(high for _, high in ImageChops.difference(ours, reference).getextrema()) <= tolerance
    assert ours.tobytes() != generate(family, tiny, cfg_scale=5.0).tobytes()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "count"), [pytest.param("flux_kontext", 1, marks=pytest.mark.slow), ("flux2_klein", 2)]
)
def test_a_preview_with_a_control_image_is_the_image_that_the_diffusers_pipeline_samples(
    build_case, name, count, tmp_path
):
    family, tiny = build_case(name)
    reference = tmp_path / "reference.png"
    make_image((150, 90)).save(reference)
    theirs = tiny.pipe(
        image=[Image.open(reference)] * count,
        prompt="a red circle",
        **tiny.build_negative(tiny.pipe, "blue"),
        **SIZE,
        **tiny.texts,
        num_inference_steps=2,
        **{tiny.scale: 3.0},
        generator=torch.Generator().manual_seed(1),
    ).images[0]
    ours = generate(family, tiny, num_inference_steps=2, control_images=(reference,) * count)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.tobytes() != generate(family, tiny, num_inference_steps=2).tobytes()


def make_image(size):
    """A picture in which a flip, a swap of sides or another crop would show."""
    gradient = Image.linear_gradient("L").resize(size)
    return Image.merge("RGB", [gradient, gradient.rotate(90, expand=True).resize(size), Image.new("L", size, 90)])


def test_a_preview_changes_no_state(case):
    """The global generator, the pipeline's scheduler and the training mode of modules are unchanged."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name).train()
    eval_module = list(denoiser.modules())[-1].eval()
    rng_state, scheduler = torch.random.get_rng_state(), tiny.pipe.scheduler
    scheduler_state = dict(vars(scheduler))
    generate(family, tiny, "euler")
    assert torch.equal(rng_state, torch.random.get_rng_state())
    assert tiny.pipe.scheduler is scheduler and vars(scheduler) == scheduler_state
    assert denoiser.training and not eval_module.training


def test_a_preview_needs_no_text_encoder_and_works_in_bfloat16(case):
    family, tiny = case
    pipe = family.load(tiny.source, torch.bfloat16)
    prompt = build_preview_prompt(tiny, "a", num_inference_steps=2)
    with torch.no_grad():
        cond, negative = (tiny.encode_prompts(family, pipe, [text]) for text in ("a", ""))
    for part in family.facts.text.components:
        setattr(pipe, part, None)
    image = family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), None)
    assert image.size == (WIDTH, HEIGHT)


def test_every_lora_weight_gets_a_gradient(case):
    """DDP would wait forever for a missing gradient."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    config = AdapterConfig(network_dim=3, network_alpha=2)
    injection.inject_into_model(
        denoiser, config, family.facts.lora.targets, 0, family.facts.lora.key_style, family.get_unused_layers(denoiser)
    )
    draw_lora_up_weights(denoiser)
    t = torch.tensor([700.0, 250.0])
    family.predict(tiny.pipe, ForwardOnlyWrapper(denoiser), tiny.batch.latents, t, tiny.batch).square().sum().backward()
    without_gradient = [
        name
        for name, weight in injection.iter_adapter_parameters(denoiser)
        if weight.grad is None or not weight.grad.any()
    ]
    assert without_gradient == []


@torch.no_grad()
def test_lora_layers_that_are_computed_together_read_one_input(case):
    """Otherwise outputs are computed that no layer asks for."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    injection.inject_into_model(
        denoiser, AdapterConfig(network_dim=3), family.facts.lora.targets, 0, family.facts.lora.key_style
    )
    assert fuse_lora_layers(denoiser, torch.bfloat16)
    recompute_activations(denoiser)
    forwards = [vars(module).get("forward") for module in denoiser.modules()]
    groups = {each.group for each in forwards if isinstance(each, FusedLoraForward) and each.group is not None}
    assert groups, "each attention has at least k and v"
    with torch.autocast("cpu", torch.bfloat16):
        family.predict(tiny.pipe, denoiser, tiny.batch.latents, torch.tensor([700.0, 250.0]), tiny.batch)
    (pending,) = {group.pending for group in groups}
    pending.clear()
    assert pending.discarded == 0


def test_gradient_checkpointing_changes_no_gradient(case):
    """diffusers has calls of checkpointed blocks that leave arguments out: masks of texts, say."""
    family, tiny = case
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    with torch.no_grad():
        cond = tiny.encode_prompts(family, tiny.pipe, ["a red circle on white ground" * 4, "Blau, 7"])
    batch, t = replace(tiny.batch, cond=cond), torch.tensor([700.0, 250.0])

    def compute_input_gradient():
        latents = tiny.batch.latents.clone().requires_grad_()
        family.predict(tiny.pipe, denoiser, latents, t, batch).square().sum().backward()
        return latents.grad

    expected = compute_input_gradient()
    denoiser.enable_gradient_checkpointing(BlockCheckpointing(1, offload=False))
    torch.testing.assert_close(compute_input_gradient(), expected, rtol=1e-4, atol=1e-5)


BLOCKS = {
    "Transformer2DModel",
    "JointTransformerBlock",
    "FluxTransformerBlock",
    "FluxSingleTransformerBlock",
    "ZImageTransformerBlock",
    "QwenImageTransformerBlock",
    "AuraFlowJointTransformerBlock",
    "AuraFlowSingleTransformerBlock",
    "LongCatImageTransformerBlock",
    "LongCatImageSingleTransformerBlock",
    "OvisImageTransformerBlock",
    "OvisImageSingleTransformerBlock",
}
"""Block classes of diffusers in which the reference trainer of a family trains the linear layers."""
EXCLUDED = {
    "z_image": r"_modulation|_refiner",
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), r"_mod\."),
    "aura_flow": r"norm1|\.ff",
    "ovis_image": r"norm|\.ff|\.proj_",
    **dict.fromkeys(("longcat_image", "longcat_image_edit"), r"norm|\.ff|\.proj_|add_"),
}
"""Layers in these blocks that it does not train."""


def test_lora_targets_are_the_layers_that_sd_scripts_trains(case):
    """Linear layers and 1x1 convolutions inside the block classes that its network modules list."""
    from library.adapters.targets_rank_alpha import match_target_modules

    family, tiny = case
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    blocks = [name for name, module in denoiser.named_modules() if type(module).__name__ in (tiny.blocks or BLOCKS)]
    expected = {
        name
        for name, module in denoiser.named_modules()
        if any(name.startswith(f"{block}.") or not block for block in blocks)
        and (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)))
        and not re.search(EXCLUDED.get(tiny.family, tiny.untrained), name)
    }
    assert set(match_target_modules(denoiser, family.facts.lora.targets)) == expected
