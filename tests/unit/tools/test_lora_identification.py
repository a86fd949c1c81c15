"""Which model a LoRA file is for: metadata first, then layers and sizes, then key names; where they fit several, ask."""

import re

import pytest
import torch
from family_cases import list_cases
from known_models_once import known_models
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY

from library.adapters.file_writer import InvalidAdapterFileError, list_changing_layers, verify_layers
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.module_adapter import ModuleAdapter
from library.cli import run_tool
from library.errors import UserError
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.known_models import load_known_models
from library.tools.lora.identification import find_stated_families, identify_lora, read_lora_file

__all__ = ["known_models"]  # a fixture

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
KOHYA_NAMES = [f"lora_unet_transformer_blocks_{n}_attn_{end.replace('.', '_')}" for n in range(19) for end in ATTENTION]
DIFFUSERS_NAMES = [f"transformer.transformer_blocks.{n}.attn.{end}" for n in range(19) for end in ATTENTION]
QWEN_METADATA = {"ss_base_model_version": "qwen_image"}


@pytest.fixture(scope="module")
def models():
    return load_known_models()


def build_lora(names, ends=("lora_down", "lora_up"), width=3072):
    """LoRAs of square layers, whose values differ from layer to layer."""
    shapes = ((1, width), (width, 1))
    return {
        f"{name}.{end}.weight": torch.full(shape, float(number + 1))
        for number, name in enumerate(names)
        for end, shape in zip(ends, shapes, strict=True)
    }


def save_lora(path, names, ends=("lora_down", "lora_up"), **metadata):
    save_file(build_lora(names, ends), path, metadata)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [{}, QWEN_METADATA, {"modelspec.architecture": "qwen-image/lora"}])
def test_attention_layers_of_qwen_image_are_not_taken_for_those_of_flux(metadata, models):
    """sd-scripts would write one fused layer for FLUX.1, so that the names alone tell."""
    assert identify_lora(build_lora(KOHYA_NAMES), metadata, models, is_for_inspection=False).family == "qwen_image"


@pytest.mark.slow
def test_a_converted_and_a_resized_file_of_qwen_image_keep_its_layers(tmp_path, capsys):
    source, there, back, small = (tmp_path / f"{name}.safetensors" for name in ("in", "there", "back", "small"))
    save_lora(source, KOHYA_NAMES)

    assert run_tool(["convert", str(source), str(there), "--to", "diffusers"]) == 0
    assert run_tool(["convert", str(there), str(back), "--to", "kohya", "--family", "qwen_image"]) == 0
    assert run_tool(["lora", "resize", str(source), "--rank", "1", "--output", str(small)]) == 0

    assert f"{2 * len(KOHYA_NAMES)} tensors" in capsys.readouterr().out
    before = load_file(source)
    for path in (back, small):
        after = load_file(path)
        assert {key for key in after if not key.endswith(".alpha")} == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "IN", "OUT", "--to", "kohya"),
        ("lora", "resize", "IN", "--rank", "1", "--output", "OUT"),
        pytest.param(("lora", "scale", "IN", "--blocks", "denoiser=2", "--output", "OUT"), marks=pytest.mark.slow),
        pytest.param(
            ("lora", "prune", "IN", "--blocks", "transformer_blocks.0", "--output", "OUT"), marks=pytest.mark.slow
        ),
        pytest.param(("lora", "merge", "IN", "IN", "--output", "OUT"), marks=pytest.mark.slow),
    ],
)
def test_a_file_that_fits_families_of_other_names_is_not_rewritten_before_one_is_given(words, tmp_path, capsys):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_lora(source, DIFFUSERS_NAMES, ("lora_A", "lora_B"))
    words = [{"IN": str(source), "OUT": str(out)}.get(word, word) for word in words]

    assert run_tool(words) == 2

    text = capsys.readouterr().err
    assert not out.exists()
    assert "flux" in text and "qwen_image" in text and "--family" in text
    assert run_tool([*words, "--family", "qwen_image"]) == 0
    assert read_lora_file(out, is_for_inspection=True).contents.alphas.keys() <= {*DIFFUSERS_NAMES}


