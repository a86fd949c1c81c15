"""Single files: the same model as the diffusers folder, known by its names, whole or in parts."""

from pathlib import Path

import original_names
import pytest
import torch
from safetensors.torch import save_file
from test_families_loading import present, same_weights
from tiny import TINY

from library.config.schema import ModelConfig
from library.errors import ConfigError
from library.families import FAMILIES
from library.families.detect import detect


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder of tokenizers as sd-scripts keeps them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in ("sd1", "sd2", "sdxl"):
        family, pipe = FAMILIES.get(name), TINY[name]().pipe
        for part, hub_id in family.tokenizers.items():
            getattr(pipe, part).save_pretrained(folder / hub_id.partition(":")[0].replace("/", "_"))
    return folder


@pytest.fixture(params=["sd1", "sd2", "sdxl"])
def single(request, cache, tmp_path):
    """A family for single files, a model in memory, and the same in one file."""
    tiny = TINY[request.param]()
    path = tmp_path / "model.safetensors"
    save_file(original_names.checkpoint(request.param, tiny.pipe), path)
    options = ModelConfig(pretrained_model_name_or_path=str(path), tokenizer_cache_dir=str(cache))
    return FAMILIES.get(request.param)(options), tiny, path


@torch.no_grad()
def test_a_single_file_is_the_same_model_as_the_folder(single):
    family, tiny, _ = single
    found = detect(family.options)
    assert found.family == tiny.family and found.kind == "file"
    assert family.facts.title in found.reason and found.pixel_step == detect(tiny.source).pixel_step
    pipe = family.load(found, torch.float32)
    same_weights(family, pipe, tiny.pipe)
    ours, theirs = (family.encode_prompts(each, ["a red circle", "7"]) for each in (pipe, tiny.pipe))
    for key, value in theirs.items():
        assert torch.equal(ours[key], value)
    assert family.process(pipe).prediction == family.process(tiny.pipe).prediction == found.prediction


def test_only_the_named_parts_of_a_single_file_are_loaded(single):
    family, tiny, _ = single
    found = detect(family.options)
    pipe = family.load(found, torch.float32, family.text_parts)
    assert present(family, pipe) == set(family.text_parts)
    family.load(found, torch.float32, ("vae", family.denoiser), into=pipe)
    same_weights(family, pipe, tiny.pipe)


def test_half_precision_in_the_file_becomes_what_is_asked_for(single, tmp_path):
    family, tiny, path = single
    half = {name: tensor.half() for name, tensor in original_names.checkpoint(tiny.family, tiny.pipe).items()}
    save_file(half, path)
    pipe = family.load(detect(str(path)), torch.bfloat16)
    dtypes = {part: {p.dtype for p in getattr(pipe, part).parameters()} for part in ("unet", "vae", "text_encoder")}
    assert dtypes == {"unet": {torch.bfloat16}, "vae": {torch.float32}, "text_encoder": {torch.bfloat16}}


def test_a_file_that_lacks_weights_is_told(single):
    family, tiny, path = single
    tensors = original_names.checkpoint(tiny.family, tiny.pipe)
    lost = next(name for name in tensors if "transformer_blocks.0.attn1.to_q" in name)
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="its unet cannot be loaded: 1 weights are missing in the file"):
        family.load(detect(str(path)), torch.float32, ("unet",))
    text = next(name for name in tensors if "ln_1.weight" in name or "layer_norm1.weight" in name)
    del tensors[text]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"weights are missing in the file, for example .*layer_norm1"):
        family.load(detect(str(path)), torch.float32, ("text_encoder",))


def test_without_network_and_cache_the_tokenizers_way_out_is_told(single):
    family, _, path = single
    strict = type(family)(ModelConfig())
    with pytest.raises(ConfigError, match=r"brings no tokenizer.* --tokenizer_cache_dir FOLDER"):
        strict.load(str(path), torch.float32, ("tokenizer",))


