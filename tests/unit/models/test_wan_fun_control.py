"""Wan 2.1 Fun-Control: the input of its transformer is that of the code of its authors, which diffusers has no pipeline of."""

from dataclasses import replace

import pytest
import torch
from family_cases import build_case
from tiny_pipelines import HEIGHT, WIDTH

from library.config import parse_config
from library.config.schema import ModelConfig
from library.models.detect import detect_model
from library.models.families import IMAGE_TO_VIDEO_FAMILIES

__all__ = ["build_case"]  # a fixture
NUM_FRAMES, CLIP_TOKENS = 5, 257


def encode(pipe, clips):
    """The normalized mean of the latents of clips."""
    config = pipe.vae.config
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (pipe.vae.encode(clips).latent_dist.mode() - mean) / std


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan_fun_control", "wan_fun_control_from_image"])
@torch.no_grad()
def test_the_transformer_gets_the_control_the_first_frame_and_what_clip_sees_in_it(name, build_case):
    family, tiny = build_case(name)
    pipe, generator = tiny.pipe, torch.Generator().manual_seed(4)
    clips, controls = torch.rand(2, 2, 3, NUM_FRAMES, HEIGHT, WIDTH, generator=generator) * 2 - 1
    moments = family.encode_moments(pipe, clips)
    batch = replace(
        tiny.batch,
        control_latents=family.encode_controls(pipe, [controls], clips),
        frame_cond=family.encode_frame_cond(pipe, clips, moments),
    )
    noisy, times = torch.randn(moments.mean_and_std[:, 0].shape, generator=generator), torch.tensor([700.0, 200.0])
    ours = family.predict(pipe, pipe.transformer, noisy, times, batch)

    given, seen = torch.zeros_like(noisy), torch.zeros(2, CLIP_TOKENS, pipe.transformer.config.image_dim)
    if name.endswith("_from_image"):
        given[:, :, :1] = encode(pipe, clips[:, :, :1])
        pipe.has_first_frame = True
        images = [pipe.video_processor.postprocess(clip[None, :, 0])[0] for clip in clips]
        seen = torch.cat([pipe.encode_image(image) for image in images])
    texts = torch.zeros(2, 512, pipe.transformer.config.text_dim)
    for row, text in enumerate(batch.cond["embeds"]):
        texts[row, : len(text)] = text
    theirs = pipe.transformer(
        torch.cat([noisy, encode(pipe, controls), given], dim=1), times, texts, seen, return_dict=False
    )[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    other = replace(batch, control_latents=(batch.control_latents[0] + 1,))
    assert not torch.allclose(family.predict(pipe, pipe.transformer, noisy, times, other), ours, atol=1e-3)


def test_the_task_of_musubi_tuner_says_whether_the_first_frame_is_given():
    common = "--dit random:wan_fun_control --network_module networks.lora_wan --dataset_config set.toml --task"
    for task, is_given in (("t2v-1.3B-FC", False), ("i2v-14B-FC", True)):
        model = "random:wan_fun_control:14b" if "14B" in task else "random:wan_fun_control"
        parsed = parse_config([*common.replace("random:wan_fun_control", model).split(), task])
        assert parsed.config.model.image_to_video is is_given
        family = IMAGE_TO_VIDEO_FAMILIES["wan_fun_control"] if is_given else "wan_fun_control"
        assert detect_model(replace(parsed.config.model, family=None)).family == family
        assert detect_model(ModelConfig(model)).family == "wan_fun_control"
