"""Settings that cannot change the result are accepted, named in one line, and set back to their defaults."""

import os
import sys

import pytest
from data_paths import DATA
from problem_lines import format_lines, format_unused

from library.config import parse_config
from library.config.help import format_config_as_toml
from library.config.options import flatten_config
from library.config.parser import format_unused_settings
from library.models.validate_options import drop_unused_model_options
from library.training.preflight import find_settings_problems, load_settings


@pytest.mark.parametrize(
    ("flags", "unused"),
    [
        ("--max_train_steps 5 --max_train_epochs 1", {"max_train_steps": "max_train_epochs is set"}),
        ("--sample_at_first", {"sample_at_first": "sample_prompts is not set"}),
        ("--sample_every_n_epochs 1 --sample_sampler ddim", {"sample_every_n_epochs": "", "sample_sampler": ""}),
        ("--prefetch_factor 3 --max_data_loader_n_workers 0", {"prefetch_factor": "there are no data loader workers"}),
        ("--dynamo_backend eager", {"dynamo_backend": "torch_compile is not set"}),
        ("--lr_decay_steps 5", {"lr_decay_steps": "only for lr_scheduler warmup_stable_decay"}),
        ("--lr_scheduler_timescale 5", {"lr_scheduler_timescale": "only for lr_scheduler inverse_sqrt"}),
        ("--lr_scheduler_num_cycles 4 --lr_scheduler cosine", {"lr_scheduler_num_cycles": ""}),
        ("--lr_scheduler_type StepLR --lr_scheduler cosine", {"lr_scheduler": "lr_scheduler_type is set"}),
        ("--optimizer_type AdamWScheduleFree --lr_scheduler cosine", {"lr_scheduler": ""}),
        ("--optimizer_type adafactor --learning_rate 1e-3", {"learning_rate": ""}),
        ("--optimizer_type adafactor --unet_lr 1e-3", {"unet_lr": ""}),
        ("--network_train_unet_only --learning_rate 1e-3 --unet_lr 1e-5", {"learning_rate": "unet_lr is set"}),
        ("--no-network_train_unet_only --learning_rate 1e-3 --unet_lr 1e-5", {}),
        (
            "--no-network_train_unet_only --learning_rate 1e-3 --unet_lr 1e-5 --text_encoder_lr 1e-6",
            {"learning_rate": "unet_lr and text_encoder_lr are set"},
        ),
        ("--network_train_unet_only --learning_rate 1e-3 --unet_lr 1e-5 --lr_scheduler polynomial", {}),
        ("--train full --learning_rate 1e-3 --unet_lr 1e-5 --optimizer_type pytorch_optimizer.Ranger21", {}),
        ("--train full --learning_rate 1e-3 --unet_lr 1e-5", {"learning_rate": "unet_lr is set"}),
        (
            "--train full --train_text_encoder --learning_rate 1e-3 --unet_lr 1e-5 --learning_rate_te 1e-6",
            {"learning_rate": "unet_lr and learning_rate_te are set"},
        ),
        ("--train full --train_text_encoder --learning_rate 1e-3 --unet_lr 1e-5 --learning_rate_te1 1e-6", {}),
        (
            "--train full --train_text_encoder --learning_rate 1e-3 --unet_lr 1e-5 --learning_rate_te1 1e-6"
            " --learning_rate_te2 0",
            {"learning_rate": "unet_lr, learning_rate_te1 and learning_rate_te2 are set"},
        ),
        (
            f"--train full --learning_rate 1e-3 --block_lr {','.join(['1e-5'] * 23)}",
            {"learning_rate": "block_lr is set"},
        ),
        ("--no-network_train_unet_only --optimizer_type adafactor --text_encoder_lr 0", {"text_encoder_lr": ""}),
        ("--optimizer_type adafactor --lr_scheduler cosine", {"lr_scheduler": ""}),
        ("--network_train_unet_only --text_encoder_lr 1e-5", {"text_encoder_lr": "text encoders are not trained"}),
        ("--network_train_text_encoder_only --unet_lr 1e-5", {"unet_lr": "only text encoders are trained"}),
        ("--wandb_run_name a --log_prefix b", {"wandb_run_name": "", "log_prefix": "no tracker is set"}),
        ("--wandb_run_name a --logging_dir b", {"wandb_run_name": "wandb is not used"}),
        ("--save_last_n_epochs 2", {"save_last_n_epochs": "save_every_n_epochs is not set"}),
        ("--save_last_n_steps_state 1", {"save_last_n_steps_state": "save_state is not set"}),
        ("--huggingface_path_in_repo a", {"huggingface_path_in_repo": "huggingface_repo_id is not set"}),
        ("--force_resume", {"force_resume": "nothing is resumed"}),
        ("--cpu_offload_checkpointing", {"cpu_offload_checkpointing": "gradient_checkpointing is not set"}),
        ("--skip_cache_check", {"skip_cache_check": "there is no disk cache"}),
        ("--cache_precision fp16", {"cache_precision": "latents are not cached"}),
        ("--pp_schedule gpipe", {"pp_schedule": "pp_size is 1"}),
        ("--no-fused_layers --torch_compile", {"no-fused_layers": "torch_compile fuses by itself"}),
        (
            "--no-fused_layers --mixed_precision no",
            {"no-fused_layers": "mixed_precision is neither fp16 nor bf16"},
        ),
        ("--noise_offset_random_strength", {"noise_offset_random_strength": "noise_offset is 0"}),
        ("--noise_offset 0 --adaptive_noise_scale 0.1", {"adaptive_noise_scale": "noise_offset is 0"}),
        ("--ip_noise_gamma_random_strength", {"ip_noise_gamma_random_strength": "ip_noise_gamma is 0"}),
        ("--multires_noise_discount 0.5", {"multires_noise_discount": "multires_noise_iterations is 0"}),
        ("--huber_c 0.2", {"huber_c": "only for loss_type huber and smooth_l1"}),
        ("--loss_type l1 --huber_schedule constant", {"huber_schedule": ""}),
        ("--logit_mean 0.5", {"logit_mean": "only for weighting_scheme logit_normal"}),
        ("--mode_scale 0", {"mode_scale": "only for weighting_scheme mode"}),
        (
            "--weighting_scheme cosmap --sigmoid_scale 2",
            {
                "sigmoid_scale": "only for timestep_sampling sigmoid, shift, flux_shift, flux2_shift, qwen_shift, krea2_shift, "
                "qinglong_flux and qinglong_qwen"
            },
        ),
        (
            "--timestep_sampling flux_shift --discrete_flow_shift 3",
            {"discrete_flow_shift": "only for timestep_sampling shift and sigma"},
        ),
        ("--lr_scheduler_args gamma=1", {"lr_scheduler_args": ""}),
        (
            "--sample_prompts pyproject.toml --sample_every_n_steps 2 --sample_every_n_epochs 1",
            {"sample_every_n_steps": "sample_every_n_epochs is set"},
        ),
        ("--optimizer_type adafactor --lr_scheduler_type StepLR", {"lr_scheduler_type": ""}),
        (
            "--optimizer_type adafactor --network_args loraplus_lr_ratio=4",
            {"network_args loraplus_lr_ratio": "Adafactor with relative_step sets its own"},
        ),
        ("--control_scale 2", {"control_scale": "only for control omini"}),
        ("--adaptive_noise_scale 0.1", {"adaptive_noise_scale": "noise_offset is 0"}),
        ("--no_metadata --metadata_title a --training_comment b", {"metadata_title": "", "training_comment": ""}),
        ("--dim_from_weights --network_dim 8", {"dim_from_weights": "network_weights is not set"}),
        ("--zero_stage 3", {"zero_stage": "deepspeed is not set"}),
        ("--zero_stage 2", {}),
        ("--fsdp_offload_params", {"fsdp_offload_params": "fsdp is not set"}),
        ("--dp_shard_size 2", {"dp_shard_size": "fsdp is not set"}),
        ("--offload_optimizer_device cpu", {"offload_optimizer_device": "deepspeed is not set"}),
        (
            "--deepspeed --zero_stage 3 --offload_param_device cpu --offload_param_nvme_path /tmp",
            {"offload_param_nvme_path": "offload_param_device is not nvme"},
        ),
        (
            "--torch_compile --gradient_checkpointing --activation_memory_budget 0.5 --dynamo_backend eager",
            {"activation_memory_budget": "only for dynamo_backend inductor and aot_eager"},
        ),
        (
            "--torch_compile --gradient_checkpointing --activation_memory_budget 0.5 --cpu_offload_checkpointing",
            {"cpu_offload_checkpointing": ""},
        ),
        (
            "--torch_compile --pp_size 2 --no-dynamo_use_regional_compilation",
            {"no-dynamo_use_regional_compilation": "with pp_size, the model is always compiled block by block"},
        ),
        (
            "--timestep_sampling shift --weighting_scheme logit_normal --logit_mean 1",
            {"weighting_scheme": "", "logit_mean": "only for weighting_scheme logit_normal"},
        ),
        ("--lowram", {"lowram": ""}),
        (
            "--zero_terminal_snr --v_parameterization --sample_sampler k_dpm_2 --sample_prompts pyproject.toml",
            {"sample_sampler": "it does not support zero_terminal_snr; previews use ddim"},
        ),
        ("--no_half_vae", {"no_half_vae": ""}),
        (
            "--pretrained_model_name_or_path random:hunyuan_image:tiny --network_module networks.lora_hunyuan_image"
            " --fp8_vl",
            {
                "fp8_vl": "text encoders are not quantized; when their outputs are cached, they leave the device before"
                " training"
            },
        ),
    ],
)
def test_a_setting_without_effect_is_named_and_set_back(flags, unused):
    parsed = parse_config([*DATA, *flags.split()])

    actual = {location.removeprefix("--"): reason for location, reason in format_unused(parsed.unused)}
    assert format_lines(parsed.problems) == [] and actual.keys() == unused.keys()
    assert all(actual[name] == reason for name, reason in unused.items() if reason)
    defaults, values = flatten_config(type(parsed.config)()), flatten_config(parsed.config)
    assert {name for name in unused if name in values and values[name] != defaults[name]} == set()


