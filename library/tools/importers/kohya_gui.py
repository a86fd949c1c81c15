"""Import a kohya_ss GUI file: what the GUI would pass to sd-scripts, whose option names are ours."""

import shlex
from pathlib import Path
from typing import Any

from ...config import parse_config
from ...config.options import flatten_config
from ...config.unused_options import is_self_tuning_adafactor
from ...config.validate import MISSING_DATASET
from ...problems import Problem
from .equivalents import FLOW_FAMILIES
from .imported import (
    ImportedConfig,
    KeyReader,
    is_among,
    to_integer,
    to_number,
    to_positive_integer,
    to_positive_number,
    to_switch,
    to_text,
)
from .keys import kohya_gui as keys
from .kohya_gui_data import read_dataset, read_keys, read_length, read_previews_and_logs
from .kohya_gui_network import read_network, read_trained_components

PROGRAM = "kohya_ss"
_OTHER_MODELS = {
    f"{name}_checkbox": f"files for {title} are not imported; write a run file (docs/from_sd_scripts.md)"
    for name, title in (("hunyuan_image", "HunyuanImage"), ("anima", "Anima"))
}


def is_kohya_gui(content: Any) -> bool:
    return isinstance(content, dict) and bool({"model_list", "LoRA_type", "num_cpu_threads_per_process"} & set(content))


