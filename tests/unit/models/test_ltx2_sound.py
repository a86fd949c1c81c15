"""LTX-2 with sound: the call and the latents of diffusers' pipeline, the layers that are trained, and previews."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_cases import ForwardOnlyWrapper, Recorder, build_case
from tiny_pipelines import HEIGHT, NO_GUIDANCE, WIDTH
from torch import nn

from library.config import RunConfig
from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.estimate.meta_run import LargestBatch, MetaRun
from library.models.detect import detect_model
from library.models.families import FAMILIES, SOUND_FAMILIES
from library.models.sound import encode_sound_latents
from library.training.full_weights import list_trained_names

__all__ = ["build_case"]  # a fixture
pytestmark = pytest.mark.slow
NUM_FRAMES = 17


def build_sound_case(build_case, name):
    """The family with sound, its tiny pipeline, and a batch of clips with sound."""
    family = FAMILIES.get(SOUND_FAMILIES["ltx2"])()
    _, tiny = build_case(name)
    generator, vae = torch.Generator().manual_seed(3), tiny.pipe.audio_vae
    vae.latents_mean.copy_(torch.randn(128, generator=generator))
    vae.latents_std.copy_(torch.rand(128, generator=generator) + 0.5)
    count = family.facts.pipeline.frames.count_sound_latents(NUM_FRAMES)
    latents = torch.randn(2, 4, 3, HEIGHT // 16, WIDTH // 16, generator=generator)
    sound = torch.randn(2, count, 128, generator=generator)
    return family, tiny, replace(tiny.batch, latents=latents, noisy_sound=sound)


@pytest.mark.parametrize("name", ["ltx2", "ltx2_2_3"])
@torch.no_grad()
def test_pictures_and_sound_are_predicted_as_in_the_pipeline(name, build_case):
    family, tiny, batch = build_sound_case(build_case, name)
    pipe = tiny.pipe
    record, sounds = Recorder(pipe.transformer), []
    pipe.transformer.register_forward_hook(lambda module, args, output: sounds.append(output[1]))
    options = {
        **tiny.call,
        **NO_GUIDANCE,
        "num_frames": NUM_FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "isolated": False,
    }
    options |= {tiny.scale: tiny.guidance_off, "num_inference_steps": 2}
    vae = pipe.audio_vae  # given latents are normalized by the pipeline
    options |= {"audio_latents": batch.noisy_sound * vae.latents_std + vae.latents_mean, "output_type": "latent"}
    pipe(**options, latents=tiny.pack_latents(batch.latents))
    times = torch.full((2,), float(pipe.scheduler.timesteps[0]))

    predicted, sound = family.predict_with_sound(
        pipe, ForwardOnlyWrapper(pipe.transformer), batch.latents, times, batch
    )

    theirs, ours = record.calls[0], record.calls[-1]
    assert theirs["audio_num_frames"] == ours["audio_num_frames"] == batch.noisy_sound.shape[1]
    assert not ours["isolate_modalities"] and ours["use_cross_timestep"] == theirs["use_cross_timestep"]
    for key in ("hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(record.outputs[-1], record.outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sound, sounds[0], rtol=1e-5, atol=1e-5)
    assert predicted.shape == batch.latents.shape
    changed, _ = family.predict_with_sound(
        pipe, pipe.transformer, batch.latents, times, replace(batch, noisy_sound=batch.noisy_sound + 1)
    )
    assert not torch.allclose(changed, predicted, atol=1e-4), "pictures attend to sound"


@pytest.mark.parametrize("name", ["ltx2", "ltx2_2_3"])
def test_clips_with_sound_give_all_layers_a_gradient_and_others_none_to_those_of_sound(name, build_case):
    family, tiny, batch = build_sound_case(build_case, name)
    denoiser, plain = tiny.pipe.transformer.requires_grad_(True), build_case(name)[0]
    times = torch.tensor([700.0, 250.0])
    both = family.predict_with_sound(tiny.pipe, denoiser, batch.latents, times, batch)
    (both[0].square().sum() + both[1].square().sum()).backward()
    idle = {each for each, weight in denoiser.named_parameters() if weight.grad is None}
    assert not idle and {*list_trained_names(RunConfig().adapter, family, "transformer", denoiser)} == {
        each for each, _ in denoiser.named_parameters()
    }
    denoiser.zero_grad(set_to_none=True)
    silent = replace(batch, noisy_sound=None)
    predicted, sound = family.predict_with_sound(tiny.pipe, denoiser, batch.latents, times, silent)
    assert sound is None
    assert torch.equal(predicted, plain.predict(tiny.pipe, denoiser, batch.latents, times, silent))
    predicted.square().sum().backward()
    layers = {each for each, layer in denoiser.named_modules() if isinstance(layer, nn.Linear)}
    trained = {each.removesuffix(".weight") for each, weight in denoiser.named_parameters() if weight.grad is not None}
    assert layers - trained == layers & {*plain.get_unused_layers(denoiser)}


@torch.no_grad()
def test_sound_is_encoded_to_the_latents_that_the_pipeline_counts_and_undone_by_it(build_case):
    family, tiny, batch = build_sound_case(build_case, "ltx2")
    pipe, rate = tiny.pipe, 16000
    generator = torch.Generator().manual_seed(2)
    samples = 0.1 * torch.randn(2, round((2 + NUM_FRAMES / 24) * rate), generator=generator)
    latents = family.encode_sound(pipe, samples, rate, NUM_FRAMES)
    assert latents.shape == batch.noisy_sound.shape[1:]
    # A longer window begins with the same latents but for the mirrored end of its spectrogram: the VAE is causal.
    longer = encode_sound_latents(pipe.audio_vae, samples[:, rate:], len(latents) + 3)
    torch.testing.assert_close(longer[: len(latents) - 2], latents[:-2], rtol=1e-4, atol=1e-4)
    denormalized = pipe._denormalize_audio_latents(latents, pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std)
    unpacked = pipe._unpack_audio_latents(denormalized[None], len(latents), 16)
    torch.testing.assert_close(pipe._pack_audio_latents(unpacked)[0], denormalized)
    decoded = pipe.audio_vae.decode(unpacked).sample
    assert decoded.shape == (1, 2, 4 * len(latents) - 3, 64)


@torch.no_grad()
def test_a_preview_has_the_sound_of_the_pipeline(build_case):
    family, tiny, _ = build_sound_case(build_case, "ltx2")
    pipe = tiny.pipe
    cond = family.encode_prompts(pipe, ["a red circle"])
    negative = family.encode_prompts(pipe, ["blue"])
    prompt = Prompt("a", height=HEIGHT, width=WIDTH, num_inference_steps=2, cfg_scale=3.0, num_frames=9)
    generator = torch.Generator().manual_seed(1)
    frames, sound = family.generate_clip(pipe, prompt, cond, negative, generator, None)
    # The tiny transformer cannot leave out attention, which the previews then do without.
    options = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "guidance_scale": 3.0, "num_inference_steps": 2}
    theirs = pipe(
        "a red circle",
        negative_prompt="blue",
        **{"height": HEIGHT, "width": WIDTH, "num_frames": 9, "output_type": "np", **options},
        generator=torch.Generator().manual_seed(1),
    )
    assert len(frames) == 9 and sound.rate == pipe.vocoder.config.output_sampling_rate
    np.testing.assert_allclose(sound.samples, theirs.audio[0].numpy(), rtol=1e-3, atol=1e-4)
    ours = np.stack([np.asarray(frame) for frame in frames]) / 255
    np.testing.assert_allclose(ours, theirs.frames[0], atol=1 / 255 + 1e-4)


def test_the_option_chooses_the_family_and_the_layers_of_sound():
    for from_image in (False, True):
        options = ModelConfig("random:ltx2:tiny", image_to_video=from_image)
        plain, heard = detect_model(options).family, detect_model(replace(options, train_audio=True)).family
        assert heard == SOUND_FAMILIES[plain]
        targets = {*FAMILIES.get(heard).facts.lora.targets}
        assert targets > {*FAMILIES.get(plain).facts.lora.targets}
        assert {"audio_ff.net.2", "audio_to_video_attn.to_k", "video_to_audio_attn.to_out.0"} <= targets


def test_estimates_of_memory_count_the_latents_of_sound():
    steps = []
    for heard in (False, True):
        model = ModelConfig("random:ltx2:tiny", train_audio=True)
        config = replace(RunConfig(), model=model)
        cached = {"cache_latents": True, "cache_text_encoder_outputs": True}
        config = replace(config, cache=replace(config.cache, **cached))
        batch = LargestBatch((96, 64), ("a clip",), num_frames=NUM_FRAMES, has_sound=heard)
        steps.append(MetaRun(config, detect_model(model), batch).step.total)
    silent, heard = steps
    assert heard.flops > 1.1 * silent.flops and heard.saved > silent.saved
