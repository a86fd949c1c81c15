"""LoRA files are verified on write, equal the trained adapter, and never replace an older file by a bad one."""

import os
from dataclasses import replace

import pytest
import tiny_sd1
import torch
from adapter_tensors import build_component_keys, convert_adapter_to_kohya
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from small_unet import CONFIG, TARGETS, randomize_lora_b, run_unet
from torch import nn

from library.adapters import injection
from library.adapters.file_comparison import compare_file_with_model
from library.adapters.file_reader import InvalidAdapterFileError, read_safetensors
from library.adapters.file_writer import cast_tensors, verify_adapter_file, write_adapter_file
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format
from library.errors import UserError

META = {"ss_network_dim": "6", "ss_v2": "False"}


def trained_lora(seed=0):
    """A model with a nonzero LoRA, and the tensors of its file."""
    model = tiny_sd1.build_pipeline(("unet",)).unet
    adapter = injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    randomize_lora_b(model, seed)
    return model, convert_adapter_to_kohya(model, adapter)


@pytest.fixture(scope="module")
def tensors():
    return trained_lora()[1]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("precision, bound", [(None, 1e-6), ("float", 1e-6), ("fp16", 1e-4), ("bf16", 1e-3)])
def test_diffusers_loads_the_file_and_predicts_the_same_as_the_model_in_memory(tmp_path, precision, bound):
    model, tensors = trained_lora()
    write_adapter_file(tmp_path / "lora.safetensors", cast_tensors(tensors, precision), META)
    pipe: StableDiffusionPipeline = tiny_sd1.build_pipeline()
    base = run_unet(pipe.unet)
    pipe.load_lora_weights(str(tmp_path), weight_name="lora.safetensors")
    difference = (run_unet(pipe.unet) - run_unet(model)).abs().max().item()
    assert difference < bound
    assert (run_unet(model) - base).abs().max().item() > 50 * bound, (
        "the LoRA changes the output by much more than the tolerance"
    )


def test_a_file_is_read_back_as_it_was_written(tmp_path, tensors):
    path = tmp_path / "new folder" / "lora.safetensors"
    write_adapter_file(path, tensors, META)
    restored, metadata = read_safetensors(path)
    assert metadata == META
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[key], tensors[key]) for key in restored)
    assert os.listdir(path.parent) == ["lora.safetensors"]


def test_weights_are_cast_and_alphas_are_not(tensors):
    half = cast_tensors(tensors, "bf16")
    assert {t.dtype for key, t in half.items() if "lora_" in key.partition(".")[2]} == {torch.bfloat16}
    assert {t.dtype for key, t in half.items() if key.endswith(".alpha")} == {torch.float32}


def test_a_weight_too_large_for_fp16_is_reported_by_name(tensors):
    key = next(key for key in tensors if "lora_up" in key)
    large = {**tensors, key: tensors[key] * 1e7}
    with pytest.raises(UserError, match=rf"{key}: .* too large for fp16; use save_precision bf16"):
        cast_tensors(large, "fp16")
    assert cast_tensors(large, "bf16")[key].isfinite().all()


def damage_tensors(tensors, change):
    """The tensors with one fault."""
    planted = dict(tensors)
    up = next(key for key in tensors if "lora_up" in key)
    down, alpha = up.replace("lora_up", "lora_down"), up.replace("lora_up.weight", "alpha")
    match change:
        case "lost key":
            del planted[up]
        case "lost alpha":
            del planted[alpha]
        case "extra key":
            planted["lora_unet_more.alpha"] = torch.tensor(1.0)
        case "wrong shape":
            planted[up] = planted[up][:, :-1].contiguous()
        case "wrong dtype":
            planted[up] = planted[up].half()
        case "wrong value":
            planted[up] = planted[up].clone()
            planted[up].view(-1)[3] += 1e-3
        case "non-finite":
            planted[up] = planted[up].clone()
            planted[up].view(-1)[3] = float("nan")
        case "zero alpha":
            planted[alpha] = torch.tensor(0.0)
        case "zero down":
            planted[down] = torch.zeros_like(planted[down])
        case "dead":
            planted = {key: torch.zeros_like(t) if "lora_up" in key else t for key, t in planted.items()}
        case "wrapped name":
            planted = {key.replace("lora_unet_", "lora_unet__orig_mod_"): t for key, t in planted.items()}
        case "empty":
            planted = {}
    return planted


IN_MEMORY = {
    "lost key": "lora_up is missing",
    "lost alpha": "has no alpha",
    "wrong shape": "lora_down has size 6 and lora_up 5",
    "non-finite": "non-finite",
    "zero alpha": "alpha is zero",
    "zero down": "lora_down.weight is zero",
    "dead": "the LoRA does nothing",
    "wrapped name": "no loader knows this key",
    "empty": "it has no tensors",
}


@pytest.mark.parametrize("change, message", IN_MEMORY.items())
def test_invalid_tensors_are_not_written_and_the_older_file_is_unchanged(tmp_path, tensors, change, message):
    path = tmp_path / "lora.safetensors"
    write_adapter_file(path, tensors, META)
    before = path.read_bytes()
    with pytest.raises(InvalidAdapterFileError, match=message):
        write_adapter_file(path, damage_tensors(tensors, change), META)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lora.safetensors"]


ON_DISK = {
    "lost key": "lora_up.weight is missing",
    "lost alpha": "alpha is missing",
    "extra key": "lora_unet_more.alpha is unexpected",
    "wrong shape": r"is \[\d+, 5.*\] float32 instead of \[\d+, 6",
    "wrong dtype": "float16 instead of",
    "wrong value": "other values than the model in memory",
    "non-finite": "non-finite",
    "zero alpha": "other values",
    "dead": "other values",
    "wrapped name": "is missing",
    "empty": "is missing",
}


