"""Single-file checkpoints load the same model as the diffusers folder, complete or by component."""

import re
from dataclasses import replace
from pathlib import Path

import original_checkpoints
import pytest
import torch
from family_cases import get_modules
from loaded_weights import assert_same_weights, list_loaded_components
from model_layouts import save_tokenizers
from problem_lines import format_lines
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY

from library.cache.model_fingerprint import (
    FileHashCache,
    compute_component_fingerprints,
    compute_quick_model_fingerprint,
)
from library.config.schema import ModelConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES

SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        *("sd2", "sd3", "z_image", "aura_flow", "ovis_image", "longcat_image", "qwen_image21", "hunyuan_image"),
        *("sd1_inpainting", "sd2_inpainting", "sdxl_inpainting", "sd1_pix2pix", "sdxl_pix2pix", "sdxl_refiner"),
    )
]


@pytest.fixture(params=["sd1", "sdxl", "qwen_image", *SLOW])
def single_file(request, tmp_path):
    """A family, a model in memory, and the same model as a single file."""
    tiny = TINY[request.param]()
    path = tmp_path / "model.safetensors"
    save_file(original_checkpoints.build_checkpoint(request.param, tiny.pipe), path)
    tokenizers = save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers")
    options = ModelConfig(pretrained_model_name_or_path=str(path), tokenizer_cache_dir=tokenizers)
    return FAMILIES.get(request.param)(options), tiny, path


@torch.no_grad()
def test_a_single_file_loads_the_same_model_as_the_folder(single_file):
    family, tiny, _ = single_file
    actual = detect_model(family.model_config)
    assert actual.family == tiny.family and actual.source_type == "file"
    assert family.facts.title in actual.reason and actual.size_multiple == detect_model(tiny.source).size_multiple
    pipe = family.load(actual, torch.float32)
    assert_same_weights(family, pipe, tiny.pipe)
    ours, reference = (family.encode_prompts(each, ["a red circle", "7"]) for each in (pipe, tiny.pipe))
    for key, value in reference.items():
        assert all(torch.equal(a, b) for a, b in zip(ours[key], value, strict=True))
    assert (
        family.build_noise_process(pipe).prediction_type
        == family.build_noise_process(tiny.pipe).prediction_type
        == actual.prediction_type
    )


def test_only_the_requested_components_of_a_single_file_are_loaded(single_file):
    family, tiny, _ = single_file
    actual = detect_model(family.model_config)
    pipe = family.load(actual, torch.float32, family.facts.text.components)
    assert list_loaded_components(family, pipe) == set(family.facts.text.components)
    family.load(actual, torch.float32, ("vae", family.facts.denoiser_name), pipe=pipe)
    assert_same_weights(family, pipe, tiny.pipe)


def test_half_precision_weights_are_cast_to_the_requested_dtype(single_file, tmp_path):
    family, tiny, path = single_file
    half = {
        name: tensor.half() for name, tensor in original_checkpoints.build_checkpoint(tiny.family, tiny.pipe).items()
    }
    save_file(half, path)
    pipe = family.load(detect_model(str(path)), torch.bfloat16)
    dtypes = {part: {p.dtype for p in module.parameters()} for part, module in get_modules(family, pipe).items()}
    assert dtypes.pop("vae") == {torch.float32}
    assert family.facts.denoiser_name in dtypes and all(each == {torch.bfloat16} for each in dtypes.values()), dtypes


def test_a_file_with_missing_weights_is_reported(single_file):
    family, tiny, path = single_file
    tensors = original_checkpoints.build_checkpoint(tiny.family, tiny.pipe)
    lost = [name for name in tensors if re.match(r"model\.diffusion_model\..*(bias|proj_out\.weight)$", name)][-1]
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(
        ConfigError, match=f"its {family.facts.denoiser_name} cannot be loaded: the file lacks 1 weights"
    ):
        family.load(detect_model(str(path)), torch.float32, (family.facts.denoiser_name,))
    text = next(
        name
        for name in tensors
        if re.search(r"(ln_1|layer_norm1|post_attention_layernorm|layer\.1\.layer_norm).weight", name)
    )
    del tensors[text]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"the file lacks .* weights, for example .*(norm1|layernorm|layer_norm)"):
        family.load(detect_model(str(path)), torch.float32, family.facts.text.components[:1])


