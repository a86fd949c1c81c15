"""``python -m library lora``: exact where it says so, sd-scripts' rules for ranks, and every problem at once."""

import json

import pytest
import torch
from adapter_states import build_random_state
from known_models_once import known_models
from safetensors.torch import load_file, save_file

from library.adapters.file_reader import read_header
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.merge import compute_delta_weight
from library.adapters.module_adapter import ModuleAdapter
from library.cli import run_tool
from library.tools.lora.block_names import get_block, is_selected, parse_block_factors
from library.tools.lora.identification import read_lora_file
from library.tools.lora.low_rank import compute_norm, decompose, factor_update, multiply_out
from library.tools.lora.rank_rule import RankRule

__all__ = ["known_models"]  # a fixture

HEADER = {"ss_base_model_version": "sd_v1", "ss_steps": "700", "ss_unet_lr": "0.0001", "modelspec.title": "old"}


def save_lora(path, name="sd1", kind="lora", file_format="kohya", seed=0, **metadata):
    state, alphas, parts = build_random_state(name, kind, seed=seed)
    tensors, alpha_metadata = convert_to_file_format(state, alphas, parts, file_format)
    sizes = {"ss_network_dim": "3", "ss_network_alpha": "1.5"}
    save_file(tensors, path, {**HEADER, **sizes, **alpha_metadata, **metadata})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two LoRAs, a LoHa and a LoKr of one model, and a LoRA of another."""
    path = tmp_path_factory.mktemp("loras")
    for name, options in {
        "one": {},
        "two": {"seed": 1, "ss_steps": "900"},
        "loha": {"kind": "loha"},
        "lokr": {"kind": "lokr"},
        "dora": {"kind": "dora"},
        "flux": {"name": "flux"},
    }.items():
        save_lora(path / f"{name}.safetensors", **options)
    return path


def run(*words, code=0):
    assert run_tool(["lora", *map(str, words)]) == code


def read_deltas(path):
    """Layer -> what it adds to the weights, in float64, by definition."""
    updates = read_lora_file(path).contents.updates
    return {name: compute_delta_weight(each, torch.float64).flatten(1) * each.scale for name, each in updates.items()}


def read_rank(path):
    return {update.rank for update in read_lora_file(path).contents.updates.values()}


def assert_close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        assert (found[name] - delta).norm() <= tolerance * delta.norm() + 1e-9, name


@pytest.mark.slow
def test_concatenation_is_the_sum_of_the_weighted_updates_and_exact(folder, tmp_path, capsys):
    one, two, out = folder / "one.safetensors", folder / "two.safetensors", tmp_path / "out.safetensors"

    run("merge", one, two, "--weights", "0.7", "-0.4", "--text_encoder_weights", "1", "0", "--output", out)

    first, second = read_deltas(one), read_deltas(two)
    expected = {
        name: first[name] if name.startswith("text_encoder") else 0.7 * first[name] - 0.4 * second[name]
        for name in first
    }
    assert_close(read_deltas(out), expected)
    metadata = read_header(out).metadata
    assert metadata["ss_base_model_version"] == "sd_v1"
    assert "ss_steps" not in metadata and "ss_unet_lr" not in metadata  # true of the sources only
    assert metadata["modelspec.merged_from"] == "one, two"
    sources = json.loads(metadata["lorikeet.sources"])["sources"]
    assert [each["weight"] for each in sources] == [0.7, -0.4]


@pytest.mark.slow
def test_a_merge_with_weight_one_keeps_the_tensors_to_the_bit(folder, tmp_path):
    one, two, out = folder / "one.safetensors", folder / "two.safetensors", tmp_path / "out.safetensors"

    run("merge", one, two, "--output", out)

    first, second, merged = load_file(one), load_file(two), load_file(out)
    key = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    for end, axis in (("lora_down", 0), ("lora_up", 1)):
        parts = [each[f"{key}.{end}.weight"] for each in (first, second)]
        assert torch.equal(merged[f"{key}.{end}.weight"], torch.cat(parts, axis))


@pytest.mark.slow
def test_svd_merge_is_the_best_approximation_of_the_sum(folder, tmp_path):
    one, two, out = folder / "one.safetensors", folder / "two.safetensors", tmp_path / "out.safetensors"

    run("merge", one, two, "--rank", "2", "--blocks", "2:MID=0.5", "--output", out)

    first, second, found = read_deltas(one), read_deltas(two), read_deltas(out)
    for name, delta in found.items():
        total = first[name] + second[name] * (0.5 if get_block(name) == "MID" else 1)
        svd = torch.linalg.svd(total, full_matrices=False)
        best = (svd.U[:, :2] * svd.S[:2]) @ svd.Vh[:2]
        assert (delta - best).norm() < 1e-5 * total.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_loha_and_lokr_become_lora_without_loss_at_full_rank(kind, folder, tmp_path):
    run("resize", folder / f"{kind}.safetensors", "--rank", "99", "--output", tmp_path / "out.safetensors")

    assert_close(read_deltas(tmp_path / "out.safetensors"), read_deltas(folder / f"{kind}.safetensors"))
    assert {each.adapter_type for each in read_lora_file(tmp_path / "out.safetensors").contents.updates.values()} == {
        "lora"
    }


VALUES = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "value", "rank"),
    [
        ("sv_ratio", 4.0, 3),  # above 8 / 4: two values, and one more, as sd-scripts
        ("sv_ratio", 1.0, 2),
        ("sv_cumulative", 0.5, 2),  # 8 of 15.5 is 0.516: one value, and one more
        ("sv_fro", 0.9, 3),  # 64 of 85.25 is 0.751 < 0.81: two values, and one more
        ("energy", 0.75, 1),
        ("energy", 0.76, 2),
        ("threshold", 0.9, 4),
    ],
)
def test_ranks_follow_the_rules(name, value, rank):
    assert RankRule(name=name, value=value).choose_rank(VALUES, 64, is_conv=False) == rank


def test_a_rule_never_exceeds_the_limit_and_zero_updates_keep_one_rank():
    rule = RankRule(2, 4, "threshold", 0.1)

    assert rule.choose_rank(VALUES, 64, is_conv=False) == 2
    assert rule.choose_rank(VALUES, 64, is_conv=True) == 4
    assert RankRule(3).choose_rank(VALUES * 0, 64, is_conv=False) == 1


@pytest.mark.slow
def test_a_resized_lora_keeps_what_sd_scripts_keeps(folder, tmp_path):
    """Its formula: the first singular vectors of up @ down, values in up, alpha in proportion to the rank."""
    run("resize", folder / "flux.safetensors", "--rank", "1", "--output", tmp_path / "out.safetensors")

    before, after = load_file(folder / "flux.safetensors"), load_file(tmp_path / "out.safetensors")
    name = "lora_unet_double_blocks_0_img_attn_qkv"  # three layers in diffusers, one in sd-scripts
    up, down = (before[f"{name}.lora_{end}.weight"].double() for end in ("up", "down"))
    svd = torch.linalg.svd(up @ down)
    best = svd.S[0] * torch.outer(svd.U[:, 0], svd.Vh[0])
    found = after[f"{name}.lora_up.weight"].double() @ after[f"{name}.lora_down.weight"].double()
    assert torch.allclose(found, best, atol=1e-5)
    assert after[f"{name}.alpha"] == before[f"{name}.alpha"] / len(down)
    assert read_header(tmp_path / "out.safetensors").metadata["ss_network_dim"] == "1"


def test_factors_have_the_singular_values_of_their_product():
    tensors = {"lokr_w1": (2, 3), "lokr_w2_a": (10, 2), "lokr_w2_b": (2, 8)}
    update = factor_update(ModuleAdapter({name: torch.randn(size) for name, size in tensors.items()}, 1.0))

    full = torch.linalg.svdvals(multiply_out(update))
    assert torch.allclose(decompose(update).values, full[: len(decompose(update).values)], atol=1e-9)
    assert compute_norm(update) == pytest.approx(float(full.norm()))


@pytest.mark.slow
def test_scale_and_prune_change_the_selected_blocks_only(folder, tmp_path):
    source = folder / "one.safetensors"

    run("scale", source, "--blocks", "MID=0.5,text_encoders=0", "--output", tmp_path / "scaled.safetensors")
    run("prune", source, "--keep", "MID", "OUT00-01", "--output", tmp_path / "kept.safetensors")

    before, scaled = read_deltas(source), read_deltas(tmp_path / "scaled.safetensors")
    expected = {name: each * (0.5 if get_block(name) == "MID" else 1) for name, each in before.items()}
    assert_close(scaled, {name: each for name, each in expected.items() if not name.startswith("text_encoder")})
    kept = read_deltas(tmp_path / "kept.safetensors")
    assert {get_block(name) for name in kept} == {"MID", "OUT00", "OUT01"}
    assert_close(kept, {name: before[name] for name in kept})
    assert read_header(tmp_path / "kept.safetensors").metadata["ss_steps"] == "700"


def test_block_names():
    assert get_block("unet.down_blocks.1.attentions.0.proj_in") == "IN04"
    assert get_block("unet.up_blocks.3.resnets.2.conv1") == "OUT11"
    assert is_selected("double_blocks.3-7", "transformer.transformer_blocks.5.attn.to_q")
    assert not is_selected("transformer_blocks.3-7", "transformer.single_transformer_blocks.5.attn.to_q")
    assert is_selected("*.resnets", "unet.mid_block.resnets.0.conv1")
    assert [each.name for each in parse_block_factors("1,0,0,0,0,.5,1,1,1,1,1,1")][:3] == ["BASE", "IN04", "IN05"]
    with pytest.raises(ValueError, match="12, 17, 20 or 26"):
        parse_block_factors("1,0")


@pytest.mark.slow
def test_metadata_are_edited_in_a_copy_with_the_same_tensors(folder, tmp_path, capsys):
    out = tmp_path / "out.safetensors"

    run("metadata", folder / "one.safetensors", "--set", "title=new", "--remove", "ss_unet*", "--output", out)

    metadata, before = read_header(out).metadata, load_file(folder / "one.safetensors")
    assert (metadata["modelspec.title"], "ss_unet_lr" in metadata) == ("new", False)
    assert len(metadata["sshs_model_hash"]) == 64
    assert all(torch.equal(tensor, before[key]) for key, tensor in load_file(out).items())
    capsys.readouterr()
    run("metadata", out, "--json")
    assert json.loads(capsys.readouterr().out)["modelspec.title"] == "new"
    save_file(before, out, {"modelspec.title": "\x1b[31mred"})
    run("metadata", out)
    assert capsys.readouterr().out == "modelspec.title = \\x1b[31mred\n"  # steers no terminal


@pytest.mark.slow
def test_inspect_tells_layers_norms_and_training_and_compares_two_files(folder, capsys):
    run("inspect", folder / "one.safetensors", folder / "two.safetensors", "--json")

    told = json.loads(capsys.readouterr().out)
    facts, comparison = told["files"][0], told["comparison"]
    deltas = read_deltas(folder / "one.safetensors")
    norms = {block: 0.0 for block in facts["blocks"]}
    for name, delta in deltas.items():
        norms[get_block(name)] += float(delta.square().sum())
    assert facts["blocks"] == pytest.approx({block: square**0.5 for block, square in norms.items()})
    assert (facts["family"], facts["format"], facts["types"]) == ("sd1", "kohya", {"lora": len(deltas)})
    assert comparison["settings"]["ss_steps"] == ["700", "900"]
    others = read_deltas(folder / "two.safetensors")
    text = [name for name in deltas if name.startswith("text")]
    inner = sum(float((deltas[name] * others[name]).sum()) for name in text)
    lengths = [sum(float(each[name].square().sum()) for name in text) ** 0.5 for each in (deltas, others)]
    assert comparison["cosine_by_block"]["text encoders"] == pytest.approx(inner / (lengths[0] * lengths[1]))

    run("inspect", folder / "one.safetensors", folder / "one.safetensors")

    text = capsys.readouterr().out
    assert "trained for 700 steps" in text and "denoiser                      1.0000" in text


@pytest.mark.slow
def test_types_that_depend_on_the_base_are_not_merged_alone(folder, tmp_path, capsys):
    run(
        "merge",
        folder / "dora.safetensors",
        folder / "one.safetensors",
        "--output",
        tmp_path / "out.safetensors",
        code=2,
    )

    assert "depends on the weights of the base model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resized_dora_keeps_its_magnitudes(folder, tmp_path):
    run("resize", folder / "dora.safetensors", "--rank", "1", "--output", tmp_path / "out.safetensors")

    before, after = (
        read_lora_file(path).contents.updates for path in (folder / "dora.safetensors", tmp_path / "out.safetensors")
    )
    for name, update in before.items():
        assert after[name].rank == 1
        assert torch.equal(after[name].tensors["magnitude"], update.tensors["magnitude"])


@pytest.mark.slow
def test_every_problem_is_reported_at_once_and_nothing_is_written(folder, tmp_path, capsys):
    broken, out = tmp_path / "broken.safetensors", tmp_path / "out.safetensors"
    tensors = load_file(folder / "one.safetensors")
    key = next(key for key in tensors if key.endswith("lora_up.weight"))
    save_file({**tensors, key: tensors[key] * float("nan")}, broken)
    out.write_bytes(b"mine")

    run("merge", tmp_path / "no.safetensors", broken, "--weights", "1", "--rank", "x", "--output", out, code=2)
    first = capsys.readouterr().err
    run("merge", folder / "one.safetensors", folder / "two.safetensors", "--weights", "0", "0", "--output", out, code=2)
    assert "--weights: all are 0" in capsys.readouterr().err
    run("merge", broken, folder / "flux.safetensors", "--output", out, "--overwrite", code=2)
    second = capsys.readouterr().err
    run("merge", folder / "one.safetensors", folder / "flux.safetensors", "--output", out, "--overwrite", code=2)
    third = capsys.readouterr().err
    run("scale", folder / "one.safetensors", "--blocks", "IN99=1", "MIDDLE=0", "--output", out, "--overwrite", code=2)
    fourth = capsys.readouterr().err

    for part in (
        "no such file",
        "--weights: expected 2 values, one for each file, got 1",
        "expected an integer",
        "already exists",
    ):
        assert part in first
    assert "broken.safetensors" in second and key in second and "NaN" in second
    assert "is a LoRA of flux, and one.safetensors one of sd1" in third
    assert "IN99 selects no layer" in fourth and "MIDDLE selects no layer" in fourth
    assert out.read_bytes() == b"mine"
    assert "Traceback" not in first + second + third + fourth