@pytest.mark.parametrize("change, message", ON_DISK.items())
def test_a_file_that_differs_from_the_model_in_memory_is_detected(tmp_path, tensors, change, message):
    path = tmp_path / "lora.safetensors"
    save_file(damage_tensors(tensors, change), path, META)
    with pytest.raises(InvalidAdapterFileError, match=message):
        verify_adapter_file(path, tensors, META)


def test_a_truncated_file_and_changed_metadata_are_detected(tmp_path, tensors):
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, {**META, "ss_v2": "True"})
    with pytest.raises(InvalidAdapterFileError, match="metadata differs: ss_v2"):
        verify_adapter_file(path, tensors, META)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidAdapterFileError, match=r"is truncated: [0-9,]+ of [0-9,]+ bytes"):
        verify_adapter_file(path, tensors, META)


def test_an_untrained_file_may_have_zero_updates(tmp_path, tensors):
    write_adapter_file(tmp_path / "start.safetensors", damage_tensors(tensors, "dead"), META, is_trained=False)
    assert not any(t.any() for key, t in load_file(tmp_path / "start.safetensors").items() if "lora_up" in key)


def test_a_full_disk_is_reported_in_one_line_and_the_older_file_is_unchanged(tmp_path, tensors):
    resource = pytest.importorskip("resource")
    path = tmp_path / "lora.safetensors"
    write_adapter_file(path, tensors, META)
    before, (limit, highest) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, highest))  # a write beyond it fails, as on a full disk
    try:
        with pytest.raises(UserError, match=r"lora\.safetensors: cannot be written: "):
            write_adapter_file(path, tensors, META)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, highest))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["lora.safetensors"]


def test_a_folder_that_cannot_be_created_is_reported_in_one_line(tmp_path, tensors):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_adapter_file(tmp_path / "file" / "lora.safetensors", tensors, META)


def lora_in_memory():
    """A trained LoRA in memory, and the contents of its file."""
    model, tensors = trained_lora()
    part = build_component_keys(model)
    return nn.ModuleDict({"unet": model}), convert_from_file_format(tensors, {}, [part])


def test_each_layer_computes_the_same_with_the_file_as_with_the_adapter_in_memory():
    holder, content = lora_in_memory()
    before = {key: tensor.clone() for key, tensor in injection.get_adapter_state_dict(holder).items()}
    assert not list(compare_file_with_model(holder, content, content.alphas))
    assert all(torch.equal(before[key], tensor) for key, tensor in injection.get_adapter_state_dict(holder).items())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_effect_of_a_half_precision_file_is_within_the_tolerance(precision):
    holder, content = lora_in_memory()
    assert not list(
        compare_file_with_model(
            holder, replace(content, state_dict=cast_tensors(content.state_dict, precision)), content.alphas
        )
    )


@pytest.mark.parametrize("fault", ["values", "alpha", "exchanged", "missing", "more"])
def test_a_file_with_another_effect_in_one_layer_is_detected(fault):
    holder, content = lora_in_memory()
    first, second = [module for module in content.alphas if module.endswith("attn1.to_q")][:2]
    state, alphas = dict(content.state_dict), dict(content.alphas)
    match fault:
        case "values":
            state[f"{first}.lora_B.weight"] = 1.2 * state[f"{first}.lora_B.weight"]
        case "alpha":
            alphas[first] *= 2
        case "exchanged":
            one, other = f"{first}.lora_B.weight", f"{first[:-4]}to_k.lora_B.weight"
            first = f"{first[:-4]}to_"
            state[one], state[other] = state[other], state[one]
        case "missing":
            del alphas[first]
        case "more":
            alphas[f"{second}.more"] = 1.0
            first = f"{second}.more"
    actual = list(compare_file_with_model(holder, replace(content, state_dict=state, alphas=alphas), content.alphas))
    assert actual and all(first in line for line in actual)


def test_a_file_that_its_check_rejects_is_not_renamed_to_its_path(tmp_path, tensors):
    def refuse(path):
        assert load_file(path).keys() == tensors.keys()
        raise InvalidAdapterFileError("not what was trained")

    write_adapter_file(tmp_path / "lora.safetensors", tensors, META)
    before = (tmp_path / "lora.safetensors").read_bytes()
    with pytest.raises(InvalidAdapterFileError, match="not what was trained"):
        write_adapter_file(tmp_path / "lora.safetensors", tensors, {**META, "ss_v2": "True"}, check=refuse)
    assert (tmp_path / "lora.safetensors").read_bytes() == before and os.listdir(tmp_path) == ["lora.safetensors"]


PIECES = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "lokr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    "dora": ("lora_down.weight", "lora_up.weight", "dora_scale"),
}


@pytest.mark.parametrize("kind", PIECES)
def test_files_of_other_adapter_types_are_verified_by_tensor(kind, tmp_path):
    path = tmp_path / "lora.safetensors"
    data = {f"lora_unet_a.{end}": torch.ones(2, 1 if end == "dora_scale" else 2) for end in PIECES[kind]} | {
        "lora_unet_a.alpha": torch.tensor(1.0)
    }
    write_adapter_file(path, data, META)
    for end in PIECES[kind]:
        if end == "dora_scale":  # without the magnitudes it is a LoRA
            continue
        with pytest.raises(InvalidAdapterFileError, match="is missing"):
            write_adapter_file(path, {key: tensor for key, tensor in data.items() if not key.endswith(f".{end}")}, META)
    with pytest.raises(InvalidAdapterFileError, match="no loader knows this key"):
        write_adapter_file(path, {**data, "lora_unet_a.hada_w3": torch.ones(1)}, META)