def test_a_file_that_names_its_model_needs_no_family(tmp_path, capsys):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_lora(source, DIFFUSERS_NAMES, ("lora_A", "lora_B"), **QWEN_METADATA)

    assert run_tool(["convert", str(source), str(out), "--to", "kohya"]) == 0

    assert {key.partition(".")[0] for key in load_file(out)} == {*KOHYA_NAMES}


def test_a_family_that_is_unknown_or_that_does_not_fit_is_refused(tmp_path, capsys):
    source, out = save_lora(tmp_path / "in.safetensors", KOHYA_NAMES), tmp_path / "out.safetensors"

    assert run_tool(["convert", str(source), str(out), "--to", "kohya", "--family", "qwen_imag"]) == 2
    assert "qwen_image" in capsys.readouterr().err
    assert run_tool(["lora", "inspect", str(source), "--family", "sdxl"]) == 2
    assert "is no LoRA of sdxl" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("prefix", "family"), [("lora_te", "sd1"), ("lora_te1", "sdxl")])
def test_the_number_of_a_text_encoder_tells_models_of_one_and_of_several_apart(prefix, family, models):
    names = [f"{prefix}_text_model_encoder_layers_{n}_self_attn_q_proj" for n in range(12)]

    assert identify_lora(build_lora(names, width=768), {}, models, is_for_inspection=False).family == family


def test_inspect_names_all_families_that_a_file_fits(tmp_path, capsys):
    source = save_lora(tmp_path / "in.safetensors", DIFFUSERS_NAMES, ("lora_A", "lora_B"))

    assert run_tool(["lora", "inspect", str(source)]) == 0

    text = capsys.readouterr().out
    assert "for flux" in text and "qwen_image" in text and "its layers fit flux_kontext and" in text


def build_full_lora(model):
    """Rank 1 for each usual layer of a denoiser."""
    family, state = FAMILIES.get(model.family), {}
    ends = tuple(f".{end}" for end in family.facts.lora.targets)
    for name, shape in model.shapes.items():
        if name.startswith(f"{family.facts.denoiser_name}.") and name.endswith(ends) and len(shape) == 2:
            state[f"{name}.lora_A.weight"] = torch.ones(1, shape[1], dtype=torch.half)
            state[f"{name}.lora_B.weight"] = torch.ones(shape[0], 1, dtype=torch.half)
    alphas = {key.removesuffix(".lora_A.weight"): 1.0 for key in state if "lora_A" in key}
    return state, alphas


def test_plain_flux_is_not_called_kontext(models):
    model = next(model for model in models if model.family == "flux")
    tensors, _ = convert_to_file_format(*build_full_lora(model), model.components, "kohya")
    architecture = {"modelspec.architecture": "flux-1-dev/lora"}

    assert identify_lora(tensors, architecture | {"ss_base_model_version": "flux1"}, models).family == "flux"
    assert identify_lora(tensors, architecture, models).family == "flux"
    assert identify_lora(tensors, {}, models).family == "flux"
    kontext = identify_lora(tensors, architecture | {"ss_base_model_version": "flux_kontext"}, models)
    assert (kontext.family, kontext.similar_families) == ("flux_kontext", ())


FILES_OF_OTHERS = {
    "sd1_inpainting": {"sd1"},
    "sd1_pix2pix": {"sd1"},
    "sd2_inpainting": {"sd2"},
    "sdxl_inpainting": {"sdxl"},
    "sdxl_pix2pix": {"sdxl"},
    "flux_fill": {"flux"},
    "flux_control": {"flux"},
    "ltx_video095": {"ltx_video", "ltx_video095"},
}
"""Families whose LoRA files are those of the text-to-image, or an earlier model, and say so."""


@pytest.mark.parametrize("family", list_cases(FAMILY_FACTS))
def test_the_metadata_of_a_run_name_its_family_and_no_other(family):
    info = FAMILIES.get(family)().get_base_model_info(TINY[family]().pipe)
    version, architecture = info.base_model_version, f"{info.architecture}/lora"

    assert find_stated_families({"ss_base_model_version": version, "modelspec.architecture": architecture}) == (
        FILES_OF_OTHERS.get(family, {family})
    )