def import_kohya_gui(content: dict[str, Any], path: Path) -> ImportedConfig:
    """Turn a file that the GUI saved for LoRA training into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    reader = KeyReader(content, result)
    if text := _describe_other_training(reader):
        result.problems.append(Problem("", text))
        return result
    _read_family(reader)
    read_keys(reader, keys.RUN_KEYS)
    _read_former_names(reader)
    _read_model_keys(reader)
    _read_precision(reader)
    _read_optimizer(reader)
    _read_schedule(reader)
    read_network(reader)
    read_trained_components(reader)
    _read_objective(reader)
    read_dataset(reader)
    read_length(reader)
    read_previews_and_logs(reader)
    _read_extra_flags(reader)
    _drop_overridden(result)
    reader.apply_rules(keys.KEY_RULES)
    _list_unused(reader)
    reader.list_unknown(PROGRAM)
    return result


def _describe_other_training(reader: KeyReader) -> str:
    """Say what else a file is for; empty for LoRA training of a family that we have."""
    if "num_vectors_per_token" in reader or "token_string" in reader:
        return "a file for textual inversion; only LoRA is trained here"
    if "LoRA_type" not in reader:
        return "a file for DreamBooth or fine-tuning (no LoRA_type); only LoRA is trained here"
    for name, problem in _OTHER_MODELS.items():
        if reader.read(name, False, to_switch):
            return f"{name} = true: {problem}"
    lora_type = reader.read("LoRA_type")
    if lora_type not in keys.LORA_TYPES:
        return f'LoRA_type = "{lora_type}": not supported; choose one of {", ".join(keys.LORA_TYPES)}'
    return ""


def _read_family(reader: KeyReader) -> None:
    switches = {"sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "sd3"}
    switches["lumina_checkbox"] = "lumina2"
    chosen = [family for name, family in switches.items() if reader.read(name, False, to_switch)]
    is_v2 = reader.read("v2", False, to_switch)
    reader.result.family = chosen[0] if chosen else "sd2" if is_v2 else "sd1"
    if reader.read("model_type") == "chroma" and reader.result.family == "flux":
        reader.result.family = "chroma"
    if is_v2 and not chosen:
        reader.result.set_option("v2", True)


def _read_former_names(reader: KeyReader) -> None:
    weights = reader.read("lora_network_weights", None, to_text)
    if "network_weights" not in reader:
        reader.result.set_option("network_weights", weights)
    for unit in ("steps", "epochs"):
        for name in (f"save_last_n_{unit}", f"save_last_n_{unit}_state"):
            needed = f"save_every_n_{unit}" if name.endswith(unit) else "save_state"
            if name in reader.result.options and not reader.result.options.get(needed):
                del reader.result.options[name]
                reader.list_harmless(name, f"no effect without {needed}, there either")


def _read_model_keys(reader: KeyReader) -> None:
    family = reader.result.family
    read_keys(reader, keys.FLOW_KEYS_BY_FAMILY.get(family, {}))
    options = reader.result.options
    if family in ("flux", "chroma"):
        for option in ("clip_l", "t5xxl") if family == "flux" else ("t5xxl",):
            if option not in options:  # names of earlier versions of the GUI
                reader.take(option, f"flux1_{option}", convert=to_text)
        if family == "chroma":  # sd-scripts requires it, as masked padding is how Chroma was trained
            reader.read_keys.update(("apply_t5_attn_mask", "guidance_scale", "clip_l", "flux1_clip_l"))
    if family in ("flux", "chroma", "lumina2"):
        key, default = "model_prediction_type", "sigma_scaled"
        if family == "lumina2":
            key, default = f"lumina_{key}", "raw"
        prediction = reader.read(key, default)
        if prediction != "raw":
            reason = "the loss is computed on the raw prediction, as with raw; other timesteps weigh more there"
            reader.list_change(key, reason, prediction)
        if options.get("timestep_sampling", "sigma") not in ("sigma", "shift"):
            options.pop("discrete_flow_shift", None)
            reader.list_harmless(
                "lumina_discrete_flow_shift" if family == "lumina2" else "discrete_flow_shift",
                "sd-scripts uses it for sigma and shift only, too",
            )
    if options.get("timestep_sampling") == "nextdit_shift":  # uniform, with the shift of the model's pipeline
        options["timestep_sampling"] = "sigma"
        options.pop("discrete_flow_shift", None)
    if family == "lumina2":
        reason = "the system prompt of the model's pipeline stands before every caption here"
        reader.list_change("lumina_system_prompt", reason, reader.read("lumina_system_prompt", ""))
    if family == "sd3":
        options |= {"timestep_sampling": "sigma", "discrete_flow_shift": 1.0}
    for suffix in ("", "_to_disk"):
        prefix = {"flux": "flux1", "chroma": "flux1", "lumina2": "lumina"}.get(family, family)
        name = f"{prefix}_cache_text_encoder_outputs{suffix}"
        if reader.read(name, False, to_switch):
            reader.result.set_option(f"cache_text_encoder_outputs{suffix}", True)


def _read_precision(reader: KeyReader) -> None:
    is_flux = reader.result.family in ("flux", "chroma")
    if reader.read("fp8_base", False, to_switch) or (is_flux and reader.read("fp8_base_unet", False, to_switch)):
        reader.result.set_option("quantize_base", "fp8")
    attention = reader.read("xformers")
    if attention in (True, "xformers"):
        reader.list_harmless("xformers", "only speed; attn_mode = 'xformers' uses it here, too")
    file_format = reader.read("save_model_as", "safetensors")
    if file_format not in ("safetensors", ""):
        reader.list_harmless("save_model_as", "LoRA files are always safetensors")
    backend = reader.read("dynamo_backend", "no", to_text)
    names = {"dynamo_mode": "dynamo_mode", "dynamo_use_fullgraph": "dynamo_fullgraph"}
    values = {option: reader.read(key) for key, option in names.items()}
    is_dynamic = reader.read("dynamo_use_dynamic", False, to_switch)
    if backend not in (None, "no"):
        reader.result.options |= {"torch_compile": True, "dynamo_backend": backend}
        reader.result.options |= {option: value for option, value in values.items() if value not in (None, "", False)}
        if is_dynamic:
            reader.result.set_option("compile_dynamic", "true")


def _read_optimizer(reader: KeyReader) -> None:
    is_8bit = reader.read("use_8bit_adam", False, to_switch)
    reader.take("optimizer_type", "optimizer", "AdamW8bit" if is_8bit else "AdamW", to_text)
    arguments = str(reader.read("optimizer_args", "")).replace('"', "").split()
    if arguments:
        reader.result.set_option("optimizer_args", arguments)


def _read_schedule(reader: KeyReader) -> None:
    result = reader.result
    scheduler = reader.read("lr_scheduler", "cosine", to_text)
    warmup = _read_warmup(reader)
    class_name = reader.read("lr_scheduler_type", convert=to_text)
    arguments = str(reader.read("lr_scheduler_args", "")).replace('"', "").split()
    epochs = reader.table.get("epoch", 1)
    cycles = reader.read("lr_scheduler_num_cycles", 1, lambda value: to_integer(epochs if value == "" else value))
    power = reader.read("lr_scheduler_power", 1.0, lambda value: 1.0 if value == "" else to_number(value)) or 1.0
    if class_name:
        result.options |= {"lr_scheduler_type": class_name}
        result.set_option("lr_scheduler_args", arguments or None)
        warmup = None
    else:
        result.set_option("lr_scheduler", scheduler)
        if arguments:
            reader.list_harmless("lr_scheduler_args", "no effect without lr_scheduler_type")
    if scheduler in ("constant", "adafactor") and warmup and not class_name:
        result.list_harmless("lr_warmup", warmup, f"lr_scheduler {scheduler} has no warmup, there either")
    elif warmup:
        result.set_option("lr_warmup_steps", warmup)
    if scheduler == "cosine_with_restarts" and cycles > 1:
        result.set_option("lr_scheduler_num_cycles", cycles)
    if scheduler == "polynomial" and power != 1:
        result.set_option("lr_scheduler_power", power)


def _read_warmup(reader: KeyReader) -> float | str | None:
    """Read the length of the warmup: steps, or else a percentage of the run."""
    steps = reader.read("lr_warmup_steps", None, to_positive_integer)
    percentage = reader.read("lr_warmup", 10, to_positive_number)
    return steps or (f"{percentage:g}%" if percentage else None)


def _read_objective(reader: KeyReader) -> None:
    result, is_flow = reader.result, reader.result.family in FLOW_FAMILIES
    if is_flow:
        names = [*keys.DIFFUSION_KEYS, "noise_offset", "multires_noise_iterations"]
        for name in names:
            if reader.read(name) and not is_among(reader.read(name), (0, False)):
                reader.list_harmless(name, f"sd-scripts ignores it for {result.family}, too")
    else:
        read_keys(reader, keys.DIFFUSION_KEYS)
    _read_noise(reader, is_flow)
    if result.options.get("loss_type", "l2") in ("huber", "smooth_l1"):
        reader.take("huber_schedule", "huber_schedule", "snr", to_text)
        reader.take("huber_c", "huber_c", 0.1, to_number)
        reader.take("huber_scale", "huber_scale", 1.0, to_number)
    gamma = reader.read("ip_noise_gamma", None, to_positive_number)
    is_random = reader.read("ip_noise_gamma_random_strength", False, to_switch)
    if gamma and result.family == "sd3":
        reader.list_harmless("ip_noise_gamma", "sd-scripts ignores it for sd3, too")
    elif gamma:
        result.set_option("ip_noise_gamma", gamma)
        result.set_option("ip_noise_gamma_random_strength", is_random or None)
    low = reader.read("min_timestep", None, to_positive_integer)
    high = reader.read("max_timestep", 1000, to_positive_integer)
    if result.family in ("flux", "chroma", "lumina2") and (low or high not in (None, 1000)):
        reason = f"sd-scripts ignores them for {result.family}, too"
        result.list_harmless("min_timestep, max_timestep", [low, high], reason)
    elif result.family not in ("flux", "chroma", "lumina2"):
        result.set_option("min_timestep", low)
        result.set_option("max_timestep", None if high == 1000 else high)
    clip_skip = reader.read("clip_skip", 1, to_positive_integer)
    if clip_skip and clip_skip > 1:
        if result.family in ("sd1", "sd2"):
            result.set_option("clip_skip", clip_skip)
        else:
            reader.list_harmless("clip_skip", f"sd-scripts ignores it for {result.family}, too")
    length = reader.read("max_token_length", 75, lambda value: to_integer(value or 75))
    if length != 75 and not is_flow:
        result.set_option("max_token_length", length)


def _read_noise(reader: KeyReader, is_flow: bool) -> None:
    """Read noise offset or multires noise, as ``noise_offset_type`` says."""
    result, kind = reader.result, reader.read("noise_offset_type", "Original")
    offset = reader.read("noise_offset", None, to_positive_number)
    adaptive = reader.read("adaptive_noise_scale", None, lambda value: to_number(value or 0) or None)
    is_random = reader.read("noise_offset_random_strength", False, to_switch)
    iterations = reader.read("multires_noise_iterations", None, to_positive_integer)
    discount = reader.read("multires_noise_discount", 0.3, to_positive_number)
    if is_flow:
        return
    if kind == "Original" and offset:
        result.set_option("noise_offset", offset)
        result.set_option("adaptive_noise_scale", adaptive)
        result.set_option("noise_offset_random_strength", is_random or None)
    elif kind == "Multires" and iterations:
        result.set_option("multires_noise_iterations", iterations)
        result.set_option("multires_noise_discount", discount)


def _read_extra_flags(reader: KeyReader) -> None:
    """The flags of ``additional_parameters``, which override everything else."""
    words = shlex.split(str(reader.read("additional_parameters", "")))
    if not words:
        return
    options = reader.result.options
    alone, together = parse_config(words), parse_config([*_format_flags(options), *words])
    values = flatten_config(together.config)
    for name in alone.locations.keys() | {place.flag.removeprefix("--") for place, _ in alone.unused}:
        if name in together.locations:
            value = values[name]
            plain = isinstance(value, (bool, int, float, str, tuple))
            options[name] = list(value) if isinstance(value, tuple) else value if plain else str(value)
    for place, reason in together.unused:
        flag = place.flag
        if flag in words or any(word.startswith(f"{flag}=") for word in words):
            reader.result.list_harmless("additional_parameters", flag, reason or "no effect on the result")
    for problem in alone.problems:
        if problem in together.problems and problem != MISSING_DATASET:
            reader.list_change("additional_parameters", str(problem))


def _format_flags(options: dict[str, Any]) -> list[str]:
    flags = list[str]()
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _drop_overridden(result: ImportedConfig) -> None:
    """Drop options that have no effect beside the others, as their facts say; sd-scripts ignores them, too."""
    options, parsed = result.options, parse_config(_format_flags(result.options))
    dropped = {place.flag.removeprefix("--").removeprefix("no-"): reason for place, reason in parsed.unused}
    if "lr_scheduler_type" in options or is_self_tuning_adafactor(parsed.config.optim):
        dropped["lr_warmup_steps"] = "the schedule has no warmup"
    for name, reason in dropped.items():
        if name in options:
            result.list_harmless(name, options.pop(name), f"{reason}, as in sd-scripts")


def _list_unused(reader: KeyReader) -> None:
    """List keys for other models and LoRA types in one line each group."""
    groups = [
        [name for name in reader.table if name.startswith(keys.OTHER_MODEL_PREFIXES)],
        [*keys.TYPE_KEYS, *keys.MODEL_KEYS],
        ["huber_schedule", "huber_c", "huber_scale", "huggingface_path_in_repo", "huggingface_repo_visibility"],
    ]
    for group in groups:
        unused = [name for name in dict.fromkeys(group) if name in reader.table and name not in reader.read_keys]
        reader.read_keys.update(unused)
        unset = ("", 0, 1, -1, False, None, 0.1, "snr", "full")
        shown = [
            name
            for name in unused
            if not is_among(reader.table[name], (*unset, True) if name == "train_on_input" else unset)
        ]
        if shown:
            names = f"{', '.join(shown[:4])}{f' and {len(shown) - 4} more' if len(shown) > 4 else ''}"
            reader.result.list_harmless(names, [reader.table[name] for name in shown], keys.NOT_PASSED_ON)