@pytest.mark.parametrize(
    ("model", "flags", "unused"),
    [
        ("sdxl", "--clip_skip 2", {"clip_skip"}),
        ("flux", "--clip_skip 2 --max_token_length 225", {"clip_skip", "max_token_length"}),
        ("sd1", "--guidance_scale 3.5 --t5xxl_max_token_length 256", {"guidance_scale", "t5xxl_max_token_length"}),
        ("sd1", "--timestep_sampling sigmoid --discrete_flow_shift 3", {"timestep_sampling", "discrete_flow_shift"}),
        ("sd1", "--t5xxl nowhere --ae nowhere", {"t5xxl", "ae"}),
        ("sd3", "--min_snr_gamma 5 --noise_offset 0.1 --adaptive_noise_scale 0.1", {"min_snr_gamma", "noise_offset"}),
        ("flux", "--sample_sampler euler_a --sample_prompts pyproject.toml", {"sample_sampler"}),
        ("z_image", "--network_train_unet_only", {"network_train_unet_only"}),
        ("z_image", "--no-network_train_unet_only", set()),
        ("z_image", "--learning_rate 1e-3 --unet_lr 1e-5", {"learning_rate"}),
        ("sd1", "--no-network_train_unet_only --learning_rate 1e-3 --unet_lr 1e-5", set()),
        ("sd1", "--scale_v_pred_loss_like_noise_pred", {"scale_v_pred_loss_like_noise_pred"}),
        ("sd1", "--v_parameterization --v_pred_like_loss 1", {"v_pred_like_loss"}),
        ("sd1", "--clip_skip 2 --v_parameterization --min_snr_gamma 5", set()),
    ],
)
def test_options_of_other_models_are_named_and_set_back(model, flags, unused):
    argv = [*DATA, "--pretrained_model_name_or_path", f"random:{model}:tiny", *flags.split()]
    parsed = drop_unused_model_options(parse_config(argv))

    actual = {location.removeprefix("--") for location, _ in format_unused(parsed.unused)}
    assert actual - {"discrete_flow_shift", "adaptive_noise_scale"} == unused - {"discrete_flow_shift"}
    defaults, values = flatten_config(type(parsed.config)()), flatten_config(parsed.config)
    assert {name for name in unused if values.get(name) != defaults.get(name)} == set()


