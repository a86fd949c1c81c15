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
from library.models.trainer_names import choose_family, find_families, format_trained_titles, list_names
from library.tools.import_config import build_files, check_written_files, run_import_config
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


def build_for(trainer, name, family, path):
    """A minimal configuration of a trainer, and its other files, for the model that the trainer calls by this name."""
    if trainer == "ai_toolkit" and name.startswith("is_"):
        content = build_ai_toolkit("", path, network={})
        content["config"]["process"][0]["model"][name] = True
        return (content,)
    if trainer == "kohya_gui":
        lora_types = {"lumina2": "Lumina", "anima": "Anima", "hunyuan_image": "HunyuanImage-2.1"}
        lora_type = lora_types.get(family, "Flux1" if "flux" in name else "Standard")
        models = {
            "LoRA_type": lora_type,
            "flux1_checkbox": False,
            "model_type": family,
            **({name: True} if name else {}),
        }
        return (build_kohya(**models, pretrained_model_name_or_path=path),)
    if trainer == "diffusion_pipe":
        return build_diffusion_pipe(
            name, **({"checkpoint_path": path} if family == "sdxl" else {"diffusers_path": path})
        )
    if trainer == "simpletuner":
        flavour = next(iter(FAMILY_FACTS[family].detection.trainer_names.simpletuner_flavours))
        return build_simpletuner(name, flavour, pretrained_model_name_or_path=path)
    return ({"ai_toolkit": build_ai_toolkit, "onetrainer": build_onetrainer}[trainer](name, path),)


TRAINERS = ("ai_toolkit", "diffusion_pipe", "kohya_gui", "onetrainer", "simpletuner")
MODELS = [
    (trainer, name, family) for trainer in TRAINERS for family in FAMILY_FACTS for name in list_names(trainer, family)
]


@pytest.mark.parametrize("trainer, name, family", MODELS)
def test_every_name_of_a_model_is_imported_as_its_family(trainer, name, family, tmp_path):
    flavours = FAMILY_FACTS[family].detection.trainer_names.simpletuner_flavours
    path = next(iter(flavours.values()), "owner/name")
    if trainer == "diffusion_pipe" and family.startswith("wan22_"):  # told apart by the names of the files
        path = f"Wan2.2-{family.removeprefix('wan22_')}-A14B/low_noise_model"

    result = import_content(*build_for(trainer, name, family, path))

    assert result.family == family
    assert result.options["pretrained_model_name_or_path"] == path, "or the demo model would be trained"
    result.datasets.clear()
    for file, text in build_files(result, tmp_path, "run", Path("config.json")).items():
        file.write_text(text, encoding="utf-8")
    problems = check_written_files(tmp_path / "run.toml", family)
    assert [problem.option for problem in problems] == ["dataset_config"], "the images, which are missing"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_model_that_is_not_here_is_refused_with_those_that_are(trainer):
    if trainer == "kohya_gui":  # it trains no others
        return
    content = build_for(trainer, "sdxl", "sdxl", "owner/name")[0]
    text = json.dumps(content).replace('"sdxl"', '"mochi"')

    _, result = import_sources([SourceFile(Path("config.json"), json.loads(text))])

    (line,) = format_lines(result.problems)
    assert '"mochi"' in line or "model mochi" in line
    assert "Qwen-Image" in line and "Ovis" not in line


def test_the_docs_list_the_models_of_each_program():
    text = Path(__file__).parents[3].joinpath("docs/import.md").read_text(encoding="utf-8")
    programs = ("ai-toolkit", "diffusion-pipe", "kohya_ss", "OneTrainer", "SimpleTuner")

    missing = [
        f"| {program} | {titles} |"
        for program, titles in zip(programs, map(format_trained_titles, TRAINERS), strict=True)
        if f"| {program} | {titles} |" not in text
    ]

    assert missing == []


