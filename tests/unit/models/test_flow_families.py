"""Flow-matching families: guidance, steps, shifts and metadata that differ between them."""

import pytest
import torch
from family_cases import SIZE, Recorder
from model_files import write_json_files
from tiny_pipelines import HEIGHT, TINY, WIDTH

from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.model_configs import load_bundled_config

FLOW = ["sd3", "flux", "flux_schnell", "z_image", "qwen_image"]


def load_family(name, options=None):
    tiny = TINY[name]()
    tiny.pipe.set_progress_bar_config(disable=True)
    return FAMILIES.get(tiny.family)(options), tiny


@torch.no_grad()
def sample_preview(family, pipe, **options):
    prompt = Prompt("a red circle", "blue", width=WIDTH, height=HEIGHT, **options)
    cond, negative = (family.encode_prompts(pipe, [text]) for text in (prompt.text, prompt.negative_prompt))
    return family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(1), None)


@torch.no_grad()
def test_flux_is_trained_with_guidance_scale_and_with_1_by_default():
    for options, expected in ((None, 1.0), (ModelConfig(guidance_scale=3.5), 3.5)):
        family, tiny = load_family("flux", options)
        record = Recorder(tiny.pipe.transformer)
        family.predict(tiny.pipe, tiny.pipe.transformer, tiny.batch.latents, torch.tensor([700.0, 250.0]), tiny.batch)
        assert record.calls[0]["guidance"].tolist() == [expected, expected]


def test_flux_dev_is_sampled_with_guidance_and_schnell_in_four_steps():
    for name, options, guidance, steps in (
        ("flux", {}, 3.5, 20),
        ("flux", {"embedded_guidance": 2.0, "num_inference_steps": 3}, 2.0, 3),
        ("flux_schnell", {}, None, 4),
    ):
        family, tiny = load_family(name)
        record = Recorder(tiny.pipe.transformer)
        sample_preview(family, tiny.pipe, **options)
        assert len(record.calls) == steps
        guidance_arg = record.calls[0]["guidance"]
        assert guidance_arg is None if guidance is None else guidance_arg.tolist() == [guidance]


def test_z_image_turbo_is_sampled_in_9_steps_and_the_base_model_in_50_with_guidance():
    for shift, steps in ((3.0, 9), (6.0, 100)):
        family, tiny = load_family("z_image")
        tiny.pipe.scheduler.register_to_config(shift=shift)
        record = Recorder(tiny.pipe.transformer)
        sample_preview(family, tiny.pipe)
        assert sum(len(call["x"]) for call in record.calls) == steps


def test_the_negative_prompt_is_evaluated_only_with_guidance():
    for name, scale, looks in (("flux", None, 1), ("flux", 2.0, 2), ("qwen_image", None, 2), ("qwen_image", 1.0, 1)):
        family, tiny = load_family(name)
        record = Recorder(tiny.pipe.transformer)
        sample_preview(family, tiny.pipe, num_inference_steps=2, cfg_scale=scale)
        assert len(record.calls) == 2 * looks


@pytest.mark.parametrize("name", FLOW)
def test_a_preview_shifts_its_timesteps_as_the_model_or_the_prompt_sets(name):
    family, tiny = load_family(name)
    record = Recorder(tiny.pipe.transformer)
    key = "t" if name == "z_image" else "timestep"
    unguided = {"num_inference_steps": 4, "cfg_scale": tiny.guidance_off}
    sample_preview(family, tiny.pipe, **unguided)
    own = [call[key][0].item() for call in record.calls]
    call = {**tiny.texts, tiny.scale: tiny.guidance_off, "num_inference_steps": 4}
    tiny.pipe("a red circle", **SIZE, **call)
    assert own == [call[key][0].item() for call in record.calls[4:8]]
    sample_preview(family, tiny.pipe, **unguided, flow_shift=5.0)
    moved = [call[key][0].item() for call in record.calls[8:]]
    assert len(moved) == 4 and moved[1] != own[1]
    scheduler = type(tiny.pipe.scheduler)(shift=5.0, shift_terminal=tiny.pipe.scheduler.config.shift_terminal)
    if name == "sd3":
        scheduler.set_timesteps(4)
    else:
        scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    times = {"sd3": scheduler.timesteps, "z_image": 1 - scheduler.timesteps / 1000}.get(
        name, scheduler.timesteps / 1000
    )
    assert moved == pytest.approx(times.tolist(), abs=1e-5)


@pytest.mark.slow
def test_the_metadata_of_a_file_contains_the_base_model():
    titles = {name: load_family(name)[0].get_base_model_info(TINY[name]().pipe) for name in FLOW}
    assert {name: (title.base_model_version, title.architecture) for name, title in titles.items()} == {
        "sd3": ("5-medium", "stable-diffusion-3-5-medium"),
        "flux": ("flux1", "flux-1-dev"),
        "flux_schnell": ("flux1", "flux-1-schnell"),
        "z_image": ("z_image", "z-image"),
        "qwen_image": ("qwen_image", "qwen-image"),
    }


@pytest.mark.parametrize(
    "name, changed, words",
    [
        ("flux", {"transformer/config.json": {"in_channels": 384}}, "has 384 input channels instead of 64"),
        (
            "sd3",
            {"scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler"}},
            "only flow matching is supported",
        ),
        ("sd3", {"scheduler/scheduler_config.json": {"num_train_timesteps": 500}}, "only 1000 is supported"),
        ("qwen_image", {"transformer/config.json": {"zero_cond_t": True}}, "Qwen-Image-Edit"),
        ("z_image", {"transformer/config.json": {"siglip_feat_dim": 1152}}, "Z-Image-Omni"),
        ("flux", {"vae/config.json": {"block_out_channels": None}}, "has no block_out_channels"),
    ],
)
def test_related_models_that_cannot_be_trained_are_rejected_by_name(name, changed, words, tmp_path):
    config = load_bundled_config(name)
    files = {**config, **{path: {**config[path], **new} for path, new in changed.items()}}
    with pytest.raises(ConfigError, match=words):
        detect_model(write_json_files(tmp_path, files))


@pytest.mark.slow
def test_long_prompts_of_longcat_image_edit_are_truncated():
    """diffusers' pipeline fails on them."""
    family, tiny = load_family("longcat_image_edit")
    with torch.no_grad():
        longer, whole = (tiny.encode_prompts(family, tiny.pipe, ["a" * count])["embeds"] for count in (600, 512))
    assert torch.equal(longer, whole)
    assert family.find_truncated_prompts(tiny.pipe, ["a" * 513, "a" * 512]) == ["a" * 513]