def test_options_of_validation_need_validation_images():
    argv = "--train_data_dir a --resolution 64 --validate_every_n_epochs 1 --validation_seed 3".split()
    assert dict(format_unused(parse_config(argv).unused)) == {
        "--validate_every_n_epochs": "validation_split is 0",
        "--validation_seed": "validation_split is 0",
    }
    assert format_unused(parse_config([*argv, "--validation_split", "0.1"]).unused) == ()


def test_all_settings_without_effect_are_one_line_with_the_lines_of_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "lr_scheduler_power = 2\nepoch = 3\n[a]\nmax_train_steps = 9\nmax_train_epochs = 2\nlowram = true\n"
    )

    parsed = parse_config([*DATA, "--config_file", str(path), "--highvram"])

    assert format_unused_settings(parsed.unused, path) == (
        f"{path}: no effect on this run: lr_scheduler_power (line 1: only for lr_scheduler polynomial), epoch (line 2),"
        " max_train_steps (line 4: max_train_epochs is set), lowram (line 6), --highvram"
    )


def test_a_learning_rate_of_0_for_text_encoders_trains_the_denoiser_only():
    adapter = parse_config([*DATA, "--no-network_train_unet_only", "--text_encoder_lr", "0"]).require_valid().adapter
    assert adapter.network_train_unet_only and not adapter.trains_text_encoders
    adapter = parse_config([*DATA, "--no-network_train_unet_only", "--unet_lr", "0"]).require_valid().adapter
    assert adapter.network_train_text_encoder_only and not adapter.trains_denoiser
    for flags in (
        "--learning_rate 0",
        "--no-network_train_unet_only --unet_lr 0 --text_encoder_lr 0",
        "--network_train_unet_only --unet_lr 0",
    ):
        (problem,) = format_lines(parse_config([*DATA, *flags.split()]).problems)
        assert problem.endswith("_rate: 0 trains nothing; set a learning rate such as 1e-4") or "unet_lr" in problem


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("learning_rate = '1e-4'", "learning_rate", 1e-4),
        ("network_dim = '8'", "network_dim", 8),
        ("network_dim = 8.0", "network_dim", 8),
        ("enable_bucket = 'True'", "enable_bucket", True),
        ("enable_bucket = 1", "enable_bucket", True),
        ("resume = false", "resume", None),
        ("network_args = ''", "network_args", ()),
        ("use_8bit_adam = true", "optimizer_type", "AdamW8bit"),
        ("use_8bit_adam = true\noptimizer_type = 'adamw8bit'", "optimizer_type", "adamw8bit"),
        ("split_mode = true\nblocks_to_swap = 3", "blocks_to_swap", 3),
        (
            "gradient_checkpointing = true\nunsloth_offload_checkpointing = true\ncpu_offload_checkpointing = false",
            "cpu_offload_checkpointing",
            True,
        ),
        ("training_shift = 3\ndiscrete_flow_shift = 3.0", "discrete_flow_shift", 3.0),
        ("caption_extention = ''\ncaption_extension = '.txt'", "caption_extension", (".txt",)),
        ("vae_batch_size = 0", "vae_batch_size", 1),
        ("torch_compile = true\ndynamo_backend = 'tensort'", "dynamo_backend", "tensorrt"),
        ("torch_compile = true\ndynamo_backend = 'OFI'", "dynamo_backend", "ofi"),
        ("torch_compile = true\ndynamo_backend = 'ipex'", "dynamo_backend", "inductor"),
        ("dynamo_backend = 'tensorrt'", "dynamo_backend", "inductor"),
        ("lr_warmup_steps = 9\nmax_train_steps = 3\nlr_scheduler = 'cosine'", "max_train_steps", 3),
        ("lr_restart_cycles = 3\nlr_scheduler = 'cosine_with_restarts'", "lr_scheduler_num_cycles", 3),
        ("dynamo_backend = 'no'", "dynamo_backend", "inductor"),
        ("no_half_vae = false", "seed", 42),
        ("text_encoder_lr = [0.0]", "network_train_unet_only", True),
        ("text_encoder_lr = [0.0]", "text_encoder_lr", ()),
        ("[sample_prompts]\nsample_sampler = 'euler_a'\nseed = 3", "seed", 3),
        ("seed = 3\n[again]\nseed = 3", "seed", 3),
    ],
)
def test_values_are_read_as_sd_scripts_reads_them(tmp_path, line, name, value):
    path = tmp_path / "run.toml"
    path.write_text(line)

    config = parse_config([*DATA, "--config_file", str(path)]).require_valid()

    assert flatten_config(config)[name] == value


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("enable_bucket = True", "; write true in lower case"),
        ("vae = None", "; TOML has no None: remove the line"),
        ('vae = "C:\\Users\\me"', "; write paths with backslashes in single quotes: 'C:\\Users\\me'"),
        ("vae = /models/vae", '; text needs quotes: vae = "/models/vae"'),
    ],
)
def test_what_is_often_wrong_in_toml_has_a_hint(tmp_path, line, hint):
    path = tmp_path / "run.toml"
    path.write_text(f"seed = 3\n{line}\n")

    (problem,) = format_lines(parse_config([*DATA, "--config_file", str(path)]).problems)
    assert problem.startswith(f"{path}:2: not valid TOML: ") and problem.endswith(hint)


