"""Models are loaded by component, directly to dtype and device, from folders and the hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from family_cases import build_case, each_family, get_modules, make_generators, make_pixels
from loaded_weights import assert_same_weights, list_loaded_components
from safetensors.torch import load_file
from tiny_pipelines import TINY
from transformers import ByT5Tokenizer
from transformers.image_processing_utils import BaseImageProcessor

from library.errors import ConfigError
from library.models import loading
from library.models.families import FAMILIES

__all__ = ["build_case", "each_family"]  # fixtures


@pytest.mark.slow
def test_the_vae_stays_in_float32_in_a_bfloat16_run(each_family, tmp_path):
    family, tiny = each_family
    exact = family.encode_moments(tiny.pipe, make_pixels()).sample(make_generators())
    image = family.decode_latents(tiny.pipe, exact)
    tiny.pipe.save_pretrained(tmp_path)
    low = family.load(str(tmp_path), torch.bfloat16)
    for pipe in (low, family.load(tiny.source, torch.bfloat16)):
        modules = get_modules(family, pipe)
        for name in family.facts.image_encoders:
            assert {parameter.dtype for parameter in modules.pop(name).parameters()} == {torch.float32}
        denoisers = [getattr(pipe, name) for name in family.facts.pipeline.denoisers]
        for part in modules.values():
            in_float32 = set(getattr(part, "_keep_in_fp32_modules", None) or ())  # diffusers keeps these so
            for parameter_name, parameter in part.named_parameters():
                if part not in denoisers or not in_float32 & set(parameter_name.split(".")):
                    assert parameter.dtype == torch.bfloat16, parameter_name
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(family.encode_moments(low, make_pixels()).sample(make_generators()), exact)
        torch.testing.assert_close(family.decode_latents(low, exact), image)


def test_only_the_requested_components_are_loaded_and_others_can_be_added(each_family, tmp_path):
    family, tiny = each_family
    vae = family.facts.image_encoders[:1]
    tiny.pipe.save_pretrained(tmp_path)
    for source in (str(tmp_path), tiny.source):
        full_pipe = family.load(source, torch.float32)
        pipe = family.load(source, torch.float32, family.facts.text.components)
        assert list_loaded_components(family, pipe) == set(family.facts.text.components)
        encoder, scheduler = getattr(pipe, family.facts.text.components[0]), pipe.scheduler
        assert family.load(source, torch.float32, vae, pipe=pipe) is pipe
        assert list_loaded_components(family, pipe) == {*family.facts.text.components, *vae}
        assert getattr(pipe, family.facts.text.components[0]) is encoder and pipe.scheduler is scheduler
        for part in family.facts.text.components:
            setattr(pipe, part, None)
        family.load(source, torch.float32, family.facts.pipeline.denoisers, pipe=pipe)
        assert list_loaded_components(family, pipe) == {*vae, *family.facts.pipeline.denoisers}
        for name in ("vae_scale_factor", "vae_scale_factor_spatial"):
            assert getattr(pipe, name, None) == getattr(full_pipe, name, None)
        assert dict(pipe.config).keys() == dict(full_pipe.config).keys()
        assert_same_weights(family, pipe, full_pipe)


def test_a_pipeline_derives_its_scale_factor_from_a_vae_that_is_added_later(tmp_path):
    family, tiny = FAMILIES.get("sd1")(), TINY["sd1"]()
    tiny.pipe.save_pretrained(tmp_path)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    shallow = AutoencoderKL.from_config(tiny.pipe.vae.config, block_out_channels=[8, 16, 32], **kinds)
    shallow.save_pretrained(tmp_path / "vae")
    pipe = family.load(str(tmp_path), torch.float32, family.facts.text.components)
    family.load(str(tmp_path), torch.float32, ("vae",), pipe=pipe)
    assert pipe.vae_scale_factor == pipe.image_processor.config.vae_scale_factor == 4


@torch.no_grad()
def test_a_saved_model_loads_with_the_same_weights(each_family, tmp_path):
    family, tiny = each_family
    tiny.pipe.save_pretrained(tmp_path)
    pipe = family.load(str(tmp_path), torch.float32)
    assert_same_weights(family, pipe, tiny.pipe)
    assert not any(part.training for part in get_modules(family, pipe).values())
    for name in family.facts.text.tokenizer_repo_ids:
        parts = [getattr(each, name) for each in (pipe, tiny.pipe)]
        if isinstance(parts[0], BaseImageProcessor):
            assert parts[0].to_dict() == parts[1].to_dict()
            continue
        rows = [(part if hasattr(part, "vocab_size") else part.tokenizer)("a red circle").input_ids for part in parts]
        assert rows[0] == rows[1]
        if hasattr(parts[1], "image_processor"):
            assert parts[0].image_processor.to_dict() == parts[1].image_processor.to_dict()
    assert family.build_noise_process(pipe).prediction_type == family.build_noise_process(tiny.pipe).prediction_type


def test_a_model_with_fp16_weights_only_is_loaded(each_family, tmp_path):
    family, tiny = each_family
    tiny.pipe.save_pretrained(tmp_path, variant="fp16")
    assert_same_weights(family, family.load(str(tmp_path), torch.float32), tiny.pipe)


def test_a_tokenizer_without_vocabulary_is_reported(each_family, tmp_path):
    family, tiny = each_family
    (part, *_) = family.facts.text.tokenizer_repo_ids
    if isinstance(getattr(tiny.pipe, part), ByT5Tokenizer):
        pytest.skip("a tokenizer of bytes has no vocabulary")
    tiny.pipe.save_pretrained(tmp_path)
    for path in (tmp_path / part).iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    with pytest.raises(ConfigError, match=f"its {part} cannot be loaded: it has no vocabulary"):
        family.load(str(tmp_path), torch.float32, (part,))


def test_a_damaged_model_is_a_user_error(each_family, tmp_path):
    family, tiny = each_family
    tiny.pipe.save_pretrained(tmp_path)
    (tmp_path / family.facts.denoiser_name / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"its {family.facts.denoiser_name} cannot be loaded"):
        family.load(str(tmp_path), torch.float32)


def test_out_of_memory_while_loading_is_not_reported_as_a_damaged_model(monkeypatch):
    def part(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24 GiB.")

    monkeypatch.setattr(loading, "_load_component", part)
    with pytest.raises(torch.OutOfMemoryError):
        FAMILIES.get("sd1")().load("random:sd1:tiny", torch.float32)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "text_encoder_2"])
def test_pickled_weights_are_never_loaded(part, tmp_path):
    tiny = TINY["sdxl"]()
    tiny.pipe.save_pretrained(tmp_path)
    (path,) = (tmp_path / part).glob("*.safetensors")
    name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
    torch.save(load_file(path), path.with_name(name))
    path.unlink()
    with pytest.raises(ConfigError, match=f"its {part} cannot be loaded: .*safetensors"):
        FAMILIES.get("sdxl")().load(str(tmp_path), torch.float32, (part,))


@pytest.mark.slow
def test_a_hub_id_is_loaded_from_the_local_hub_cache(tmp_path):
    """The complete model, and one with fp16 weights only; the hub does not answer."""
    tiny = TINY["sdxl"]()
    commit = "0" * 40
    for name, variant in (("tiny", None), ("half", "fp16")):
        repository = tmp_path / "hub" / f"models--me--{name}"
        tiny.pipe.save_pretrained(repository / "snapshots" / commit, variant=variant)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    script = (
        "import torch; from library.models.families import FAMILIES; from library.models.detect import detect_model\n"
        "for name in ('me/tiny', 'me/half'):\n"
        "    found = detect_model(name); pipe = FAMILIES.get(found.family)().load(found, torch.float32)\n"
        "    print(found.family, found.source_type, "
        "sum(float(p.detach().double().sum()) for p in pipe.unet.parameters()),"
        "pipe.tokenizer_2('a').input_ids)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
        timeout=120,
        text=True,
        capture_output=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert result.returncode == 0, result.stderr
    total = sum(float(p.detach().double().sum()) for p in tiny.pipe.unet.parameters())
    assert result.stdout.splitlines() == [f"sdxl hub {total} {tiny.pipe.tokenizer_2('a').input_ids}"] * 2