def test_a_tokenizer_without_network_and_cache_is_reported_with_a_fix(single_file):
    family, _, path = single_file
    strict = type(family)(ModelConfig())
    with pytest.raises(ConfigError, match=r"contains no tokenizer.* --tokenizer_cache_dir FOLDER"):
        strict.load(str(path), torch.float32, tuple(family.facts.text.tokenizer_repo_ids)[:1])


def test_a_hub_that_does_not_answer_is_not_asked_for_each_file_of_a_tokenizer(single_file, monkeypatch):
    """huggingface_hub retries each of them for half a minute."""
    family, _, path = single_file
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    retries = []
    monkeypatch.setattr("time.sleep", retries.append)
    with pytest.raises(ConfigError, match=r"contains no tokenizer"):
        type(family)(ModelConfig()).load(str(path), torch.float32, tuple(family.facts.text.tokenizer_repo_ids)[:1])
    assert retries == []


def test_a_file_with_only_the_denoiser_needs_the_other_component_options(tmp_path):
    tiny = TINY["sdxl"]()
    single, vae, clip_l, clip_g = (str(tmp_path / f"{name}.safetensors") for name in ("unet", "vae", "l", "g"))
    save_file(original_checkpoints.convert_unet_to_ldm(tiny.pipe.unet), single)
    save_file(original_checkpoints.convert_vae_to_ldm(tiny.pipe.vae), vae)
    save_file(original_checkpoints.convert_clip(tiny.pipe.text_encoder), clip_l)
    save_file(original_checkpoints.convert_clip(tiny.pipe.text_encoder_2), clip_g)
    with pytest.raises(ConfigError) as caught:
        detect_model(single)
    assert [line.split("the file has ")[1] for line in format_lines(caught.value.problems)] == [
        "no vae; give one with --vae",
        "no text_encoder; give one with --clip_l",
        "no text_encoder_2; give one with --clip_g",
    ]
    options = ModelConfig(
        single,
        vae=vae,
        clip_l=clip_l,
        clip_g=clip_g,
        tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers"),
    )
    family = FAMILIES.get("sdxl")(options)
    assert_same_weights(family, family.load(detect_model(options), torch.float32), tiny.pipe)


def test_component_options_replace_the_components_of_the_model(tmp_path):
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
    save_file(original_checkpoints.convert_vae_to_ldm(tiny.pipe.vae), vaes["original"])
    save_file(tiny.pipe.vae.state_dict(), vaes["diffusers"])
    save_file(original_checkpoints.build_checkpoint("sd1", tiny.pipe), vaes["checkpoint"])
    tiny.pipe.vae.save_pretrained(vaes["folder"])
    tiny.pipe.save_pretrained(vaes["pipeline"])
    tiny.pipe.text_encoder.save_pretrained(tmp_path / "text")
    for clip_l, vae in zip([None, *[str(vaes["checkpoint"]), str(tmp_path / "text")] * 2], vaes.values(), strict=True):
        options = ModelConfig(str(tmp_path / "model"), vae=str(vae), clip_l=clip_l)
        pipe = family.load(detect_model(options), torch.float32, ("vae", "text_encoder"))
        if clip_l is None:
            pipe.text_encoder = None
        assert_same_weights(family, pipe, tiny.pipe)


def load_problem(tmp_path: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig("random:sdxl:tiny", **options))
    (line,) = format_lines(caught.value.problems)
    return line