def test_the_denoiser_alone_needs_the_other_parts_and_takes_them(tmp_path, cache):
    tiny = TINY["sdxl"]()
    alone, vae, clip_l, clip_g = (str(tmp_path / f"{name}.safetensors") for name in ("unet", "vae", "l", "g"))
    save_file(original_names.ldm_unet(tiny.pipe.unet), alone)
    save_file(original_names.ldm_vae(tiny.pipe.vae), vae)
    save_file(original_names.clip(tiny.pipe.text_encoder), clip_l)
    save_file(original_names.clip(tiny.pipe.text_encoder_2), clip_g)
    with pytest.raises(ConfigError) as caught:
        detect(alone)
    assert [line.split("the file has ")[1] for line in caught.value.problems] == [
        "no vae; name one with --vae",
        "no text_encoder; name one with --clip_l",
        "no text_encoder_2; name one with --clip_g",
    ]
    options = ModelConfig(alone, vae=vae, clip_l=clip_l, clip_g=clip_g, tokenizer_cache_dir=str(cache))
    family = FAMILIES.get("sdxl")(options)
    same_weights(family, family.load(detect(options), torch.float32), tiny.pipe)


def test_parts_of_their_own_take_the_place_of_the_models(tmp_path):
    tiny, family = TINY["sd1"](), FAMILIES.get("sd1")()
    tiny.pipe.save_pretrained(tmp_path / "model")
    for parameter in (*tiny.pipe.vae.parameters(), *tiny.pipe.text_encoder.parameters()):
        parameter.data += 0.5
    vaes = {
        "original": tmp_path / "original.safetensors",
        "diffusers": tmp_path / "diffusers.safetensors",
        "checkpoint": tmp_path / "checkpoint.safetensors",
        "folder": tmp_path / "folder",
        "pipeline": tmp_path / "pipeline",
    }
    save_file(original_names.ldm_vae(tiny.pipe.vae), vaes["original"])
    save_file(tiny.pipe.vae.state_dict(), vaes["diffusers"])
    save_file(original_names.checkpoint("sd1", tiny.pipe), vaes["checkpoint"])
    tiny.pipe.vae.save_pretrained(vaes["folder"])
    tiny.pipe.save_pretrained(vaes["pipeline"])
    tiny.pipe.text_encoder.save_pretrained(tmp_path / "text")
    for clip_l, vae in zip([None, *[str(vaes["checkpoint"]), str(tmp_path / "text")] * 2], vaes.values(), strict=True):
        options = ModelConfig(str(tmp_path / "model"), vae=str(vae), clip_l=clip_l)
        pipe = family.load(detect(options), torch.float32, ("vae", "text_encoder"))
        if clip_l is None:
            pipe.text_encoder = None
        same_weights(family, pipe, tiny.pipe)


def wrong(tmp_path: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        detect(ModelConfig("random:sdxl:tiny", **options))
    (line,) = caught.value.problems
    return line


def test_a_wrong_part_is_named_by_what_it_is(tmp_path):
    tiny = TINY["sdxl"]()
    path = str(tmp_path / "part.safetensors")
    save_file(original_names.ldm_vae(tiny.pipe.vae), path)
    assert wrong(tmp_path, clip_l=path).endswith(
        "is a VAE with 4 latent channels, where the model has a CLIP text encoder of width 16"
    )
    save_file(original_names.clip(tiny.pipe.text_encoder_2), path)
    assert wrong(tmp_path, clip_l=path).endswith(
        "is a CLIP text encoder of width 24, where the model has a CLIP text encoder of width 16"
    )
    assert wrong(tmp_path, vae=path).endswith(
        "is a CLIP text encoder of width 24, where the model has a VAE with 4 latent channels"
    )
    save_file({"one.weight": torch.ones(1)}, path)
    assert wrong(tmp_path, vae=path).endswith("holds nothing that could be the vae")
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, path)
    assert "is a LoRA file and no model" in wrong(tmp_path, vae=path)
    assert "no such file or folder" in wrong(tmp_path, vae=str(tmp_path / "absent"))
    assert "no config.json in it" in wrong(tmp_path, vae=str(tmp_path))
    assert wrong(tmp_path, ae=path) == "ae: Stable Diffusion XL has no such part"
