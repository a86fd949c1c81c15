"""A file that is damaged, or no LoRA, is named with what is wrong, before a model is loaded."""

import json

import pytest
import torch
from adapter_states import build_random_state
from problem_lines import format_lines
from safetensors.torch import save_file

from library.adapters.file_reader import InvalidAdapterFileError, read_adapter_file
from library.adapters.file_writer import write_adapter_file
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.peft_metadata import UNREAD_SETTINGS, PeftSettings, find_unread_settings, parse_peft_settings
from library.cli import run_tool
from library.config.schema import AdapterConfig
from library.errors import ConfigError, UserError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.tools.lora.identification import identify_lora
from library.training.network_weights import read_initial_weights

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

    assert [line.split(":")[0] for line in format_lines(error.value.problems)] == ["--base_weights"] * 2 + [
        "--network_weights"
    ]


@pytest.mark.slow
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


def test_a_whole_checkpoint_is_refused_by_its_names_before_its_tensors_are_read(tmp_path, capsys):
    """It may have many gigabytes; here they are a hole in the file, of a type that would be refused next."""
    path, size = tmp_path / "model.safetensors", 2**35
    for name in ("model.diffusion_model.out.weight", "double_blocks.0.img_attn.qkv.weight"):
        header = json.dumps({name: {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)

        assert run_tool(["convert", str(path), str(tmp_path / "out.safetensors"), "--to", "kohya"]) == 2
        assert f"{path}: not a LoRA file: " in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"--base_weights: {path}: not a LoRA file: .*{name}"):
            read_weights(base_weights=(str(path),))


def test_a_bias_of_a_layer_that_has_none_is_named(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({f"{MODULE}.diff_b": torch.ones(64)}, path)

    with pytest.raises(ConfigError, match=rf"{path}: .*attn1.to_q has diff_b in the file, but no bias in the model"):
        read_weights(base_weights=(str(path),))


@pytest.mark.parametrize("is_equal", [True, False])
def test_one_tensor_under_two_keys_has_to_be_equal(is_equal, tmp_path):
    path, other = tmp_path / "lora.safetensors", f"{MODULE}.lora.up.weight"
    tensors = build_tensors(64)
    save_file(tensors | {other: tensors[KEY].clone() if is_equal else -tensors[KEY]}, path)

    if is_equal:
        assert len(read_weights(base_weights=(str(path),)).base_weights[0][1].alphas) == 1
        return
    with pytest.raises(ConfigError, match=f"{other} and {KEY} are one tensor with two values"):
        read_weights(base_weights=(str(path),))


def test_a_layer_under_two_names_is_named_with_both(tmp_path):
    path, tensors = tmp_path / "lora.safetensors", build_tensors(64)
    dotted = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file(tensors | {key.replace(MODULE, dotted): -tensor for key, tensor in tensors.items()}, path)

    with pytest.raises(ConfigError, match=f"{MODULE} and {dotted} are the same layer"):
        read_weights(base_weights=(str(path),))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["other size of a fused layer", "ranks", "metadata"])
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_damaged_file_is_an_error_of_its_own_model(damage, name):
    """And not a file of another model that has layers of the same names."""
    state, alphas, parts = build_random_state(name, scale=1, with_t5=False)
    tensors, metadata = convert_to_file_format(state, alphas, parts, "kohya")
    key = next(key for key in tensors if key.endswith("attn_qkv.lora_up.weight"))
    if damage == "ranks":
        tensors[key] = tensors[key][:, :-1]
    elif damage == "metadata":
        metadata = {"lora_adapter_metadata": '{"transformer.r": 64}'}
        tensors = {each: tensor for each, tensor in tensors.items() if not each.endswith(".alpha")}
    else:
        tensors[key] = torch.cat([tensors[key], tensors[key]])
    expected = {"ranks": "lora_down has size", "metadata": "says 64; it belongs"}.get(damage, "have other sizes than")

    with pytest.raises(UserError, match=expected) as error:
        identify_lora(tensors, metadata)

    assert damage == "metadata" or key.partition(".")[0] in str(error.value)


PEFT = {"r": 4, "lora_alpha": 8, "peft_type": "LORA"}
UNREAD_PEFT_SETTINGS = {
    "init_lora_weights pissa_niter_4 changed the base model, which the file does not have": {
        "init_lora_weights": "pissa_niter_4"
    },
    "init_lora_weights OLoRA changed the base model": {"init_lora_weights": "OLoRA"},
    "lora_bias = True is not supported": {"lora_bias": True},
    "bias = all is not supported": {"bias": "all"},
    r"modules_to_save = \['conv_in'\] is not supported": {"modules_to_save": ["conv_in"]},
    "peft_type RANDLORA is not supported": {"peft_type": "RANDLORA"},
    "use_cayley_neumann = False is not supported": {"use_cayley_neumann": False},
    "attn1.to_q has no DoRA magnitudes, but its .* says use_dora": {"use_dora": True},
    "has rank 4, but its .* says 2": {"rank_pattern": {"to_q": 2}},
}


@pytest.mark.parametrize("message", UNREAD_PEFT_SETTINGS)
@pytest.mark.parametrize("is_beside", [True, False])
def test_settings_of_peft_that_change_the_effect_are_refused_by_name(message, is_beside, tmp_path):
    path, values = tmp_path / "lora.safetensors", PEFT | UNREAD_PEFT_SETTINGS[message]
    name = f"{'base_model.model' if is_beside else 'unet'}.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(64, 4)}
    metadata = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in values.items()})}
    save_file(tensors, path, {} if is_beside else metadata)
    if is_beside:
        (tmp_path / "adapter_config.json").write_text(json.dumps(values))

    with pytest.raises(ConfigError, match=f"{path}: .*{message}"):
        read_weights(base_weights=(str(path),))


def test_settings_of_peft_without_an_effect_on_the_weights_are_accepted():
    from peft import LoraConfig, OFTConfig

    for config in (LoraConfig(init_lora_weights="gaussian", lora_dropout=0.1, use_rslora=True), OFTConfig()):
        values = json.loads(json.dumps(config.to_dict(), default=str))
        assert not list(find_unread_settings(values))
        assert all(values[name] == default for name, default in UNREAD_SETTINGS.items() if name in values)