def parse_file(folder, text, *flags):
    path = folder / "run.toml"
    path.write_text(text)
    return parse_config([*DATA, "--config_file", str(path), *flags]), f"{path}:"


@pytest.mark.parametrize(
    ("first", "second", "option", "values"),
    [
        ("training_shift = 3", "discrete_flow_shift = 1", "discrete_flow_shift", "1.0 3.0"),
        ("discrete_flow_shift = 1", "training_shift = 3", "training_shift", "3.0 1.0"),
        ("lr_restart_cycles = 2", "lr_scheduler_num_cycles = 3", "lr_scheduler_num_cycles", "3 2"),
        ("caption_extension = '.txt'", "caption_extention = '.tags'", "caption_extention", ".tags .txt"),
        ("use_8bit_adam = true", "optimizer_type = 'Lion'", "optimizer_type", "Lion AdamW8bit"),
        ("use_8bit_adam = true", "use_lion_optimizer = true", "use_lion_optimizer", "Lion AdamW8bit"),
        ("fp8_base = true", "quantize_base = 'nf4'", "quantize_base", "nf4 fp8"),
    ],
)
def test_two_names_of_one_option_with_different_values_are_an_error(tmp_path, first, second, option, values):
    parsed, start = parse_file(tmp_path, f"seed = 1\n{first}\n{second}\n")
    new, old = values.split()
    name = first.partition(" ")[0]
    assert format_lines(parsed.problems) == [
        f"{start}3: {option}: {new} contradicts {name} in line 2, another name of this option, which is {old};"
        " remove one of them"
    ]
    flags = [f"--{line.split()[0]}" + ("" if "true" in line else f"={line.split()[2]}") for line in (first, second)]
    (problem,) = format_lines(parse_config([*DATA, *(flag.replace("'", "") for flag in flags)]).problems)
    assert problem.startswith(f"--{option}: ") and f"contradicts --{name}, another" in problem
    assert format_lines(parse_file(tmp_path, f"{first}\n", flags[1].replace("'", ""))[0].problems) == [], (
        "flags win over the file"
    )


