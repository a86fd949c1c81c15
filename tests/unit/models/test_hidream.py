"""HiDream-I1: experts, sizes of previews, and Llama, which the published model does not contain."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    FlowMatchLCMScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    UniPCMultistepScheduler,
)
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from family_cases import build_case

from library.config.schema import ModelConfig
from library.dataloader.sample_prompts import Prompt
from library.models import detect
from library.models.checkpoint_inspection import ComponentSource
from library.models.families import FAMILIES
from library.models.model_configs import load_bundled_config

__all__ = ["build_case"]  # a fixture


def restore_diffusers_classes(transformer):
    for module in transformer.modules():
        for original in (HiDreamImageTransformer2DModel, MOEFeedForwardSwiGLU):
            if isinstance(module, original):
                module.__class__ = original
    return transformer


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 12), (8, 8)])
def test_experts_and_image_are_those_of_diffusers_also_in_training(build_case, shape):
    family, tiny = build_case("hidream")
    theirs = restore_diffusers_classes(copy.deepcopy(tiny.pipe.transformer))
    latents, t = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(1)), torch.tensor([700.0, 250.0])
    with torch.no_grad():
        expected = family.predict(tiny.pipe, theirs, latents, t, tiny.batch)
        assert type(theirs) is not type(tiny.pipe.transformer)
    for mode in (False, True):
        predicted = family.predict(tiny.pipe, tiny.pipe.transformer.train(mode), latents, t, tiny.batch)
        torch.testing.assert_close(predicted, expected)
    predicted.square().sum().backward()
    expert = tiny.pipe.transformer.single_stream_blocks[0].block.ff_i.experts[1]
    assert all(weight.grad.abs().sum() > 0 for weight in expert.parameters()), "diffusers gives experts no gradient"


@pytest.mark.slow
@torch.no_grad()
def test_an_image_of_more_tokens_than_the_model_pads_to_is_predicted(build_case):
    family, tiny = build_case("hidream")
    latents = torch.randn(2, 4, 12, 24)  # 72 patches, and the tiny model pads to 64
    t = torch.tensor([700.0, 250.0])
    assert family.predict(tiny.pipe, tiny.pipe.transformer, latents, t, tiny.batch).shape == latents.shape
    assert tiny.pipe.transformer.max_seq == 64
    theirs = restore_diffusers_classes(copy.deepcopy(tiny.pipe.transformer))
    with pytest.raises(RuntimeError):
        family.predict(tiny.pipe, theirs, latents, t, tiny.batch)


@pytest.mark.slow
@torch.no_grad()
def test_the_pipeline_samples_the_size_that_is_asked_for_and_is_that_of_diffusers(build_case):
    _, tiny = build_case("hidream")
    options = {**tiny.call, "guidance_scale": 1.0, "num_inference_steps": 2, "output_type": "latent"}
    for height, width in ((64, 64), (64, 96), (80, 208), (1088, 944)):
        sizes = list[tuple[int, int]]()
        tiny.pipe.prepare_latents = lambda count, channels, *sides, found=sizes: found.append(sides[:2])
        with pytest.raises((AttributeError, TypeError)):  # there are no latents
            tiny.pipe(**options, height=height, width=width)
        assert sizes == [(height, width)]
        del tiny.pipe.prepare_latents
    theirs = HiDreamImagePipeline(**tiny.pipe.components)
    theirs.set_progress_bar_config(disable=True)
    theirs.default_sample_size = 8
    ours, reference = (
        pipe(**options, height=64, width=64, generator=torch.Generator().manual_seed(2)).images
        for pipe in (tiny.pipe, theirs)
    )
    assert torch.equal(ours, reference) and math.prod(ours.shape[2:]) == 64


def test_dev_and_fast_are_known_as_distilled_and_sampled_in_few_steps():
    family, texts = FAMILIES.get("hidream")(), {"t5": None, "llama": torch.zeros(1, 3, 2, 4), "pooled": None}
    full = SimpleNamespace(scheduler=UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"))
    dev = SimpleNamespace(scheduler=FlowMatchLCMScheduler(shift=6.0))
    assert [family.is_step_distilled(pipe) for pipe in (full, dev)] == [False, True]
    assert family.build_noise_process(dev).shift.compute_factor(4096) == pytest.approx(6)
    prompts = Prompt("a"), Prompt("a", num_inference_steps=3, cfg_scale=2.0)
    names = ("num_inference_steps", "guidance_scale")
    sampled = [family.build_sampling_kwargs(pipe, prompt, texts, texts) for pipe in (full, dev) for prompt in prompts]
    assert [tuple(kwargs[name] for name in names) for kwargs in sampled] == [(50, 5.0), (3, 2.0), (28, 1.0), (3, 2.0)]


def write_folder(folder: Path, *, has_llama: bool) -> Path:
    """The JSON files of a model, as published without Llama."""
    data = copy.deepcopy(dict(load_bundled_config("hidream")))
    for name in () if has_llama else ("text_encoder_4", "tokenizer_4"):
        data["model_index.json"][name] = [None, None]
        data = {path: each for path, each in data.items() if not path.startswith(f"{name}/")}
    for path, content in data.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return folder


def test_llama_comes_from_the_hub_where_a_folder_lacks_it_or_from_an_option(tmp_path):
    folder = write_folder(tmp_path / "model", has_llama=False)
    hub = ComponentSource("hub", "unsloth/Meta-Llama-3.1-8B-Instruct")
    detected = detect.detect_model(str(folder))
    assert (detected.family, dict(detected.component_sources)) == (
        "hidream",
        {"text_encoder_4": hub, "tokenizer_4": hub},
    )
    assert detect.get_config_reader(detected)("model_index.json")["text_encoder_4"][1] == "LlamaForCausalLM"

    llama = tmp_path / "llama"
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps(load_bundled_config("hidream")["text_encoder_4/config.json"]))
    options = ModelConfig(pretrained_model_name_or_path=str(folder), text_encoder=str(llama))
    own = ComponentSource("folder", str(llama))
    assert dict(detect.detect_model(options).component_sources) == {"text_encoder_4": own, "tokenizer_4": own}

    complete = detect.detect_model(str(write_folder(tmp_path / "complete", has_llama=True)))
    assert complete.family == "hidream" and not complete.component_sources