def test_models_of_one_name_are_told_apart_by_their_files():
    families = find_families("diffusion_pipe", "qwen_image")

    assert choose_family(families, "qwen_image_bf16.safetensors") == "qwen_image"
    assert choose_family(families, "qwen_image_bf16.safetensors", has_control_images=True) == "qwen_image_edit"
    assert choose_family(families, "Qwen_Image_Edit_2511_bf16.safetensors") == "qwen_image_edit_plus"
    assert choose_family(families, "models/2511/qwen_image.safetensors") == "qwen_image"
    assert choose_family(("flux2_dev", "flux2_klein"), "", has_control_images=True) == "flux2_dev"


@pytest.mark.parametrize("arch", sorted({name for _, name, _ in MODELS if name in ("krea2", "qwen_image_edit", "sd3")}))
def test_control_images_and_layers_of_ai_toolkit(arch):
    result = import_content(build_ai_toolkit(arch, dataset={"control_path": "before"}))

    takes_controls = FAMILY_FACTS[result.family].control.num_images[1] > 0
    assert list_controls(result) == (["before"] if takes_controls else [None])
    assert any("control_path" in item.key for item in result.untaken) == (not takes_controls)
    assert ("blocks" in list_patterns(result)) == (result.family == "krea2")


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


def test_the_guidance_of_onetrainer_is_that_of_models_that_have_one():
    taken = {
        kind: "guidance_scale" in import_content(build_onetrainer(kind)).options
        for kind in ("FLUX_DEV_1", "FLUX_2", "ANIMA", "KREA_2")
    }
    assert taken == {"FLUX_DEV_1": True, "FLUX_2": True, "ANIMA": False, "KREA_2": False}


def test_layers_and_timesteps_of_onetrainer():
    klein = build_onetrainer("FLUX_2", "black-forest-labs/FLUX.2-klein-base-9B", layer_filter_preset="blocks")
    result = import_content({**klein, "dynamic_timestep_shifting": True, "timestep_distribution": "LOGIT_NORMAL"})
    assert result.family == "flux2_klein" and "guidance_scale" not in result.options
    assert result.options["timestep_sampling"] == "flux_shift" and "discrete_flow_shift" not in result.options
    assert not {"dynamic_timestep_shifting", "timestep_distribution"} & {item.key for item in result.untaken}
    assert list_patterns(result) == ""

    result = import_content(build_onetrainer("CHROMA_1", layer_filter_preset="attn-mlp", timestep_shift=2.0))
    assert "proj_mlp" in list_patterns(result) and result.options["discrete_flow_shift"] == 2.0
    assert "self_attention" in list_patterns(import_content(build_onetrainer("ERNIE", layer_filter_preset="attn-only")))
    krea2 = import_content(build_onetrainer("KREA_2", layer_filter_preset="blocks"))
    assert "transformer_blocks" in list_patterns(krea2)


def test_layers_of_anima_that_get_no_adapter_here_are_listed():
    for rates, is_listed in (({}, True), ({"llm_adapter_lr": 1e-5}, True), ({"llm_adapter_lr": 0}, False)):
        result = import_content(*build_diffusion_pipe("anima", transformer_path="a.safetensors", **rates))
        assert ("model.llm_adapter_lr" in {item.key for item in result.untaken if item.changes_result}) is is_listed

    result = import_content(build_onetrainer("ANIMA", layer_filter_preset="attn-only"))
    assert "attn1" in list_patterns(result) and "layer_filter_preset" not in {item.key for item in result.untaken}
    result = import_content(build_onetrainer("ANIMA", layer_filter_preset="full"))
    assert list_patterns(result) == "" and "layer_filter_preset" in {item.key for item in result.untaken}


def test_a_file_without_a_model_says_that_the_demo_model_would_be_trained(tmp_path):
    Path(tmp_path / "gui.json").write_text(
        json.dumps(build_kohya(flux1_checkbox=False, sdxl=True, LoRA_type="Standard"))
    )

    text, _ = run_import_config([str(tmp_path / "gui.json"), "--output_dir", str(tmp_path)])

    assert "--pretrained_model_name_or_path: no model was found in the file" in text


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


