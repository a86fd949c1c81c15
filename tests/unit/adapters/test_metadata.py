"""Metadata of LoRA files: correct, text only, without paths, with the hashes of sd-scripts."""

import dataclasses
import hashlib
import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from library.adapters.file_reader import read_safetensors
from library.adapters.file_writer import write_adapter_file
from library.adapters.metadata import (
    MODELSPEC_USER_KEYS,
    BaseModelMetadata,
    RunMetadata,
    add_model_hashes,
    build_metadata,
)
from library.config import parse_config
from library.config.schema import AdapterConfig, ModelConfig, RunConfig, TrainConfig
from library.config.schema_objective import LossConfig, NoiseConfig
from library.config.schema_output import SaveConfig
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.trained_components import record_used_rate
from library.training.save_weights import build_model_metadata

MODEL = BaseModelMetadata("sd_v1", "stable-diffusion-v1", "epsilon")
RUN = RunMetadata(
    step=30,
    epoch=2,
    max_train_steps=100,
    num_epochs=7,
    started_at=1_700_000_000.5,
    saved_at=1_700_000_900.0,
    session_id=7,
    num_train_images=32,
    num_reg_images=0,
    num_validation_images=0,
    num_batches_per_epoch=16,
    resolution=(96, 64),
    dataset_metadata={"ss_tag_frequency": '{"cats": {"a cat": 3}}'},
    model_metadata={"ss_sd_model_name": "sd15"},
    rank=8,
    alpha=4.0,
    optimizer="torch.optim.adamw.AdamW(weight_decay=0.01)",
    mixed_precision="bf16",
)
CONFIG = RunConfig(
    adapter=AdapterConfig(network_dim=8, network_alpha=4.0),
    train=TrainConfig(seed=11, gradient_accumulation_steps=3),
    save=SaveConfig(output_name="cat", training_comment="first try"),
)


def build_run_metadata(config=CONFIG):
    return build_metadata(config, MODEL, RUN, "lorikeet-lora/0.1.0")


def test_the_keys_that_loaders_read_are_always_written():
    least = {
        "ss_v2": "False",
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "8",
        "ss_network_alpha": "4.0",
        "ss_network_args": "{}",
    }
    quiet = dataclasses.replace(CONFIG, save=dataclasses.replace(CONFIG.save, no_metadata=True))
    assert build_run_metadata(quiet) == least
    assert build_run_metadata().items() >= least.items()


def test_the_run_is_described_with_sd_scripts_keys():
    actual = build_run_metadata()
    expected = {
        "ss_steps": "30",
        "ss_max_train_steps": "100",
        "ss_epoch": "2",
        "ss_num_epochs": "7",
        "ss_seed": "11",
        "ss_gradient_accumulation_steps": "3",
        "ss_learning_rate": "0.0001",
        "ss_mixed_precision": "bf16",
        "ss_output_name": "cat",
        "ss_training_comment": "first try",
        "ss_num_train_images": "32",
        "ss_optimizer": "torch.optim.adamw.AdamW(weight_decay=0.01)",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "cat",
        "modelspec.resolution": "96x64",
        "modelspec.prediction_type": "epsilon",
        "modelspec.date": "2023-11-14T22:28:20+00:00",
        "modelspec.implementation_version": "lorikeet-lora/0.1.0",
    }
    assert actual.items() >= expected.items()
    assert all(type(value) is str for value in actual.values())


@pytest.mark.parametrize(
    ("family", "flags", "rate"),
    [
        ("sd1", "--network_train_unet_only --unet_lr 1e-5", 1e-5),
        ("z_image", "--unet_lr 1e-5 --learning_rate 1e-3", 1e-5),
        ("sd1", "--unet_lr 1e-5 --text_encoder_lr 1e-6 --no-network_train_unet_only", 1e-5),
        ("sd1", "--unet_lr 1e-5 --learning_rate 1e-3 --no-network_train_unet_only", 1e-3),
        ("sd1", "--network_train_unet_only --unet_lr 1e-5 --learning_rate 1e-3 --lr_scheduler polynomial", 1e-3),
    ],
)
def test_the_learning_rate_of_the_metadata_is_one_that_is_used(family, flags, rate):
    config = parse_config(["--train_data_dir", "a", "--resolution", "64", *flags.split()]).config
    assert record_used_rate(config, FAMILY_FACTS[family]).optim.learning_rate == rate


