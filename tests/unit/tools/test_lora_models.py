"""LoRAs merged into models and extracted from them: folders and single files of every family."""

import pytest
import torch
from adapter_states import build_random_state
from adapter_tensors import merge
from known_models_once import known_models
from original_checkpoints import add_prefix, build_checkpoint, convert_flux_transformer
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY

from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.cli import run_tool
from library.models.families import FAMILIES
from library.tools.lora.identification import read_lora_file
from library.tools.lora.lora_files import read_lora_files
from library.tools.lora.low_rank import add_updates, compute_difference, compute_norm, factor_update

__all__ = ["known_models"]  # a fixture

KEY_STYLE_FAMILIES = (
    "sd1 sdxl sd3 flux flux2_klein z_image qwen_image lumina2 krea2 sana anima flux3 hunyuan_image qwen_image21 "
    "ideogram4 minimax_h3"
).split()
"""Every key style; each other family shares one of these."""
FILE_FAMILIES = ["sd1", "sd2", "sdxl", "sd3", "flux", "z_image", "qwen_image", "qwen_image21"]
"""Families whose original single-file layout the tests can write."""
FORMATS = {"sd3": "diffusers", "z_image": "diffusers", "qwen_image21": "diffusers"}


def save_model(name, pipe, path):
    """As a folder, or with the keys of the original code."""
    if path.suffix != ".safetensors":
        pipe.save_pretrained(path)
        return
    if name == "flux":
        tensors = add_prefix("model.diffusion_model.", convert_flux_transformer(pipe.transformer))
    else:
        tensors = build_checkpoint(name, pipe)
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path)


def save_lora(path, name, pipe, kind="lora", components=None, **options):
    state, alphas, parts = build_random_state(name, kind, pipe=pipe, **options)
    if components is not None:
        state = {key: each for key, each in state.items() if key.partition(".")[0] in components}
        alphas = {key: each for key, each in alphas.items() if key.partition(".")[0] in components}
    state = {key: each if "magnitude" in key else each * 0.1 for key, each in state.items()}
    for key in [key for key in state if "magnitude" in key]:  # as after training: near the norms of the base rows
        component, _, module = key.removesuffix(".lora_magnitude_vector.weight").partition(".")
        weight = getattr(pipe, component).get_submodule(module).weight.detach()
        state[key] = 1.2 * weight.flatten(1).norm(dim=1).reshape(state[key].shape)
    tensors, metadata = convert_to_file_format(state, alphas, parts, FORMATS.get(name, "kohya"))
    save_file(tensors, path, metadata)
    return state, alphas


def run(*words):
    assert run_tool(["lora", *map(str, words)]) == 0


ONE_DENOISER = [name for name in FAMILIES.entries if FAMILIES.get(name).facts.pipeline.experts is None]


@pytest.mark.slow
def test_a_folder_of_two_experts_is_refused(tmp_path, capsys):
    TINY["wan22_t2v"]().pipe.save_pretrained(tmp_path / "base")
    out, base = tmp_path / "out.safetensors", tmp_path / "base"
    words = ["lora", "extract", str(base), str(base), "--output", str(out), "--rank", "2"]
    assert run_tool(words) == 2 and not out.exists()
    assert "two transformers" in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_file"), [*((name, False) for name in ONE_DENOISER), *((name, True) for name in FILE_FAMILIES)]
)
def test_a_merged_model_has_the_weights_of_one_with_the_lora_applied_and_gives_the_lora_back(name, is_file, tmp_path):
    pipe, end = TINY[name]().pipe, ".safetensors" if is_file else ""
    base, merged, expected = (tmp_path / f"{each}{end}" for each in ("base", "merged", "expected"))
    components = ("transformer",) if name == "flux" and is_file else None
    save_model(name, pipe, base)
    state, alphas = save_lora(tmp_path / "lora.safetensors", name, pipe, components=components)

    run("merge", tmp_path / "lora.safetensors", "--model", base, "--output", merged, "--math", "float64")
    run("extract", base, merged, "--energy", "0.99999999", "--output", tmp_path / "back.safetensors")

    merge(pipe, state, alphas)
    save_model(name, pipe, expected)
    files = [each.relative_to(expected) for each in expected.rglob("*")] if not is_file else ["."]
    for file in files:
        if str(file).endswith(".safetensors") or is_file:
            wanted, found = (
                load_file(expected / file if not is_file else expected),
                load_file(merged / file if not is_file else merged),
            )
            assert wanted.keys() == found.keys()
            for key, tensor in wanted.items():
                assert torch.allclose(found[key], tensor, rtol=0, atol=1e-6), key
    paths = [str(tmp_path / f"{each}.safetensors") for each in ("lora", "back")]
    before, after = (each.updates for each in read_lora_files(paths, name))  # families share names and sizes
    assert before.keys() == after.keys()
    for module, update in before.items():
        wanted, found = factor_update(update), factor_update(after[module])
        assert compute_difference(wanted, found) < 1e-4 * compute_norm(wanted) + 1e-6, module