def test_a_component_of_the_wrong_type_is_rejected_by_its_type(tmp_path):
    tiny = TINY["sdxl"]()
    path = str(tmp_path / "part.safetensors")
    save_file(original_checkpoints.convert_vae_to_ldm(tiny.pipe.vae), path)
    assert load_problem(tmp_path, clip_l=path).endswith(
        "is a VAE with 4 latent channels, but the model has a CLIP text encoder of width 16"
    )
    save_file(original_checkpoints.convert_clip(tiny.pipe.text_encoder_2), path)
    assert load_problem(tmp_path, clip_l=path).endswith(
        "is a CLIP text encoder of width 24, but the model has a CLIP text encoder of width 16"
    )
    assert load_problem(tmp_path, vae=path).endswith(
        "is a CLIP text encoder of width 24, but the model has a VAE with 4 latent channels"
    )
    save_file({"one.weight": torch.ones(1)}, path)
    assert load_problem(tmp_path, vae=path).endswith("contains no vae")
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, path)
    assert "is a LoRA file, not a model" in load_problem(tmp_path, vae=path)
    assert "no such file or folder" in load_problem(tmp_path, vae=str(tmp_path / "absent"))
    assert "no config.json in it" in load_problem(tmp_path, vae=str(tmp_path))
    assert load_problem(tmp_path, ae=path) == "--ae: Stable Diffusion XL has no such component"


def test_flux_is_loaded_from_four_files_and_a_transformer_with_diffusers_keys(tmp_path):
    tiny = TINY["flux_schnell"]()
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("flux", "ae", "clip_l", "t5xxl")}
    save_file(tiny.pipe.transformer.state_dict(), files["flux"])
    save_file(original_checkpoints.convert_vae_to_ldm(tiny.pipe.vae), files["ae"])
    save_file(original_checkpoints.convert_text_encoder(tiny.pipe.text_encoder), files["clip_l"])
    save_file(original_checkpoints.convert_text_encoder(tiny.pipe.text_encoder_2), files["t5xxl"])
    with pytest.raises(ConfigError) as caught:
        detect_model(files["flux"])
    assert [line.split("; give one with ")[1] for line in format_lines(caught.value.problems)] == [
        "--vae",
        "--clip_l",
        "--t5xxl",
    ]
    options = ModelConfig(
        files.pop("flux"), **files, tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers")
    )
    family, actual = FAMILIES.get("flux")(options), detect_model(options)
    assert (actual.family, actual.bundled_config) == ("flux", "flux_schnell_tiny")
    assert_same_weights(family, family.load(actual, torch.float32), tiny.pipe)
    with pytest.raises(ConfigError, match=r"guidance_scale: FLUX.1 schnell has no guidance embedding"):
        detect_model(replace(options, guidance_scale=3.5))


@pytest.mark.parametrize("name", ["z_image", "qwen_image", "wan"])
def test_text_encoder_and_vae_are_loaded_from_their_own_files(name, tmp_path):
    tiny = TINY[name]()
    transformer = {
        "z_image": original_checkpoints.convert_z_image_transformer,
        "qwen_image": torch.nn.Module.state_dict,
        "wan": original_checkpoints.convert_wan_transformer,
    }[name]
    vae = original_checkpoints.convert_vae_to_ldm if name == "z_image" else original_checkpoints.convert_wan_vae
    files = {part: str(tmp_path / f"{part}.safetensors") for part in ("transformer", "vae", "text_encoder")}
    save_file(transformer(tiny.pipe.transformer), files["transformer"])
    save_file(vae(tiny.pipe.vae), files["vae"])
    words = original_checkpoints.convert_text_encoder(tiny.pipe.text_encoder)
    words.pop("lm_head.weight", None)  # missing in some files
    save_file(words, files["text_encoder"])
    options = ModelConfig(
        files["transformer"],
        vae=files["vae"],
        text_encoder=files["text_encoder"],
        tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers"),
    )
    family, actual = FAMILIES.get(name)(options), detect_model(options)
    assert actual.bundled_config == f"{name}_tiny"
    pipe = family.load(actual, torch.float32)
    for part in ("transformer", "vae"):
        reference = getattr(tiny.pipe, part).state_dict()
        assert all(torch.equal(tensor, reference[key]) for key, tensor in getattr(pipe, part).state_dict().items()), (
            part
        )
    ours, reference = (family.encode_prompts(each, ["a red circle"])["embeds"][0] for each in (pipe, tiny.pipe))
    assert torch.equal(ours, reference)


