"""Files and commands that people published for other programs end a dry run without a problem of their own.

Each is dry-run twice: as it is, where the only problems are models that are not here, and with a tiny model of its family
in their place. The datasets are images of this repository, where the file names none. Of a package that is not installed,
such as bitsandbytes, a dry run says in one line that it would end a run; beside problems it is listed as one of them.
"""

import json
import re
import shutil
from pathlib import Path

import model_layouts
import original_checkpoints
import pytest
from clip_files import write_clip
from data_paths import ROOT
from tiny_pipelines import TINY

from library import cli

DATA = ROOT / "tests" / "data"
FILES = DATA / "published_files"
DATASETS = DATA / "musubi_datasets"
COMMANDS = json.loads((DATA / "musubi_commands.json").read_text("utf-8"))
DEMO = ["--dataset_config", str(ROOT / "dataset_configs" / "demo.toml")]
MODELS_THAT_ARE_NOT_HERE = re.compile(
    r"no such file or folder|no such folder, and the hub cannot be reached|not found on the hub"
)
MISSING_PACKAGE = re.compile(r"optimizer_type: \w+ needs the package bitsandbytes, which is not installed")
COMPONENTS = ("vae", "text_encoder", "gemma2", "dit", "pretrained_model_name_or_path")
IMPORTED = {
    "kohya_gui/sdxl_loha.json": "sdxl",
    "onetrainer/anima_LoRA.json": "anima",
    "simpletuner/anima.peft-lora.json": "anima",
}
RUN_FILES = {"sdscripts/lumina_service.toml": "lumina2", "musubi/gui_krea2.toml": "krea2"}
COMMAND_MODELS = (
    *("flux2_dev:tiny", "qwen_image:tiny", "qwen_image_edit_plus:2511:tiny", "wan", "wan", "wan:14b", "wan:14b"),
    *("wan_i2v", "wan22_t2v", "hunyuan_video", "hunyuan_video15", "hunyuan_video15_i2v", "framepack:tiny"),
)
"""A model for each command; those of Wan say in their task how large they are."""
DATASET_MODELS = {
    "qinglong-qwen-image-datasets.toml": "qwen_image",
    "qinglong-flux-kontext-datasets.toml": "flux_kontext",
    "obs_dataset.toml": "wan",
    "qinglong-video-datasets.toml": "wan",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with the image folders of the dataset files."""
    for name in ("data/mus/big", "data/mus/ctl"):
        shutil.copytree(
            ROOT / "dataset_configs" / "demo", tmp_path / name, ignore=shutil.ignore_patterns("*.toml", ".*")
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def dry_run(words: list[str], capsys) -> tuple[int, list[str]]:
    """Return the exit code of a dry run, and its problems."""
    code = cli.main([*words, "--dry_run"])
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    stopped = next((number for number, line in enumerate(lines) if line.startswith("train_lora: stopped")), None)
    return code, [] if stopped is None else [line for line in lines[stopped + 1 :] if line]


def check_as_it_is(words: list[str], capsys) -> None:
    code, problems = dry_run(words, capsys)
    others = [line for line in problems if not MODELS_THAT_ARE_NOT_HERE.search(line)]
    assert [line for line in others if not MISSING_PACKAGE.search(line)] == [] and code in (0, 2)
    assert (code == 2) == (len(problems) > len(others))


def replace_models(text: str, option: str, model: str) -> str:
    """Replace the models of a run file by a tiny one with all components."""
    kept = [line for line in text.splitlines() if line.split("=")[0].strip() not in COMPONENTS]
    start = next((number for number, line in enumerate(kept) if line.strip() == "[model]"), -1)
    kept.insert(start + 1, f'{option} = "random:{model}:tiny"')
    return "\n".join(kept) + "\n"


@pytest.mark.parametrize("name", IMPORTED)
def test_a_file_of_another_program_is_imported_and_dry_run(name, folder, capsys):
    assert cli.run_tool(["import", str(FILES / name), "--output_dir", "out"]) == 0
    (path,) = (folder / "out").glob("*.toml")
    check_as_it_is(["--config_file", str(path), *DEMO], capsys)
    path.write_text(replace_models(path.read_text("utf-8"), "pretrained_model_name_or_path", IMPORTED[name]), "utf-8")
    assert dry_run(["--config_file", str(path), *DEMO], capsys) == (0, [])


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_file_is_dry_run(name, folder, capsys):
    check_as_it_is(["--config_file", str(FILES / name), *DEMO], capsys)
    option = "dit" if name.startswith("musubi") else "pretrained_model_name_or_path"
    path = folder / "run.toml"
    path.write_text(replace_models((FILES / name).read_text("utf-8"), option, RUN_FILES[name]), "utf-8")
    assert dry_run(["--config_file", str(path), *DEMO], capsys) == (0, [])


@pytest.mark.parametrize(
    ("command", "model"), zip(COMMANDS, COMMAND_MODELS, strict=True), ids=[each["script"] for each in COMMANDS]
)
def test_a_command_of_musubi_tuners_documentation_is_dry_run(command, model, folder, capsys):
    dataset = "qinglong-flux-kontext-datasets.toml" if "edit" in str(model) else "qinglong-qwen-image-datasets.toml"
    argv = list(command["argv"])
    argv[argv.index("--dataset_config") + 1] = str(DATASETS / dataset)
    if command["doc"] == "framepack.md":  # which is trained on clips alone
        write_clip(folder / "clips" / "a.mp4", 40, 30).with_suffix(".txt").write_text("a clip", "utf-8")
        text = f"video_directory = '{folder / 'clips'}'\nframe_extraction = 'full'\nfp_latent_window_size = 9\n"
        (folder / "clips.toml").write_text(f"[[datasets]]\ncaption_extension = '.txt'\n{text}", "utf-8")
        argv[argv.index("--dataset_config") + 1] = "clips.toml"
    if "--sample_prompts" in argv:  # a prompt of musubi-tuner's page about previews
        (folder / "prompts.txt").write_text("A cat walks. --w 640 --h 480 --f 25 --d 1 --s 20\n", "utf-8")
        argv[argv.index("--sample_prompts") + 1] = "prompts.txt"
    check_as_it_is(argv, capsys)
    encoders = ("--text_encoder", "--text_encoder1", "--text_encoder2", "--t5", "--clip", "--byt5", "--image_encoder")
    for option in ("--vae", *encoders, "--dit_high_noise"):
        if option in argv:
            del argv[argv.index(option) : argv.index(option) + 2]
    argv[argv.index("--dit") + 1] = f"random:{model}"
    assert dry_run(argv, capsys) == (0, [])


@pytest.mark.parametrize("name", DATASET_MODELS)
def test_a_dataset_file_of_musubi_tuner_is_dry_run(name, folder, capsys):
    model, clips = DATASET_MODELS[name], folder / "clips"
    path = folder / name
    path.write_text((DATASETS / name).read_text("utf-8").replace("/data/videos", clips.as_posix()), "utf-8")
    words = ["--dit", f"random:{model}:tiny"]
    if model == "wan":
        clips.mkdir()
        write_clip(clips / "clip.mp4", num_frames=30, rate=16)
        clips.joinpath("clip.txt").write_text("a caption", "utf-8")
    assert dry_run([*words, "--dataset_config", str(path)], capsys) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("expert", ["both", "low_noise"])
def test_a_command_with_the_files_of_both_transformers_of_wan_is_dry_run(expert, folder, capsys):
    """As documented, with tiny files; or one file alone, which its range of timesteps tells."""
    (command,) = [each for each in COMMANDS if "t2v-A14B" in each["argv"]]
    pipe = TINY["wan22_t2v"]().pipe
    models = {"low_noise": pipe.transformer_2, "high_noise": pipe.transformer.high_noise}
    files = {
        name: model_layouts.save_tensors(
            original_checkpoints.convert_wan_transformer(model), folder / f"wan2.2_t2v_{name}_14B.safetensors"
        )
        for name, model in models.items()
    }
    parts = model_layouts.build_files("wan", pipe)
    tokenizers = model_layouts.save_tokenizers("wan22_t2v", pipe, folder / "tokenizers")
    words = {"--dit": files["low_noise"], "--dit_high_noise": files["high_noise"], "--dataset_config": DEMO[1]}
    argv = [words.get(before, word) for before, word in zip(["", *command["argv"]], command["argv"], strict=False)]
    argv += ["--vae", model_layouts.save_tensors(parts["vae"], folder / "vae.safetensors")]
    argv += ["--t5", model_layouts.save_tensors(parts["text_encoder"], folder / "t5.safetensors")]
    argv += ["--tokenizer_cache_dir", tokenizers]
    if expert == "low_noise":
        del argv[argv.index("--dit_high_noise") : argv.index("--dit_high_noise") + 2]
        argv += ["--min_timestep", "0", "--max_timestep", "875"]
    assert dry_run(argv, capsys) == (0, [])


@pytest.mark.slow
def test_one_transformer_of_wan_without_its_range_is_one_problem(folder, capsys):
    pipe = TINY["wan22_t2v"]().pipe
    tensors = original_checkpoints.convert_wan_transformer(pipe.transformer_2)
    file = model_layouts.save_tensors(tensors, folder / "low_noise.safetensors")
    flags = ["--task", "t2v-A14B", "--dit", file, "--vae", file, "--t5", file, "--network_module", "networks.lora_wan"]
    code, problems = dry_run([*flags, *DEMO], capsys)
    assert code == 2 and any("--dit_high_noise" in line and "--noise_experts" in line for line in problems)