FLAVOURS = [
    (name, flavour, family)
    for family, facts in FAMILY_FACTS.items()
    for name in facts.detection.trainer_names.simpletuner
    for flavour in facts.detection.trainer_names.simpletuner_flavours
]


@pytest.mark.parametrize("name, flavour, family", FLAVOURS)
def test_every_flavour_of_simpletuner_is_a_model_of_its_family(name, flavour, family):
    result = import_content(*build_simpletuner(name, flavour, control=True))

    names = FAMILY_FACTS[family].detection.trainer_names
    assert result.family == family
    assert result.options["pretrained_model_name_or_path"] == names.simpletuner_flavours[flavour]
    assert list_controls(result) == (["before"] if FAMILY_FACTS[family].control.num_images[1] else [None])
    assert not any("dataset_type" in item.key for item in result.untaken)
    assert "to_q" in list_patterns(result)
    assert ("to_qkv_mlp_proj" in list_patterns(result)) == family.startswith("flux2")


@pytest.mark.parametrize("name", sorted({name for name, _, _ in FLAVOURS}))
def test_simpletuner_trains_its_default_flavour_without_one(name):
    result = import_content(*build_simpletuner(name))

    names = FAMILY_FACTS[result.family].detection.trainer_names
    assert result.options["pretrained_model_name_or_path"] == names.simpletuner_flavours[names.simpletuner_default]


def test_flags_of_kohya_ss_override_its_keys_and_only_what_is_wrong_is_listed():
    scheduler = "torch.optim.lr_scheduler.LinearLR"
    result = import_content(
        build_kohya(lr_scheduler="cosine", additional_parameters=f"--lr_scheduler_type={scheduler}")
    )
    assert result.options["lr_scheduler_type"] == scheduler
    result = import_content(
        build_kohya(additional_parameters="--network_train_unet_only --network_train_text_encoder_only")
    )
    assert result.options["network_train_unet_only"] is True


def test_values_that_a_file_of_kohya_ss_leaves_empty_are_those_of_the_script():
    sd3 = {"LoRA_type": "Standard", "flux1_checkbox": False, "sd3_checkbox": True}
    empty, unset = (import_content(build_kohya(**sd3, **keys)) for keys in ({"weighting_scheme": ""}, {}))
    assert (empty.options["weighting_scheme"], unset.options["weighting_scheme"]) == ("uniform", "logit_normal")


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("anima", ("sigma", 3.0)), ("ernie_image", ("sigma", 3.0)), ("chroma", ("nextdit_shift", None))],
)
def test_shifts_of_the_scheduler_of_ai_toolkit_are_those_of_its_models(arch, expected):
    content = build_ai_toolkit(arch)
    content["config"]["process"][0]["train"]["timestep_type"] = "shift"
    result = import_content(content)
    assert (result.options["timestep_sampling"], result.options.get("discrete_flow_shift")) == expected


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
    assert result.options["timestep_sampling"] == "nextdit_shift" and "discrete_flow_shift" not in result.options
    assert "network_train_unet_only" not in result.options
    listed = {item.key for item in result.untaken if item.changes_result}
    assert "text_encoder_lr" in listed and result.options["system_prompt"] == "Draw."