def test_files_of_wan_are_known_by_the_names_of_its_authors_and_of_diffusers(tmp_path):
    tiny, files = (
        TINY["wan"](),
        {part: str(tmp_path / f"{part}.safetensors") for part in ("dit", "vae", "text_encoder")},
    )
    tiny.pipe.vae.save_pretrained(tmp_path / "vae")
    save_file(original_checkpoints.convert_umt5(tiny.pipe.text_encoder), files["text_encoder"])
    options = ModelConfig(
        files["dit"],
        vae=str(tmp_path / "vae"),
        text_encoder=files["text_encoder"],
        tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers"),
    )
    original = original_checkpoints.convert_wan_transformer(tiny.pipe.transformer)
    prefixed = original_checkpoints.add_prefix("model.diffusion_model.", original)
    for tensors in (original, prefixed, tiny.pipe.transformer.state_dict()):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, files["dit"])
        family, actual = FAMILIES.get("wan")(options), detect_model(options)
        assert (actual.family, actual.bundled_config) == ("wan", "wan_tiny")
        assert_same_weights(family, family.load(actual, torch.float32), tiny.pipe)
    tiny.pipe.save_pretrained(tmp_path / "folder")
    loaded = [family.load(detect_model(each), torch.bfloat16) for each in (options, str(tmp_path / "folder"))]
    ours, theirs = ({name: each.dtype for name, each in pipe.transformer.named_parameters()} for pipe in loaded)
    assert ours == theirs and {*ours.values()} == {torch.bfloat16, torch.float32}, "diffusers keeps some in float32"


@pytest.mark.parametrize(
    ("key", "shape", "text"),
    [
        ("patch_embedding.weight", (8, 36, 1, 2, 2), "use the model as a diffusers folder"),
        ("ref_conv.weight", (8, 48, 2, 2), "Wan 2.2 Fun-Control 5B"),
        ("control_adapter.conv.weight", (8, 1536, 2, 2), "Fun-Control-Camera"),
    ],
)
def test_a_file_of_another_model_of_wan_is_refused_by_what_it_is(key, shape, text, tmp_path):
    tensors = original_checkpoints.convert_wan_transformer(TINY["wan"]().pipe.transformer)
    save_file(tensors | {key: torch.zeros(shape)}, tmp_path / "dit.safetensors")
    with pytest.raises(ConfigError, match=text):
        detect_model(str(tmp_path / "dit.safetensors"))


def test_a_file_that_is_named_like_an_expert_of_wan_2_2_is_refused(tmp_path):
    """Names and shapes are those of Wan 2.1."""
    tensors = original_checkpoints.convert_wan_transformer(TINY["wan"]().pipe.transformer)
    save_file(tensors, path := tmp_path / "wan2.2_t2v_A14B_High_Noise.safetensors")
    with pytest.raises(ConfigError, match=r"high_noise.* Wan 2.2 A14B; for low noise .*--dit_high_noise"):
        detect_model(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", ["ovis_image", "longcat_image"])
def test_norms_of_flux_like_models_may_have_a_weight_and_diffusers_keys_are_known(name, prefix, tmp_path):
    tiny, path = TINY[name](), tmp_path / "model.safetensors"
    original = getattr(original_checkpoints, f"convert_{name}_transformer")(tiny.pipe.transformer)
    family = FAMILIES.get(name)(ModelConfig(str(path), vae=str(tmp_path / "vae"), text_encoder=str(tmp_path / "text")))
    tiny.pipe.vae.save_pretrained(tmp_path / "vae")
    tiny.pipe.text_encoder.save_pretrained(tmp_path / "text")
    renamed = {key.replace(".scale", ".weight"): tensor for key, tensor in original.items()}
    assert renamed.keys() != original.keys()
    for tensors in (renamed, tiny.pipe.transformer.state_dict()):
        save_file(original_checkpoints.add_prefix(prefix, tensors), path)
        actual = detect_model(family.model_config)
        assert (actual.family, actual.bundled_config) == (name, f"{name}_tiny")
        loaded, expected = (
            pipe.transformer.state_dict() for pipe in (family.load(actual, torch.float32, ("transformer",)), tiny.pipe)
        )
        assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.items())
    del renamed["txt_in.bias"]
    save_file(renamed, path)
    with pytest.raises(ConfigError, match=r"lacks 1 weights, for example txt_in\.bias"):
        family.load(detect_model(family.model_config), torch.float32, ("transformer",))


