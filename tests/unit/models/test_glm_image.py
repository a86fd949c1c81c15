"""GLM-Image: image tokens are those of the model's own tokenizer; an empty caption has none."""

from dataclasses import replace

import pytest
import torch
from family_cases import build_case
from PIL import Image
from tiny_pipelines import tokenize_by_processor
from transformers import GlmImageConfig, GlmImageForConditionalGeneration
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from library.dataloader.batch import Moments
from library.models.families.glm_image import build_prior_tokenizer_class
from library.models.model_configs import load_bundled_config
from library.models.weights import build_random_component

__all__ = ["build_case"]  # a fixture
CONFIG = load_bundled_config("glm_image_tiny")["vision_language_encoder/config.json"]


def make_picture(size):
    gradient = Image.linear_gradient("L").rotate(30).resize(size)
    return Image.merge("RGB", [gradient, gradient.rotate(180), gradient.rotate(90)])


def as_pixels(image):
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, image.height, image.width, 3)
    return values.permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.mark.slow
@torch.no_grad()
def test_tokens_of_a_picture_are_those_that_the_language_model_reads_of_it(build_case, tmp_path):
    """The whole model of transformers, with its processor as it is published, of which only a part is loaded here."""
    family, tiny = build_case("glm_image")
    whole = GlmImageForConditionalGeneration(GlmImageConfig(**CONFIG)).eval()
    whole.load_state_dict(tiny.pipe.vision_language_encoder.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    part = build_prior_tokenizer_class().from_pretrained(tmp_path)
    assert part.state_dict().keys() == tiny.pipe.vision_language_encoder.state_dict().keys()

    picture = make_picture((768, 512))
    sizes = {"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048}
    processor = GlmImageImageProcessorPil(size=sizes, patch_size=16, merge_size=1, temporal_patch_size=1)
    inputs = processor(images=[picture], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [[1, 512 // 32, 768 // 32]]
    features = whole.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    expected = whole.get_image_tokens(features, inputs["image_grid_thw"]).view(16, 24)

    tiny.pipe.vision_language_encoder = part
    latents = torch.zeros(1, 2, 4, 64, 96)
    prior = family.encode_frame_cond(tiny.pipe, as_pixels(picture), Moments(latents))["prior"]
    assert prior.shape == (1, 1, 1, 64, 96) and not prior.is_floating_point()
    assert torch.equal(prior[0, 0, 0, ::4, ::4], expected.int()) and len(expected.unique()) > 8
    assert torch.equal(prior[0, 0, 0, 3::4, 3::4], expected.int())


@torch.no_grad()
def test_an_empty_caption_has_no_image_tokens_as_the_pipeline_drops_them_for_guidance(build_case):
    family, tiny = build_case("glm_image")
    transformer, batch = tiny.pipe.transformer, tiny.batch
    cond = family.encode_prompts(tiny.pipe, ["", "a caption without quotes"])
    assert cond["is_empty"].tolist() == [[1], [0]] and torch.equal(*cond["embeds"])
    batch = replace(batch, cond=cond)
    tokens = tokenize_by_processor(tiny.pipe.vision_language_encoder.model, tiny.frame_images[0])
    times = torch.full((2,), 1000.0)
    ours = family.predict(tiny.pipe, transformer, batch.latents, times, batch)
    ids = tokens.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()[None].expand(2, -1)
    drop = torch.zeros_like(ids, dtype=torch.bool)
    drop[0] = True
    theirs = transformer(
        hidden_states=batch.latents,
        encoder_hidden_states=torch.stack(cond["embeds"]),
        prior_token_id=ids,
        prior_token_drop=drop,
        timestep=times - 1,
        target_size=torch.tensor([[64.0, 96.0]] * 2),
        crop_coords=torch.zeros(2, 2),
    ).sample
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert (ours[0] - ours[1]).abs().max() > 1e-3


def test_the_language_model_is_not_built():
    part = build_random_component(build_prior_tokenizer_class(), CONFIG, "vision_language_encoder", torch.float32, None)
    assert {name.split(".")[1] for name in part.state_dict()} == {"visual", "vqmodel"}