ALWAYS = """session_id training_started_at output_name learning_rate text_encoder_lr unet_lr num_train_images
    num_validation_images num_reg_images num_batches_per_epoch num_epochs gradient_checkpointing
    gradient_accumulation_steps max_train_steps lr_warmup_steps lr_scheduler network_module network_dim network_alpha
    network_dropout mixed_precision full_fp16 v2 base_model_version clip_skip max_token_length cache_latents seed lowram
    noise_offset multires_noise_iterations multires_noise_discount adaptive_noise_scale zero_terminal_snr
    training_comment sd_scripts_commit_hash optimizer max_grad_norm caption_dropout_rate
    caption_dropout_every_n_epochs caption_tag_dropout_rate face_crop_aug_range prior_loss_weight min_snr_gamma
    scale_weight_norms ip_noise_gamma debiased_estimation noise_offset_random_strength ip_noise_gamma_random_strength
    loss_type huber_schedule huber_scale huber_c fp8_base fp8_base_unet validation_seed validation_split
    max_validation_steps validate_every_n_epochs validate_every_n_steps resize_interpolation training_finished_at steps
    epoch sd_model_name""".split()
FLOW = "weighting_scheme logit_mean logit_std mode_scale".split()
SD_SCRIPTS_KEYS = {
    "stable-diffusion-v1": ALWAYS,
    "stable-diffusion-xl-v1-base": ALWAYS,
    "flux-1-dev": [
        *(*ALWAYS, *FLOW, "model_type", "apply_t5_attn_mask", "guidance_scale", "timestep_sampling"),
        *("sigmoid_scale", "model_prediction_type", "discrete_flow_shift"),
    ],
    "stable-diffusion-3-medium": [*ALWAYS, *FLOW, "apply_lg_attn_mask", "apply_t5_attn_mask"],
}
"""What sd-scripts writes whatever the settings, besides the keys of the dataset."""
OURS_TOO = {
    "network_args",  # sd-scripts: if there are any
    "tag_frequency",  # given here as the dataset's
    "objective_defaults",
    *("timestep_sampling", "sigmoid_scale", "discrete_flow_shift", "model_prediction_type"),  # of SD3
}


@pytest.mark.parametrize("architecture", SD_SCRIPTS_KEYS)
def test_the_keys_are_those_that_sd_scripts_writes(architecture):
    kind = "epsilon" if "stable-diffusion-v1" in architecture or "xl" in architecture else "flow"
    transformer = SimpleNamespace(config=SimpleNamespace(guidance_embeds=True, qk_norm=None))
    family = next(
        name for name, facts in FAMILY_FACTS.items() if architecture.startswith(facts.lora.modelspec_architecture)
    )
    info = FAMILIES.get(family)().get_base_model_info(SimpleNamespace(transformer=transformer))
    assert info.architecture == architecture
    model = BaseModelMetadata(info.base_model_version, architecture, kind, metadata=info.metadata)
    actual = build_metadata(CONFIG, model, RUN, "x")
    written = {key.removeprefix("ss_") for key in actual if key.startswith("ss_")}
    expected = set(SD_SCRIPTS_KEYS[architecture])
    assert expected - written == set()
    assert written - expected <= OURS_TOO


SDXL_KINDS = ("sdxl", "sdxl_inpainting", "sdxl_pix2pix", "sdxl_refiner")
FLUX_KINDS = ("flux", "flux_kontext", "flux_fill", "flux_control")
HUNYUAN15_KINDS = ("hunyuan_video15", "hunyuan_video15_i2v")


