"""A command of musubi-tuner trains what a file of our own trains, into a file that musubi-tuner loads."""

import json
import re
from pathlib import Path

import original_checkpoints
import pytest
import torch
from clip_files import write_clip
from rank_processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY
from training_runs import write_images

from library.training.preflight import find_settings_problems, load_settings
from library.training.run import run_training

COMMON = "--mixed_precision bf16 --max_data_loader_n_workers 0 --network_dim 4 --max_train_steps 2 --seed 42 --quiet"
KNOWN_TO_COMFYUI = json.loads((Path(__file__).resolve().parents[2] / "data" / "comfyui_keys.json").read_text())


def train_settings(*flags: str) -> None:
    """Train as the command line does, in a process whose only run this is."""
    loaded = load_settings(flags)
    assert find_settings_problems(loaded) == []
    run_training(loaded.config)


@pytest.mark.slow
def test_a_command_of_musubi_tuner_trains_what_our_own_options_train(tmp_path):
    pipe = TINY["qwen_image"]().pipe
    files = {part: str(tmp_path / f"{part}.safetensors") for part in ("dit", "vae", "text_encoder")}
    save_file(pipe.transformer.state_dict(), files["dit"])
    save_file(original_checkpoints.convert_wan_vae(pipe.vae), files["vae"])
    words = original_checkpoints.convert_text_encoder(pipe.text_encoder)
    save_file({key: tensor for key, tensor in words.items() if key != "lm_head.weight"}, files["text_encoder"])
    pipe.tokenizer.save_pretrained(tmp_path / "tokenizers" / "Qwen_Qwen-Image")
    dataset = write_images(tmp_path, {(64, 64): 2, (96, 64): 2})
    shared = ["--dataset_config", str(dataset), "--vae", files["vae"], "--text_encoder", files["text_encoder"]]
    shared += ["--tokenizer_cache_dir", str(tmp_path / "tokenizers"), "--output_dir", str(tmp_path), *COMMON.split()]
    command = f"--dit {files['dit']} --network_module networks.lora_qwen_image --model_version original --sdpa"
    own = f"--pretrained_model_name_or_path {files['dit']} --learning_rate 2e-6 --timestep_sampling sigma"
    runs = {"musubi": command, "own": f"{own} --discrete_flow_shift 1 --save_format kohya"}
    tensors = {}
    for name, flags in runs.items():
        run_on_ranks(1, train_settings, *flags.split(), *shared, "--output_name", name)
        tensors[name] = load_file(tmp_path / f"{name}.safetensors")
    assert tensors["musubi"].keys() == tensors["own"].keys()
    assert all(torch.equal(tensor, tensors["own"][key]) for key, tensor in tensors["musubi"].items())

    layers = {name for name, module in pipe.transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    names = {key.partition(".")[0] for key in tensors["musubi"]}
    ends = {key.partition(".")[2] for key in tensors["musubi"]}
    assert ends == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert names <= {f"lora_unet_{layer.replace('.', '_')}" for layer in layers}, "musubi-tuner's rule"
    assert {re.sub(r"(?<=_)\d+(?=_)", "{}", name) for name in names} <= {
        re.sub(r"(?<=_)\d+(?=_)", "{}", name) for name in KNOWN_TO_COMFYUI["qwen_image"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wan", "wan_i2v"])
def test_a_command_for_wan_trains_its_files_as_a_folder_of_diffusers_is_trained(model, tmp_path):
    pipe = TINY[model]().pipe
    pipe.save_pretrained(tmp_path / "folder")
    files = {part: str(tmp_path / f"{part}.safetensors") for part in ("dit", "vae", "t5")}
    save_file(original_checkpoints.convert_wan_transformer(pipe.transformer), files["dit"])
    save_file(original_checkpoints.convert_wan_vae(pipe.vae), files["vae"])
    save_file(original_checkpoints.convert_umt5(pipe.text_encoder), files["t5"])
    pipe.tokenizer.save_pretrained(tmp_path / "tokenizers" / "google_umt5-xxl")
    write_clip(tmp_path / "clips" / "a.mp4", 12)
    (tmp_path / "clips" / "a.txt").write_text("a clip")
    dataset = tmp_path / "clips.toml"
    dataset.write_text(
        "[general]\nresolution = [64, 48]\ncaption_extension = '.txt'\nenable_bucket = true\n"
        f"[[datasets]]\nvideo_directory = '{tmp_path / 'clips'}'\ntarget_frames = [5]\nframe_extraction = 'chunk'\n"
    )
    clip = ""
    if model == "wan_i2v":  # with the names of ComfyUI's file
        state = {f"vision_model.{key}": value for key, value in pipe.image_encoder.state_dict().items()}
        save_file(state, tmp_path / "clip.safetensors")
        clip = f"--clip {tmp_path / 'clip.safetensors'}"
    shared = ["--dataset_config", str(dataset), "--output_dir", str(tmp_path), *COMMON.split()]
    shift = "--timestep_sampling shift --discrete_flow_shift 3.0 --learning_rate 2e-4"
    command = f"--dit {files['dit']} --vae {files['vae']} --t5 {files['t5']} --network_module networks.lora_wan --sdpa"
    command = f"{command} --tokenizer_cache_dir {tmp_path / 'tokenizers'} {shift} {clip}"
    own = f"--pretrained_model_name_or_path {tmp_path / 'folder'} --save_format kohya {shift}"
    tensors = {}
    for name, flags in {"musubi": command, "own": own}.items():
        run_on_ranks(1, train_settings, *flags.split(), *shared, "--output_name", name)
        tensors[name] = load_file(tmp_path / f"{name}.safetensors")
    assert tensors["musubi"].keys() == tensors["own"].keys()
    assert all(torch.equal(tensor, tensors["own"][key]) for key, tensor in tensors["musubi"].items())
    names = {re.sub(r"(?<=_)\d+(?=_)", "{}", key.partition(".")[0]) for key in tensors["musubi"]}
    image_layers = {f"lora_unet_blocks_{{}}_cross_attn_{name}_img" for name in ("k", "v") if clip}
    assert names <= set(KNOWN_TO_COMFYUI["wan"]) | image_layers and len(names) == 10 + len(image_layers)
