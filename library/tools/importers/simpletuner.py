"""Import a configuration of SimpleTuner (config.json or config.env) and its dataloader configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.families import FAMILY_FACTS
from ...models.trainer_names import choose_family, find_families
from ...problems import Problem
from .equivalents import (
    FLOW_FAMILIES,
    FULL_LOKR_DIM,
    GUIDED_FAMILIES,
    describe_unknown_model,
    keep_only_layers,
    match_containing,
    match_last_parts,
    set_optimizer,
    set_quantization,
)
from .imported import (
    ImportedConfig,
    KeyReader,
    to_integer,
    to_number,
    to_positive_integer,
    to_positive_number,
    to_switch,
    to_text,
)
from .keys import simpletuner as keys
from .simpletuner_data import is_backend_list, read_backends, read_previews
from .source_file import SourceFile, find_companion

PROGRAM = "SimpleTuner"
_ENV_NAMES = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_SEED": "seed",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_STEPS": "checkpoint_step_interval",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval",
    "LR_SCHEDULE": "lr_scheduler",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
    "TRAINER_DYNAMO_BACKEND": "dynamo_backend",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "ACCELERATE_CONFIG_PATH": "accelerate_config",
}
"""Variables of config.env that are not just the name of the option in capitals."""
_FORMER_NAMES = {
    "checkpointing_steps": "checkpoint_step_interval",
    "validation_steps": "validation_step_interval",
    "save_total_limit": "checkpoints_total_limit",
}


def is_simpletuner(content: Any) -> bool:
    table = normalize_keys(content)
    return "model_family" in table and bool({"data_backend_config", "model_type", "lora_type"} & set(table))


def normalize_keys(content: Any) -> dict[str, Any]:
    """The options without dashes in front, of a JSON or .env file."""
    if isinstance(content, str):
        return parse_env_file(content)
    if not isinstance(content, dict):
        return {}
    if isinstance(content.get("config"), dict) and "_metadata" in content:
        content = content["config"]
    table = {str(key).removeprefix("--").replace("-", "_"): value for key, value in content.items()}
    return {_FORMER_NAMES.get(key, key): value for key, value in table.items()}


def parse_env_file(text: str) -> dict[str, Any]:
    """Read the lines ``NAME=value``; extra arguments hold further options."""
    table: dict[str, Any] = {}
    for line in text.splitlines():
        line = line.strip().removeprefix("export ")
        name, equals, value = line.partition("=")
        if line.startswith("#") or not equals:
            continue
        name, value = name.strip().rstrip("+"), value.strip().strip("\"'")
        if name == "TRAINER_EXTRA_ARGS":
            table |= _split_extra_args(value)
        else:
            table[_ENV_NAMES.get(name, name.lower())] = value
    return {_FORMER_NAMES.get(key, key): value for key, value in table.items()}


def _split_extra_args(text: str) -> dict[str, Any]:
    words = [word for word in text.split() if not word.startswith("${")]
    pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name.replace("-", "_"): value if equals else True for name, equals, value in pairs}


def import_simpletuner(content: Any, path: Path, others: Sequence[SourceFile]) -> ImportedConfig:
    """Turn a configuration and its dataloader configuration into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    config = KeyReader(normalize_keys(content), result)
    if text := _describe_other_training(config):
        result.problems.append(Problem("", text))
        return result
    result.family, flavour = _find_family_and_flavour(config)
    _read_model(config, flavour)
    lycoris = None
    if config.read("lora_type", "standard") == "lycoris":
        lycoris = find_companion(
            config,
            key="lycoris_config",
            main_path=path,
            others=others,
            matches=is_lycoris_config,
            title="LyCORIS",
            default="config/lycoris_config.json",
        )
    config.read("lycoris_config")
    read_lora_or_lycoris(config, None if lycoris is None else lycoris.content)
    _read_optimizer(config)
    _read_length_and_schedule(config)
    _read_objective(config)
    _read_saving_and_logs(config)
    backends = find_companion(
        config, key="data_backend_config", main_path=path, others=others, matches=is_backend_list, title="dataloader"
    )
    read_backends(config, backends.content if backends is not None else None)
    read_previews(config)
    _list_features(config)
    config.apply_rules(keys.RUN_RULES)
    for key in config.table:
        if key not in config.read_keys and key.startswith((*keys.MEMORY_PREFIXES, *keys.LOCAL_PREFIXES)):
            config.list_harmless(key, "of its files, logs, memory or machine")
    config.list_unknown(PROGRAM, keys.RUN_RULES)
    return result


