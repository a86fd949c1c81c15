"""MiniMax H3 in batches, with sound and with guidance, compared with diffusers' pipeline; and its numbers of frames."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    align_num_frames,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from family_cases import Recorder, build_case
from tiny_pipelines import HEIGHT, WIDTH

from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.models.detect import detect_model
from library.models.families import FAMILIES, SOUND_FAMILIES
from library.models.families.minimax_h3 import FACTS, _pack_sound
from library.tools.family_check.cases import slice_rows

__all__ = ["build_case"]  # a fixture
SIZE = {"height": HEIGHT, "width": WIDTH}
NUM_FRAMES, NUM_SOUNDS = 22, 37
TIMES = torch.tensor([700.0, 250.0])


def build_sound_case(build_case):
    """The family with sound, its tiny pipeline with an autoencoder of sound, and a batch of clips with sound."""
    family = FAMILIES.get(SOUND_FAMILIES["minimax_h3"])()
    _, tiny = build_case("minimax_h3")
    model = detect_model(ModelConfig(tiny.source, train_audio=True))
    tiny.pipe.update_components(audio_vae=family.load(model, torch.float32, ["audio_vae"]).audio_vae)
    sound = torch.randn(2, NUM_SOUNDS, 64, generator=torch.Generator().manual_seed(4))
    return family, tiny, replace(tiny.batch, noisy_sound=sound)


def test_clips_have_the_frames_and_latents_that_the_pipeline_counts():
    rule = replace(FACTS.pipeline.frames, sound_rate=40.0)
    for length in range(22, 200):
        up = align_num_frames(length, 17, 5)
        assert rule.round_up(length) == up and rule.round_down(length) == (up if up == length else up - 17)
        assert rule.count_latent_frames(up) == video_latent_num_frames(up, 17, 5)
        assert rule.count_sound_latents(up) == audio_latent_num_frames(up)
    assert [rule.round_down(length) for length in (1, 5, 21)] == [1, 1, 1]
    assert (rule.round_up(2), rule.count_latent_frames(1), rule.describe_lengths()) == (22, 1, "17 x N + 5")


@pytest.mark.slow
@torch.no_grad()
def test_pictures_and_sound_are_predicted_as_in_the_pipeline_at_noise_levels_of_their_own(build_case):
    family, tiny, _ = build_sound_case(build_case)
    pipe, embeds = tiny.pipe, tiny.call["prompt_embeds"]
    record, sounds = Recorder(pipe.transformer), []
    pipe.transformer.register_forward_hook(lambda module, args, output: sounds.append(output[1]))
    generator = torch.Generator().manual_seed(1)
    pipe(prompt_embeds=embeds, num_frames=NUM_FRAMES, **SIZE, num_inference_steps=4, generator=generator)
    theirs = record.calls[1]
    levels = theirs["timestep"].tolist()
    assert len(levels) == 2 and 0 < levels[0] < levels[1] < 1

    grid = theirs["hidden_states"].view(1, 7, HEIGHT // 16, WIDTH // 16, 4, 1, 2, 2)
    latents = grid.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(1, 4, 7, HEIGHT // 8, WIDTH // 8)
    left, right = theirs["audio_hidden_states"].chunk(2, dim=1)
    batch = replace(slice_rows(tiny.batch, slice(1)), noisy_sound=torch.cat([left, right], dim=2))
    times = torch.full((1,), 1000 - 1000 * levels[0])
    predicted, sound = family.predict_with_sound(pipe, pipe.transformer, latents, times, batch)

    ours = record.calls[-1]
    torch.testing.assert_close(ours["timestep"].sort().values, theirs["timestep"][None], rtol=1e-6, atol=1e-6)
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states", "token_tags", "text_indices"):
        assert torch.equal(ours[name], theirs[name]), name
    torch.testing.assert_close(record.outputs[-1], record.outputs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(sounds[1].chunk(2, dim=1), dim=2), -sound, rtol=1e-5, atol=1e-5)
    assert predicted.shape == latents.shape


@pytest.mark.slow
def test_samples_of_a_batch_have_their_own_texts_noise_levels_and_gradients(build_case):
    """Two forwards, of which the first has padded texts and both are recomputed, are those of each sample alone."""
    family, tiny, batch = build_sound_case(build_case)
    denoiser = tiny.pipe.transformer.requires_grad_(True).train()

    def compute_loss(rows, sound):
        part = replace(slice_rows(batch, rows), noisy_sound=sound[rows] if sound is not None else None)
        frames, heard = family.predict_with_sound(tiny.pipe, denoiser, part.latents, TIMES[rows], part)
        weights = 1 + torch.arange(len(TIMES))[rows].view(-1, 1)
        loss = (frames.square().flatten(1).mean(1, keepdim=True) * weights).sum()
        return loss if heard is None else loss + (heard.square().flatten(1).mean(1, keepdim=True) * weights).sum()

    def collect_gradients(losses):
        denoiser.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        return {name: weight.grad.clone() for name, weight in denoiser.named_parameters()}

    alone = [compute_loss(slice(row, row + 1), sound) for sound in (batch.noisy_sound, None) for row in (0, 1)]
    expected = collect_gradients(alone)
    denoiser.enable_gradient_checkpointing()
    found = collect_gradients([compute_loss(slice(2), batch.noisy_sound), compute_loss(slice(2), None)])
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_guidance_goes_from_the_prediction_for_the_negative_prompt_through_that_for_the_prompt(build_case):
    """One step from pure noise is linear in the prediction."""
    _, tiny, _ = build_sound_case(build_case)

    def sample(prompt, **options):
        options |= {"num_frames": NUM_FRAMES, **SIZE, "num_inference_steps": 2, "output_type": "latent"}
        return vars(tiny.pipe(prompt, generator=torch.Generator().manual_seed(1), **options))

    positive, negative = sample("a red circle"), sample("blue, which is longer")
    guided = sample("a red circle", negative_prompt="blue, which is longer", guidance_scale=3.0)
    for name in ("frames", "audio"):
        expected = negative[name] + 3 * (positive[name] - negative[name])
        assert not torch.allclose(positive[name], negative[name], atol=1e-3)
        torch.testing.assert_close(guided[name], expected, rtol=1e-4, atol=1e-4)
    again = sample("a red circle")
    assert torch.equal(again["frames"], positive["frames"])


@pytest.mark.slow
@torch.no_grad()
def test_sound_is_encoded_by_channel_and_decoded_as_by_the_pipeline(build_case):
    family, tiny, _ = build_sound_case(build_case)
    vae, rate = tiny.pipe.audio_vae, 32000
    samples = 0.1 * torch.randn(2, 3 * rate, generator=torch.Generator().manual_seed(2))
    latents = family.encode_sound(tiny.pipe, samples, rate, NUM_FRAMES)
    assert latents.shape == (NUM_SOUNDS, 64)
    window = samples[:, rate : rate + 800 * NUM_SOUNDS]
    mean, std = (torch.tensor(each) for each in (vae.config.latents_mean, vae.config.latents_std))
    for number, channel in enumerate(window):
        encoded = (vae.encode(channel.view(1, 1, -1)).latent_dist.mode()[0].T - mean) / std
        torch.testing.assert_close(latents[:, 32 * number : 32 * (number + 1)], encoded, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(_pack_sound(latents[None])[0].chunk(2)[number], encoded, rtol=1e-4, atol=1e-5)

    prompt = Prompt("a", **SIZE, num_inference_steps=3, num_frames=NUM_FRAMES)
    cond, negative = (family.encode_prompts(tiny.pipe, [text]) for text in ("a red circle", ""))
    frames, sound = family.generate_clip(tiny.pipe, prompt, cond, negative, torch.Generator().manual_seed(1), None)
    options = {"num_frames": NUM_FRAMES, **SIZE, "num_inference_steps": 3, "output_type": "np"}
    theirs = tiny.pipe("a red circle", generator=torch.Generator().manual_seed(1), **options)
    assert (len(frames), sound.rate) == (NUM_FRAMES, rate)
    np.testing.assert_allclose(sound.samples, theirs.audio[0].numpy(), rtol=1e-4, atol=1e-5)
    image, silence = family.generate_clip(
        tiny.pipe, replace(prompt, num_frames=None), cond, negative, torch.Generator().manual_seed(1), None
    )
    assert silence is None and [each.tobytes() for each in image] == [frames[0].tobytes()]
