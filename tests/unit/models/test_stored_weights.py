"""Models that are stored quantized load as what their values stand for, and are trained."""

import json
from dataclasses import replace

import model_layouts
import pytest
import torch
from data_paths import ROOT
from family_cases import build_case
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from torch import nn
from training_runs import max_relative_difference, write_images

from library.config.schema import ModelConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.gguf_blocks import BLOCK_SIZES, dequantize_rows
from library.models.loading import split_variant
from library.models.model_configs import ModelError
from library.models.stored_weights import read_file_weights
from library.models.weights import load_tensors

__all__ = ["build_case"]  # a fixture


def load_denoiser(name, path, tiny, folder, dtype=torch.float32, **others):
    """Load a denoiser from a file; the other components are folders."""
    files = {"text_encoder": str(folder / "text_encoder"), "vae": str(folder / "vae")}
    tiny.pipe.save_pretrained(folder)
    options = model_layouts.build_options(name, {"transformer": str(path), **files}, "")
    family, detected = FAMILIES.get(name)(options), detect_model(options)
    return family.load(detected, dtype, ("transformer",)).transformer.state_dict(), detected


@pytest.mark.parametrize("name", ["z_image", "qwen_image"])
@pytest.mark.parametrize("layout", ["scale_weight", "comfy_quant", "rows", "plain"])
def test_scaled_fp8_is_the_model_that_its_values_stand_for(name, layout, build_case, tmp_path):
    _, tiny = build_case(name)
    original = model_layouts.convert_denoiser(name, tiny.pipe)
    stored, reference = model_layouts.scale_to_fp8(original, layout)
    assert any(tensor.dtype is torch.float8_e4m3fn and tensor.numel() > 2 for tensor in stored.values())
    loaded = []
    for number, tensors in enumerate((stored, reference)):
        path = model_layouts.save_tensors(tensors, tmp_path / f"{number}.safetensors")
        loaded.append(load_denoiser(name, path, tiny, tmp_path / "model"))
    (ours, detected), (theirs, plain) = loaded
    assert detected.stored_formats == ("fp8",) and plain.stored_formats == ()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["z_image", "qwen_image"])
def test_gguf_is_the_model_that_its_blocks_stand_for(name, build_case, tmp_path):
    _, tiny = build_case(name)
    reference = model_layouts.write_gguf(
        model_layouts.convert_denoiser(name, tiny.pipe), tmp_path / "model.gguf", "any"
    )
    plain = model_layouts.save_tensors(reference, tmp_path / "plain.safetensors")
    ours, detected = load_denoiser(name, tmp_path / "model.gguf", tiny, tmp_path / "model")
    theirs, _ = load_denoiser(name, plain, tiny, tmp_path / "model")
    assert detected.stored_formats == ("Q8_0",)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_every_type_of_blocks_has_the_values_of_the_gguf_package():
    tensors = load_file(ROOT / "tests" / "data" / "gguf_blocks.safetensors")
    assert {key.partition(".")[0] for key in tensors} == {*BLOCK_SIZES}
    for name in BLOCK_SIZES:
        ours = dequantize_rows(tensors[f"{name}.bytes"], name)
        torch.testing.assert_close(ours, tensors[f"{name}.values"], rtol=1e-5, atol=1e-6)


def test_a_repository_in_nf4_is_read_without_bitsandbytes(build_case, tmp_path):
    _, tiny = build_case("z_image")
    tiny.pipe.save_pretrained(tmp_path)
    stored, reference = model_layouts.quantize_nf4(tiny.pipe.transformer.state_dict())
    model_layouts.save_tensors(stored, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    path = tmp_path / "transformer" / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    detected = detect_model(str(tmp_path))
    assert detected.stored_formats == ("nf4",)
    loaded = FAMILIES.get("z_image")().load(detected, torch.float32, ("transformer",)).transformer.state_dict()
    assert all(torch.equal(tensor, reference[key]) for key, tensor in loaded.items())
    settings["quant_method"] = "torchao"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(ConfigError, match=r"transformer is stored by torchao.* use the repository in bf16"):
        detect_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_repository_of_torchao_is_read_without_torchao(kind, build_case, tmp_path):
    _, tiny = build_case("z_image")
    tiny.pipe.save_pretrained(tmp_path)
    stored, metadata, reference = model_layouts.quantize_torchao(tiny.pipe.transformer.state_dict(), kind)
    file, path = "diffusion_pytorch_model.safetensors", tmp_path / "transformer" / "config.json"
    model_layouts.save_tensors(stored, tmp_path / "transformer" / file, metadata)
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": f"{kind.capitalize()}WeightOnlyConfig"}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    detected = detect_model(str(tmp_path))
    assert detected.stored_formats == ("int8" if kind == "int8" else "fp8",)
    loaded = FAMILIES.get("z_image")().load(detected, torch.float32, ("transformer",)).transformer.state_dict()
    assert all(torch.equal(tensor, reference[key]) for key, tensor in loaded.items())
    key = next(key for key in stored if key.endswith("_qdata"))
    more = {key.replace("_qdata", "_zero_point"): torch.ones(1)}
    model_layouts.save_tensors(stored | more, tmp_path / "transformer" / file, metadata)
    with pytest.raises(ModelError, match=r"torchao .* not read; use a file of this model in bf16"):
        read_file_weights([tmp_path / "transformer" / file])


def test_a_variant_in_several_files_is_loaded(build_case, tmp_path):
    _, tiny = build_case("z_image")
    tiny.pipe.save_pretrained(tmp_path, variant="fp16", max_shard_size="60KB")
    names = [path.name for path in (tmp_path / "transformer").glob("*.safetensors")]
    assert len(names) > 1 and {split_variant(name) for name in names} == {"fp16"}
    loaded = FAMILIES.get("z_image")().load(str(tmp_path), torch.float32, ("transformer",)).transformer.state_dict()
    expected = tiny.pipe.transformer.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.items())