def _describe_other_training(config: KeyReader) -> str:
    """Say what else a configuration is for; empty for LoRA training of a family that we have."""
    family = config.read("model_family")
    if not find_families("simpletuner", family):
        return describe_unknown_model("simpletuner", f'model_family = "{family}"')
    kind = config.read("model_type", "full")
    if kind != "lora":
        return f'model_type = "{kind}": full training; only lora can be imported'
    for name in ("controlnet", "control"):
        if config.read(name, False, to_switch):
            return f"{name} = true: ControlNet training is not supported"
    flavours = [name for each in find_families("simpletuner", family) for name in _list_flavours(each)]
    flavour = config.read("model_flavour")
    if flavour not in (None, *flavours) and "pretrained_model_name_or_path" not in config:
        return f'model_flavour = "{flavour}": not supported; choose one of {", ".join(flavours)}, or a model path'
    return ""


def _list_flavours(family: str) -> Mapping[str, str]:
    """List the flavours of a family with their hub ids."""
    return FAMILY_FACTS[family].detection.trainer_names.simpletuner_flavours


def _find_family_and_flavour(config: KeyReader) -> tuple[str, str]:
    """Find the family that the flavour is of; one that is not here is told by the name of the model."""
    families = find_families("simpletuner", config.read("model_family"))
    names = {family: FAMILY_FACTS[family].detection.trainer_names for family in families}
    default = next((each.simpletuner_default for each in names.values() if each.simpletuner_default), "")
    flavour = str(config.read("model_flavour", default))
    by_flavour = next((family for family in families if flavour in _list_flavours(family)), None)
    return by_flavour or choose_family(families, str(config.read("pretrained_model_name_or_path", ""))), flavour


def _read_model(config: KeyReader, flavour: str) -> None:
    result = config.result
    path = config.read("pretrained_model_name_or_path", None, to_text)
    result.options["pretrained_model_name_or_path"] = path or _list_flavours(result.family)[flavour]
    transformer = config.read("pretrained_transformer_model_name_or_path", None, to_text)
    if transformer:
        config.list_change(
            "pretrained_transformer_model_name_or_path", "give it as the model, and the others by their options"
        )
    config.read("pretrained_transformer_subfolder")
    vae = config.read("pretrained_vae_model_name_or_path", None, to_text)
    if vae and vae != path:
        result.set_option("vae", vae)
    elif result.family == "sdxl" and not vae:
        result.list_harmless(
            "pretrained_vae_model_name_or_path", "sdxl-vae-fp16-fix", "the model's own VAE runs in float32"
        )
    if result.family.startswith("qwen_image"):
        config.take("text_encoder", "qwen_text_encoder_model_name_or_path", None, to_text)
    precision = str(config.read("base_model_precision", "no_change"))
    if precision not in ("no_change", "bf16", "fp16", "fp32"):
        set_quantization(result, "base_model_precision", precision, keys.QUANTIZATIONS)
    if flavour in keys.ASSISTED_FLAVOURS and not config.read("disable_assistant_lora", False, to_switch):
        reason = "it has an assistant LoRA while training; download it and set training_adapter"
        config.list_change("model_flavour", reason, flavour)
    config.read_keys.update(("disable_assistant_lora", "assistant_lora_strength", "assistant_lora_inference_strength"))
    if result.family in GUIDED_FAMILIES:
        if config.read("flux_guidance_mode", "constant") != "constant":
            config.list_change("flux_guidance_mode", "one guidance_scale for all steps; set it by hand")
        result.set_option("guidance_scale", config.read("flux_guidance_value", 1.0, to_number))
    config.read_keys.update(("flux_guidance_value", "flux_guidance_min", "flux_guidance_max", "flux_guidance_mode"))
    if config.read("dynamo_backend", "no") not in ("no", "", None, "NO"):
        result.options |= {"torch_compile": True, "dynamo_backend": str(config.read("dynamo_backend"))}
    config.read_keys.update(key for key in config.table if key.startswith("dynamo_"))
    if length := config.read("tokenizer_max_length", None, to_integer):
        if "t5xxl_max_token_length" in FAMILY_FACTS[result.family].options.extra:
            result.set_option("t5xxl_max_token_length", length)
        else:
            config.list_change("tokenizer_max_length", "the length of captions is fixed; see max_token_length")


