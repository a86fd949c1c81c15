"""Runs on texts alone: equal on every layout and after resuming; and the strength of the LoRA of image datasets."""

import json
from pathlib import Path

import pytest
import torch
from one_result import BOUNDS, get_model_path
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from resumed_runs import copy_as_killed, read_metrics
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.preflight import find_settings_problems, load_settings
from library.training.validate_model import validate_slider_family

PROMPTS = """
neutral = "a 17 b"
resolution = [64, 96]
guidance_scale = 2.0
batch_size = {batch}
[[targets]]
target_class = "picture 1"
positive = "picture 2"
negative = "picture 3"
preserve = ["picture 4"]
"""
SETTINGS = "--network_dim 4 --network_alpha 3 --learning_rate 0.5 --optimizer_type SGD --max_denoising_steps 4".split()
TRAIN = "--network_dim 2 --learning_rate 1e-2 --lr_scheduler cosine --ema_decay 0.9 --save_every_n_steps 3 --save_state"


def write_prompts(folder: Path, batch: int = 2) -> str:
    path = folder / f"prompts{batch}.toml"
    path.write_text(PROMPTS.format(batch=batch), encoding="utf-8")
    return str(path)


def train_layout(folder: Path, model: str, ranks: int, batch: int, *flags: str) -> dict[str, torch.Tensor]:
    """Train four samples in each of six steps, one for each prompt, and return the adapter."""
    name = f"{model}-{ranks}-{batch}-{len(flags)}"
    path = () if model == "sd1" else ("--pretrained_model_name_or_path", get_model_path(model, folder))
    output = ("--output_dir", str(folder), "--output_name", name, "--max_train_steps", "6")
    words = ("--slider_prompts", write_prompts(folder, batch), *path, *output, *SETTINGS, *flags)
    return load_file(run_on_ranks(ranks, train, *words)[0])


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("sd1", ((2, 2), (2, 1, "--gradient_accumulation_steps", "2"))),
        ("flux", ((2, 2, "--fsdp"), (1, 4, "--blocks_to_swap", "1"))),
        ("flux", ((2, 4, "--tp_size", "2"), (2, 4, "--cp_size", "2"))),
        ("flux", tuple((2, 2, "--deepspeed", "--zero_stage", stage) for stage in ("2", "3"))),
    ],
)
def test_every_layout_trains_the_slider_of_one_process(model, layouts, tmp_path):
    one = train_layout(tmp_path, model, 1, 4)
    updates = [tensor for name, tensor in one.items() if "lora_up" in name or "lora_B" in name]
    assert min(float(tensor.abs().max()) for tensor in updates) > 0
    for ranks, batch, *flags in layouts:
        other = train_layout(tmp_path, model, ranks, batch, *flags)
        assert max_relative_difference(one, other) < BOUNDS["no"], (ranks, batch, flags)


def test_checkpointing_recomputes_blocks_at_the_strength_of_the_prompt(tmp_path):
    plain = train_layout(tmp_path, "sd1", 1, 4)
    recomputed = train_layout(tmp_path, "sd1", 1, 4, "--gradient_checkpointing")
    assert max_relative_difference(plain, recomputed) < 1e-5


def test_a_resumed_run_is_equal_to_the_bit_and_other_texts_are_refused(tmp_path):
    def flags(folder: Path, prompts: str) -> tuple[str, ...]:
        words = "--max_train_steps 8 --max_denoising_steps 5 --network_dropout 0.1 --seed 3".split()
        return ("--slider_prompts", prompts, "--output_dir", str(folder), *TRAIN.split(), *words)

    prompts = write_prompts(tmp_path)
    run_on_ranks(1, train, *flags(tmp_path / "whole", prompts))
    folder = copy_as_killed(tmp_path / "whole", tmp_path / "cut", 3)
    run_on_ranks(1, train, *flags(folder, prompts), "--auto_resume")
    whole, resumed = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert read_metrics(folder) == read_metrics(tmp_path / "whole")

    (tmp_path / "other.toml").write_text(PROMPTS.format(batch=2).replace("picture 3", "picture 5"), "utf-8")
    folder = copy_as_killed(tmp_path / "whole", tmp_path / "again", 3)
    with pytest.raises(AssertionError, match=r"the first that differs is .*prompt 1"):
        run_on_ranks(1, train, *flags(folder, str(tmp_path / "other.toml")), "--auto_resume")
    with safe_open(tmp_path / "whole" / "lora.safetensors", "pt") as file:
        metadata = file.metadata()
    shown = json.loads(metadata["ss_leco_preview"])
    assert metadata["ss_leco_prompt_count"] == "6" and metadata["ss_leco_prompts_file"] == "prompts2.toml"
    assert shown[0] == {
        "target": "picture 1",
        "positive": "picture 3",
        "unconditional": "picture 2",
        "neutral": "a 17 b",
        "action": "erase",
        "multiplier": 1.0,
        "weight": 1.0,
    }
    assert str(tmp_path) not in str(metadata)