def test_flags_without_a_value_turn_off_what_the_file_sets(tmp_path):
    parsed, _ = parse_file(tmp_path, "vae_batch_size = 4\nscale_weight_norms = 2", *"--vae_batch_size 0".split())
    assert (format_lines(parsed.problems), parsed.config.cache.vae_batch_size) == ([], 1)
    parsed, _ = parse_file(tmp_path, "scale_weight_norms = 2", "--scale_weight_norms", "0")
    assert parsed.config.adapter.scale_weight_norms is None


def test_masked_loss_without_masks_is_one_line_of_notice_as_nothing_is_masked(tmp_path):
    (tmp_path / "images").mkdir()
    file = tmp_path / "set.toml"
    subset = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'images'\n"
    for text, is_used in ((subset, False), (f"{subset}conditioning_data_dir = 'masks'\n", True)):
        file.write_text(text)
        loaded = load_settings(["--dataset_config", str(file), "--masked_loss"])
        assert loaded.config.data.masked_loss == is_used
        reason = "no subset has masks (conditioning_data_dir or alpha_mask)"
        assert format_unused(loaded.unused) == (() if is_used else (("--masked_loss", reason),))


def test_keys_and_tokens_become_environment_variables_and_are_shown_nowhere(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "old")
    parsed, start = parse_file(tmp_path, "wandb_api_key = 'key-1'\nhuggingface_token = 'hf_2'\n")
    assert (format_lines(parsed.problems), parsed.notices, format_unused(parsed.unused)) == ([], [], ())
    assert parsed.secrets == {"WANDB_API_KEY": "key-1", "HF_TOKEN": "hf_2"}
    assert not any(secret in f"{parsed}{format_config_as_toml(parsed.config)}" for secret in ("key-1", "hf_2"))

    argv = [*DATA, "--config_file", str(tmp_path / "run.toml"), "--huggingface_token=hf_3"]
    monkeypatch.setattr("sys.argv", ["train_lora.py", *argv])
    loaded = load_settings(argv)
    assert (os.environ["WANDB_API_KEY"], os.environ["HF_TOKEN"]) == ("key-1", "hf_3")
    assert not any("hf_3" in word for word in sys.argv)
    (notice,) = loaded.notices
    assert notice == (
        "--huggingface_token: flags appear in process lists and shell histories; set HF_TOKEN, or write it in the run"
        " file"
    )
    assert parse_file(tmp_path, "wandb_api_key = ''\nhuggingface_token = false")[0].secrets == {}
    assert format_lines(parse_file(tmp_path, "wandb_api_key = 5")[0].problems) == [
        f"{start}1: wandb_api_key: expected text in quotes"
    ]
    (problem,) = format_lines(parse_file(tmp_path, "wandb_api_key = abcdef")[0].problems)
    assert "abcdef" not in problem and problem.endswith('; text needs quotes: wandb_api_key = "..."')
    parsed, _ = parse_file(
        tmp_path, "additional_parameters = '--lowram --wandb_api_key=key-1 --huggingface_token  hf_2'"
    )
    assert "key-1" not in f"{parsed.unused}" and "hf_2" not in f"{parsed.unused}" and "--lowram" in f"{parsed.unused}"