def _read_optimizer(config: KeyReader) -> None:
    result = config.result
    rate = config.read("learning_rate", 4e-7, to_number)
    if config.read("lr_scale", False, to_switch):
        batch = int(config.table.get("train_batch_size", 4)) * int(config.table.get("gradient_accumulation_steps", 1))
        factor = batch**0.5 if config.read("lr_scale_sqrt", False, to_switch) else batch
        rate *= factor
        config.list_change("lr_scale", f"multiplied by {factor:g}, for one GPU; multiply again for more")
    config.read("lr_scale_sqrt")
    result.options["learning_rate"] = rate
    name = str(config.read("optimizer", "adamw_bf16"))
    given: dict[str, Any] = {}
    pairs = [part.partition("=") for part in str(config.read("optimizer_config", "") or "").split(",") if part.strip()]
    for key, _, value in pairs:
        given[key.strip()] = _parse_literal(value.strip())
    betas = [config.read(f"optimizer_beta{number}", None, to_number) for number in (1, 2)]
    if None not in betas:
        given["betas"] = tuple(betas)
    set_optimizer(result, "optimizer", name, keys.OPTIMIZERS, given)
    for key in ("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon"):
        if config.read(key) is not None:
            config.list_harmless(key, "SimpleTuner does not use it; optimizer_config does")
    config.read("prodigy_steps")
    method = config.read("grad_clip_method", "value")
    norm = config.read("max_grad_norm", 2.0, to_number)
    if method == "norm":
        result.set_option("max_grad_norm", norm)
    else:
        result.set_option("max_grad_norm", 0.0)
        reason = f"each gradient is cut at {norm:g} there; not cut here, set max_grad_norm to limit their norm"
        config.list_change("grad_clip_method", reason, method)
    config.read("max_grad_norm")


def _parse_literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def _read_length_and_schedule(config: KeyReader) -> None:
    result = config.result
    steps = config.read("max_train_steps", None, to_positive_integer)
    epochs = config.read("num_train_epochs", 1, to_positive_integer)
    if steps and epochs and "num_train_epochs" in config:
        config.list_change("num_train_epochs", "max_train_steps is set, too, and used")
    if steps:
        result.options["max_train_steps"] = steps
    else:
        result.options["max_train_epochs"] = epochs or 1
    name = str(config.read("lr_scheduler", "constant_with_warmup")).strip().lower()
    warmup = config.read("lr_warmup_steps", 0, to_integer)
    end, power = config.read("lr_end", 4e-7, to_number), config.read("lr_power", 0.8, to_number)
    cycles = config.read("lr_num_cycles", 1, to_integer)
    if name in ("constant", "constant_with_warmup"):
        result.options["lr_scheduler"] = "constant_with_warmup" if warmup else "constant"
    elif name == "linear":
        result.options["lr_scheduler"] = "linear"
    elif name == "polynomial":
        result.options["lr_scheduler"] = "polynomial"
        result.set_option("lr_scheduler_power", power)
        result.set_option("lr_scheduler_args", [f"lr_end={end:g}"])
    elif name in ("cosine", "cosine_with_warmup", "sine", "cosine_with_restarts"):
        kind = "cosine_with_restarts" if name == "cosine_with_restarts" else "cosine"
        result.options["lr_scheduler"] = kind
        if kind == "cosine_with_restarts":
            result.set_option("lr_scheduler_num_cycles", max(1, cycles))
        reason = f"its period is lr_warmup_steps ({warmup}) there; {kind} over the whole run here, without warmup"
        config.list_change("lr_scheduler", reason, name)
        warmup = 0
    else:
        config.list_change("lr_scheduler", "no such schedule here; constant is used", name)
        warmup = 0
    result.set_option("lr_warmup_steps", warmup or None)
    seed = config.read("seed", None, to_integer)
    result.set_option("seed", seed if seed is not None and seed > 0 else None)
    ema = config.read("use_ema", False, to_switch)
    decay = config.read("ema_decay", 0.995, to_number)
    result.set_option("ema_decay", decay if ema else None)
    for key, neutral in (("ema_update_interval", 1), ("ema_warmup_steps", 0)):
        if config.read(key, neutral, to_integer) != neutral and ema:
            config.list_change(key, "the average is updated in every step here")