def test_anima_and_hunyuan_image_of_kohya_ss():
    anima = {"LoRA_type": "Anima", "flux1_checkbox": False, "anima_checkbox": True, "anima_qwen3": "qwen.safetensors"}
    anima |= {"vae": "sd.safetensors", "anima_vae": "vae.safetensors", "anima_timestep_sampling": "shift"}
    anima |= {"anima_compile": True, "anima_compile_mode": "max-autotune", "gradient_checkpointing": True}
    anima["anima_unsloth_offload_checkpointing"] = True
    result = import_content(build_kohya(**anima, anima_discrete_flow_shift=3, network_dropout=0.1, rank_dropout=0.2))
    options = result.options
    assert (options["text_encoder"], options["vae"]) == ("qwen.safetensors", "vae.safetensors")
    assert (options["timestep_sampling"], options["discrete_flow_shift"]) == ("shift", 3.0)
    assert (options["torch_compile"], options["dynamo_mode"]) == (True, "max-autotune")
    assert options["cpu_offload_checkpointing"] is True and options["network_dropout"] == 0.1
    assert options["network_module"] == "networks.lora_anima" and options["network_args"] == ["rank_dropout=0.2"]
    assert [item.key for item in result.untaken if item.changes_result] == []

    hunyuan = {"LoRA_type": "HunyuanImage-2.1", "flux1_checkbox": False, "hunyuan_image_checkbox": True}
    hunyuan |= {"hunyuan_byt5": "b.safetensors", "hunyuan_fp8_scaled": True, "hunyuan_split_attn": True}
    result = import_content(build_kohya(**hunyuan, hunyuan_image_cache_text_encoder_outputs=True, text_encoder_lr=1e-4))
    options = result.options
    assert (options["byt5"], options["quantize_base"]) == ("b.safetensors", "fp8")
    assert (options["timestep_sampling"], options["discrete_flow_shift"]) == ("sigma", 5.0), "the GUI's defaults"
    assert options["cache_text_encoder_outputs"] is True and "network_train_unet_only" not in options
    assert [(item.key, item.changes_result) for item in result.untaken] == [("hunyuan_split_attn", False)]


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


