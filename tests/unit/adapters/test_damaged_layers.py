"""Every tensor of every adapter type is damaged in every way: the file and the layer are named, without a traceback."""

from pathlib import Path

import pytest
import torch
from problem_lines import format_lines
from safetensors.torch import save_file
from training_runs import write_images

from library.cli import main, run_tool
from library.config.schema import AdapterConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.tools.lora.identification import read_lora_file
from library.training.network_weights import read_initial_weights

LINEAR = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"  # 64 x 64
CONV = "lora_unet_down_blocks_0_resnets_0_conv1"  # 32 x 32 x 3 x 3
NORM = "lora_unet_conv_norm_out"  # 32
OTHERS = ("to_k", "to_v")

DOWN, UP = "lora_down.weight", "lora_up.weight"
LAYERS = {
    "lora": (LINEAR, {DOWN: (4, 64), UP: (64, 4)}),
    "dora": (LINEAR, {DOWN: (4, 64), UP: (64, 4), "dora_scale": (64, 1)}),
    "locon": (CONV, {DOWN: (4, 32, 3, 3), UP: (32, 4, 1, 1)}),
    "tucker locon": (CONV, {DOWN: (4, 32, 1, 1), "lora_mid.weight": (4, 4, 3, 3), UP: (32, 4, 1, 1)}),
    "loha": (LINEAR, {"hada_w1_a": (64, 4), "hada_w1_b": (4, 64), "hada_w2_a": (64, 4), "hada_w2_b": (4, 64)}),
    "tucker loha": (
        CONV,
        {
            **{f"hada_w{number}_{part}": (4, 32) for number in "12" for part in "ab"},
            **{f"hada_t{number}": (4, 4, 3, 3) for number in "12"},
        },
    ),
    "lokr": (LINEAR, {"lokr_w1_a": (8, 2), "lokr_w1_b": (2, 8), "lokr_w2_a": (8, 4), "lokr_w2_b": (4, 8)}),
    "full lokr": (LINEAR, {"lokr_w1": (8, 8), "lokr_w2": (8, 8)}),
    "tucker lokr": (CONV, {"lokr_w1": (4, 4), "lokr_w2_a": (4, 8), "lokr_w2_b": (4, 8), "lokr_t2": (4, 4, 3, 3)}),
    "input dora": (LINEAR, {"lora_down.weight": (4, 64), "lora_up.weight": (64, 4), "dora_scale": (1, 64)}),
    "biased lora": (CONV, {"lora_down.weight": (4, 32, 3, 3), "lora_up.weight": (32, 4, 1, 1), "diff_b": (32,)}),
    "glora": (LINEAR, {"a1.weight": (64, 4), "a2.weight": (4, 64), "b1.weight": (64, 4), "b2.weight": (4, 64)}),
    "diag-oft": (LINEAR, {"oft_blocks": (8, 8, 8), "rescale": (64, 1)}),
    "lycoris boft": (LINEAR, {"oft_blocks": (3, 8, 8, 8)}),
    "oft": (LINEAR, {"oft_R": (8, 28)}),
    "boft": (LINEAR, {"boft_R": (1, 8, 8, 8), "boft_s": (64, 1)}),
    "norm": (NORM, {"w_norm": (32,), "b_norm": (32,)}),
    "full": (CONV, {"diff": (32, 32, 3, 3), "diff_b": (32,)}),
}
OPTIONAL = {"rescale", "b_norm", "diff_b", "diff", "dora_scale", "alpha"}
"""Tensors that a layer may lack; a full difference may be of the bias only."""

HARMLESS = {
    *(
        "dora dora_scale flat",
        "input dora dora_scale flat",
        "diag-oft rescale flat",
        "lycoris boft oft_blocks one row less",
    ),
    *("lycoris boft oft_blocks missing", "oft oft_R missing"),  # no tensor of the layer is left
}

DAMAGES = {
    "missing": lambda tensor: None,
    "of no dimension": lambda tensor: torch.tensor(1.0),
    "flat": lambda tensor: tensor.flatten() if tensor.dim() != 1 else tensor[:-1].clone(),
    "one dimension more": lambda tensor: tensor[..., None].repeat(*[1] * tensor.dim(), 2).contiguous(),
    "one row less": lambda tensor: tensor[:-1].contiguous() if len(tensor) > 1 else tensor[..., :-1].contiguous(),
    "one column less": lambda tensor: tensor[..., :-1].contiguous(),
    "empty": lambda tensor: tensor[:0],
    "integers": lambda tensor: tensor.to(torch.int8),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "booleans": lambda tensor: tensor > 0,
}
ALPHAS = {
    "complex": torch.tensor(1j),
    "two": torch.ones(2),
    "empty": torch.ones(0),
    "boolean": torch.tensor(True),
    "NaN": torch.tensor(float("nan")),
    "zero": torch.tensor(0.0),
}


def build_layer(kind):
    name, shapes = LAYERS[kind]
    draw = torch.Generator().manual_seed(0)
    tensors = {f"{name}.{end}": 0.1 * torch.randn(shape, generator=draw) for end, shape in shapes.items()}
    others = {
        LINEAR.replace("to_q", other) + f".{end}": torch.ones(shape)
        for other in OTHERS
        for end, shape in LAYERS["lora"][1].items()
    }
    return {**others, **tensors}


