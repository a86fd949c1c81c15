"""Base weights that files store quantized stay as they are, and compute what the dequantized weights compute."""

import json
from dataclasses import replace
from types import SimpleNamespace

import model_layouts
import pytest
import torch
from data_paths import ROOT
from family_cases import build_case
from safetensors.torch import load_file
from torch import nn

from library.config import parse_config
from library.config.schema import AdapterConfig, ModelConfig
from library.estimate.base_storage import BlockWeights
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.gguf_blocks import BLOCK_SIZES
from library.models.loading import load_pipeline_on_meta
from library.models.stored_weights import StoredWeight, read_file_weights
from library.parallel.frozen_base import find_innermost_blocks, should_quantize
from library.parallel.quantize import FrozenLayer, QuantizedWeight, take_ranges
from library.parallel.stored_base import (
    KEPT,
    describe_rounding,
    explain_dequantization,
    has_room,
    keep_stored_layers,
    pack_stored_weight,
)
from library.parallel.strategy_registry import select_base_kernel
from library.training.oom_advice import suggest_oom_fixes
from library.training.resume import find_changes

__all__ = ["build_case"]  # a fixture


def build_stored_weights(folder):
    """A weight of each format, as it is read from a file."""
    values, scale = torch.randn(256, 256), torch.rand(256, 1) + 0.5
    fp8, e5m2, int8 = values.to(torch.float8_e4m3fn), values.to(torch.float8_e5m2), (values * 30).to(torch.int8)
    plain = {"rows.weight": fp8, "rows.weight_scale": scale, "one.weight": e5m2, "one.scale_weight": torch.tensor(0.3)}
    plain |= {"squares.weight": fp8, "squares.weight_scale_inv": torch.rand(2, 2), "none.weight": fp8}
    plain |= {"int8.weight": int8, "int8.SCB": scale.flatten()}
    packed, _ = model_layouts.quantize_nf4({"nf4.0.weight": values})
    model_layouts.save_tensors({**plain, **packed}, folder / "a.safetensors")
    stored = dict(read_file_weights([folder / "a.safetensors"]))
    blocks = load_file(ROOT / "tests" / "data" / "gguf_blocks.safetensors")
    for name, (count, _) in BLOCK_SIZES.items():
        rows = blocks[f"{name}.bytes"].flatten(1)[:2].repeat(128, 256 // count)
        stored[name] = StoredWeight(name, torch.Size((256, 256)), (rows,))
    return stored


def test_kept_weights_and_their_slices_have_the_values_of_the_file(tmp_path):
    stored = build_stored_weights(tmp_path)
    assert {"fp8", "int8", "nf4", *BLOCK_SIZES} == {each.format for each in stored.values()}
    for name, each in stored.items():
        weight = pack_stored_weight(each, torch.bfloat16)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(weight.dequantize(dtype), each.to(dtype=dtype)), (name, dtype)
        whole = each.to(dtype=torch.bfloat16)
        for dim, ranges in ((0, ((64, 32), (128, 16))), (1, ((64, 64),)), (1, ((0, 256),)), (1, ((16, 48), (96, 16)))):
            shard = weight.take_ranges(dim, ranges)
            expected = take_ranges(whole, dim, ranges)
            assert torch.equal(shard.dequantize(torch.bfloat16), expected) and shard.shape == expected.shape, name


def test_a_base_is_rounded_again_only_where_that_saves_memory(tmp_path):
    stored = {name: pack_stored_weight(each, torch.bfloat16) for name, each in build_stored_weights(tmp_path).items()}
    assert not any(should_quantize(weight, kind) for weight in stored.values() for kind in ("none", "fp8", "int8"))
    rounded = {
        each.format for name, each in build_stored_weights(tmp_path).items() if should_quantize(stored[name], "nf4")
    }
    assert rounded == {"fp8", "int8", "Q8_0", "Q6_K", "Q5_1"}


def write_nf4(pipe, folder):
    pipe.save_pretrained(folder)
    stored, _ = model_layouts.quantize_nf4(pipe.transformer.state_dict())
    model_layouts.save_tensors(stored, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    path = folder / "transformer" / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return ModelConfig(str(folder))


def write_stored_model(name, kind, pipe, folder):
    """Write a model whose transformer is stored in this way, and return its options."""
    if kind == "nf4":
        return write_nf4(pipe, folder / "model")
    pipe.save_pretrained(folder / "model")
    tensors, path = model_layouts.convert_denoiser(name, pipe), folder / f"stored.{kind}"
    if kind == "gguf":
        model_layouts.write_gguf(tensors, path, "any")
    else:
        model_layouts.save_tensors(model_layouts.scale_to_fp8(tensors, "comfy_quant")[0], path)
    tokenizers = model_layouts.save_tokenizers(name, pipe, folder / "tokenizers")
    others = {part: str(folder / "model" / part) for part in ("text_encoder", "vae")}
    return model_layouts.build_options(name, {"transformer": str(path), **others}, tokenizers)


@pytest.mark.parametrize(("name", "kind"), [("z_image", "gguf"), ("z_image", "nf4"), ("qwen_image", "fp8")])
def test_a_loaded_base_is_kept_where_it_is_stored_and_estimated_so(name, kind, build_case, tmp_path):
    _, tiny = build_case(name)
    options = write_stored_model(name, kind, tiny.pipe, tmp_path)
    family, detected = FAMILIES.get(name)(options), detect_model(options)
    plain = family.load(detected, torch.bfloat16, ("transformer",)).transformer.requires_grad_(False)
    kept = family.load(detected, torch.bfloat16, ("transformer",), keeps_stored=True).transformer
    assert keep_stored_layers(kept) > 10
    weights = dict(plain.named_parameters())
    for path, layer in kept.named_modules():
        if isinstance(layer, FrozenLayer):
            assert torch.equal(layer.weight, weights[f"{path}.weight"])
        elif isinstance(layer, nn.Linear):
            assert torch.equal(layer.weight, weights[f"{path}.weight"]) and not layer.weight.is_meta
    assert not any(parameter.is_meta for parameter in kept.parameters())
    on_meta = load_pipeline_on_meta(family, detected, torch.bfloat16, keeps_stored=True).transformer
    keep_stored_layers(on_meta)
    sizes = [[parameter.nbytes for parameter in model.requires_grad_(False).parameters()] for model in (kept, on_meta)]
    assert sizes[0] == sizes[1] and sum(sizes[0]) < sum(weight.nbytes for weight in weights.values())
    ours, theirs = (BlockWeights(model.requires_grad_(False)) for model in (on_meta, plain))
    assert ours.store("none", 0).saved_bytes == 0 and ours.store("none", 0).unpacked_weights > 10
    in_blocks = sum(weight.nbytes for block in find_innermost_blocks(kept) for weight in block.parameters())
    offloaded = ours.store("none", ours.count).saved_bytes
    assert offloaded <= in_blocks < theirs.store("none", theirs.count).saved_bytes


def test_what_dequantizes_a_base_is_said():
    lora, keeps = AdapterConfig(), {"can_quantize": True}
    assert explain_dequantization(ModelConfig(), lora, **keeps) is None
    assert "ZeRO 3" in explain_dequantization(ModelConfig(), lora, can_quantize=False)
    assert "dequantize_base" in explain_dequantization(ModelConfig(dequantize_base=True), lora, **keeps)
    assert "merged" in explain_dequantization(ModelConfig(), replace(lora, base_weights=("a",)), **keeps)


def test_dequantize_base_is_named_where_the_device_has_room(monkeypatch):
    monkeypatch.setattr("library.parallel.stored_base.get_total_memory", lambda device: 100)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [has_room(size, device) for size, device in ((49, cuda), (50, cuda), (1, cpu))] == [True, False, False]


def test_after_out_of_memory_nothing_is_advised_that_the_files_of_the_base_have_already():
    def advise(words, *formats):
        config = parse_config(words.split()).config
        return [line for line in suggest_oom_fixes(config, "forward", 1, formats) if "base" in line]

    assert len(advise("")) == 1 and "--quantize_base int8" in advise("")[0]
    for name, is_large in (("int8", 1), ("fp8", 1), ("Q8_0", 1), ("Q5_1", 1), ("Q5_K", 0), ("nf4", 0), ("Q4_K", 0)):
        lines = advise("", name)
        assert len(lines) == is_large and all(f"--quantize_base nf4, which makes weights in {name}" in x for x in lines)
        rounded = QuantizedWeight.quantize(torch.empty(256, 256, device="meta"), "nf4").nbytes
        size = 256**2 * BLOCK_SIZES[name][1] / BLOCK_SIZES[name][0] if name in BLOCK_SIZES else None
        assert size is None or (rounded < 0.75 * size) == is_large, "as should_quantize counts"
    assert "leave out --dequantize_base" in advise("--dequantize_base", "fp8")[0]


def test_a_base_that_is_stored_in_nf4_has_the_kernel_of_one_that_is_rounded_to_it(monkeypatch):
    monkeypatch.setattr("library.parallel.strategy_registry.select_nf4_kernel", lambda device: f"kernel of {device}")
    for quantize_base, formats, kernel in (("nf4", (), "cpu"), ("none", ("nf4", "fp8"), "cpu"), ("int8", ("fp8",), "")):
        strategy = SimpleNamespace(nf4_kernel=None, device="cpu")
        select_base_kernel(strategy, quantize_base, formats)
        assert strategy.nf4_kernel == (f"kernel of {kernel}" if kernel else None)


def test_a_checkpoint_of_a_base_that_was_rounded_from_other_weights_is_not_resumed_without_a_word():
    """Versions before ``dequantize_base`` rounded dequantized weights; in plain precision both bases are equal."""

    def find_lines(saved, **options):
        model = ModelConfig(**options)
        reason = explain_dequantization(model, AdapterConfig(), can_quantize=True)
        current = {"settings": {}, "stored_rounding": describe_rounding(model, ("fp8",), reason)}
        return [(str(change), change.changes_result) for change in find_changes(saved, current)]

    old, new = {"settings": {}}, {"settings": {"dequantize_base": False, "base_weights": "()"}}
    ((line, is_refused),) = find_lines(old, quantize_base="int8")
    assert (
        is_refused and "dequantized before they are rounded -> kept" in line and line.endswith("add --dequantize_base")
    )
    assert find_lines(old, quantize_base="int8", dequantize_base=True) == []
    assert find_lines(old) == find_lines(old, dequantize_base=True) == find_lines(new, dequantize_base=True) == []
    assert find_lines(new, quantize_base="int8") == []
    recorded = {"settings": {}, "stored_rounding": KEPT}
    ((line, _),) = find_lines(recorded, quantize_base="int8", dequantize_base=True)
    assert line.endswith("remove --dequantize_base") and find_lines(recorded, quantize_base="int8") == []
    plain = describe_rounding(ModelConfig(quantize_base="int8"), (), None)
    assert plain is None, "weights that are not stored quantized resume as before"


def test_fp4_is_not_taken_for_nf4():
    """The kernel of bitsandbytes has the levels of nf4."""
    weight = QuantizedWeight.quantize(torch.randn(4, 64), "nf4")
    values, scale, levels = weight.tensors
    stored = StoredWeight("fp4", weight.shape, (values, scale.float(), levels.flip(0)))
    kept = replace(pack_stored_weight(stored, torch.bfloat16), nf4_kernel="bitsandbytes 0")
    assert torch.equal(kept.dequantize(torch.float32), stored.dequantize())


def test_a_repository_of_which_only_configs_are_downloaded_counts_as_dequantized(build_case, tmp_path, monkeypatch):
    """A plan reads the configs from the hub, whose folder in the cache has no weights then, or not all of a download."""
    _, tiny = build_case("z_image")
    repository = tmp_path / "models--me--nf4"
    folder = repository / "snapshots" / ("0" * 40)
    write_nf4(tiny.pipe, folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("library.models.model_configs.is_hub_reachable", lambda: False)
    family, detected = FAMILIES.get("z_image")(), detect_model("me/nf4")
    assert detected.source_type == "hub" and detected.stored_formats == ("nf4",)

    def count_stored():
        return keep_stored_layers(
            load_pipeline_on_meta(family, detected, torch.bfloat16, keeps_stored=True).transformer
        )

    assert count_stored() > 10
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    index = weights.with_name(f"{weights.name}.index.json")
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "diffusion_pytorch_model-2.safetensors"}}))
    assert count_stored() == 0, "not all are downloaded"
    index.unlink()
    weights.unlink()
    assert count_stored() == 0