def _read_objective(config: KeyReader) -> None:
    result, options = config.result, config.result.options
    if result.family in FLOW_FAMILIES:
        _read_flow_timesteps(config)
    else:
        prediction = config.read("prediction_type", None, to_text)
        if prediction in ("v_prediction", "epsilon"):
            options["v_parameterization"] = prediction == "v_prediction"
        if config.read("rescale_betas_zero_snr", False, to_switch):
            options["zero_terminal_snr"] = True
        result.set_option("min_snr_gamma", config.read("snr_gamma", None, to_number) or None)
        offset, chance = (
            config.read(key, default, to_number)
            for key, default in (("noise_offset", 0.1), ("noise_offset_probability", 0.25))
        )
        if config.read("offset_noise", False, to_switch):
            options["noise_offset"] = offset
            if chance < 1:
                config.list_change("noise_offset_probability", "the offset is added to every image here", chance)
    gamma = config.read("input_perturbation", 0.0, to_number)
    if gamma:
        options["ip_noise_gamma"] = gamma
        if config.read("input_perturbation_steps", 0, to_integer):
            config.list_change("input_perturbation_steps", "it does not fade here")
    for key in (
        "noise_offset",
        "noise_offset_probability",
        "offset_noise",
        "input_perturbation_steps",
        "prediction_type",
        "rescale_betas_zero_snr",
        "snr_gamma",
        "huber_schedule",
        "huber_c",
        "masked_loss_probability",
    ):
        config.read(key)
    config.read_keys.update(
        key for key in config.table if key.startswith(("flow_", "timestep_bias_")) and key not in keys.RUN_RULES
    )
    if config.table.get("loss_type") in ("huber", "smooth_l1"):
        config.take("huber_schedule", "huber_schedule", "snr", to_text)
        config.take("huber_c", "huber_c", 0.1, to_number)


def _read_flow_timesteps(config: KeyReader) -> None:
    options = config.result.options
    shift = config.read("flow_schedule_shift", 3.0, lambda value: None if value in ("", "None") else to_number(value))
    is_auto = config.read("flow_schedule_auto_shift", False, to_switch)
    scale = config.read("flow_sigmoid_scale", 1.0, to_number)
    is_uniform = config.read("flow_use_uniform_schedule", False, to_switch)
    if config.read("flow_use_beta_schedule", False, to_switch):
        config.list_change("flow_use_beta_schedule", "no beta distribution here; sigmoid is used")
    has_shift = bool(shift and shift > 0) or is_auto
    if is_uniform:
        options["timestep_sampling"] = "sigma" if has_shift else "uniform"
    else:
        options["timestep_sampling"] = "shift" if has_shift else "sigmoid"
        config.result.set_option("sigmoid_scale", scale)
    if shift and shift > 0:
        options["discrete_flow_shift"] = shift


