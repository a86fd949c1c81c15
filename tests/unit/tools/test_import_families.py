"""`python -m library import` for each kind of model that the other program and this one can train."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from problem_lines import format_lines

from library.config import parse_config
from library.dataset.dataset_config import load_dataset_config
from library.models.families import FAMILY_FACTS
from library.tools.import_config import run_import_config
from library.tools.importers.keys import ai_toolkit, diffusion_pipe, onetrainer, simpletuner
from library.tools.importers.programs import import_sources
from library.tools.importers.source_file import SourceFile


def build_kohya(**settings):
    return {"LoRA_type": "Flux1", "flux1_checkbox": True, "model_list": "custom", "text_encoder_lr": 0, **settings}


def build_ai_toolkit(arch, path="models/x.safetensors", dataset=None, sample=None, **network):
    process = {
        "type": "sd_trainer",
        "model": {"arch": arch, "name_or_path": path},
        "network": {"type": "lora", "linear": 8, **network},
        "train": {"noise_scheduler": "flowmatch", "steps": 10},
        "datasets": [{"folder_path": "photos", **(dataset or {})}],
        "sample": sample or {},
    }
    return {"job": "extension", "config": {"name": "x", "process": [process]}}


def build_onetrainer(kind, path="owner/name", **settings):
    transformer = {"train": True, "guidance_scale": 2.0}
    parts = {"transformer": transformer, "text_encoder": {"train": False}}
    return {"training_method": "LORA", "model_type": kind, "base_model_name": path, **parts, **settings}


def build_diffusion_pipe(kind, control=None, adapter=None, **model):
    directory = {"path": "photos", **({"control_path": control} if control else {})}
    main = {"model": {"type": kind, "dtype": "bfloat16", **model}, "dataset": "data.toml", "epochs": 1}
    main |= {"adapter": {"type": "lora", "rank": 8, "dtype": "float32", **(adapter or {})}, "optimizer": {"lr": 1e-4}}
    return main, {"resolutions": [512], "directory": [directory]}


def build_simpletuner(family, flavour=None, control=None, **settings):
    image = {"id": "photos", "instance_data_dir": "photos", "caption_strategy": "textfile", "crop": False}
    before = {"id": "before", "dataset_type": "conditioning", "instance_data_dir": "before"}
    backends = [{**image, "conditioning_data": "before"}, before] if control else [image]
    main = {"model_family": family, "model_type": "lora", "max_train_steps": 10, **settings}
    return main | ({"model_flavour": flavour} if flavour else {}), backends


def import_content(content, *others):
    sources = [SourceFile(Path("config.json"), content)]
    _, result = import_sources([*sources, *(SourceFile(Path(f"data{n}.json"), each) for n, each in enumerate(others))])
    assert format_lines(result.problems) == []
    return result


def list_patterns(result):
    words = result.options.get("network_args", [])
    return next((word.partition("=")[2] for word in words if word.startswith("include_patterns")), "")


def list_controls(result):
    return [subset.get("control_directory") for dataset in result.datasets for subset in dataset["subsets"]]


@pytest.mark.parametrize("arch, family", ai_toolkit.FAMILY_OF_ARCH.items())
def test_every_model_of_ai_toolkit_that_is_here(arch, family):
    result = import_content(build_ai_toolkit(arch, dataset={"control_path": "before"}))

    takes_controls = FAMILY_FACTS[family].control.num_images[1] > 0
    assert result.family == family
    assert list_controls(result) == (["before"] if takes_controls else [None])
    assert any("control_path" in item.key for item in result.untaken) == (not takes_controls)
    assert ("blocks" in list_patterns(result)) == (family == "krea2")


def test_references_and_layer_names_of_ai_toolkit():
    sample = {"samples": [{"prompt": "make it blue", "ctrl_img_1": "a.png", "ctrl_img_2": "b.png"}]}
    controls = {"control_path_1": "before", "control_path_2": "style"}
    result = import_content(build_ai_toolkit("qwen_image_edit_plus", dataset=controls, sample=sample))
    assert result.prompts[0]["control_image_path"] == ["a.png", "b.png"]
    assert list_controls(result) == ["before"]
    (item,) = [item for item in result.untaken if item.key == "datasets[0].control_path"]
    assert item.value == ["before", "style"] and item.changes_result
    assert any("img_mod.1" in item.reason for item in result.untaken)

    result = import_content(build_ai_toolkit("flux2", network_kwargs={"only_if_contains": ["double_blocks"]}))
    assert list_patterns(result) == ""
    assert "network.network_kwargs.only_if_contains" in {item.key for item in result.untaken}
    assert "refiner" in list_patterns(import_content(build_ai_toolkit("lumina2")))


@pytest.mark.parametrize("kind, family", onetrainer.FAMILIES.items())
def test_every_model_of_onetrainer_that_is_here(kind, family):
    result = import_content(build_onetrainer(kind))

    assert result.family == family
    assert ("guidance_scale" in result.options) == (family in ("flux", "flux2_dev"))


def test_layers_and_timesteps_of_onetrainer():
    klein = build_onetrainer("FLUX_2", "black-forest-labs/FLUX.2-klein-base-9B", layer_filter_preset="blocks")
    result = import_content({**klein, "dynamic_timestep_shifting": True, "timestep_distribution": "LOGIT_NORMAL"})
    assert result.family == "flux2_klein" and "guidance_scale" not in result.options
    assert result.options["weighting_scheme"] == "logit_normal" and "discrete_flow_shift" not in result.options
    assert "dynamic_timestep_shifting" in {item.key for item in result.untaken}
    assert list_patterns(result) == ""

    result = import_content(build_onetrainer("CHROMA_1", layer_filter_preset="attn-mlp", timestep_shift=2.0))
    assert "proj_mlp" in list_patterns(result) and result.options["discrete_flow_shift"] == 2.0
    assert "self_attention" in list_patterns(import_content(build_onetrainer("ERNIE", layer_filter_preset="attn-only")))
    krea2 = import_content(build_onetrainer("KREA_2", layer_filter_preset="blocks"))
    assert "transformer_blocks" in list_patterns(krea2)


@pytest.mark.parametrize("kind, family", diffusion_pipe.FAMILIES.items())
def test_every_model_of_diffusion_pipe_that_is_here(kind, family):
    main, data = build_diffusion_pipe(kind, transformer_path="models/x.safetensors")

    result = import_content(main, data)

    assert result.family == family
    assert ("refiner" in list_patterns(result)) == (family == "lumina2")


def test_editing_and_files_of_diffusion_pipe():
    for kind, path, family in (
        ("flux", "flux1-dev.safetensors", "flux_kontext"),
        ("qwen_image", "qwen_image_edit_bf16.safetensors", "qwen_image_edit"),
        ("qwen_image", "qwen_image_edit_2509_bf16.safetensors", "qwen_image_edit_plus"),
        ("flux2", "flux-2-klein-base-4b.safetensors", "flux2_klein"),
    ):
        result = import_content(*build_diffusion_pipe(kind, "before", diffusion_model=path))
        assert (result.family, list_controls(result)) == (family, ["before"])
    result = import_content(*build_diffusion_pipe("chroma", "before", transformer_path="c.safetensors"))
    assert list_controls(result) == [None] and "directory[0].control_path" in {item.key for item in result.untaken}

    paths = {"transformer_path": "c.safetensors", "diffusers_path": "FLUX.1-dev"}
    options = import_content(*build_diffusion_pipe("chroma", **paths)).options
    assert (options["ae"], options["t5xxl"]) == ("FLUX.1-dev/vae", "FLUX.1-dev/text_encoder_2")
    paths = {"transformer_path": "l.safetensors", "llm_path": "gemma.safetensors", "lumina_shift": True}
    options = import_content(*build_diffusion_pipe("lumina_2", **paths)).options
    assert (options["text_encoder"], options["timestep_sampling"]) == ("gemma.safetensors", "flux_shift")
    files = {"transformer_path": "h.safetensors", "text_encoder_path": "q.safetensors", "byt5_path": "b.safetensors"}
    options = import_content(*build_diffusion_pipe("hunyuan_image", **files)).options
    assert (options["text_encoder"], options["byt5"]) == ("q.safetensors", "b.safetensors")


@pytest.mark.parametrize("family", simpletuner.FAMILIES)
def test_every_model_of_simpletuner_that_is_here(family):
    result = import_content(*build_simpletuner(family, pretrained_model_name_or_path="owner/name"))

    assert result.family == simpletuner.FAMILIES[family]
    assert "to_q" in list_patterns(result)


@pytest.mark.parametrize("key, family", simpletuner.FAMILY_OF_FLAVOUR.items())
def test_flavours_of_simpletuner(key, family):
    (name,) = [name for name, base in simpletuner.FAMILIES.items() if base == key[0]]
    result = import_content(*build_simpletuner(name, key[1], control=True))

    assert (result.family, list_controls(result)) == (family, ["before"])
    assert not any("dataset_type" in item.key for item in result.untaken)
    assert ("to_qkv_mlp_proj" in list_patterns(result)) == (family == "flux2_dev")


def test_chroma_and_lumina_of_kohya_ss():
    result = import_content(build_kohya(model_type="chroma", t5xxl="t5.safetensors", img_attn_dim="8", img_mod_dim="4"))
    assert result.family == "chroma" and result.options["t5xxl"] == "t5.safetensors"
    assert result.options["network_module"] == "networks.lora_flux"
    assert result.options["network_args"] == ["img_attn_dim=8"]
    listed = {item.key for item in result.untaken if item.changes_result}
    assert "img_mod_dim" in listed and not {"apply_t5_attn_mask", "guidance_scale"} & listed

    lumina = {"LoRA_type": "Lumina", "flux1_checkbox": False, "lumina_checkbox": True, "lumina_gemma2": "g.safetensors"}
    lumina["lumina_system_prompt"] = "Draw."
    result = import_content(build_kohya(**lumina, text_encoder_lr=1e-4, lumina_timestep_sampling="nextdit_shift"))
    assert result.family == "lumina2" and result.options["text_encoder"] == "g.safetensors"
    assert result.options["network_module"] == "networks.lora_lumina"
    assert result.options["timestep_sampling"] == "sigma" and "discrete_flow_shift" not in result.options
    assert "network_train_unet_only" not in result.options
    listed = {item.key for item in result.untaken if item.changes_result}
    assert "text_encoder_lr" in listed and result.options["system_prompt"] == "Draw."


FILES = {
    "chroma.json": build_kohya(model_type="chroma", t5xxl="t5.safetensors", train_data_dir="photos", epoch=1),
    "kontext.yaml": build_ai_toolkit("flux_kontext", dataset={"control_path": "before"}),
    "krea2.json": build_onetrainer("KREA_2", layer_filter_preset="attn-mlp", concepts=[{"path": "photos"}]),
    "lumina.toml": build_diffusion_pipe("lumina_2", transformer_path="x.safetensors")[0],
    "edit.json": build_simpletuner("qwen_image", "edit-v2", control=True, data_backend_config="backends.json")[0],
}


@pytest.mark.parametrize("name", FILES)
def test_the_output_is_accepted_by_our_own_parser(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("photos/1_bird", "before"):
        Path(folder).mkdir(parents=True)
    Path("backends.json").write_text(json.dumps(build_simpletuner("qwen_image", "edit-v2", control=True)[1]))
    Path("data.toml").write_text('resolutions = [512]\n[[directory]]\npath = "photos"\n')
    content = FILES[name]
    if name.endswith(".toml"):
        tables = {key: value for key, value in content.items() if isinstance(value, dict)}
        lines = [f"{key} = {json.dumps(value)}" for key, value in content.items() if key not in tables]
        for key, table in tables.items():
            lines += [f"[{key}]", *(f"{inner} = {json.dumps(value)}" for inner, value in table.items())]
        Path(name).write_text("\n".join(lines))
    else:
        Path(name).write_text(yaml.safe_dump(content) if name.endswith(".yaml") else json.dumps(content))

    text, code = run_import_config([name, "--output_dir", "out"])

    (run,) = [path for path in Path("out").glob("*.toml") if not path.name.endswith(".dataset.toml")]
    loaded = parse_config(["--config_file", str(run)])
    assert code == 0 and format_lines(loaded.problems) == []
    assert load_dataset_config(loaded.config.data).datasets
    assert (loaded.config.model.family == "flux_kontext") == (name == "kontext.yaml"), "a file does not tell them apart"
    assert "unknown key" not in text
    shutil.rmtree("out")