def test_the_implementation_is_the_one_that_sd_scripts_names():
    """For a LoRA; for HunyuanImage sd-scripts has a name, but does not write it."""
    authors = {
        **dict.fromkeys(SDXL_KINDS, "https://github.com/Stability-AI/generative-models"),
        **dict.fromkeys(FLUX_KINDS, "https://github.com/black-forest-labs/flux"),
        "chroma": "https://huggingface.co/lodestones/Chroma",
        "lumina2": "https://github.com/Alpha-VLLM/Lumina-Image-2.0",
        "anima": "https://huggingface.co/circlestone-labs/Anima",
        "hunyuan_image": "https://github.com/Tencent-Hunyuan/HunyuanImage-2.1",
        **dict.fromkeys(
            ("wan", "wan_i2v", "wan_flf2v", "wan_vace", "wan_fun_control", "wan_fun_control11"),
            "https://github.com/Wan-Video/Wan2.1",
        ),
        **dict.fromkeys(
            ("wan_animate", "wan22_t2v", "wan22_i2v", "wan22_fun_control", "wan22_ti2v"),
            "https://github.com/Wan-Video/Wan2.2",
        ),
        **dict.fromkeys(("skyreels_v2", "skyreels_v2_i2v"), "https://github.com/SkyworkAI/SkyReels-V2"),
        **dict.fromkeys(HUNYUAN15_KINDS, "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5"),
        **dict.fromkeys(("ltx_video", "ltx_video095"), "https://github.com/Lightricks/LTX-Video"),
        "ltx2": "https://github.com/Lightricks/LTX-2",
        "hunyuan_video": "https://github.com/Tencent-Hunyuan/HunyuanVideo",
        **dict.fromkeys(
            ("hunyuan_video_i2v", "hunyuan_video_33ch_i2v"), "https://github.com/Tencent-Hunyuan/HunyuanVideo-I2V"
        ),
        "framepack": "https://github.com/lllyasviel/FramePack",
        **dict.fromkeys(("cogvideox", "cogvideox15"), "https://github.com/THUDM/CogVideo"),
        "mochi": "https://github.com/genmoai/mochi",
        **dict.fromkeys(("kandinsky5_video", "kandinsky5_i2v"), "https://github.com/kandinskylab/kandinsky-5"),
        **dict.fromkeys(
            ("cosmos2_text2image", "cosmos2_video2world"), "https://github.com/nvidia-cosmos/cosmos-predict2"
        ),
        "kandinsky6_video": "https://github.com/kandinskylab/kandinsky-6",
        "sana_video": "https://github.com/NVlabs/Sana",
        "minimax_h3": "https://huggingface.co/MiniMaxAI/MiniMax-H3",
    }
    found = {name: facts.lora.modelspec_implementation for name, facts in FAMILY_FACTS.items()}
    assert found == {**dict.fromkeys(FAMILY_FACTS, "diffusers"), **authors}


def test_options_that_only_sd_scripts_has_are_written_as_unset():
    actual = build_run_metadata()
    expected = {
        "ss_full_fp16": "False",
        "ss_lowram": "False",
        "ss_fp8_base": "False",
        "ss_fp8_base_unet": "False",
        "ss_face_crop_aug_range": "None",
        "ss_num_validation_images": "0",
        "ss_validation_seed": "None",
        "ss_validation_split": "0.0",
        "ss_max_validation_steps": "None",
        "ss_validate_every_n_epochs": "None",
        "ss_validate_every_n_steps": "None",
        "ss_sd_scripts_commit_hash": "",
    }
    assert {key: actual[key] for key in expected} == expected
    fp8 = build_run_metadata(dataclasses.replace(CONFIG, model=ModelConfig(quantize_base="fp8")))
    assert fp8["ss_fp8_base_unet"] == "True"


def test_noise_and_loss_options_are_written_and_those_of_flow_matching_for_flow_models():
    config = dataclasses.replace(
        CONFIG,
        noise=NoiseConfig(noise_offset=0.1, ip_noise_gamma=0.0, weighting_scheme="cosmap"),
        loss=LossConfig(loss_type="huber", min_snr_gamma=5.0),
    )
    actual = build_run_metadata(config)
    expected = {
        "ss_noise_offset": "0.1",
        "ss_ip_noise_gamma": "None",
        "ss_adaptive_noise_scale": "None",
        "ss_loss_type": "huber",
        "ss_huber_c": "0.1",
        "ss_min_snr_gamma": "5.0",
        "ss_zero_terminal_snr": "False",
        "ss_multires_noise_iterations": "None",
    }
    assert actual.items() >= expected.items()
    assert "ss_timestep_sampling" not in actual
    flow = build_metadata(config, dataclasses.replace(MODEL, prediction_type="flow"), RUN, "x")
    expected |= {
        "ss_timestep_sampling": "sigma",
        "ss_weighting_scheme": "cosmap",
        "ss_discrete_flow_shift": "None",
        "ss_model_prediction_type": "raw",
    }
    assert flow.items() >= expected.items()