def _read_saving_and_logs(config: KeyReader) -> None:
    result = config.result
    every = config.read("checkpoint_step_interval", 500, to_positive_integer)
    kept = config.read("checkpoints_total_limit", 5, to_positive_integer)
    result.set_option("save_every_n_steps", every)
    if every and kept:
        result.options["save_last_n_steps"] = max(1, (kept - 1) * every)
    if config.read("push_to_hub", False, to_switch):
        result.set_option("huggingface_repo_id", config.read("hub_model_id", None, to_text))
        is_private = config.read("model_card_private", True, to_switch)
        result.set_option("huggingface_repo_visibility", "private" if is_private else "public")
    config.read("hub_model_id")
    tracker = config.read("report_to", "none")
    if tracker in ("wandb", "tensorboard", "all", "comet_ml"):
        result.options["log_with"] = tracker
        project, run = (config.read(f"tracker_{part}_name", None, to_text) for part in ("project", "run"))
        result.set_option("log_tracker_name", project)
        if tracker in ("wandb", "all"):
            result.set_option("wandb_run_name", run)
        if tracker != "wandb":
            result.options["logging_dir"] = config.read("logging_dir", "logs", to_text)
    config.read_keys.update(("tracker_project_name", "tracker_run_name", "logging_dir"))
    if config.read("train_text_encoder", False, to_switch):
        result.options["network_train_unet_only"] = False
        rate = config.read("text_encoder_lr", None, to_number)
        if rate is not None:
            result.options["text_encoder_lr"] = [rate]
    else:
        result.options["cache_text_encoder_outputs_to_disk"] = True
    config.read("text_encoder_lr")
    result.options["cache_latents_to_disk"] = True


def _list_features(config: KeyReader) -> None:
    """Training methods of SimpleTuner: one line if it is on, nothing else of it."""
    for prefix, switch in keys.FEATURES.items():
        members = [key for key in config.table if key.startswith(prefix)]
        value = config.table.get(switch)
        if value not in (None, False, 0, "", "false", "none", "None"):
            config.list_change(switch, "no such training method here; remove it, or expect another result")
        config.read_keys.update(members)


FULL_MATRIX_DIM = 9_999_999
_MODULES = {
    "lora": "networks.lora",
    "locon": "networks.lora",
    "loha": "networks.loha",
    "lokr": "networks.lokr",
}


def is_lycoris_config(content: Any) -> bool:
    return isinstance(content, dict) and "algo" in content


def read_lora_or_lycoris(config: KeyReader, lycoris: dict[str, Any] | None) -> None:
    """Adapter type, rank, alpha and layers."""
    if config.read("lora_type", "standard") == "lycoris":
        config.read_keys.update(("lora_rank", "lora_alpha", "lora_dropout", "flux_lora_target", "use_dora"))
        if lycoris is not None:
            _read_lycoris(KeyReader(lycoris, config.result, "lycoris_config."))
        return
    if config.read("lora_type", "standard") != "standard":
        config.list_change("lora_type", "no such type here; LoRA is trained")
    result = config.result
    rank = config.read("lora_rank", 16, to_integer)
    alpha = config.read("lora_alpha", float(rank), to_number)
    result.options |= {"network_dim": rank, "network_alpha": float(alpha)}
    if config.read("use_dora", False, to_switch):
        result.add_network_arg("use_dora", True)
    targets = config.read("peft_lora_target_modules")
    if isinstance(targets, str):
        targets = [part.strip() for part in targets.strip("[]").replace('"', "").split(",") if part.strip()]
    flux_target = config.read("flux_lora_target", "all")
    if not targets and result.family in ("flux", "flux_kontext", "chroma"):
        targets = keys.FLUX_TARGETS.get(str(flux_target))
        if targets is None:
            config.list_change(
                "flux_lora_target", "no such choice of layers here; all layers of the blocks are trained"
            )
    elif not targets:
        targets = keys.DEFAULT_TARGETS.get(result.family, keys.ATTENTION)
    if targets:
        keep_only_layers(result, [match_last_parts(targets)])


