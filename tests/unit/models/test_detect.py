"""The family of a model is detected from its JSON files or header, without torch and with a reason."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError
from model_files import write_json_files
from problem_lines import format_lines

from library.config.schema import DataConfig, ModelConfig
from library.dataset.dataset_config import load_dataset_config
from library.dataset.validate import validate_resolution_multiple
from library.errors import ConfigError
from library.models.detect import detect_model, get_config_reader
from library.models.facts import DetectionFacts
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.model_configs import is_tokenizer, list_bundled_configs, list_family_configs, load_bundled_config


def write_model_folder(folder, name="StableDiffusionPipeline", unet=None, vae=None, scheduler=None, config=None):
    """Write the JSON files of a diffusers folder: Stable Diffusion 1.5, or a bundled config."""
    if config is not None:
        return write_json_files(folder, load_bundled_config(config))
    sizes = {"cross_attention_dim": 768, "block_out_channels": [320, 640, 1280, 1280], "in_channels": 4}
    files = {
        "model_index.json": {"_class_name": name},
        "unet/config.json": {**sizes, **(unet or {})},
        "vae/config.json": {"block_out_channels": [128, 256, 512, 512], **(vae or {})},
        "scheduler/scheduler_config.json": scheduler or {},
        "text_encoder/config.json": {},
        "tokenizer/tokenizer_config.json": {},
    }
    return write_json_files(folder, files)


def detect_problem(source, **options):
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig(source, **options))
    (line,) = format_lines(caught.value.problems)
    assert options or line.startswith(f"--pretrained_model_name_or_path: {source}: ")
    return line


def test_a_diffusers_folder_of_stable_diffusion_1_is_detected_with_a_reason(tmp_path):
    actual = detect_model(write_model_folder(tmp_path))
    assert actual.family == "sd1"
    assert "StableDiffusionPipeline" in actual.reason and "768" in actual.reason
    assert (actual.size_multiple, actual.prediction_type, actual.source_type) == (64, "epsilon", "folder")


@pytest.mark.parametrize("name", list_bundled_configs())
def test_every_bundled_config_is_detected_as_its_family(name, tmp_path):
    (family,) = (each for each in FAMILY_FACTS if name in list_family_configs(each))
    read, detected = (
        detect_model(write_model_folder(tmp_path, config=name)),
        detect_model(f"random:{name.replace(f'{family}_', f'{family}:')}"),
    )
    assert read.family == detected.family == family
    assert (read.size_multiple, read.prediction_type) == (detected.size_multiple, detected.prediction_type)
    assert FAMILY_FACTS[read.family].pipeline.class_name in read.reason and f"sizes of {name}" in detected.reason


def test_size_multiples_and_prediction_types_are_those_of_the_published_models():
    actual = {name: detect_model(f"random:{name}") for name in ("sd1", "sd2", "sd2:base", "sdxl")}
    assert {name: (each.size_multiple, each.prediction_type) for name, each in actual.items()} == {
        "sd1": (64, "epsilon"),
        "sd2": (64, "v"),
        "sd2:base": (64, "epsilon"),
        "sdxl": (32, "epsilon"),
    }
    assert {detect_model(f"random:{name}").size_multiple for name in ("qwen_image21", "hunyuan_image")} == {32}


@pytest.mark.parametrize(
    "name",
    # An image token of GLM-Image stands for 32 pixels, whatever the size of the model.
    [name for name in list_bundled_configs() if "_tiny" in name and name != "glm_image_tiny"],
)
def test_the_demo_datasets_have_bucket_steps_of_every_tiny_model(name):
    """Whoever adds a family tries it on these."""
    (family,) = (each for each in FAMILY_FACTS if name in list_family_configs(each))
    multiple = detect_model(f"random:{name.replace(f'{family}_', f'{family}:')}").size_multiple
    for file in ("demo.toml", "demo_control.toml"):
        read = load_dataset_config(DataConfig(dataset_config=f"dataset_configs/{file}"))
        assert read.datasets and not read.problems
        assert not format_lines(validate_resolution_multiple(read.datasets, multiple)), file


def test_the_built_in_model_is_detected_from_its_files(tmp_path):
    import tiny_sd1

    tiny_sd1.build_pipeline().save_pretrained(tmp_path)
    read, detected = detect_model(str(tmp_path)), detect_model(None)
    assert (read.family, read.size_multiple) == (detected.family, detected.size_multiple) == ("sd1", 16)
    assert "built-in" in detected.reason


def test_unsupported_models_are_rejected_by_name(tmp_path):
    assert "AllegroPipeline is not supported; supported: Stable Diffusion 1, " in detect_problem(
        write_model_folder(tmp_path / "a", name="AllegroPipeline")
    )
    assert "has 9 input channels" in detect_problem(write_model_folder(tmp_path / "c", unet={"in_channels": 9}))
    assert "has no size conditioning" in detect_problem(
        write_model_folder(tmp_path / "d", name="StableDiffusionXLPipeline")
    )
    refiner = {"addition_embed_type": "text_time", "projection_class_embeddings_input_dim": 2560}
    assert "refiner" in detect_problem(
        write_model_folder(tmp_path / "e", name="StableDiffusionXLPipeline", unet=refiner)
    )


def test_a_path_that_is_no_model_is_reported_with_a_fix(tmp_path):
    assert "no model_index.json" in detect_problem(str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    assert "this one holds only AutoencoderKL" in detect_problem(str(tmp_path))
    assert "no such file or folder (looked in" in detect_problem(str(tmp_path / "absent"))
    assert "no such file or folder (looked in" in detect_problem("absent.safetensors")
    assert "did you mean random:sdxl:tiny?" in detect_problem("random:sdxl:tini")
    assert "did you mean random:sd" in detect_problem("random:sd")
    assert "available: random:" in detect_problem("random:12345678")
    assert "--family needs a model" in detect_problem(None, family="sdxl")
    broken = tmp_path / "broken"
    write_model_folder(broken)
    (broken / "unet/config.json").write_text("{")
    assert "config.json cannot be read" in detect_problem(str(broken))
    (broken / "unet/config.json").unlink()
    assert "unet/config.json is missing" in detect_problem(str(broken))


def write_sparse_file(path, shapes, metadata=None, cut=0):
    """Write a sparse safetensors file with these keys and shapes."""
    head, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        head[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end - cut)
    return str(path)


UNET = "model.diffusion_model."
XL = {
    f"{UNET}input_blocks.0.0.weight": [320, 4, 3, 3],
    f"{UNET}label_emb.0.0.weight": [1280, 2816],
    "first_stage_model.decoder.conv_in.weight": [512, 4, 3, 3],
    "conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight": [49408, 768],
    "conditioner.embedders.1.model.token_embedding.weight": [49408, 1280],
}
ATTENTION = f"{UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
ONE = {
    f"{UNET}input_blocks.0.0.weight": [320, 4, 3, 3],
    ATTENTION: [320, 768],
    "first_stage_model.decoder.conv_in.weight": [512, 4, 3, 3],
    "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": [49408, 768],
}
TWO = {**ONE, ATTENTION: [320, 1024], "cond_stage_model.model.token_embedding.weight": [49408, 1024]}


REFINER = {
    f"{UNET}input_blocks.0.0.weight": [384, 4, 3, 3],
    f"{UNET}label_emb.0.0.weight": [1536, 2560],
    "first_stage_model.decoder.conv_in.weight": [512, 4, 3, 3],
    "conditioner.embedders.0.model.token_embedding.weight": [49408, 1280],
}


def set_input_channels(shapes, count):
    return {**shapes, f"{UNET}input_blocks.0.0.weight": [320, count, 3, 3]}


@pytest.mark.parametrize(
    "shapes, family, config",
    [
        (ONE, "sd1", "sd1"),
        (TWO, "sd2", "sd2"),
        (XL, "sdxl", "sdxl"),
        (REFINER, "sdxl_refiner", "sdxl_refiner"),
        (set_input_channels(ONE, 9), "sd1_inpainting", "sd1_inpainting"),
        (set_input_channels(TWO, 9), "sd2_inpainting", "sd2_inpainting"),
        (set_input_channels(XL, 9), "sdxl_inpainting", "sdxl_inpainting"),
        (set_input_channels(ONE, 8), "sd1_pix2pix", "sd1_pix2pix"),
        (set_input_channels(XL, 8), "sdxl_pix2pix", "sdxl_pix2pix"),
    ],
)
def test_a_single_file_is_detected_by_its_keys_and_shapes(shapes, family, config, tmp_path):
    actual = detect_model(write_sparse_file(tmp_path / "model.safetensors", shapes))
    assert (actual.family, actual.bundled_config, actual.source_type) == (family, config, "file")
    assert {*actual.single_file_components} == {
        part for part in FAMILY_FACTS[family].components if not is_tokenizer(part)
    }
    assert FAMILY_FACTS[family].title in actual.reason


@pytest.mark.parametrize(("channels", "family"), [(64, "flux"), (128, "flux_control"), (384, "flux_fill")])
def test_the_input_channels_tell_the_models_of_flux_apart(channels, family, tmp_path):
    shapes = {
        "double_blocks.0.img_attn.qkv.weight": [9216, 3072],
        "img_in.weight": [3072, channels],
        "txt_in.weight": [3072, 4096],
        "vector_in.in_layer.weight": [3072, 768],
        "guidance_in.in_layer.weight": [3072, 256],
    }
    options = dict.fromkeys(("ae", "clip_l", "t5xxl"), write_model_folder(tmp_path / "others", config="flux"))
    path = write_sparse_file(tmp_path / "model.safetensors", shapes)
    assert detect_model(ModelConfig(path, **options)).family == family


def test_the_prediction_type_of_a_single_file_is_read_from_its_metadata(tmp_path):
    def prediction(shapes, metadata=None):
        actual = detect_model(write_sparse_file(tmp_path / "model.safetensors", shapes, metadata))
        assert (
            actual.scheduler_overrides.get("prediction_type", "").startswith(actual.prediction_type)
            or not actual.scheduler_overrides
        )
        return actual.prediction_type

    assert prediction(XL) == "epsilon"
    assert prediction(XL, {"modelspec.prediction_type": "v"}) == "v"
    assert prediction({**XL, "v_pred": [0]}) == "v"
    assert prediction(TWO) == "v", "as the published 768 model"
    assert prediction(TWO, {"modelspec.prediction_type": "epsilon"}) == "epsilon"
    zero = detect_model(write_sparse_file(tmp_path / "zero.safetensors", {**XL, "v_pred": [0], "ztsnr": [0]}))
    assert zero.scheduler_overrides["rescale_betas_zero_snr"] is True


Z_IMAGE = {
    "noise_refiner.0.attention.qkv.weight": [11520, 3840],
    "cap_embedder.1.weight": [3840, 2560],
    "layers.0.adaLN_modulation.0.weight": [15360, 256],
    "vae.decoder.conv_in.weight": [512, 16, 3, 3],
    "text_encoders.qwen3_4b.transformer.model.norm.weight": [2560],
}


def test_family_tells_z_image_base_from_turbo_where_a_single_file_does_not(tmp_path):
    path = write_sparse_file(tmp_path / "model.safetensors", Z_IMAGE)

    def detect(family):
        model = detect_model(ModelConfig(path, family))
        return model, get_config_reader(model)("scheduler/scheduler_config.json")["shift"]

    model, shift = detect(None)
    assert (model.family, model.bundled_config, shift) == ("z_image", "z_image", 3.0)
    assert model.reason.endswith("(config z_image); --family z_image:base if it is that one")
    model, shift = detect("z_image:base")
    assert (model.family, model.bundled_config, shift) == ("z_image", "z_image_base", 6.0)
    assert model.reason == "set by --family (config z_image_base)"
    with pytest.raises(ConfigError, match="family: z_image has no variant bass; set z_image or z_image:base"):
        detect("z_image:bass")
    with pytest.raises(ConfigError, match="does not have the sizes of z_image:tiny"):
        detect("z_image:tiny")
    folder = tmp_path / "folder"
    write_model_folder(folder, config="z_image_tiny")
    with pytest.raises(ConfigError, match="its own files tell the variant; set --family z_image, or leave it out"):
        detect_model(ModelConfig(str(folder), "z_image:base"))


OTHERS = {
    "a LoRA file, not a model": {"lora_unet_x.lora_down.weight": [4, 4]},
    "a LoRA file": {"transformer.blocks.0.to_q.lora_A.weight": [4, 4]},
    "a textual inversion": {"emb_params": [2, 768]},
    "textual inversion": {"clip_l": [2, 768], "clip_g": [2, 1280]},
    "a ControlNet": {"control_model.input_blocks.0.0.weight": [320, 4, 3, 3]},
    "an IP-Adapter": {"image_proj.proj.weight": [4, 4]},
    "an SVDQuant model of Nunchaku": {"transformer_blocks.0.attn.to_qkv.wscales": [4, 4]},
    "AWQ, GPTQ": {"model.layers.0.mlp.up_proj.qzeros": [4, 4]},
    "NVFP4": {**XL, f"{UNET}label_emb.0.0.weight_scale_2": []},
    "a VAE with 4 latent channels": {"decoder.conv_in.weight": [512, 4, 3, 3]},
    "a CLIP text encoder of width 1280": {"text_model.embeddings.token_embedding.weight": [49408, 1280]},
    "a T5 text encoder of width 4096": {"encoder.block.0.layer.0.SelfAttention.q.weight": [4096, 4096]},
    "a depth model": {**TWO, f"{UNET}input_blocks.0.0.weight": [320, 5, 3, 3]},
    "of unknown sizes": {**XL, f"{UNET}input_blocks.0.0.weight": [640, 4, 3, 3]},
    "not a known model; it holds 1 weights, the first is bias": {"bias": [3]},
}


@pytest.mark.parametrize("words", OTHERS)
def test_an_unsupported_single_file_is_rejected_by_its_type(words, tmp_path):
    assert words in detect_problem(write_sparse_file(tmp_path / "model.safetensors", OTHERS[words]))


BROKEN = {
    "is empty": b"",
    "is a pickle (.ckpt, .pt, .bin), which can run code": b"PK\x03\x04" + bytes(100),
    "is a pickle": b"\x80\x02" + bytes(100),
    "never read; use the .safetensors file of this model, or save it as one in ComfyUI": b"PK\x03\x04" + bytes(99),
    "is a GGUF file": b"GGUF" + bytes(100),
    "is a git-lfs pointer; run": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "is a web page": b"<!DOCTYPE html><html>Sign in</html>",
    "is not a safetensors file": b"Hello, this is some text",
    "is truncated": (500).to_bytes(8, "little") + b'{"a":',
    "is a damaged safetensors file": (20).to_bytes(8, "little") + b'{"a": {"shape": [1]}' + b"}",
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_file_that_is_not_safetensors_is_rejected_by_its_type(words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(BROKEN[words])
    assert words in detect_problem(str(tmp_path / "model.safetensors"))


def test_a_truncated_file_is_reported_before_it_is_loaded(tmp_path):
    assert "is truncated: " in detect_problem(write_sparse_file(tmp_path / "model.safetensors", XL, cut=10))


def test_the_family_option_must_match_the_model(tmp_path):
    folder = write_model_folder(tmp_path / "one", config="sdxl", name="")
    actual = detect_model(ModelConfig(folder, family="sdxl"))
    assert actual.family == "sdxl" and "set by --family" in actual.reason
    assert detect_problem(folder, family="sdxll") == "--family: unknown model family 'sdxll'; did you mean sdxl?"
    assert "pathlib:Path is not a model family" in detect_problem(folder, family="pathlib:Path")
    assert "its files are not those of family sd2" in detect_problem(write_model_folder(tmp_path / "b"), family="sd2")
    own = detect_model(ModelConfig(folder, family="library.models.families.sdxl:StableDiffusionXL"))
    assert own.family == "library.models.families.sdxl:StableDiffusionXL"
    assert FAMILIES.get(own.family).facts.denoiser_name == "unet"
    file = write_sparse_file(tmp_path / "model.safetensors", XL)
    assert "does not contain weights of family sd1" in detect_problem(file, family="sd1")
    assert "is of family sdxl, not sd1" in detect_problem("random:sdxl:tiny", family="sd1")


class FamilyOfFolders(FAMILIES.get("sdxl")):
    """A family without keys of single files."""

    facts = replace(FAMILY_FACTS["sdxl"], detection=DetectionFacts(FAMILY_FACTS["sdxl"].detection.match_configs))


def test_a_family_without_keys_is_in_no_single_file(tmp_path):
    file = write_sparse_file(tmp_path / "model.safetensors", XL)
    problem = detect_problem(file, family=f"{__name__}:FamilyOfFolders")
    assert "does not contain weights of family" in problem


def test_the_author_of_a_family_is_told_all_that_is_missing(tmp_path):
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig(write_model_folder(tmp_path), family="library.models.base:Family"))
    assert format_lines(caught.value.problems) == [
        "--family: library.models.base:Family has no facts; set facts = FamilyFacts(...); see docs/adding_a_family.md",
        "--family: library.models.base:Family does not write encode_prompts, get_base_model_info, predict; see"
        " docs/adding_a_family.md",
    ]


def test_options_of_other_families_are_all_rejected_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        detect_model(ModelConfig(write_model_folder(tmp_path), clip_g="x", ae="y", v2=True))
    assert format_lines(caught.value.problems) == [
        "--clip_g: Stable Diffusion 1 has no such component",
        "--ae: Stable Diffusion 1 has no such component",
        "--v2: the model is Stable Diffusion 1; leave this option out",
    ]
    assert "clip_skip: does not apply to Stable Diffusion XL; leave this option out" in detect_problem(
        "random:sdxl:tiny", clip_skip=2
    )
    assert detect_model(ModelConfig("random:sd2:tiny", v2=True, clip_skip=2)).family == "sd2"


def test_a_hub_id_without_network_is_reported_in_one_line():
    assert "the hub cannot be reached" in detect_problem("nobody/nothing")
    assert "the hub says: " in detect_problem("no--body/nothing")


def test_a_gated_model_is_reported_with_the_way_to_it(monkeypatch):
    def refuse(*_, **__):
        raise GatedRepoError(
            "403 Client Error", response=httpx.Response(403, request=httpx.Request("GET", "http://hub"))
        )

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("library.models.model_configs.is_hub_reachable", lambda: True)
    problem = detect_problem("nobody/gated")
    assert (
        "this model is gated: accept its terms at https://huggingface.co/nobody/gated, then run 'hf auth login'"
        in problem
    )


def test_an_unreachable_hub_is_asked_once_and_only_its_cache_is_read(monkeypatch):
    """hf_hub_download alone would retry each file for half a minute."""
    asked, downloads = [], []

    class UnreachableHub:
        def head(self, url, timeout):
            asked.append(url)
            raise OSError("no network")

    def read_cache(repo_id, name, local_files_only):
        downloads.append(local_files_only)
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "get_session", UnreachableHub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", read_cache)
    assert "the hub cannot be reached" in detect_problem("nobody/nothing")
    assert len(asked) == 1 and set(downloads) == {True}


def test_detecting_a_folder_imports_neither_torch_nor_diffusers(tmp_path):
    script = (
        "import sys; from library.models.detect import detect_model; from library.models.families import FAMILIES;"
        f"detect_model({write_model_folder(tmp_path / 'a')!r}); detect_model(None); "
        "FAMILIES.list_names(); detect_model('random:sdxl:tiny');"
        f"detect_model({write_sparse_file(tmp_path / 'model.safetensors', XL)!r});"
        "print({'torch', 'diffusers', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "part",
    [
        "unet/config.json",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_model_without_a_component_is_reported_before_it_is_loaded(part, tmp_path):
    source = write_model_folder(tmp_path)
    (tmp_path / part).unlink()

    assert f"{part} is missing; the model is not complete" in detect_problem(source)


def test_an_untrainable_model_is_reported_before_it_is_loaded(tmp_path):
    assert "predict" in detect_problem(write_model_folder(tmp_path / "a", scheduler={"prediction_type": "sample"}))
    assert "num_train_timesteps 500" in detect_problem(
        write_model_folder(tmp_path / "b", scheduler={"num_train_timesteps": 500})
    )
    assert "has no block_out_channels" in detect_problem(
        write_model_folder(tmp_path / "c", unet={"block_out_channels": None})
    )


def test_a_damaged_weight_file_is_reported_in_one_line_and_a_tilde_is_expanded(tmp_path, monkeypatch):
    import tiny_sd1
    import torch

    from library.models.families.sd1_sd2 import StableDiffusion1

    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_sd1.build_pipeline().save_pretrained(tmp_path / "model")
    assert StableDiffusion1().load("~/model", torch.float32, ["vae"]).vae is not None
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")

    with pytest.raises(ConfigError, match="cannot be loaded"):
        StableDiffusion1().load("~/model", torch.float32, ["vae"])