def save_damaged_files(folder: Path) -> dict[str, str]:
    """Write a file for each damage; return the layer's name by path."""
    files = {}

    def save(title, tensors, name):
        path = folder / f"{title.replace(' ', '_')}.safetensors"
        save_file(tensors, path)
        files[str(path)] = name

    for kind, (name, shapes) in LAYERS.items():
        for end in shapes:
            for damage, change in DAMAGES.items():
                tensors = build_layer(kind)
                changed = change(tensors.pop(f"{name}.{end}"))
                if (changed is None and end in OPTIONAL) or f"{kind} {end} {damage}" in HARMLESS:
                    continue
                save(f"{kind} {end} {damage}", tensors | ({} if changed is None else {f"{name}.{end}": changed}), name)
    for title, alpha in ALPHAS.items():
        save(f"alpha {title}", build_layer("lora") | {f"{LINEAR}.alpha": alpha}, LINEAR)
    for kind in ("lora", "lokr"):
        mixed = build_layer(kind) | {f"{LINEAR}.diff": torch.ones(64, 64)}
        save(f"{kind} and full", mixed, LINEAR)
    save("two factors", build_layer("lokr") | {f"{LINEAR}.lokr_w1": torch.ones(8, 8)}, LINEAR)
    save("scaled norm", build_layer("norm") | {f"{NORM}.dora_scale": torch.ones(32)}, NORM)
    save(
        "other kernel",
        build_layer("lora") | {f"{CONV}.{DOWN}": torch.ones(4, 96, 3, 1), f"{CONV}.{UP}": torch.ones(32, 4, 1, 1)},
        CONV,
    )
    save(
        "bias of none",
        build_layer("lora") | {f"{NORM.replace('conv_norm_out', 'conv_in')}.diff_b": torch.ones(31)},
        "conv_in",
    )
    twice = {f"{LINEAR}.lora_A.weight": torch.ones(4, 64)}
    save(
        "twice",
        build_layer("lora") | twice,
        f"{LINEAR}.lora_A.weight and {LINEAR}.{DOWN} are one tensor with two values",
    )
    return files


@pytest.fixture(scope="module")
def damaged_files(tmp_path_factory):
    return save_damaged_files(tmp_path_factory.mktemp("damaged"))


def assert_each_is_named(problems, files, start):
    lines = {line.removeprefix(start).partition(": ")[0]: line for line in problems}
    assert sorted(files.keys() - lines.keys()) == []
    assert len(problems) == len(files)
    assert not [line for path, line in lines.items() if files[path] not in line]


@pytest.mark.slow
def test_the_layers_are_right_before_they_are_damaged(tmp_path):
    paths = []
    for kind in LAYERS:
        paths.append(tmp_path / f"{kind}.safetensors")
        save_file(build_layer(kind), paths[-1])
    mergeable = tuple(str(path) for path in paths if path.stem not in ("oft", "boft"))
    initial = read_initial_weights(
        AdapterConfig(base_weights=mergeable), FAMILIES.get("sd1")(), detect_model("random:sd1:tiny")
    )

    assert all(len(content.alphas) == 3 for _, content, _ in initial.base_weights)
    for path in (paths[0], paths[-1]):
        assert (read_lora_file(path).family, read_lora_file(path).is_known_size) == ("sd1", True)


@pytest.mark.slow
def test_base_weights_with_a_damaged_tensor_are_named_with_the_layer(damaged_files):
    adapter = AdapterConfig(base_weights=tuple(damaged_files))

    with pytest.raises(ConfigError) as error:
        read_initial_weights(adapter, FAMILIES.get("sd1")(), detect_model("random:sd1:tiny"))

    assert_each_is_named(format_lines(error.value.problems), damaged_files, "--base_weights: ")


def test_a_dry_run_names_damaged_files_of_both_options(damaged_files, tmp_path, capsys):
    data = write_images(tmp_path / "data", {(64, 64): 2})
    paths = [path for path in damaged_files if "empty" not in path][:40:5]
    first, *others = paths
    flags = ("--dry_run", "--pretrained_model_name_or_path", "random:sd1:tiny", "--dataset_config", str(data))

    code = main([*flags, "--output_dir", str(tmp_path), "--network_weights", first, "--base_weights", *others])

    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert code == 2 and "Traceback" not in "".join(lines)
    for path in paths:
        option = "network_weights" if path == first else "base_weights"
        assert any(line.startswith(f"--{option}: {path}: ") and damaged_files[path] in line for line in lines), path


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 33, 66])
def test_convert_names_damaged_files(part, damaged_files, tmp_path, capsys):
    for path, name in list(damaged_files.items())[part::100]:
        assert run_tool(["convert", path, str(tmp_path / "out.safetensors"), "--to", "kohya"]) == 2, path
        text = capsys.readouterr().err
        assert f"{path}: " in text and name in text and "Traceback" not in text, text
    assert not (tmp_path / "out.safetensors").exists()