def _read_lycoris(lycoris: KeyReader) -> None:
    result = lycoris.result
    algorithm = str(lycoris.read("algo", "lora")).lower()
    if algorithm not in _MODULES:
        lycoris.list_change("algo", f"not supported; LoRA is trained instead of {algorithm}")
    result.set_option("network_module", _MODULES.get(algorithm, "networks.lora"))
    rank = lycoris.read("linear_dim", 4, to_integer)
    alpha = lycoris.read("linear_alpha", 1.0, to_number)
    if lycoris.read("full_matrix", False, to_switch) and algorithm == "lokr":
        rank = max(rank, FULL_MATRIX_DIM)
    if algorithm == "lokr" and rank >= FULL_LOKR_DIM:
        alpha = float(rank)
    result.options |= {"network_dim": rank, "network_alpha": alpha}
    if algorithm == "lokr":
        result.add_network_arg("factor", lycoris.read("factor", -1, to_integer))
        if lycoris.read("decompose_both", False, to_switch):
            result.add_network_arg("decompose_both", True)
    is_lora = _MODULES.get(algorithm, "networks.lora") == "networks.lora"
    if dropout := lycoris.read("dropout", None, to_positive_number):
        if is_lora:
            result.set_option("network_dropout", dropout)
        else:
            lycoris.list_change("dropout", f"only LoRA has it here, not {algorithm}; remove it")
    supported = {"rank_dropout": is_lora, "module_dropout": is_lora, "dora_wd": is_lora, "use_tucker": not is_lora}
    for name, is_supported in (supported | {"use_scalar": False, "train_norm": False}).items():
        value = lycoris.read(name, 0)
        if value and is_supported:
            result.add_network_arg(name, value)
        elif value:
            lycoris.list_change(name, "not supported for this adapter type here; remove it")
    if lycoris.read("multiplier", 1.0, to_number) != 1:
        lycoris.list_change("multiplier", "the adapter is trained at strength 1 here")
    if lycoris.read("bypass_mode") is not None:
        lycoris.list_harmless("bypass_mode", "how the product is computed; the result is the same")
    for name in ("conv_dim", "conv_alpha", "conv_factor"):
        if lycoris.read(name) not in (None, 0):
            lycoris.list_change(name, "convolutions are trained with network_args conv_dim; add it by hand")
    _read_preset(lycoris, lycoris.read_table("apply_preset"))
    lycoris.list_unknown(PROGRAM)


def _read_preset(lycoris: KeyReader, preset: KeyReader) -> None:
    """Read which modules are trained, by class or by name."""
    result, family = lycoris.result, lycoris.result.family
    classes, names = preset.read("target_module", []), preset.read("target_name", preset.read("unet_target_name", []))
    contained: list[str] = []
    for name in classes:
        known = keys.MODULE_CLASSES.get(name)
        if known is None:
            preset.list_change(
                "target_module", f"no such modules here: {name}; see include_patterns in docs/adapters.md", name
            )
        else:
            contained += known.get(family, known[""])
    patterns = [match_containing(text) for text in contained]
    patterns += [rf"(unet|transformer)\.{str(name).replace('.', chr(92) + '.').replace('*', '.*')}" for name in names]
    if patterns and not (len(classes) == 2 and family not in ("flux", "flux_kontext", "chroma", "sd3")):
        keep_only_layers(result, [f"({'|'.join(patterns)})"])
    factor = lycoris.table.get("factor")
    for name, settings in (preset.read("module_algo_map", {}) or {}).items():
        if isinstance(settings, dict) and {
            key: value for key, value in settings.items() if (key, value) != ("factor", factor)
        }:
            preset.list_change("module_algo_map", f"one setting for all layers here; {name} has others", settings)
    if preset.read("exclude_name"):
        preset.list_change("exclude_name", "add them to exclude_patterns by hand")
    preset.read_keys.update(("unet_target_name", "unet_target_module", "enable_conv"))
    preset.list_unknown(PROGRAM)
