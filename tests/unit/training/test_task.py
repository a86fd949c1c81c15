"""The diffusion task: loss, masks, noise and dropout of one batch, on a tiny Stable Diffusion 1."""

from dataclasses import replace
from inspect import signature

import pytest
import torch
from tiny_pipelines import TINY
from training_task import HEIGHT, WIDTH, make_pixel_batch, task

from library.adapters.lora_dropout import LoraDropout
from library.config.schema_objective import LossConfig, NoiseConfig
from library.models.families import FAMILIES
from library.models.text_encoding import EncodedCaptions
from library.parallel.async_copy import CopyStream
from library.training.setup import build_objective
from library.training.task import DiffusionTask

__all__ = ["task"]  # a fixture


def test_the_loss_of_a_sample_is_its_mean_times_timestep_weight_times_sample_weight(task):
    losses = task(make_pixel_batch((0, 1, 2), [1.0, 0.25, 0.0]), step=5)
    generators = [
        torch.Generator().manual_seed(generator.initial_seed())
        for generator in task.build_generators("noise", 5, (0, 1, 2))
    ]
    for row, generator in enumerate(generators):
        t = torch.randint(0, 1000, (1,), generator=generator)
        noise = torch.randn(4, HEIGHT // 8, WIDTH // 8, generator=generator)
        a = task.objective.process.alphas_cumprod[t].item()
        weight = min(a / (1 - a), 2.0) / (a / (1 - a))
        assert task.denoiser.t[row] == t
        assert losses[row].item() == pytest.approx(noise.abs().mean().item() * weight * (1.0, 0.25, 0.0)[row])


def test_masked_pixels_have_no_loss_and_the_mean_is_over_all_pixels(task):
    mask = torch.full((2, 1, HEIGHT, WIDTH), 255, dtype=torch.uint8)
    mask[0, :, :, :32] = 0
    mask[1, :, :, :] = 51
    plain, masked = (task(make_pixel_batch((0, 1), [1.0, 1.0], batch_mask), step=0) for batch_mask in (None, mask))
    assert masked[1].item() == pytest.approx(plain[1].item() / 5)
    assert 0.1 * plain[0] < masked[0] < 0.6 * plain[0]


def test_micro_batch_stats_are_those_of_the_latest_step(task):
    for step in (0, 1):
        losses = [
            task(make_pixel_batch(positions, weights), step)
            for positions, weights in (((0, 1), [1.0, 0.5]), ((2,), [0.0]))
        ]
    first, second = task.micro_batch_stats
    assert first.sample_keys == ("picture 0", "picture 1") and second.sample_keys == ("picture 2",)
    assert second.loss_weights.tolist() == [0.0]
    torch.testing.assert_close(first.losses * first.loss_weights, losses[0].detach())
    assert losses[0].requires_grad and not first.losses.requires_grad and second.losses.item() > 0
    assert torch.equal(second.noise_fractions, task.denoiser.t / 1000)
    assert all(0 <= t < 1 for stats in task.micro_batch_stats for t in stats.noise_fractions)


def test_timestep_buckets_are_counted_over_the_run_however_a_step_is_split(task):
    objective = replace(task.objective, noise_config=NoiseConfig(num_timestep_buckets=4))
    task = replace(task, objective=objective, samples_per_step=2)
    timesteps = []
    for step in range(4):
        for positions in ((0, 1),) if step % 2 else ((0,), (1,)):
            task(make_pixel_batch(positions, [1.0] * len(positions)), step)
            timesteps += task.denoiser.t.tolist()
    buckets = [int(t // 250) for t in timesteps]
    assert sorted(buckets[:4]) == sorted(buckets[4:]) == [0, 1, 2, 3]
    assert len({t % 250 for t in timesteps}) > 4, "at random levels within them"


def test_noise_depends_on_step_and_position_and_not_on_the_batch(task):
    batched = task(make_pixel_batch((3, 4), [1.0, 1.0]), step=1)
    single = [task(make_pixel_batch((position,), [1.0]), step=1) for position in (3, 4)]
    torch.testing.assert_close(batched, torch.cat(single))
    assert not torch.isclose(task(make_pixel_batch((3,), [1.0]), step=2), single[0])


def test_lora_dropout_is_a_function_of_step_and_position(task):
    task.dropout = LoraDropout(0.5, 0, 0)
    task(make_pixel_batch((0, 1, 2), [1.0, 1.0, 1.0]), step=5)
    sample_keys = task.dropout.sample_keys
    assert len(set(sample_keys.tolist())) == 3
    task(make_pixel_batch((2,), [1.0]), step=5)
    assert task.dropout.sample_keys.tolist() == sample_keys[2:].tolist()
    task(make_pixel_batch((2,), [1.0]), step=6)
    assert task.dropout.sample_keys.tolist() != sample_keys[2:].tolist()


@torch.no_grad()
def test_frozen_encoders_encode_a_caption_once_as_long_as_there_is_room(task, monkeypatch):
    family, encoded = task.family, []
    encode = family.encode_prompts
    monkeypatch.setattr(family, "encode_prompts", lambda pipe, texts: (encoded.extend(texts), encode(pipe, texts))[1])
    expected = {caption: encode(task.pipe, [caption])["embeds"] for caption in ("a", "b")}
    size = expected["a"].nbytes
    task = replace(task, encoded_captions=EncodedCaptions(max_bytes=size))
    for captions in (["a", "b"], ["b", "a"], ["a"]):
        embeds = task.encode_text(captions)["embeds"]
        assert torch.equal(embeds, torch.cat([expected[caption] for caption in captions]))
        embeds.zero_()  # what is kept does not change with it
    assert encoded == ["a", "b", "b"], "there is room for one"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(task.encode_text(["a"])["embeds"], encode(task.pipe, ["a"])["embeds"])
    trained = replace(task, trains_text_encoders=True)
    encoded.clear()
    trained.encode_text(["a", "a"])
    assert len(encoded) == 2


@torch.no_grad()
def test_negative_prompts_are_encoded_as_such_without_a_cache():
    family, pipe = FAMILIES.get("sana")(), TINY["sana"]().pipe
    objective = build_objective(NoiseConfig(), LossConfig(), family, pipe)
    task = DiffusionTask(family, pipe, pipe.transformer, objective, 7, CopyStream(torch.device("cpu")))
    caption, negative = (task.encode_text(["blue"], is_negative=each)["embeds"][0] for each in (False, True))
    assert torch.equal(caption, family.encode_prompts(pipe, ["blue"])["embeds"][0])
    assert torch.equal(negative, family.encode_negative_prompts(pipe, ["blue"])["embeds"][0])
    assert caption.shape != negative.shape


CAPTIONS = ["a", "a lorikeet", "a lorikeet on a branch", " ".join(["a lorikeet on a branch"] * 20)]


@pytest.mark.parametrize("pads_texts", [False, True])
@pytest.mark.parametrize("name", ["z_image", "qwen_image"])
def test_padded_text_embeddings_give_blocks_equal_shapes(name, pads_texts):
    family, pipe, block_shapes = FAMILIES.get(name)(), TINY[name]().pipe, []
    denoiser = getattr(pipe, family.facts.denoiser_name)
    objective = build_objective(NoiseConfig(), LossConfig(), family, pipe)
    task = DiffusionTask(family, pipe, denoiser, objective, 7, CopyStream(torch.device("cpu")), pads_texts=pads_texts)
    first_block = denoiser.get_submodule(family.facts.blocks.lists[0])[0]
    forward_signature = signature(first_block.forward)

    def record_shapes(_, args, kwargs):
        arguments = forward_signature.bind(*args, **kwargs).arguments
        block_shapes.append(tuple(arguments[name].shape for name in family.facts.blocks.activation_args))

    first_block.register_forward_pre_hook(record_shapes, with_kwargs=True)
    losses, shape_keys = {}, []
    for captions in zip(CAPTIONS):
        batch = replace(make_pixel_batch((0,), [1.0]), captions=captions)
        with torch.no_grad():
            losses[captions] = task(batch, 0)
            cached = {name: [text.detach() for text in texts] for name, texts in task.encode_text(captions).items()}
        shape_keys.append(task.get_shape_key(batch))
        assert shape_keys[-1] == task.get_shape_key(replace(batch, cond=cached)), (
            "cached text embeddings have the length of encoded ones"
        )

    assert [[one == other for other in shape_keys] for one in shape_keys] == [
        [one == other for other in block_shapes] for one in block_shapes
    ]
    assert (len(set(shape_keys)) < len(CAPTIONS)) == (pads_texts or name == "z_image")
    plain = replace(task, pads_texts=False)
    for captions, loss in losses.items():
        with torch.no_grad():
            assert loss == pytest.approx(plain(replace(make_pixel_batch((0,), [1.0]), captions=captions), 0), rel=1e-4)