@pytest.mark.parametrize(
    ("version", "families"),
    [
        ("sd_v1", {"sd1"}),
        ("sd_1.5", {"sd1"}),
        ("sd_v2_v", {"sd2"}),
        ("sdxl_base_v1-0", {"sdxl"}),
        ("sdxl_1.0", {"sdxl"}),
        ("flux1", {"flux"}),
        ("Flux.1-dev", {"flux", "flux_kontext", "flux_fill", "flux_control"}),
        ("flux_kontext", {"flux_kontext"}),
        ("flux2_klein_9b", {"flux2_klein"}),
        ("qwen_image_edit_plus", {"qwen_image_edit_plus"}),
        ("zimage", {"z_image"}),
        ("flux2", set()),
        ("qwen_imagery", set()),
        ("wan2.2", set()),
        ("", set()),
    ],
)
def test_names_of_base_models_are_compared_by_whole_words(version, families):
    assert find_stated_families({"ss_base_model_version": version}) == families


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "first"), [("kohya", 0), ("diffusers", 1), ("comfy", 2)])
def test_a_full_lora_of_every_published_model_is_recognized_or_asked_about_without_metadata(file_format, first, models):
    """What is rewritten has all its layers; what is recognized is the family, or one of equal names and sizes."""
    for model in models[first::3]:
        state, alphas = build_full_lora(model)
        if not state:
            continue
        tensors, _ = convert_to_file_format(state, alphas, model.components, file_format)
        found = identify_lora(tensors, {}, models)
        assert model.family in (found.family, *found.similar_families)
        assert found.contents.alphas.keys() == alphas.keys()
        try:
            identify_lora(tensors, {}, models, is_for_inspection=False)
        except UserError as error:
            assert re.search(rf"\b{model.family}\b", str(error))
        else:
            again, _ = convert_to_file_format(found.contents.state_dict, alphas, found.components, file_format)
            assert again.keys() == tensors.keys()


def test_a_file_that_lost_a_layer_does_not_get_its_name(tmp_path, models):
    model = next(model for model in models if model.family == "qwen_image")
    path = save_lora(tmp_path / "in.safetensors", KOHYA_NAMES[:4])
    layers = [name.removesuffix(".0") + ".0" * name.endswith(".0") for name in DIFFUSERS_NAMES[:4]]
    verify_layers(path, layers, model.components, model.shapes)

    with pytest.raises(InvalidAdapterFileError, match=r"1 of 5 layers would be lost .*transformer_blocks.1.attn.to_q"):
        verify_layers(path, [*layers, DIFFUSERS_NAMES[4]], model.components, model.shapes)


def test_a_part_of_a_fused_layer_without_effect_may_be_left_out():
    down = torch.ones(1, 2)
    adapters = {"a": ModuleAdapter({"down": down, "up": torch.zeros(2, 1)}, 1.0)}

    assert list_changing_layers(adapters) == frozenset()
    assert list_changing_layers({"a": ModuleAdapter({"down": down, "up": torch.ones(2, 1)}, 1.0)}) == {"a"}


def test_files_of_models_with_the_same_layers_can_be_merged_and_others_cannot(tmp_path, capsys):
    names = [f"lora_unet_double_blocks_{n}_img_attn_proj" for n in range(3)]
    paths = [tmp_path / f"{version}.safetensors" for version in ("flux1", "flux_kontext")]
    for path in paths:
        save_lora(path, names, ss_base_model_version=path.stem)
    other = save_lora(tmp_path / "qwen.safetensors", KOHYA_NAMES, **QWEN_METADATA)
    out = tmp_path / "out.safetensors"

    assert run_tool(["lora", "merge", *map(str, paths), "--output", str(out)]) == 0
    assert "merged 2 LoRAs of flux and flux_kontext" in capsys.readouterr().out
    assert len(load_file(out)) == 3 * len(names)
    assert run_tool(["lora", "merge", str(paths[0]), str(other), "--output", str(out), "--overwrite"]) == 2
    assert "is a LoRA of qwen_image, and flux1.safetensors one of flux" in capsys.readouterr().err
