"""Import a configuration of OneTrainer, with its concepts and samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...problems import Problem
from .equivalents import GUIDED_FAMILIES, SUPPORTED, UNET_FAMILIES, set_quantization
from .imported import ImportedConfig, KeyReader, to_integer, to_number, to_positive_integer, to_switch, to_text
from .keys import onetrainer as keys
from .onetrainer_data import is_concept_list, is_sample_list, read_concepts, read_samples
from .onetrainer_network import read_adapter
from .onetrainer_objective import read_objective
from .onetrainer_optimizer import find_lr_factor, read_optimizer
from .source_file import SourceFile, find_companion

PROGRAM = "OneTrainer"


def is_onetrainer(content: Any) -> bool:
    if not isinstance(content, dict) or "LoRA_type" in content:
        return False
    kind = content.get("model_type")
    return "training_method" in content or (isinstance(kind, str) and kind.isupper())


def import_onetrainer(content: dict[str, Any], path: Path, others: Sequence[SourceFile]) -> ImportedConfig:
    """Turn a configuration and its concepts into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    config = KeyReader(upgrade_keys(content), result)
    if text := _describe_other_training(config):
        result.problems.append(Problem("", text))
        return result
    result.family = keys.FAMILIES[config.read("model_type", "STABLE_DIFFUSION_15")]
    if result.family == "flux2_dev" and "klein" in str(config.read("base_model_name", "")).lower():
        result.family = "flux2_klein"
    parts = {name: config.read_table(name) for name in keys.PARTS}
    _read_denoiser(config, parts["unet" if result.family in UNET_FAMILIES else "transformer"])
    _read_text_encoders(config, parts)
    read_adapter(config)
    read_optimizer(config)
    read_objective(config)
    _read_precision_and_files(config)
    _read_intervals(config)
    concepts = config.read("concepts")
    if concepts is None:
        found = find_companion(
            config,
            key="concept_file_name",
            main_path=path,
            others=others,
            matches=is_concept_list,
            title="concepts",
            default="training_concepts/concepts.json",
        )
        concepts = None if found is None else found.content
    read_concepts(config, concepts)
    samples = config.read("samples")
    if samples is None:
        found = find_companion(
            config,
            key="sample_definition_file_name",
            main_path=path,
            others=others,
            matches=is_sample_list,
            title="samples",
            default="",
        )
        samples = None if found is None else found.content
    read_samples(config, samples or [])
    config.apply_rules(keys.RUN_RULES)
    config.read_keys.update(keys.OTHER_PARTS)
    for name, part in parts.items():
        _list_part(part, name)
    for reader in (config, *parts.values()):
        reader.list_unknown(PROGRAM)
    return result