def test_only_the_syntax_error_of_a_run_file_is_told(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("dataset_config = 'data.toml'\nseed = \n")
    loaded = load_settings(["--config_file", str(path)])
    (problem,) = format_lines(find_settings_problems(loaded))
    assert problem.startswith(f"{path}:2: not valid TOML: ")
    (problem,) = format_lines(find_settings_problems(load_settings(["--config_file", str(tmp_path / "absent.toml")])))
    assert "no such file" in problem


def test_a_preset_without_text_encoders_names_their_learning_rate():
    argv = [*DATA, "--network_module", "lycoris.kohya", "--network_args", "preset=unet-only"]
    parsed = parse_config([*argv, "--text_encoder_lr", "1e-5"])
    assert format_lines(parsed.problems) == [] and parsed.config.adapter.network_train_unet_only
    assert dict(format_unused(parsed.unused)) == {"--text_encoder_lr": "text encoders are not trained"}
    assert parsed.config.optim.text_encoder_lr == ()


def test_samplers_of_prompts_that_previews_do_not_use_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("library.config.unused_options.find_spec", lambda name: None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a --ss k_dpm_2\nb --ss lms\nc --ss lms\nd --ss euler\n")
    for model, lines in (("flux", {1: "k_dpm_2", 2: "lms"}), ("sd1", {2: "lms"})):
        argv = [*DATA, "--pretrained_model_name_or_path", f"random:{model}:tiny", "--sample_prompts", str(prompts)]
        loaded = load_settings([*argv, "--sample_sampler", "k_lms"])
        assert format_lines(loaded.problems) == [] and loaded.config.preview.sample_sampler is None
        names = {location for location, _ in format_unused(loaded.unused)}
        assert names == {"--sample_sampler", *(f"{prompts}:{line}: --ss {name}" for line, name in lines.items())}


@pytest.mark.parametrize(
    ("model", "flags", "named"),
    [
        ("sd3", "", "seed learning_rate timestep_sampling model_prediction_type"),
        ("sd3", "--weighting_scheme uniform --training_shift 1", "seed learning_rate model_prediction_type"),
        ("sd3", "--weighting_scheme logit_normal", "seed learning_rate model_prediction_type"),
        ("sd3", "--training_shift 3", "seed learning_rate timestep_sampling model_prediction_type"),
        ("lumina2", "", "seed learning_rate system_prompt timestep_sampling"),
        ("hunyuan_image", "", "seed learning_rate"),
        ("hunyuan_image", "--timestep_sampling shift", "seed learning_rate"),
        ("flux", "", "seed learning_rate guidance_scale timestep_sampling discrete_flow_shift model_prediction_type"),
        (
            "flux",
            "--timestep_sampling sigmoid --unet_lr 1 --text_encoder_lr 1",
            "seed guidance_scale model_prediction_type",
        ),
        ("sdxl", "--seed 1", "learning_rate"),
    ],
)
def test_defaults_that_differ_from_sd_scripts_are_named(model, flags, named):
    """By its train_util.py, flux_train_utils.py and sd3_train_utils.py."""
    flags = f"{flags} --objective_defaults own"
    argv = [*DATA, "--network_module", "networks.lora", "--pretrained_model_name_or_path", f"random:{model}:tiny"]
    loaded = load_settings([*argv, *flags.split()])
    assert sorted(text.split()[0] for text in loaded.kohya_defaults) == sorted(named.split())
    assert {"learning_rate 1e-4 (there 2e-6)", "seed 42 (there another one for each run)"} & {*loaded.kohya_defaults}