@pytest.mark.parametrize(
    ("name", "component", "architecture"),
    [
        ("flux", "text_encoder_2", "t5encoder"),
        ("z_image", "text_encoder", "qwen3"),
        ("qwen_image", "text_encoder", "qwen2vl"),
        ("lumina2", "text_encoder", "gemma2"),
        ("hunyuan_video", "text_encoder", "llama"),
    ],
)
def test_a_text_encoder_in_gguf_is_the_model_that_its_blocks_stand_for(
    name, component, architecture, build_case, tmp_path
):
    """Names, the order of rotary heads and the norms of llama.cpp are undone."""
    _, tiny = build_case(name)
    path = tmp_path / "text.gguf"
    reference = model_layouts.write_gguf_encoder(getattr(tiny.pipe, component), path, architecture)
    plain = model_layouts.save_tensors(reference, tmp_path / "text.safetensors")
    tiny.pipe.save_pretrained(tmp_path / "model")
    option = {part: option for option, part in FAMILY_FACTS[name].options.components.items()}[component]
    loaded = []
    for file in (path, plain):
        options = ModelConfig(str(tmp_path / "model"), **{option: str(file)})
        pipe = FAMILIES.get(name)(options).load(detect_model(options), torch.float32, (component,))
        loaded.append(getattr(pipe, component).state_dict())
    ours, theirs = loaded
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-6) for key in theirs)


def test_a_gguf_file_of_no_known_text_encoder_is_refused_with_the_way_out(build_case, tmp_path):
    _, tiny = build_case("qwen_image_edit")
    options = model_layouts.write_separate_files("qwen_image_edit", tiny.pipe, tmp_path)
    for architecture, reason in {"bert": "architecture bert", "qwen2vl": "without the vision part"}.items():
        path = tmp_path / f"{architecture}.gguf"
        model_layouts.write_gguf({"token_embd.weight": torch.ones(64, 32)}, path, architecture)
        with pytest.raises(ConfigError, match=rf"text_encoder: .*{reason}.*use the .safetensors file"):
            detect_model(replace(options, text_encoder=str(path)))


def train_settings(*flags: str) -> None:
    from library.training.preflight import find_settings_problems, load_settings
    from library.training.run import run_training

    loaded = load_settings(flags)
    assert find_settings_problems(loaded) == []
    run_training(loaded.config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["scale_weight", "gguf", "plain_files"])
def test_a_model_that_is_stored_quantized_is_trained(layout, build_case, tmp_path):
    """Two steps, equal to those of the file of what its values stand for."""
    _, tiny = build_case("z_image")
    files, dataset = model_layouts.build_files("z_image", tiny.pipe), write_images(tmp_path, {(64, 64): 4})
    tokenizers = model_layouts.save_tokenizers("z_image", tiny.pipe, tmp_path / "tokenizers")
    paths = {name: model_layouts.save_tensors(files[name], tmp_path / f"{name}.safetensors") for name in files}
    reference = files["transformer"]
    stored = tmp_path / f"stored.{'gguf' if layout == 'gguf' else 'safetensors'}"
    if layout == "gguf":
        reference = model_layouts.write_gguf(files["transformer"], stored, "lumina2")
    elif layout == "scale_weight":
        tensors, reference = model_layouts.scale_to_fp8(files["transformer"], layout)
        model_layouts.save_tensors(tensors, stored)
    else:
        model_layouts.save_tensors(files["transformer"], stored)
    model_layouts.save_tensors(reference, tmp_path / "reference.safetensors")
    results = {}
    for path in (stored, tmp_path / "reference.safetensors"):
        options = model_layouts.build_options("z_image", {**paths, "transformer": str(path)}, tokenizers)
        flags = [*model_layouts.list_flags(options), "--dataset_config", str(dataset), "--output_dir", str(tmp_path)]
        flags += "--mixed_precision no --network_dim 4 --max_train_steps 2 --learning_rate 0.1 --optimizer_type SGD --quiet".split()
        flags += ["--max_data_loader_n_workers", "0", "--output_name", path.stem]
        run_on_ranks(1, train_settings, *flags)
        results[path.stem] = load_file(tmp_path / f"{path.stem}.safetensors")
    assert max_relative_difference(results["stored"], results["reference"]) < 1e-4


