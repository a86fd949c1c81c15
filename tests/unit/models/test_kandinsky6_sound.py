"""Kandinsky 6 with sound: the call and the latents of diffusers' pipeline, the layers that are trained, previews."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_cases import ForwardOnlyWrapper, Recorder, build_case
from tiny_pipelines import HEIGHT, WIDTH
from torch import nn

from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.models.detect import detect_model
from library.models.families import FAMILIES, SOUND_FAMILIES
from library.models.sound import resample

__all__ = ["build_case"]  # a fixture
pytestmark = pytest.mark.slow
NUM_FRAMES = 5
CASES = ("kandinsky6_video", "kandinsky6_video_from_image")


def build_sound_case(build_case, name):
    """The family with sound, its tiny case with all that makes sound, and a batch of clips with sound."""
    _, tiny = build_case(name)
    family = FAMILIES.get(SOUND_FAMILIES[tiny.family])()
    family.load("random:kandinsky6_video:tiny", torch.float32, ("audio_vae", "vocoder"), pipe=tiny.pipe)
    count = family.facts.pipeline.frames.count_sound_latents(NUM_FRAMES)
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, 4, 2, HEIGHT // 8, WIDTH // 8, generator=generator)
    sound = torch.randn(2, count, 40, generator=generator)
    return family, tiny, replace(tiny.batch, latents=latents, noisy_sound=sound)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_frames_and_sound_are_predicted_as_in_the_pipeline(name, build_case):
    family, tiny, batch = build_sound_case(build_case, name)
    pipe, sounds = tiny.pipe, []
    record = Recorder(pipe.transformer)
    pipe.transformer.register_forward_hook(lambda module, args, output: sounds.append(output[1]))
    options = {**tiny.call, "num_frames": NUM_FRAMES, "height": HEIGHT, "width": WIDTH, "sample_audio": True}
    options |= {"guidance_scale": 1.0, "num_inference_steps": 2, "output_type": "latent"}
    pipe(**options, latents=batch.latents, audio_latents=batch.noisy_sound.transpose(1, 2))
    times = torch.full((2,), float(pipe.scheduler.timesteps[0]))

    predicted, sound = family.predict_with_sound(
        pipe, ForwardOnlyWrapper(pipe.transformer), batch.latents, times, batch
    )

    for key in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        torch.testing.assert_close(record.calls[-1][key], record.calls[0][key], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(record.outputs[-1], record.outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sound, sounds[0], rtol=1e-5, atol=1e-5)
    assert predicted.shape == batch.latents.shape and sound.shape == batch.noisy_sound.shape
    other = replace(batch, noisy_sound=batch.noisy_sound + 1)
    changed, _ = family.predict_with_sound(pipe, pipe.transformer, batch.latents, times, other)
    assert not torch.allclose(changed, predicted, atol=1e-4), "frames attend to sound"


def test_clips_with_sound_give_all_layers_a_gradient_and_others_none_to_those_of_sound(build_case):
    family, tiny, batch = build_sound_case(build_case, "kandinsky6_video")
    denoiser, plain = tiny.pipe.transformer.requires_grad_(True), build_case("kandinsky6_video")[0]
    layers = {each for each, layer in denoiser.named_modules() if isinstance(layer, nn.Linear)}
    times = torch.tensor([700.0, 250.0])
    both = family.predict_with_sound(tiny.pipe, denoiser, batch.latents, times, batch)
    (both[0].square().sum() + both[1].square().sum()).backward()
    assert all(denoiser.get_submodule(layer).weight.grad is not None for layer in layers)
    assert family.get_unused_layers(denoiser) == ("visual_token_type_embeddings",)
    denoiser.zero_grad(set_to_none=True)
    silent = replace(batch, noisy_sound=None)
    predicted, sound = family.predict_with_sound(tiny.pipe, denoiser, batch.latents, times, silent)
    assert sound is None
    assert torch.equal(predicted, plain.predict(tiny.pipe, denoiser, batch.latents, times, silent))
    predicted.square().sum().backward()
    idle = {layer for layer in layers if denoiser.get_submodule(layer).weight.grad is None}
    assert idle == layers & {*plain.get_unused_layers(denoiser)}


@torch.no_grad()
def test_sound_is_encoded_by_diffusers_autoencoder_to_the_latents_that_the_pipeline_counts(build_case):
    family, tiny, _ = build_sound_case(build_case, "kandinsky6_video")
    vae, rate, num_frames = tiny.pipe.audio_vae, 48000, 17
    samples = 0.1 * torch.randn(2, round((2 + num_frames / 24) * rate), generator=torch.Generator().manual_seed(2))
    latents = family.encode_sound(tiny.pipe, samples, rate, num_frames)
    options = {"prompt": "a", "num_frames": num_frames, "height": 16, "width": 16, "num_inference_steps": 1}
    sampled = tiny.pipe(**options, guidance_scale=1.0, output_type="latent").audio
    assert latents.shape == sampled[0].T.shape
    own = resample(samples, rate, 44100)[:, 44100 : 44100 + len(latents) * 1024].mean(0, keepdim=True)
    theirs = vae.encode(own).latent_dist.mode()[0].T * vae.config.scaling_factor
    torch.testing.assert_close(latents, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(latents, family.encode_sound(tiny.pipe, samples.flip(1), rate, num_frames), atol=1e-3)


@torch.no_grad()
def test_a_preview_has_the_sound_of_the_pipeline(build_case):
    family, tiny, _ = build_sound_case(build_case, "kandinsky6_video")
    pipe = tiny.pipe
    cond, negative = family.encode_prompts(pipe, ["a red circle"]), family.encode_prompts(pipe, ["blue"])
    prompt = Prompt("a", height=HEIGHT, width=WIDTH, num_inference_steps=2, cfg_scale=3.0, num_frames=NUM_FRAMES)
    frames, sound = family.generate_clip(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), None)
    theirs = pipe(
        "a red circle",
        negative_prompt="blue",
        **{"height": HEIGHT, "width": WIDTH, "num_frames": NUM_FRAMES, "output_type": "np", "guidance_scale": 3.0},
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
    )
    assert len(frames) == NUM_FRAMES and sound.rate == 44100
    np.testing.assert_allclose(sound.samples, np.stack([theirs.audio[0]] * 2), rtol=1e-3, atol=1e-4)
    ours = np.stack([np.asarray(frame) for frame in frames]) / 255
    np.testing.assert_allclose(ours, theirs.frames[0], atol=1 / 255 + 1e-4)


def test_the_options_choose_the_family_and_the_layers_of_sound():
    for from_image in (False, True):
        options = ModelConfig("random:kandinsky6_video:tiny", image_to_video=from_image)
        plain, heard = detect_model(options).family, detect_model(replace(options, train_audio=True)).family
        assert heard == SOUND_FAMILIES[plain]
        targets = {*FAMILIES.get(heard).facts.lora.targets} - {*FAMILIES.get(plain).facts.lora.targets}
        assert {"va_cross_attention.to_query", "av_cross_attention.out_layer"} <= targets
