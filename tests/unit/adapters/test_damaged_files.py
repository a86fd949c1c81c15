"""A file that is damaged, or no LoRA, is named with what is wrong, before a model is loaded."""

import pytest
import torch
from safetensors.torch import save_file

from library.adapters.file_reader import InvalidAdapterFileError, read_adapter_file
from library.adapters.lora_file import write_adapter_file
from library.adapters.peft_metadata import PeftSettings, parse_peft_settings
from library.checkpoint.init_weights import read_initial_weights
from library.cli import run_tool
from library.config.schema import AdapterConfig
from library.errors import ConfigError, UserError
from library.models.detect import detect_model
from library.models.families import FAMILIES

MODULE = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
KEY = f"{MODULE}.lora_up.weight"


def build_tensors(size=32, rank=4, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return {
        f"{MODULE}.lora_down.weight": torch.randn(rank, size, generator=draw).to(dtype),
        KEY: torch.randn(size, rank, generator=draw).to(dtype),
        f"{MODULE}.alpha": torch.tensor(2.0),
    }


def with_values(value):
    tensors = build_tensors()
    tensors[KEY][3, 1] = value
    return tensors


DAMAGED = {
    "NaN": (lambda: with_values(float("nan")), rf"{KEY}: 1 of 128 values are NaN; the file is damaged"),
    "infinite": (lambda: with_values(float("inf")), rf"{KEY}: 1 of 128 values are infinite"),
    "no tensors": (lambda: {}, "it has no tensors"),
    "alpha 0": (lambda: build_tensors() | {f"{MODULE}.alpha": torch.tensor(0.0)}, r"alpha is 0: sd-scripts reads"),
    "integers": (lambda: build_tensors() | {KEY: torch.ones(32, 4, dtype=torch.int8)}, rf"{KEY} is of type int8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tensors_are_named(name, tmp_path):
    build, message = DAMAGED[name]
    path = tmp_path / "lora.safetensors"
    save_file(build(), path)

    with pytest.raises(InvalidAdapterFileError, match=f"^{path}: .*{message}"):
        read_adapter_file(path)


STARTS = {
    "lora.pt": (b"PK\x03\x04 anything", "is a pickle; only .safetensors files are read"),
    "old.ckpt": (b"\x80\x02}q", "is a pickle; only .safetensors"),
    "protocol0.bin": (b"(dp0\nS" + bytes(400), "is a pickle; only .safetensors"),
    "renamed.safetensors": (b"PK\x03\x04" + bytes(400), "is a pickle; only .safetensors"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "page.safetensors": (b"<!DOCTYPE html><html>" + bytes(100), "is a web page"),
    "empty.safetensors": (b"", "is empty"),
    "text.safetensors": (b"no", "does not begin with a safetensors header"),
    "header.safetensors": ((200).to_bytes(8, "little") + b'{"a":', "is truncated: 13 of 208 bytes"),
    "json.safetensors": ((4).to_bytes(8, "little") + b"[1,]", "its header is damaged"),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_is_no_safetensors_file_is_named(name, tmp_path):
    start, message = STARTS[name]
    (tmp_path / name).write_bytes(start)

    with pytest.raises(InvalidAdapterFileError, match=f"{name}: .*{message}"):
        read_adapter_file(tmp_path / name)


def test_a_truncated_file_says_how_much_of_it_is_there(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file(build_tensors(), path)
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(
        InvalidAdapterFileError, match=r"is truncated: [\d,]+ of [\d,]+ bytes; download or copy it again"
    ):
        read_adapter_file(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_tensors_are_read_with_their_exact_values(dtype, tmp_path):
    path, tensors = tmp_path / "lora.safetensors", build_tensors(dtype=dtype)
    save_file(tensors, path)

    found, _ = read_adapter_file(path)

    assert found[KEY].dtype == torch.bfloat16 and torch.equal(found[KEY].float(), tensors[KEY].float())


def test_a_message_about_a_new_file_has_its_final_name(tmp_path):
    with pytest.raises(InvalidAdapterFileError) as error:
        write_adapter_file(tmp_path / "lora.safetensors", with_values(float("nan")), {})

    assert str(error.value).startswith(f"{tmp_path / 'lora.safetensors'} failed its verification")
    assert ".part" not in str(error.value)


def read_weights(**options):
    """Read the files of a run on the tiny Stable Diffusion 1."""
    detected = detect_model("random:sd1:tiny")
    return read_initial_weights(AdapterConfig(**options), FAMILIES.get("sd1")(), detected)


SIZES = {
    "inputs": (build_tensors(48), r"attn1.to_q has 48 inputs in the file and \d+ in the model"),
    "ranks": (build_tensors() | {KEY: torch.ones(32, 3)}, rf"{MODULE}: lora_down has size 4 and lora_up 3"),
    "no matrix": (build_tensors() | {KEY: torch.ones(32)}, r"lora_up is \[32\] and not a matrix|up is \[32\]"),
    "half": ({KEY: torch.ones(32, 4)}, rf"{MODULE}: lora_down is missing"),
    "unknown": ({f"x_{KEY}": torch.ones(32, 4)}, "1 of 1 keys do not belong to this model, for example x_lora"),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("option", ["base_weights", "network_weights"])
def test_a_file_that_does_not_fit_the_model_is_named_before_the_model_is_loaded(name, option, tmp_path):
    tensors, message = SIZES[name]
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, {"ss_base_model_version": "sd_v2"})

    with pytest.raises(ConfigError, match=f"--{option}: {path}: .*(?:{message})") as error:
        read_weights(**{option: (str(path),) if option == "base_weights" else str(path)})

    assert len(error.value.problems) == 1
    if name in ("inputs", "unknown"):
        assert "its metadata says it is for sd_v2" in str(error.value)


def test_all_files_with_problems_are_reported_at_once(tmp_path):
    paths = [tmp_path / "one.safetensors", tmp_path / "two.ckpt", tmp_path / "three.safetensors"]
    save_file(with_values(float("nan")), paths[0])
    paths[1].write_bytes(b"PK\x03\x04")
    save_file(build_tensors(48), paths[2])

    with pytest.raises(ConfigError) as error:
        read_weights(base_weights=tuple(map(str, paths[:2])), network_weights=str(paths[2]))

    assert [line.split(":")[0] for line in error.value.problems] == ["--base_weights"] * 2 + ["--network_weights"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: with_values(float("nan")), "values are NaN"),
        (lambda tensors: {key: each[:4] if key == KEY else each for key, each in tensors.items()}, "have other sizes"),
        (lambda tensors: {**tensors, KEY: torch.ones(32, 3)}, "lora_down has size 4 and lora_up 3"),
    ],
)
def test_the_converter_rejects_damaged_files_of_known_models(change, message, tmp_path, capsys):
    path, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    other = MODULE.replace("to_q", "to_k")
    fitting = {
        key.replace(MODULE, f"{other[:-1]}{end}"): each for end in "kv" for key, each in build_tensors(64).items()
    }
    save_file({**fitting, **change(build_tensors(64))}, path)

    assert run_tool(["convert", str(path), str(target), "--to", "diffusers"]) == 2

    assert message in capsys.readouterr().err and not target.exists()


@pytest.mark.parametrize(
    "values", ['{"unet.r": 4, "unet.lora_alpha": 0}', '{"unet.r": 4, "unet.lora_alpha": NaN}', '{"unet.r": Infinity}']
)
def test_unusable_numbers_in_the_metadata_of_diffusers_are_an_error(values):
    with pytest.raises(UserError, match="no valid LoRA config"):
        parse_peft_settings(values, ["unet"], "unet")


def test_patterns_of_text_encoders_match_with_and_without_text_model():
    values = {"alpha_pattern": {"text_model.encoder.layers.0.q_proj": 16, "encoder.layers.1.q_proj": 8}}
    settings = PeftSettings.from_values({"r": 4, "lora_alpha": 4, **values})
    assert [settings.get_alpha(f"encoder.layers.{index}.q_proj") for index in range(3)] == [16, 8, 4]
