"""Import a kohya_ss GUI file: what the GUI would pass to sd-scripts, whose option names are ours."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import parse_config
from ...config.network_args import LYCORIS_PRESETS, TUCKER_ARGS, TUCKER_TYPES
from ...config.options import flatten_config, iter_options
from ...config.schema import RunConfig
from ...config.unused_options import is_self_tuning_adafactor
from ...config.validate import MISSING_DATASET
from ...models.detect import get_size_multiple
from ...models.families import FAMILY_FACTS
from ...problems import Problem
from .equivalents import FLOW_FAMILIES, FULL_LOKR_DIM
from .imported import (
    OUR_DEFAULTS,
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
        options["system_prompt"] = reader.read("lumina_system_prompt", "")
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


_SECRETS = {"wandb_api_key": "run wandb login", "huggingface_token": "run hf auth login"}
_SAMPLERS = {option.name: option.value_type for option in iter_options(RunConfig)}["sample_sampler"]


def read_keys(reader: KeyReader, table: Mapping[str, keys.GuiKey], target: dict[str, Any] | None = None) -> None:
    for name, key in table.items():
        value = _read_key(reader, name, key)
        if value is None:
            continue
        if target is None:
            reader.result.set_option(key.option, value, name in reader)
        elif value != OUR_DEFAULTS.get(key.option):
            target[key.option] = value


def _read_key(reader: KeyReader, name: str, key: keys.GuiKey) -> Any:
    """Return what sd-scripts would get: the GUI drops 0, false and empty values."""
    text = reader.table.get(name)
    value = reader.read(name, key.gui_default, None if text == "" else key.convert)
    return key.script_default if value in ("", 0, None) else value  # False equals 0


def read_dataset(reader: KeyReader) -> None:
    result = reader.result
    read_keys(reader, keys.DATASET_KEYS, result.general)
    step, multiple = result.general.get("bucket_reso_steps", 0), get_size_multiple(result.family)
    if 0 < step < multiple and multiple % step == 0:
        result.general["bucket_reso_steps"] = multiple
        reader.list_change("bucket_reso_steps", f"finer than the model can train; buckets are multiples of {multiple}")
    config = reader.read("dataset_config", None, to_text)
    folder, reg_folder = (reader.read(name, None, to_text) for name in ("train_data_dir", "reg_data_dir"))
    if config:
        renamed = {"batch_size": "train_batch_size"}
        result.options["dataset_config"] = config
        result.options |= {renamed.get(name, name): value for name, value in result.general.items()}
        result.general.clear()
    elif folder:
        subsets = [*list_repeat_folders(reader, "train_data_dir", folder)]
        if reg_folder:
            subsets += [table | {"is_reg": True} for table in list_repeat_folders(reader, "reg_data_dir", reg_folder)]
        result.datasets.append({"subsets": subsets})


def list_repeat_folders(reader: KeyReader, key: str, folder: str) -> list[dict[str, Any]]:
    """Return a subset for each subfolder ``REPEATS_NAME``, as sd-scripts reads a folder of images."""
    root = Path(folder).expanduser()
    folders = sorted(item for item in root.iterdir() if item.is_dir()) if root.is_dir() else []
    found = [(match, item) for item in folders if (match := re.fullmatch(r"(\d+)_(.+)", item.name))]
    if not found:
        where = "has no subfolders REPEATS_NAME" if root.is_dir() else "is not on this machine"
        reader.list_change(key, f"{where}; give each subfolder a [[datasets.subsets]] with image_dir and num_repeats")
        return [{"image_dir": folder}]
    return [
        {"image_dir": f"{folder.rstrip('/')}/{item.name}", "num_repeats": int(match[1]), "class_tokens": match[2]}
        for match, item in found
    ]


def read_length(reader: KeyReader) -> None:
    result = reader.result
    epochs = reader.read("max_train_epochs", None, to_positive_integer)
    steps = reader.read("max_train_steps", 1600, to_positive_integer)
    gui_epochs = reader.read("epoch", 1, to_integer)
    if epochs:
        result.options["max_train_epochs"] = epochs
    elif steps:
        result.options["max_train_steps"] = steps
        if "max_train_steps" not in reader and gui_epochs > 1:
            reason = (
                "the GUI trains 1600 steps without max_train_steps; set max_train_epochs instead to train by epochs"
            )
            reader.list_change("epoch", reason)
    elif "dataset_config" in result.options:
        result.options["max_train_steps"] = 1600  # sd-scripts' default
    else:
        result.options["max_train_epochs"] = max(1, gui_epochs)


def read_previews_and_logs(reader: KeyReader) -> None:
    result = reader.result
    prompts = [line for line in str(reader.read("sample_prompts", "")).splitlines() if line.strip()]
    intervals = {
        name: reader.read(name, None, to_positive_integer) for name in ("sample_every_n_steps", "sample_every_n_epochs")
    }
    sampler = reader.read("sample_sampler", "euler_a", to_text)
    if prompts and any(intervals.values()):
        result.prompts = [{"line": line} for line in prompts]
        for name, value in intervals.items():
            result.set_option(name, value)
        if result.family not in FLOW_FAMILIES and sampler in _SAMPLERS:
            result.set_option("sample_sampler", sampler)
        elif result.family not in FLOW_FAMILIES:
            reader.list_harmless("sample_sampler", "not available for previews; the default sampler is used")
    for name, command in _SECRETS.items():
        if reader.read(name):
            result.list_harmless(name, "***", f"keys are not stored in files; {command}")
    if reader.read("use_wandb", False, to_switch):
        result.set_option("log_with", "wandb")
    tracker = result.options.get("log_with")
    for name in ("wandb_run_name", "log_tracker_name", "log_tracker_config", "log_config"):
        value = reader.read(name)
        if value and (tracker in ("wandb", "all") or (tracker and name != "wandb_run_name")):
            result.set_option(name, value)
    if "huggingface_repo_id" in result.options:
        for name in ("huggingface_path_in_repo", "huggingface_repo_visibility"):
            result.set_option(name, reader.read(name, None, to_text))


def read_network(reader: KeyReader) -> None:
    result, lora_type = reader.result, reader.read("LoRA_type")
    module, algorithm = keys.LORA_TYPES[lora_type]
    if module == "networks.lora" and result.family == "sd3":
        module = "networks.lora_sd3"
    result.set_option("network_module", module)
    if algorithm:
        result.add_network_arg("algo", algorithm)
        _read_lycoris_args(reader, algorithm)
    elif lora_type in ("Kohya LoHa", "Kohya LoKr"):
        _read_native_loha_args(reader, lora_type)
    elif lora_type != "Flux1 OFT":
        if lora_type == "Kohya LoCon":
            _read_conv_args(reader)
        names = {"Flux1": keys.FLUX_ARGS, "Lumina": keys.DROPOUTS}.get(lora_type, keys.NATIVE_ARGS)
        for name in names:
            value = reader.read(name)
            if not value or is_among(value, (0,)):
                continue
            if result.family == "chroma" and name.endswith(("mod_dim", "in_dims")):
                reader.list_change(name, "Chroma has no such layers, or they get no adapter here; remove it")
            else:
                result.add_network_arg(name, str(value).replace(" ", ""))
        _read_flux_switches(reader, lora_type)
    for name in ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"):
        if ratio := reader.read(name, None, to_positive_number):
            result.add_network_arg(name, ratio)
    for name, others in (("network_dropout", ()), ("scale_weight_norms", ("loha", "lokr"))):
        value, kind = reader.read(name, None, to_positive_number), algorithm or module.removeprefix("networks.")
        if value and kind in ("loha", "lokr", "diag-oft", "boft", "ia3") and kind not in others:
            reader.list_change(name, f"not for {lora_type} here; remove it")
        else:
            result.set_option(name, value)
    if algorithm == "lokr" and result.options.get("network_dim", 0) >= FULL_LOKR_DIM:
        result.options["network_alpha"] = float(result.options["network_dim"])  # full matrices have no scale
    if module == "networks.oft_flux" or algorithm in ("diag-oft", "boft"):
        result.options.pop("network_alpha", None)  # OFT and BOFT have no alpha


def _read_conv_args(reader: KeyReader) -> None:
    reader.result.add_network_arg("conv_dim", reader.read("conv_dim", 1, to_integer))
    reader.result.add_network_arg("conv_alpha", reader.read("conv_alpha", 1, to_number))


def _read_lycoris_args(reader: KeyReader, algorithm: str) -> None:
    if reader.result.family not in FLOW_FAMILIES and algorithm not in ("diag-oft", "boft"):
        _read_conv_args(reader)
    elif "conv_dim" in reader and reader.result.family not in FLOW_FAMILIES:
        reader.list_change("conv_dim", "OFT of convolutions is not supported; only linear layers are trained")
    preset = reader.read("LyCORIS_preset", "full")
    if preset in LYCORIS_PRESETS and reader.result.family not in FLOW_FAMILIES:
        if preset != "full":
            reader.result.add_network_arg("preset", preset)
    elif preset != "full":
        reason = "only the presets of LyCORIS for U-Nets are known; all layers of the blocks are trained"
        reader.list_change("LyCORIS_preset", f"{reason}, see docs/adapters.md", preset)
    if algorithm == "lokr":
        reader.result.add_network_arg("factor", reader.read("factor", -1, to_integer))
        if reader.read("decompose_both", False, to_switch):
            reader.result.add_network_arg("decompose_both", True)
    has_lora_args = algorithm == "locon"
    if reader.read("dora_wd", False, to_switch):
        if has_lora_args:
            reader.result.add_network_arg("dora_wd", True)
        else:
            reader.list_change(
                "dora_wd", f"weight decomposition of {algorithm} is not supported; use LoCon with dora_wd"
            )
    _read_dropouts(reader, has_lora_args, algorithm)
    for name in keys.LYCORIS_SWITCHES:
        if not reader.read(name) or is_among(reader.read(name), (0, False)):
            continue
        if name in TUCKER_ARGS and algorithm in TUCKER_TYPES:
            reader.result.add_network_arg(name, True)
        else:
            reader.list_change(name, "not supported by the adapter types here; remove it")


def _read_native_loha_args(reader: KeyReader, lora_type: str) -> None:
    if reader.read("conv_dim", 1, to_integer) > 0:
        _read_conv_args(reader)
    if reader.read("use_tucker", False, to_switch):
        reader.result.add_network_arg("use_tucker", True)
    factor = reader.read("factor", -1, to_integer)
    if lora_type == "Kohya LoKr" and factor != -1:
        reader.result.add_network_arg("factor", factor)
    _read_dropouts(reader, False, lora_type)


def _read_dropouts(reader: KeyReader, is_supported: bool, adapter: str) -> None:
    for name in ("rank_dropout", "module_dropout"):
        value = reader.read(name, None, to_positive_number)
        if value and is_supported:
            reader.result.add_network_arg(name, value)
        elif value:
            reader.list_change(name, f"only LoRA has it here, not {adapter}; remove it")


def _read_flux_switches(reader: KeyReader, lora_type: str) -> None:
    if lora_type != "Flux1":
        return
    if reader.read("split_mode", False, to_switch):
        reader.result.add_network_arg("train_blocks", "single")
    elif reader.read("train_blocks", "all") != "all":
        reader.list_harmless("train_blocks", "the GUI does not pass it on without split_mode")
    for name, reason in (
        ("split_qkv", "q, k and v share one down matrix here; their ranks add up to the same size"),
        ("train_lora_ggpo", "weight perturbation (GGPO) is not supported; remove it"),
    ):
        if reader.read(name, False, to_switch):
            reader.list_change(name, reason)
    if reader.read("train_t5xxl", False, to_switch) and reader.result.family == "chroma":
        reader.list_change("train_t5xxl", "the text encoder of Chroma cannot be trained here; remove it")
    elif reader.read("train_t5xxl", False, to_switch):
        reader.result.add_network_arg("train_t5xxl", True)


def read_trained_components(reader: KeyReader) -> None:
    result = reader.result
    unet_lr = reader.read("unet_lr", 1e-4, lambda value: to_number(value or 0)) or 0.0
    text_lr = reader.read("text_encoder_lr", 1e-4, lambda value: to_number(value or 0)) or 0.0
    t5_lr = reader.read("t5xxl_lr", 0.0, lambda value: to_number(value or 0))
    if unet_lr:
        result.set_option("unet_lr", unet_lr)
    if text_lr == 0 and unet_lr != 0:
        return  # the denoiser only
    if result.family == "lumina2":
        reader.list_change("text_encoder_lr", "the text encoder is not trained here; set it to 0", text_lr)
    if not FAMILY_FACTS[result.family].lora.text_encoders:
        return
    if unet_lr == 0 and text_lr != 0:
        result.options["network_train_text_encoder_only"] = True
    else:
        result.options["network_train_unet_only"] = False
    if text_lr:
        has_t5 = t5_lr and "train_t5xxl=True" in result.options.get("network_args", ())
        result.options["text_encoder_lr"] = [text_lr, t5_lr] if has_t5 else [text_lr]