def test_frames_of_diffusion_pipe_become_windows_of_clips():
    content, dataset = build_diffusion_pipe("wan", ckpt_path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    dataset["directory"] = [{"path": "/data/clips", "frame_buckets": [1, 33, 81], "num_repeats": 2}]
    content["video_clip_mode"] = "single_middle"

    result = import_content(content, dataset)

    (subset,) = result.datasets[0]["subsets"]
    assert (subset["video_dir"], subset["target_frames"], subset["num_repeats"]) == ("/data/clips", [33, 81], 2)
    assert "image_dir" not in subset
    changes = " ".join(map(str, result.untaken))
    assert "add a subset with image_dir" in changes and "video_clip_mode" in changes


def test_frames_of_ai_toolkit_become_windows_of_clips():
    content, *others = build_for("ai_toolkit", "wan21", "wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    (process,) = content["config"]["process"]
    process["datasets"] = [{"folder_path": "/data/clips", "num_frames": 41, "resolution": [480]}]
    process["sample"] = {"prompts": ["a walk"], "num_frames": 40, "fps": 24, "width": 832, "height": 480}

    result = import_content(content, *others)
    (prompt,) = result.prompts
    assert (prompt["frame_count"], prompt["fps"]) == (37, 24.0)

    (subset,) = result.datasets[0]["subsets"]
    assert (subset["video_dir"], subset["target_frames"]) == ("/data/clips", [41]) and "image_dir" not in subset
    assert any("shrink_video_to_frames" in str(change) for change in result.untaken)
    process["model"]["arch"], process["model"]["name_or_path"] = "qwen_image", "Qwen/Qwen-Image"
    images = import_content(content, *others)
    assert any("num_frames" in str(change) for change in images.untaken)
    assert "frame_count" not in images.prompts[0]


@pytest.mark.parametrize(
    ("trained", "expert"), [((True, True), None), ((False, True), "low_noise"), ((True, False), "high_noise")]
)
def test_the_trained_transformers_of_ai_toolkit_are_the_experts(trained, expert):
    (content,) = build_for("ai_toolkit", "wan22_14b_i2v", "wan22_i2v", "owner/name")
    (process,) = content["config"]["process"]
    process["model"]["model_kwargs"] = dict(zip(("train_high_noise", "train_low_noise"), trained, strict=True))
    result = import_content(content)
    assert (result.family, result.options.get("noise_experts")) == ("wan22_i2v", expert)
    assert not any("model_kwargs" in str(change) for change in result.untaken)
    process["model"] = {"arch": "wan21", "name_or_path": "owner/name", "model_kwargs": {"train_low_noise": True}}
    assert any("train_low_noise" in str(change) for change in import_content(content).untaken)


@pytest.mark.parametrize(
    ("paths", "family", "expert"),
    [
        ({"ckpt_path": "models/Wan2.1-I2V-14B-480P"}, "wan_i2v", None),
        ({"ckpt_path": "models/Wan2.1-FLF2V-14B-720P"}, "wan_flf2v", None),
        ({"ckpt_path": "m/Wan2.2-T2V-A14B", "transformer_path": "m/low_noise_model"}, "wan22_t2v", "low_noise"),
        ({"ckpt_path": "m/Wan2.2-I2V-A14B", "transformer_path": "m/high_noise_model"}, "wan22_i2v", "high_noise"),
    ],
)
def test_models_of_wan_are_told_apart_by_the_files_of_diffusion_pipe(paths, family, expert):
    result = import_content(*build_diffusion_pipe("wan", **paths, min_t=0.0, max_t=0.875))
    assert (result.family, result.options.get("noise_experts")) == (family, expert)
    assert result.options["pretrained_model_name_or_path"] == paths.get("transformer_path", paths["ckpt_path"])
    assert any("ckpt_path" in str(change) for change in result.untaken)
    assert any("max_t" in str(change) for change in result.untaken)


def test_files_of_hunyuan_video_in_diffusion_pipe_are_its_components():
    files = {"vae_path": "vae", "llm_path": "llava", "clip_path": "clip"}
    result = import_content(*build_diffusion_pipe("hunyuan-video", transformer_path="x.safetensors", **files))
    names = ("pretrained_model_name_or_path", "vae", "text_encoder", "clip_l")
    assert [result.options[name] for name in names] == ["x.safetensors", "vae", "llava", "clip"]
    encoders = [{"paths": ["qwen.safetensors", "byt5.safetensors"], "type": "hunyuan_video_15"}]
    other = import_content(*build_diffusion_pipe("hunyuan_video_15", diffusion_model="y", text_encoders=encoders))
    assert [other.options[name] for name in ("text_encoder", "byt5")] == ["qwen.safetensors", "byt5.safetensors"]


def test_the_given_first_frame_of_ai_toolkit_is_that_of_all_clips():
    (content,) = build_for("ai_toolkit", "wan22_5b", "wan22_ti2v", "owner/name")
    (process,) = content["config"]["process"]
    clips = {"folder_path": "/data/clips", "num_frames": 41}
    images = {"folder_path": "/data/images"}
    for given, expected in ({}, True), ({"do_i2v": False}, False):
        process["datasets"] = [{**clips, **given}, images]
        result = import_content(content)
        assert (result.family, result.options["image_to_video"]) == ("wan22_ti2v", expected)
        assert not any("do_i2v" in str(change) for change in result.untaken)
    process["datasets"] = [clips, {**clips, "do_i2v": False}]
    result = import_content(content)
    assert result.options["image_to_video"] and any("do_i2v" in str(change) for change in result.untaken)


def test_sound_of_ai_toolkit_is_that_of_all_clips():
    (content,) = build_for("ai_toolkit", "ltx2", "ltx2", "owner/name")
    (process,) = content["config"]["process"]
    process["train"]["audio_loss_multiplier"] = 0.5
    clips = {"folder_path": "/data/clips", "num_frames": 41, "do_i2v": False}
    process["datasets"] = [{**clips, "do_audio": True}]
    result = import_content(content)
    assert result.options["train_audio"] and result.options["cache_latents_to_disk"]
    assert result.options["audio_loss_weight"] == 0.5
    assert not any("audio" in str(change) for change in result.untaken)
    process["datasets"] = [{**clips, "do_audio": True}, clips]
    assert any("do_audio" in str(change) for change in import_content(content).untaken)
