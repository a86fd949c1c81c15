"""Wan Fun-Control: the input of its transformer is that of the code of its authors, which diffusers has no pipeline of."""

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
NAMES = [
    f"{name}{end}"
    for name in ("wan_fun_control", "wan_fun_control11", "wan22_fun_control")
    for end in ("", "_from_image")
]


def encode(pipe, clips):
    """The normalized mean of the latents of clips."""
    config = pipe.vae.config
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (pipe.vae.encode(clips).latent_dist.mode() - mean) / std


def predict_as_the_authors(transformer, noisy, condition, picture, times, texts, seen):
    """Predict with the code of the authors for their channels, and for a picture, whose tokens are the first ones."""
    weights = transformer.state_dict()
    stride, (count, _, frames, height, width) = transformer.config.patch_size, noisy.shape
    latents = torch.cat([noisy, condition], dim=1)
    weight, bias = weights["patch_embedding.weight"], weights["patch_embedding.bias"]
    tokens = torch.nn.functional.conv3d(latents, weight, bias, stride).flatten(2).transpose(1, 2)
    num_first = 0
    if picture is not None:
        weight, bias = weights["patch_embedding.ref_conv.weight"], weights["patch_embedding.ref_conv.bias"]
        first = torch.nn.functional.conv2d(picture, weight, bias, stride[1:]).flatten(2).transpose(1, 2)
        num_first, tokens = first.shape[1], torch.cat([first, tokens], dim=1)
    places = transformer.rope(noisy.new_empty(1, 1, frames + (picture is not None), height, width))
    time, modulation, text, image = transformer.condition_embedder(times, texts, seen)
    text = text if image is None else torch.cat([image, text], dim=1)
    for block in transformer.blocks:
        tokens = block(tokens, text, modulation.unflatten(1, (6, -1)), places)
    shift, scale = (transformer.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
    tokens = transformer.proj_out(transformer.norm_out(tokens) * (1 + scale) + shift)[:, num_first:]
    patches = tokens.reshape(count, frames, height // 2, width // 2, 2, 2, -1)
    return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def build_condition(name, pipe, clips, control):
    """Build the channels behind the noisy latents, and what CLIP sees, as the code of the authors."""
    has_frame, config = name.endswith("_from_image"), pipe.transformer.config
    seen = None if config.image_dim is None else torch.zeros(2, CLIP_TOKENS, config.image_dim)
    given = torch.zeros_like(control)
    if name.startswith("wan22"):
        mask = torch.zeros(2, 4, *control.shape[2:])
        if has_frame:
            grey = clips.clone()
            grey[:, :, 1:] = 0
            given, mask[:, :, 0] = encode(pipe, grey), 1
        return torch.cat([control, mask, given], dim=1), None
    if has_frame:
        given[:, :, :1] = encode(pipe, clips[:, :, :1])
        pipe.has_first_frame = True
        images = [pipe.video_processor.postprocess(clip[None, :, 0])[0] for clip in clips]
        seen = torch.cat([pipe.encode_image(image) for image in images])
    return torch.cat([control, given], dim=1), seen


@pytest.mark.slow
@pytest.mark.parametrize("has_picture", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_transformer_gets_what_it_gets_in_the_code_of_the_authors(name, has_picture, build_case):
    family, tiny = build_case(name)
    pipe, generator = tiny.pipe, torch.Generator().manual_seed(4)
    takes_picture = family.facts.control.num_images[1] == 2
    if has_picture and not takes_picture:
        pytest.skip("the model takes no picture")
    clips, controls, pictures = torch.rand(3, 2, 3, NUM_FRAMES, HEIGHT, WIDTH, generator=generator) * 2 - 1
    moments = family.encode_moments(pipe, clips)
    batch = replace(
        tiny.batch,
        control_latents=family.encode_controls(pipe, [controls, pictures][: 1 + has_picture], clips),
        frame_cond=family.encode_frame_cond(pipe, clips, moments),
    )
    noisy, times = torch.randn(moments.mean_and_std[:, 0].shape, generator=generator), torch.tensor([700.0, 200.0])
    ours = family.predict(pipe, pipe.transformer, noisy, times, batch)

    control = encode(pipe, controls)
    condition, seen = build_condition(name, pipe, clips, control)
    picture = encode(pipe, pictures[:, :, :1])[:, :, 0] if has_picture else torch.zeros_like(noisy)[:, :, 0]
    texts = torch.zeros(2, 512, pipe.transformer.config.text_dim)
    for row, text in enumerate(batch.cond["embeds"]):
        texts[row, : len(text)] = text
    model = getattr(pipe.transformer, "high_noise", pipe.transformer)
    theirs = predict_as_the_authors(model, noisy, condition, picture if takes_picture else None, times, texts, seen)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for number in range(1 + has_picture):
        changed = [each + (each is batch.control_latents[number]) for each in batch.control_latents]
        other = family.predict(pipe, pipe.transformer, noisy, times, replace(batch, control_latents=tuple(changed)))
        assert not torch.allclose(other, ours, atol=1e-3)


def test_the_task_of_musubi_tuner_says_whether_the_first_frame_is_given():
    common = "--dit random:wan_fun_control --network_module networks.lora_wan --dataset_config set.toml --task"
    for task, is_given in (("t2v-1.3B-FC", False), ("i2v-14B-FC", True)):
        model = "random:wan_fun_control:14b" if "14B" in task else "random:wan_fun_control"
        parsed = parse_config([*common.replace("random:wan_fun_control", model).split(), task])
        assert parsed.config.model.image_to_video is is_given
        family = IMAGE_TO_VIDEO_FAMILIES["wan_fun_control"] if is_given else "wan_fun_control"
        assert detect_model(replace(parsed.config.model, family=None)).family == family
        assert detect_model(ModelConfig(model)).family == "wan_fun_control"
