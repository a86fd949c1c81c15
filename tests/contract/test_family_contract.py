"""Every family fulfils the contract of library.models.base, compared with the pipelines of diffusers."""

import re
import tempfile
from dataclasses import replace

import pytest
import torch
from family_cases import SIZE, build_case, case
from PIL import Image, ImageChops
from tiny_pipelines import TINY, shrink_references
from torch import nn

from library.models.base import Family, T5Family
from library.models.families import FAMILIES, FAMILY_FACTS, IMAGE_TO_VIDEO_FAMILIES
from library.tools.family_check.adapter_checks import ADAPTER_CHECKS
from library.tools.family_check.cases import CheckSkippedError
from library.tools.family_check.checks import CHECKS
from library.tools.family_check.preview_checks import PREVIEW_CHECKS, build_preview_prompt, generate_preview

__all__ = ["build_case", "case"]  # fixtures


@pytest.mark.slow
def test_every_family_has_a_tiny_pipeline():
    assert {make().family for make in TINY.values()} == {*FAMILIES.list_names(), *IMAGE_TO_VIDEO_FAMILIES.values()}


def test_a_registered_family_has_the_facts_that_detection_knows(case):
    family, tiny = case
    assert isinstance(family, Family)
    if tiny.family not in IMAGE_TO_VIDEO_FAMILIES.values():
        assert family.facts is FAMILY_FACTS[tiny.family]
    assert (family.facts.text.t5_encoder in family.facts.lora.text_encoders) == isinstance(family, T5Family)


@pytest.mark.parametrize("sentence", [*CHECKS, *PREVIEW_CHECKS, *ADAPTER_CHECKS])
def test_a_family_passes_the_checks_of_the_program(sentence, case):
    """``python -m library models --check`` makes the same for a family of the user's own."""
    check = {**CHECKS, **PREVIEW_CHECKS, **ADAPTER_CHECKS}[sentence]
    try:
        check(*case)
    except CheckSkippedError:
        if sentence == "layers that are computed together read one input":
            assert case[1].family.startswith("joyimage_edit"), "whose query, key and value are one layer"
            return
        assert sentence == "text encoders can be trained through the prompts"
        assert not case[0].facts.lora.text_encoders


VARIANTS = [f"{name}_from_image" for name in IMAGE_TO_VIDEO_FAMILIES]
QUICK = ("wan", "ltx_video")
VIDEO_FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
    for name in (*(name for name, facts in FAMILY_FACTS.items() if facts.pipeline.frames is not None), *VARIANTS)
]


@torch.no_grad()
@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_a_preview_of_several_frames_is_the_clip_that_the_diffusers_pipeline_samples(name, build_case, monkeypatch):
    shrink_references(monkeypatch)
    family, tiny = build_case(name)
    rule = family.facts.pipeline.frames
    num_frames = rule.round_up(max(2, rule.shortest))
    if tiny.controls:
        clips = family.build_control_clip_kwargs(tiny.pipe, [[image] * num_frames for image in tiny.controls])
        tiny = replace(tiny, texts={**tiny.texts, **clips})
    theirs = tiny.pipe(
        prompt="a red circle",
        **tiny.build_negative(tiny.pipe, "blue"),
        **SIZE,
        **{**tiny.texts, "num_frames": num_frames, tiny.scale: 3.0},
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
        output_type="pil",
    ).frames[0]
    settings = {"num_inference_steps": 2, "cfg_scale": 3.0, "num_frames": num_frames}
    with build_preview_prompt(tiny, "a red circle", "blue", **settings) as prompt:
        cond = tiny.encode_prompts(family, tiny.pipe, [prompt.text])
        negative = tiny.encode_negative_prompts(family, tiny.pipe, [prompt.negative_prompt])
        ours = family.generate_frames(tiny.pipe, prompt, cond, negative, torch.Generator().manual_seed(1), None)
    assert len(ours) == len(theirs) == num_frames
    # Latents are divided by a deviation here and multiplied by its inverse there, so that values round apart.
    for mine, reference in zip(ours, theirs, strict=True):
        assert max(high for _, high in ImageChops.difference(mine, reference).getextrema()) <= 1
    assert len({frame.tobytes() for frame in ours}) == num_frames


def test_a_decoder_that_draws_noise_gives_one_preview_and_changes_no_state(build_case, monkeypatch):
    """That of LTX-Video 0.9.1 draws from torch's global generator."""
    family, tiny = build_case("flux")
    decode = family.decode_sampled_latents
    monkeypatch.setattr(family, "decode_sampled_latents", lambda *each: decode(*each) + torch.rand(1))
    state = torch.random.get_rng_state()
    first = generate_preview(family, tiny, num_inference_steps=1)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(5)
    assert first.tobytes() == generate_preview(family, tiny, num_inference_steps=1).tobytes()


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
    ours = generate_preview(family, tiny, num_inference_steps=2, control_images=(reference,) * count)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.tobytes() != generate_preview(family, tiny, num_inference_steps=2).tobytes()


def test_the_files_of_control_images_are_removed_after_the_preview(build_case, tmp_path, monkeypatch):
    family, tiny = build_case("flux2_klein")
    tiny = replace(tiny, controls=(make_image((96, 64)), make_image((64, 96))))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    generate_preview(family, tiny, num_inference_steps=1)
    with build_preview_prompt(tiny, "a") as prompt:
        assert [Image.open(path).size for path in prompt.control_images] == [(96, 64), (64, 96)]
    assert list(tmp_path.iterdir()) == []


def make_image(size):
    """A picture in which a flip, a swap of sides or another crop would show."""
    gradient = Image.linear_gradient("L").resize(size)
    return Image.merge("RGB", [gradient, gradient.rotate(90, expand=True).resize(size), Image.new("L", size, 90)])


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
    **dict.fromkeys(("z_image", "z_image_omni"), r"_modulation|_refiner"),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "qwen_image_layered"), r"_mod\."),
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