def upgrade_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Give the keys of older versions their current names; OneTrainer does the same when it opens a file."""
    renamed = {
        **{
            "save_after": "save_every",
            "save_after_unit": "save_every_unit",
            "enable_async_offloading": "async_offloading",
        },
        **{"lora_layers": "layer_filter", "lora_layer_preset": "layer_filter_preset"},
        "lora_layers_regex": "layer_filter_regex",
    }
    table = {renamed.get(key, key): value for key, value in content.items()}
    for name in ("unet", "transformer"):
        part = dict(table.get(name) or {})
        if "gradient_checkpointing" in table:
            part.setdefault("gradient_checkpointing", table["gradient_checkpointing"] not in ("OFF", False))
        if part:
            table[name] = part
    for key in ("gradient_checkpointing", "enable_activation_offloading", "layer_offload_fraction", "weight_dtype"):
        table.pop(key, None)  # of all components; memory only
    return table


def _describe_other_training(config: KeyReader) -> str:
    """Say what else a configuration is for; empty for LoRA training of a family that we have."""
    kind = config.read("model_type", "STABLE_DIFFUSION_15")
    if kind not in keys.FAMILIES:
        return f'model_type = "{kind}": not supported; {SUPPORTED} are, without inpainting'
    method = config.read("training_method", "FINE_TUNE")
    if method != "LORA":
        return f'training_method = "{method}": only LORA can be imported'
    adapter = config.table.get("peft_type", "LORA")
    if adapter not in ("LORA", "LOHA", "LOKR"):
        return f'peft_type = "{adapter}": its blocks have one size, here one number; choose LORA, LOHA or LOKR'
    return ""


def _read_denoiser(config: KeyReader, part: KeyReader) -> None:
    result = config.result
    if not part.read("train", True, to_switch):
        result.options["network_train_text_encoder_only"] = True
    rate = part.read("learning_rate", None, to_number)
    if rate is not None:
        result.options["unet_lr"] = rate * find_lr_factor(config)
    dtype = str(part.read("weight_dtype", "FLOAT_32"))
    if dtype not in keys.PLAIN_DTYPES:
        set_quantization(result, f"{part.prefix}weight_dtype", dtype, keys.QUANTIZATIONS)
    if model := part.read("model_name", None, to_text):
        part.list_change(
            "model_name", "give this file as pretrained_model_name_or_path, with its text encoders and VAE", model
        )
    result.set_option("gradient_checkpointing", part.read("gradient_checkpointing", True, to_switch))
    if result.family in GUIDED_FAMILIES:
        result.set_option("guidance_scale", part.read("guidance_scale", 1.0, to_number))
    if part.read("attention_mask", False, to_switch):
        part.list_change("attention_mask", "padding tokens are attended to for this model, as in diffusers' pipeline")
    if part.read("offload_fraction", 0, to_number):
        part.list_harmless("offload_fraction", "memory only; blocks_to_swap keeps blocks in host memory")
    if part.read("activation_offloading", False, to_switch):
        result.options["cpu_offload_checkpointing"] = True
    _read_stop(part, config)
    vae = config.read_table("vae")
    vae.take("vae", "model_name", None, to_text)
    if vae.read("weight_dtype", "FLOAT_32") != "FLOAT_32":
        vae.list_change("weight_dtype", "the VAE runs in float32 here, which is more exact")
    vae.read_keys.update(vae.table)  # it is neither trained nor offloaded


def _read_stop(part: KeyReader, config: KeyReader, default: int = 0) -> None:
    """Training of a part may stop before the end; that of text encoders does, after 30 epochs."""
    after = part.read("stop_training_after", default)
    unit = part.read("stop_training_after_unit", "EPOCH" if default else "NEVER")
    epochs = config.table.get("epochs") or 100
    if unit not in ("NEVER", None) and after and not (unit == "EPOCH" and after >= epochs):
        reason = f"everything is trained to the end, not {after} {unit.lower()}s; train twice with network_weights"
        part.list_change("stop_training_after", reason, after)


def _read_text_encoders(config: KeyReader, parts: dict[str, KeyReader]) -> None:
    result, count = config.result, keys.TEXT_ENCODERS.get(config.result.family, 0)
    names = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    trained, rates, dropouts = [], [], []
    for number, name in enumerate(names[: max(count, 1)]):
        part = parts[name]
        is_trained = part.read("train", True, to_switch)
        if number < count:
            trained.append(is_trained)
            rates.append(part.read("learning_rate", None, to_number))
        elif is_trained:
            part.list_change("train", "the text encoder of this model cannot be trained here", is_trained)
        if is_trained:
            _read_stop(part, config, default=30)
        dropouts.append(part.read("dropout_probability", 0.0, to_number))
        if skip := config.read(f"{name}_layer_skip", 0, to_integer):
            if result.family in ("sd1", "sd2"):
                result.options["clip_skip"] = skip + 1
            else:
                config.list_change(f"{name}_layer_skip", "the last layer but one is used, as the model was trained")
    if dropouts and any(dropouts):
        if len(dropouts) > 1:
            reason = "each text encoder drops its caption by itself there; here all of them at once"
            result.list_change("text_encoder.dropout_probability", dropouts, reason)
        result.general["caption_dropout_rate"] = max(dropouts)
    if any(trained):
        _set_trained_encoders(config, trained, rates)
    elif config.table.get("latent_caching", True):
        result.options["cache_text_encoder_outputs_to_disk"] = True
    if result.family == "flux":
        result.set_option("t5xxl_max_token_length", config.read("text_encoder_2_sequence_length", 77, to_integer))
    for name in ("text_encoder_sequence_length", "text_encoder_2_sequence_length"):
        value = config.read(name)
        if value not in (None, 77, 512) and result.family != "flux":
            config.list_change(name, "the length of captions is fixed for this model")


def _set_trained_encoders(config: KeyReader, trained: list[bool], rates: list[float | None]) -> None:
    result, factor = config.result, find_lr_factor(config)
    if not result.options.get("network_train_text_encoder_only"):
        result.options["network_train_unet_only"] = False
    base = config.read("learning_rate", 3e-6, to_number)
    if result.family in keys.T5_FAMILIES:
        if trained[-1]:
            result.add_network_arg("train_t5xxl", True)
        else:
            trained, rates = trained[:-1], rates[:-1]
    if not any(trained):
        return
    values = [
        (base if rate is None else rate) * factor if is_on else 0.0 for is_on, rate in zip(trained, rates, strict=True)
    ]
    if values != [base * factor] * len(values):
        result.options["text_encoder_lr"] = values


def _read_precision_and_files(config: KeyReader) -> None:
    result = config.result
    dtype = config.read("train_dtype", "FLOAT_16")
    result.set_option("mixed_precision", keys.DTYPES.get(str(dtype)))
    if dtype not in keys.DTYPES:
        config.list_change("train_dtype", "not a precision here; set mixed_precision to no, fp16 or bf16")
    if config.read("lora_weight_dtype", "FLOAT_32") == "BFLOAT_16":
        result.options["full_bf16"] = True
    elif config.read("lora_weight_dtype", "FLOAT_32") != "FLOAT_32":
        config.list_change("lora_weight_dtype", "the LoRA is trained in float32 here, or in bf16 with full_bf16")
    result.set_option("save_precision", keys.SAVE_DTYPES.get(str(config.read("output_dtype", "FLOAT_32"))))
    file_format = keys.FILE_FORMATS.get(str(config.read("output_model_format", "SAFETENSORS")))
    if file_format and config.table.get("peft_type", "LORA") == "LORA":
        result.options["save_format"] = file_format
    path = Path(config.read("output_model_destination", "models/model.safetensors", to_text) or "model")
    result.options |= {"output_dir": path.parent.as_posix(), "output_name": path.name.removesuffix(".safetensors")}
    workspace = config.read("workspace_dir", "workspace/run", to_text)
    if config.read("tensorboard", True, to_switch) and workspace:
        result.options["logging_dir"] = f"{workspace}/tensorboard"
    if config.read("latent_caching", True, to_switch):
        result.options["cache_latents_to_disk"] = True
    if config.read("ema", "OFF") not in ("OFF", "GPU", "CPU"):
        config.list_change("ema", "not a device for averages; none are kept")
    elif config.read("ema", "OFF") != "OFF":
        result.options["ema_decay"] = config.read("ema_decay", 0.999, to_number)
        interval = config.read("ema_update_step_interval", 5, to_integer)
        if interval != 1:
            config.list_change("ema_update_step_interval", "the average is updated in every step here", interval)
    config.read_keys.update(("ema_decay", "ema_update_step_interval"))


def _read_intervals(config: KeyReader) -> None:
    """Read the intervals of saving and previews; the steps of OneTrainer are micro-batches."""
    result, accumulation = config.result, config.table.get("gradient_accumulation_steps") or 1
    for key, default, option in (("save_every", 0, "save"), ("sample_after", 10, "sample")):
        number = config.read(key, default, to_positive_integer)
        unit = config.read(f"{key}_unit", "NEVER" if key == "save_every" else "MINUTE")
        prefix = f"{option}_every_n"
        if unit == "EPOCH" and number:
            result.options[f"{prefix}_epochs"] = number
        elif unit == "STEP" and number:
            result.options[f"{prefix}_steps"] = max(1, number // accumulation)
        elif unit not in ("NEVER", "EPOCH", "STEP") and key in config:
            config.list_harmless(key, f"intervals are epochs or steps here; set {prefix}_epochs")


def _list_part(part: KeyReader, name: str) -> None:
    """Settings of components that say nothing about training, or of components that the model does not have."""
    if name in ("unet", "prior", "transformer", "unconditional_transformer"):
        part.read_keys.update(part.table)  # of the other one, unless read above
        return
    model = part.read("model_name", None, to_text)
    if model:
        part.list_change("model_name", "give it as clip_l, clip_g, t5xxl or text_encoder; see docs/models.md", model)
    dtype = part.read("weight_dtype")
    if dtype not in (None, *keys.PLAIN_DTYPES):
        part.list_change("weight_dtype", "text encoders are not quantized here: more exact, more memory")
    part.read_keys.update(part.table)