def test_the_first_step_at_minus_one_is_the_opposite_of_that_at_one(tmp_path):
    data, found = write_images(tmp_path, {(64, 64): 4}), {}
    text = data.read_text(encoding="utf-8")
    for sign in (1, -1):
        path = tmp_path / f"set{sign}.toml"
        path.write_text(text.replace("[[datasets]]", f"[[datasets]]\nnetwork_multiplier = {sign}"), "utf-8")
        output = ("--output_dir", str(tmp_path), "--output_name", f"at{sign}")
        words = ("--dataset_config", str(path), *output, "--max_train_steps", "1", "--lr_scheduler", "constant")
        found[sign] = load_file(run_on_ranks(1, train, *words, *SETTINGS[:-2])[0])
    plus, minus = found[1], found[-1]
    for name, tensor in plus.items():
        if "lora_up" in name:
            assert float(tensor.abs().max()) > 0
            torch.testing.assert_close(minus[name], -tensor, rtol=1e-4, atol=1e-9)
        else:
            assert torch.equal(minus[name], tensor)


@pytest.mark.quick
def test_settings_with_which_it_cannot_work_are_named_before_a_model_is_loaded(tmp_path):
    prompts = write_prompts(tmp_path)
    model = ("--pretrained_model_name_or_path", "random:sd3:tiny", "--slider_prompts", prompts)
    for flags, text in (
        (("--dataset_config", prompts), "--dataset_config: cannot be combined with slider_prompts"),
        (("--train", "full"), "--train: cannot be combined with slider_prompts: full has no adapter"),
        (("--network_train_text_encoder_only",), "the denoiser is trained, as in sd-scripts"),
        (("--blank_prompt_preservation_multiplier", "1"), "list texts to keep in preserve"),
        (("--pp_size", "2"), "would overlap"),
        (("--torch_compile",), "compiled blocks have the adapter switched on"),
        (("--gpu_memory", "24GB"), "it chooses among caches of images"),
        (("--slider_prompts", str(tmp_path / "none.toml")), "none.toml: no such file"),
        (("--slider_prompts", str(tmp_path)), "is a folder"),
        (("--network_module", "networks.oft"), ":6: multiplier: the update of oft is not proportional to its strength"),
    ):
        lines = format_lines(find_settings_problems(load_settings([*model, *flags])))
        assert any(text in line for line in lines), (flags, lines)
    loaded = load_settings([*model, "--shuffle_caption", "--timestep_sampling", "sigmoid", "--cache_latents"])
    assert find_settings_problems(loaded) == []
    unused = {place.rpartition(" ")[2].lstrip("-"): reason for place, reason in format_unused(loaded.unused)}
    assert unused.keys() == {"shuffle_caption", "timestep_sampling", "cache_latents"}


@pytest.mark.quick
def test_models_that_need_images_or_have_two_experts_are_refused(tmp_path):
    config = parse_config(["--slider_prompts", write_prompts(tmp_path)]).config
    refused = {
        "wan22_t2v": "has two transformers",
        "qwen_image_edit": "needs control images",
        "wan_i2v": "needs the frames of clips",
    }
    for name in ("sd1", "sdxl", "flux", "wan", *refused):
        family, detected = FAMILIES.get(name)(), detect_model(f"random:{name}:tiny")
        lines = format_lines(validate_slider_family(config, family, detected))
        assert [refused[name] in line for line in lines] == ([True] if name in refused else [])


@pytest.mark.quick
def test_the_options_of_train_leco_mean_the_same_here(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
        prompts_file = '{write_prompts(tmp_path)}'
        network_module = 'networks.lora'
        max_denoising_steps = 20
        leco_denoise_guidance_scale = 2.5
        """,
        encoding="utf-8",
    )
    loaded = parse_config(["--config_file", str(run)])
    assert format_lines(loaded.problems) == []
    config = loaded.config
    assert config.data.slider_prompts == write_prompts(tmp_path)
    assert (config.slider.max_denoising_steps, config.slider.denoise_guidance_scale) == (20, 2.5)
    assert not config.adapter.trains_text_encoders