CONVROT = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}


@pytest.mark.parametrize(
    ("mark", "metadata"),
    [
        (CONVROT, None),
        ({"format": "int8_tensorwise", "params": {"convrot": True}}, None),
        (None, {"_quantization_metadata": json.dumps({"layers": {"a": CONVROT}})}),
        (None, {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "mxfp8"}}})}),
    ],
)
def test_rotated_weights_and_formats_that_only_the_metadata_name_are_refused(mark, metadata, tmp_path):
    tensors = {"a.weight": torch.ones(4, 256, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    if mark is not None:
        tensors["a.comfy_quant"] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    model_layouts.save_tensors(tensors, tmp_path / "a.safetensors", metadata)
    with pytest.raises(ModelError, match=r"(int8_tensorwise with ConvRot|mxfp8) .*is not read"):
        read_file_weights([tmp_path / "a.safetensors"])


@pytest.mark.parametrize("columns", [192, 448, 960])
def test_scales_of_square_blocks_end_with_the_weight(columns, tmp_path):
    values, scale = torch.randn(200, columns).to(torch.float8_e4m3fn), torch.rand(2, -(-columns // 128)) + 0.5
    path = tmp_path / "a.safetensors"
    model_layouts.save_tensors({"a.weight": values, "a.weight_scale_inv": scale}, path)
    expected = values.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :columns]
    torch.testing.assert_close(read_file_weights([path])["a.weight"].dequantize(), expected)


@pytest.mark.parametrize("name", ["sdxl", "z_image"])
def test_a_vae_cast_to_fp8_loads_as_its_values(name, build_case, tmp_path):
    """Conversions of a VAE squeeze its attention's convolutions."""
    _, tiny = build_case(name)
    tensors = {key: each.to(torch.float8_e4m3fn) for key, each in model_layouts.convert_vae(tiny.pipe.vae).items()}
    tiny.pipe.save_pretrained(tmp_path / "model")
    loaded = []
    for number, vae in enumerate((tensors, {key: each.float() for key, each in tensors.items()})):
        path = model_layouts.save_tensors(vae, tmp_path / f"{number}.safetensors")
        options = ModelConfig(str(tmp_path / "model"), vae=path)
        loaded.append(FAMILIES.get(name)(options).load(detect_model(options), torch.float32, ("vae",)).vae.state_dict())
    assert all(torch.equal(loaded[0][key], loaded[1][key]) for key in loaded[1])


@pytest.mark.parametrize("end", ["scale_weight", "weight_scale"])
def test_a_scale_beside_a_weight_of_ordinary_floats_is_multiplied(end, tmp_path):
    """As in ComfyUI, whose layers of scaled files all multiply with their scale."""
    weight = torch.randn(4, 8, dtype=torch.bfloat16)
    model_layouts.save_tensors({"a.weight": weight, f"a.{end}": torch.tensor(0.5)}, tmp_path / "a.safetensors")
    read = read_file_weights([tmp_path / "a.safetensors"])["a.weight"]
    assert torch.equal(read.to(dtype=torch.float32), weight.float() / 2)


@pytest.mark.parametrize("name", ["a.scale", "a.weight.scale", "a.block_scale"])
def test_fp8_with_a_scale_of_another_name_is_refused(name, tmp_path):
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), name: torch.ones(1), "b.scale": torch.ones(4)}
    model_layouts.save_tensors(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=f"fp8 weights with {name}, which is not read"):
        read_file_weights([tmp_path / "a.safetensors"])


def test_gguf_is_known_by_its_first_bytes_and_a_damaged_header_is_told(tmp_path):
    path = tmp_path / "a.safetensors"
    expected = model_layouts.write_gguf({"a.weight": torch.randn(4, 64)}, path, "any")
    torch.testing.assert_close(read_file_weights([path])["a.weight"].dequantize(), expected["a.weight"])
    for at in (8, 16):  # the number of tensors, and of values
        damaged = bytearray(path.read_bytes())
        damaged[at : at + 8] = (2**60).to_bytes(8, "little")
        (tmp_path / "b.gguf").write_bytes(damaged)
        with pytest.raises(ModelError, match="damaged"):
            read_file_weights([tmp_path / "b.gguf"])


def test_loaded_weights_that_were_parts_of_one_tensor_count_their_changes_alone():
    """A fused backward pass updates one while autograd still needs another."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to("meta")
    parts = torch.zeros(4, 2).split(2)
    assert load_tensors(model, {"0.weight": parts[0], "1.weight": parts[1]}, torch.float32, None) == []
    before = model[1].weight._version
    with torch.no_grad():
        model[0].weight.add_(1)
    assert model[1].weight._version == before and not model[1].weight.any()