LAYER = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
CONV = "lora_unet_mid_block_resnets_0_conv1"
NORM = "lora_unet_mid_block_attentions_0_norm"


def list_lycoris_kinds(pipe):
    """Tensors by file key, of types that random states do not have."""
    block = pipe.unet.mid_block
    linear = block.attentions[0].transformer_blocks[0].attn1.to_q.weight
    conv, norm = block.resnets[0].conv1.weight, block.attentions[0].norm.weight
    (rows, columns), (outputs, inputs, *_), size = linear.shape, conv.shape, len(norm)
    torch.manual_seed(0)
    kinds = {
        "tucker locon": {
            f"{CONV}.lora_down.weight": (2, inputs, 1, 1),
            f"{CONV}.lora_mid.weight": (2, 2, 3, 3),
            f"{CONV}.lora_up.weight": (outputs, 2, 1, 1),
        },
        "tucker loha": {
            **{f"{CONV}.hada_w{number}_a": (2, outputs) for number in (1, 2)},
            **{f"{CONV}.hada_w{number}_b": (2, inputs) for number in (1, 2)},
            **{f"{CONV}.hada_t{number}": (2, 2, 3, 3) for number in (1, 2)},
        },
        "loha of a convolution": {
            **{f"{CONV}.hada_w{number}_a": (outputs, 2) for number in (1, 2)},
            **{f"{CONV}.hada_w{number}_b": (2, inputs * 9) for number in (1, 2)},
        },
        "glora": {
            f"{LAYER}.a1.weight": (columns, 2),
            f"{LAYER}.a2.weight": (2, columns),
            f"{LAYER}.b1.weight": (rows, 2),
            f"{LAYER}.b2.weight": (2, columns),
        },
        "diag-oft": {f"{LAYER}.oft_blocks": (rows // 4, 4, 4)},
        "norm": {f"{NORM}.w_norm": (size,), f"{NORM}.b_norm": (size,)},
        "full": {f"{LAYER}.diff": (rows, columns)},
    }
    return {kind: {key: torch.randn(shape) * 0.1 for key, shape in shapes.items()} for kind, shapes in kinds.items()}


@pytest.mark.slow
def test_every_kind_of_lycoris_is_inspected_merged_into_a_model_and_resized_where_it_can_be(tmp_path, capsys):
    pipe = TINY["sd1"]().pipe
    save_model("sd1", pipe, tmp_path / "base")
    for kind, tensors in list_lycoris_kinds(pipe).items():
        source, merged, small = (tmp_path / f"{kind} {each}".replace(" ", "_") for each in ("in", "merged", "out"))
        source, small = source.with_suffix(".safetensors"), small.with_suffix(".safetensors")
        save_file(tensors, source)

        run("inspect", source, "--layers")
        run("merge", source, "--model", tmp_path / "base", "--output", merged)
        run("resize", source, "--rank", "500", "--output", small)

        before, after = (
            load_file(each / "unet/diffusion_pytorch_model.safetensors") for each in (tmp_path / "base", merged)
        )
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert {key.rpartition(".")[0] for key in changed} == set(
            update.removeprefix("unet.") for update in read_lora_file(source).contents.updates
        )
        (update,), (resized,) = (read_lora_file(each).contents.updates.values() for each in (source, small))
        if kind.partition(" ")[0] in ("tucker", "loha"):
            assert resized.adapter_type == "lora"
            run(
                "extract",
                tmp_path / "base",
                merged,
                "--energy",
                "0.9999999",
                "--output",
                tmp_path / f"{kind}.safetensors",
            )
            (extracted,) = read_lora_file(tmp_path / f"{kind}.safetensors").contents.updates.values()
            wanted = factor_update(update)
            for found in (resized, extracted):
                assert compute_difference(wanted, factor_update(found)) < 1e-3 * compute_norm(wanted)
        else:
            assert "stay as they are" in capsys.readouterr().out
            assert all(torch.equal(tensor, resized.tensors[name]) for name, tensor in update.tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", KEY_STYLE_FAMILIES)
def test_every_tool_works_on_every_key_style(name, tmp_path, capsys):
    """What they write is checked as converted files are; the merged one is their sum."""
    one, two, loha, out = (tmp_path / f"{each}.safetensors" for each in ("one", "two", "loha", "out"))
    pipe = TINY[name]().pipe
    save_lora(one, name, pipe)
    save_lora(two, name, pipe, seed=1)
    state, alphas, parts = build_random_state(name, "loha", pipe=pipe)
    save_file(convert_to_file_format(state, alphas, parts, "comfy")[0], loha)

    run("inspect", one, two, loha, "--json")
    run("merge", one, two, "--weights", "0.5", "1", "--output", out)

    first, second, merged = (read_lora_file(each).contents.updates for each in (one, two, out))
    for module, update in merged.items():
        terms = [factor_update(first[module]).scale(0.5), factor_update(second[module])]
        assert compute_difference(factor_update(update), add_updates(terms)) < 1e-5 * compute_norm(terms[1]), module
    run("merge", one, two, loha, "--rank", "2", "--to", "diffusers", "--output", out, "--overwrite")
    run("resize", loha, "--sv_fro", "0.9", "--output", out, "--overwrite")
    run("scale", one, "--blocks", "denoiser=0.5", "--output", out, "--overwrite")
    run("prune", one, "--keep", "denoiser", "--output", out, "--overwrite")
    run("metadata", one, "--set", "title=new", "--output", out, "--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_dora_and_lokr_are_extracted_and_close_to_the_tuned_model(kind, tmp_path, capsys):
    pipe = TINY["sd1"]().pipe
    base, tuned, out, applied = (tmp_path / each for each in ("base", "tuned", "out.safetensors", "applied"))
    save_model("sd1", pipe, base)
    save_lora(tmp_path / "lora.safetensors", "sd1", pipe, kind)
    run("merge", tmp_path / "lora.safetensors", "--model", base, "--output", tuned)

    options = ["--factor", "2"] if kind == "lokr" else ["--rank", "16"]
    run("extract", base, tuned, "--type", kind, *options, "--output", out)
    run("merge", out, "--model", base, "--output", applied)

    file = "unet/diffusion_pytorch_model.safetensors"
    before, wanted, found = (load_file(each / file) for each in (base, tuned, applied))
    lost = sum(float((found[key] - wanted[key]).square().sum()) for key in wanted) ** 0.5
    whole = sum(float((before[key] - wanted[key]).square().sum()) for key in wanted) ** 0.5
    assert lost < (1e-3 if kind == "lokr" else 0.05) * whole


@pytest.mark.slow
def test_a_merge_into_a_model_stops_before_writing_if_a_lora_does_not_fit(tmp_path, capsys):
    pipe = TINY["sd1"]().pipe
    save_model("sd1", pipe, tmp_path / "base")
    save_lora(tmp_path / "flux.safetensors", "flux", None)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "flux.safetensors").read_bytes()[:-9])

    words = ["--model", tmp_path / "base", "--output", tmp_path / "out"]
    assert run_tool(["lora", "merge", *map(str, [tmp_path / "flux.safetensors", *words])]) == 2
    assert "is a LoRA of flux, and base a model of sd1" in capsys.readouterr().err
    assert run_tool(["lora", "merge", *map(str, [tmp_path / "cut.safetensors", *words])]) == 2
    assert "is truncated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    save_lora(tmp_path / "lora.safetensors", "sd1", pipe)
    for architecture, is_told in {"stable-diffusion-v1/lora": False, "stable-diffusion-v2-768-v/lora": True}.items():
        run(
            "metadata",
            tmp_path / "lora.safetensors",
            "--set",
            f"modelspec.architecture={architecture}",
            "--output",
            tmp_path / "stated.safetensors",
            "--overwrite",
        )
        run("merge", tmp_path / "stated.safetensors", *words, "--overwrite")
        assert ("its metadata say that it is for sd2" in capsys.readouterr().out) == is_told
    assert run_tool(["lora", "extract", str(tmp_path / "base"), str(tmp_path / "flux.safetensors"), "--rank", "4"]) == 2
    assert "--output: missing" in capsys.readouterr().err


def test_a_file_of_a_model_in_several_files_is_no_model_of_the_lora_tools(tmp_path, capsys):
    pipe, path = TINY["sd1"]().pipe, tmp_path / "model-00001-of-00002.safetensors"
    save_model("sd1", pipe, path)
    save_lora(tmp_path / "lora.safetensors", "sd1", pipe)
    words = [tmp_path / "lora.safetensors", "--model", path, "--output", tmp_path / "out.safetensors"]
    assert run_tool(["lora", "merge", *map(str, words)]) == 2
    assert "is one of the 2 files of a model; give the model in one file" in capsys.readouterr().err