def write_shards(tensors, folder, count=3):
    """Write a checkpoint in several files, as diffusers and transformers do."""
    paths = [folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = list(tensors)
    for number, path in enumerate(paths):
        save_file({name: tensors[name].contiguous() for name in names[number::count]}, path)
    return paths


def test_a_checkpoint_in_several_files_is_loaded_whole_by_the_name_of_one(tmp_path):
    tiny = TINY["qwen_image"]()
    paths = write_shards(original_checkpoints.build_checkpoint("qwen_image", tiny.pipe), tmp_path)
    assert all(len(path.name) == len("model-00001-of-00003.safetensors") for path in paths)
    for path in (paths[0], paths[2]):
        options = ModelConfig(
            pretrained_model_name_or_path=str(path),
            tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers"),
        )
        family = FAMILIES.get("qwen_image")(options)
        detected = detect_model(options)
        assert detected.family == "qwen_image" and detected.source_type == "file"
        assert_same_weights(family, family.load(detected, torch.float32), tiny.pipe)


def test_a_text_encoder_in_several_files_is_one_component(tmp_path):
    tiny = TINY["qwen_image"]()
    tensors = original_checkpoints.build_checkpoint("qwen_image", tiny.pipe)
    transformer = {name: tensor for name, tensor in tensors.items() if not name.startswith(("text_encoders.", "vae."))}
    encoder = dict(tiny.pipe.text_encoder.state_dict())
    (tmp_path / "te").mkdir()
    save_file(
        transformer | {name: each for name, each in tensors.items() if name.startswith("vae.")},
        tmp_path / "a.safetensors",
    )
    paths = write_shards(encoder, tmp_path / "te", 2)
    options = ModelConfig(
        str(tmp_path / "a.safetensors"),
        text_encoder=str(paths[0]),
        tokenizer_cache_dir=save_tokenizers(tiny.family, tiny.pipe, tmp_path / "tokenizers"),
    )
    family = FAMILIES.get("qwen_image")(options)
    pipe = family.load(detect_model(options), torch.float32)
    assert_same_weights(family, pipe, tiny.pipe)


def test_missing_files_of_a_checkpoint_are_one_problem(tmp_path):
    tiny = TINY["qwen_image"]()
    first, second, third = write_shards(original_checkpoints.build_checkpoint("qwen_image", tiny.pipe), tmp_path)
    second.unlink()
    third.unlink()
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig(str(first)))
    (line,) = format_lines(caught.value.problems)
    assert line.endswith(
        "2 of the 3 files of the model are missing: model-00002-of-00003.safetensors, "
        "model-00003-of-00003.safetensors; put them into the same folder"
    )


def test_the_fingerprint_of_a_checkpoint_in_several_files_covers_them_all(tmp_path):
    tiny = TINY["qwen_image"]()
    tensors = original_checkpoints.build_checkpoint("qwen_image", tiny.pipe)
    paths = write_shards(tensors, tmp_path)
    detected, family = detect_model(str(paths[0])), FAMILIES.get("qwen_image")(ModelConfig())
    hashes = FileHashCache(tmp_path / "hashes.json")

    def compute():
        return (
            compute_component_fingerprints(family, detected, ("transformer",), hashes),
            compute_quick_model_fingerprint(detected),
        )

    whole = tmp_path / "whole.safetensors"
    save_file(tensors, whole)
    before = compute()
    assert before[0] == compute_component_fingerprints(family, detect_model(str(whole)), ("transformer",), hashes)
    save_file({name: tensor + 1 for name, tensor in load_file(paths[2]).items()}, paths[2])
    assert all(old != new for old, new in zip(before, compute(), strict=True))
