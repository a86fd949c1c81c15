"""Control by LoRA on FLUX.1: the token layout of OminiControl, built a second time from diffusers' own forward."""

import math
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from tiny_pipelines import TINY

from library.adapters import injection
from library.config.schema import AdapterConfig, ModelConfig
from library.config.schema_optim import OptimConfig
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.trainable_modules import select_target_components

DISPATCH = "diffusers.models.transformers.transformer_flux.dispatch_attention_fn"
ADAPTER = AdapterConfig(network_dim=4, network_alpha=4)
TIMES = torch.tensor([700.0, 250.0])


def load(**options):
    """A family with ``--control omini`` and its pipeline, with LoRA weights that change the output."""
    config = ModelConfig("random:flux:tiny", control="omini", guidance_scale=3.5, **options)
    detected = detect_model(config)
    family = FAMILIES.get(detected.family)(config)
    pipe = family.load(detected, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    parts = select_target_components(ADAPTER, OptimConfig(), family, pipe)
    adapter = injection.inject_adapters(parts, ADAPTER, 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in pipe.transformer.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return family, pipe, adapter


def clear_lora(pipe):
    for name, parameter in pipe.transformer.named_parameters():
        if ".lora_B." in name:
            parameter.data.zero_()


@pytest.fixture
def plain():
    """FLUX.1 without control, of the same weights, with two condition images in the batch."""
    tiny = TINY["flux"]()
    tiny.pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    conditions = tuple(torch.randn(2, 4, *size, generator=generator) for size in ((8, 12), (4, 6)))
    return replace(tiny, batch=replace(tiny.batch, control_latents=conditions))


def merge_lora(transformer, trained):
    """Add the LoRA of every layer to the weights of diffusers' own transformer."""
    for name, layer in trained.named_modules():
        if "default" in getattr(layer, "lora_A", {}):
            transformer.get_submodule(name).weight.data += layer.get_delta_weight("default")


def attend_in_groups(rows, columns, query, key, value, **_):
    """Attention by diffusers' arguments, with a bias for each pair of groups of tokens."""
    bias = torch.cat(
        [
            torch.cat(
                [torch.full((1, 1), each).expand(row, column) for each, column in zip(values, columns, strict=True)], 1
            )
            for row, values in rows
        ]
    )
    return dispatch_attention_fn(query, key, value, attn_mask=bias[None, None])


@contextmanager
def record_keys_and_values(store):
    def record(query, key, value, **_):
        store.append((key, value))
        return dispatch_attention_fn(query, key, value)

    with mock.patch(DISPATCH, record):
        yield


@contextmanager
def add_keys_and_values(store, bias):
    left = iter(store)

    def add(query, key, value, **_):
        more = next(left)
        mask = torch.cat([query.new_zeros(key.shape[1]), query.new_full((more[0].shape[1],), bias)])
        keys, values = torch.cat([key, more[0]], 1), torch.cat([value, more[1]], 1)
        return dispatch_attention_fn(query, keys, values, attn_mask=mask[None, None, None])

    with mock.patch(DISPATCH, add):
        yield


def predict_with_scale(family, pipe, batch, scale):
    build = type(family)._build_control
    with (
        torch.no_grad(),
        mock.patch.object(
            type(family), "_build_control", lambda self, pipe, latents, grid: build(self, pipe, latents, grid, scale)
        ),
    ):
        return family.predict(pipe, pipe.transformer, batch.latents, TIMES, batch)


@torch.no_grad()
@pytest.mark.parametrize("is_independent", [False, True])
def test_without_attention_to_the_condition_the_output_is_the_base_models(plain, is_independent):
    family, pipe, _ = load(control_independent=is_independent)
    base = FAMILIES.get("flux")(family.model_config)
    expected = base.predict(
        plain.pipe, plain.pipe.transformer, plain.batch.latents, TIMES, replace(plain.batch, control_latents=())
    )
    torch.testing.assert_close(predict_with_scale(family, pipe, plain.batch, 0.0), expected, rtol=1e-5, atol=1e-5)
    alone = replace(plain.batch, control_latents=())
    assert torch.equal(family.predict(pipe, pipe.transformer, plain.batch.latents, TIMES, alone), expected)
    assert (predict_with_scale(family, pipe, plain.batch, 1.0) - expected).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(("position", "scale"), [("aligned", 1.0), ("offset", 0.3)])
def test_independent_conditions_are_the_lora_model_at_time_0_and_others_the_base_model(plain, position, scale):
    """Two passes of diffusers' transformer: the condition's through merged weights, the image's through its own."""
    family, pipe, _ = load(control_position=position, control_independent=True)
    condition, batch = plain.batch.control_latents[1], plain.batch
    merged = TINY["flux"]().pipe.transformer
    merge_lora(merged, pipe.transformer)
    positions = torch.tensor([[0.0, y, x] for y in range(2) for x in range(3)])
    if position == "offset":
        positions[:, 2] -= 3
    else:  # half the size of the image: each token is in the middle of 2 x 2
        positions[:, 1:] = positions[:, 1:] * 2 + 0.5
    keys_and_values = []
    with record_keys_and_values(keys_and_values):
        merged(
            hidden_states=pipe._pack_latents(condition, *condition.shape),
            timestep=torch.zeros(2),
            guidance=torch.ones(2),
            encoder_hidden_states=batch.cond["embeds"][:, :0],
            pooled_projections=batch.cond["pooled"],
            txt_ids=torch.zeros(0, 3),
            img_ids=positions,
        )
    base = FAMILIES.get("flux")(family.model_config)
    with add_keys_and_values(keys_and_values, math.log(scale)):
        expected = base.predict(
            plain.pipe, plain.pipe.transformer, batch.latents, TIMES, replace(batch, control_latents=())
        )
    ours = predict_with_scale(family, pipe, replace(batch, control_latents=(condition,)), scale)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_conditions_see_text_and_image_but_not_each_other(plain):
    """At time 0 and guidance 1, and with a LoRA of zeros, all tokens are alike: diffusers' forward with a mask."""
    family, pipe, _ = load()
    clear_lora(pipe)
    family.model_config = replace(family.model_config, guidance_scale=1.0)
    latents, times = plain.batch.latents, torch.zeros(2)
    text, image, first, second = plain.batch.cond["embeds"].shape[1], 24, 24, 6
    never, sizes = -math.inf, (text + image, first, second)
    rows = ((sizes[0], (0.0, 0.0, 0.0)), (first, (0.0, 0.0, never)), (second, (0.0, never, 0.0)))
    control = family._build_control(pipe, plain.batch.control_latents, (4, 6))["control"]
    tokens = torch.cat([pipe._pack_latents(latents, *latents.shape), control["tokens"]], 1)
    image_ids = pipe._prepare_latent_image_ids(2, 4, 6, None, torch.float32)
    with mock.patch(DISPATCH, lambda *args, **kwargs: attend_in_groups(rows, sizes, *args, **kwargs)):
        expected = plain.pipe.transformer(
            hidden_states=tokens,
            timestep=times,
            guidance=torch.ones(2),
            encoder_hidden_states=plain.batch.cond["embeds"],
            pooled_projections=plain.batch.cond["pooled"],
            txt_ids=torch.zeros(text, 3),
            img_ids=torch.cat([image_ids, control["ids"]]),
        ).sample[:, :image]
    ours = family.predict(pipe, pipe.transformer, latents, times, plain.batch)
    torch.testing.assert_close(pipe._pack_latents(ours, *ours.shape), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_previews_compute_independent_conditions_once(plain, tmp_path):
    from PIL import Image

    from library.dataloader.sample_prompts import Prompt

    path = tmp_path / "condition.png"
    Image.effect_noise((96, 64), 90).convert("RGB").save(path)
    prompt = Prompt("a", width=96, height=64, num_inference_steps=3, cfg_scale=2.0, control_images=(path,))
    family, pipe, _ = load(control_independent=True)
    first = pipe.transformer.transformer_blocks[0].attn.to_k.lora_A["default"]
    calls = []
    first.register_forward_hook(lambda *_: calls.append(1))
    cond, negative = family.encode_prompts(pipe, ["a"]), family.encode_prompts(pipe, ["b"])

    def draw():
        calls.clear()
        return family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(0), None), len(calls)

    cached, num_calls = draw()
    assert num_calls == 2  # one for each text
    with mock.patch("library.models.omini_control.ConditionCache.find", lambda *_: {}):
        anew, num_calls = draw()
    assert num_calls == 6
    assert cached.tobytes() == anew.tobytes()


def test_every_trained_layer_gets_a_gradient(plain):
    family, pipe, adapter = load()
    pipe.transformer.enable_gradient_checkpointing()
    predicted = family.predict(pipe, pipe.transformer, plain.batch.latents, TIMES, plain.batch)
    predicted.square().sum().backward()
    weights = [p for name, p in pipe.transformer.named_parameters() if ".lora_" in name]
    assert len(weights) == 2 * len(adapter.modules) == 2 * 22
    assert all(bool(weight.grad.abs().sum() > 0) for weight in weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["flux", "sd1"])
def test_a_condition_in_channels_changes_nothing_before_the_input_layer_has_learned_it(name):
    config, tiny = ModelConfig(f"random:{name}:tiny", control="channels"), TINY[name]()
    detected = detect_model(config)
    family, base = FAMILIES.get(detected.family)(config), FAMILIES.get(name)()
    pipe = family.load(detected, torch.float32)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    batch = replace(tiny.batch, control_latents=(torch.ones_like(tiny.batch.latents),))
    expected = base.predict(tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name), batch.latents, TIMES, tiny.batch)
    torch.testing.assert_close(family.predict(pipe, denoiser, batch.latents, TIMES, batch), expected)
    parts = select_target_components(AdapterConfig(network_train_unet_only=True), OptimConfig(), family, pipe)
    injection.inject_adapters(parts, replace(ADAPTER, network_train_unet_only=True), 0)
    layer = denoiser.get_submodule(family.input_layer)
    layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
    changed = family.predict(pipe, denoiser, batch.latents, TIMES, batch)
    other = replace(batch, control_latents=(-batch.control_latents[0],))
    assert (family.predict(pipe, denoiser, batch.latents, TIMES, other) - changed).abs().max() > 1e-2