@pytest.mark.parametrize(
    "source, name",
    [
        ("/home/someone/models/sd15/", "sd15"),
        ("C:\\Users\\someone\\sd15", "sd15"),
        ("owner/name", "owner/name"),
        (None, "built-in"),
    ],
)
def test_only_the_last_component_of_a_path_is_written(source, name):
    assert build_model_metadata(ModelConfig(source, vae=source)).items() >= {"ss_sd_model_name": name}.items()
    assert "someone" not in json.dumps(build_model_metadata(ModelConfig(source, vae=source)))


def test_only_the_last_component_of_a_relative_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "private/sd15").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert build_model_metadata(ModelConfig(os.path.join("private", "sd15"))) == {"ss_sd_model_name": "sd15"}


def test_a_single_file_model_is_written_with_the_two_hashes_that_web_uis_look_up(tmp_path):
    content = os.urandom(0x110010)
    (tmp_path / "sd.safetensors").write_bytes(content)
    actual = build_model_metadata(ModelConfig(str(tmp_path / "sd.safetensors"), vae=str(tmp_path / "sd.safetensors")))
    whole, old = hashlib.sha256(content).hexdigest(), hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert actual == {
        "ss_sd_model_name": "sd.safetensors",
        "ss_sd_model_hash": old,
        "ss_new_sd_model_hash": whole,
        "ss_vae_name": "sd.safetensors",
        "ss_vae_hash": old,
        "ss_new_vae_hash": whole,
    }


def test_the_metadata_options_of_the_user_are_written(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"image")
    words = {name: f"my {name}" for name in MODELSPEC_USER_KEYS}
    save = dataclasses.replace(
        CONFIG.save,
        metadata_title="Cat",
        metadata_thumbnail=str(tmp_path / "cat.png"),
        **{f"metadata_{name}": text for name, text in words.items()},
    )
    adapter = dataclasses.replace(CONFIG.adapter, network_args=("conv_dim=4", "verbose = True"))
    actual = build_run_metadata(dataclasses.replace(CONFIG, save=save, adapter=adapter))
    assert actual["modelspec.title"] == "Cat" and actual["modelspec.thumbnail"] == "data:image/png;base64,aW1hZ2U="
    assert {name: actual[f"modelspec.{name}"] for name in words} == words
    assert json.loads(actual["ss_network_args"]) == {"conv_dim": "4", "verbose": "True"}
    assert (
        actual["ss_tag_frequency"] == RUN.dataset_metadata["ss_tag_frequency"] and actual["ss_sd_model_name"] == "sd15"
    )
    assert "modelspec.author" not in build_run_metadata()


def test_the_hashes_are_those_of_sd_scripts(tmp_path):
    tensors = {
        "lora_unet_é.alpha": torch.tensor(1.0),
        "lora_unet_a.lora_down.weight": torch.rand(600, 600),
        "lora_unet_b.lora_down.weight": torch.rand(60, 60).bfloat16(),
        "lora_unet_b.lora_up.weight": torch.rand(60, 60).half(),
        "lora_unet_b.alpha": torch.tensor(1.0, dtype=torch.float64),
    }
    actual = add_model_hashes(tensors, build_run_metadata())

    # The rules anew, on a real file that has only the ss_ keys.
    save_file(
        tensors, tmp_path / "plain.safetensors", {k: v for k, v in build_run_metadata().items() if k.startswith("ss_")}
    )
    content = (tmp_path / "plain.safetensors").read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert actual["sshs_model_hash"] == hashlib.sha256(content[8 + header :]).hexdigest()
    legacy = hashlib.sha256()
    with (tmp_path / "plain.safetensors").open("rb") as file:
        file.seek(0x100000)
        legacy.update(file.read(0x10000))
    assert actual["sshs_legacy_hash"] == legacy.hexdigest()[:8]

    other = add_model_hashes(tensors, {**build_run_metadata(), "modelspec.title": "another"})
    assert other["sshs_model_hash"] == actual["sshs_model_hash"]


def test_the_metadata_is_written_to_the_file(tmp_path):
    tensors = {
        "lora_unet_a.alpha": torch.tensor(1.0),
        "lora_unet_a.lora_down.weight": torch.rand(2, 3),
        "lora_unet_a.lora_up.weight": torch.rand(4, 2),
    }
    metadata = add_model_hashes(tensors, build_run_metadata())
    write_adapter_file(tmp_path / "cat.safetensors", tensors, metadata)
    assert read_safetensors(tmp_path / "cat.safetensors")[1] == metadata
