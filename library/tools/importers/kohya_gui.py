"""Import a kohya_ss GUI file: what the GUI would pass to sd-scripts, whose option names are ours."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config import parse_config
from ...config.kohya_compat import KOHYA_OPTIONS, OtherScriptOption
from ...config.network_args import (
    LYCORIS_ALGORITHMS,
    LYCORIS_PRESETS,
    NETWORK_MODULES,
    RANKED_TYPES,
    TUCKER_ARGS,
    TUCKER_TYPES,
)
from ...config.options import iter_options
from ...config.schema import RunConfig
from ...config.schema_optim import SCHEDULERS_WITH_ARGS
from ...config.unused_options import is_self_tuning_adafactor
from ...models.detect import get_size_multiple
from ...models.families import FAMILY_FACTS
from ...models.trainer_names import choose_family, find_families, list_names, list_trained_families
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
from .script_options import ScriptFlag, build_command_line, build_flag, split_command_line, take_script_flags

PROGRAM = "kohya_ss"


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
        return (
            "a file for textual inversion; only those for LoRA are imported (docs/textual_inversion.md has the options)"
        )
    if "LoRA_type" not in reader:
        return "a file for DreamBooth or fine-tuning (no LoRA_type); only LoRA is trained here"
    lora_type, supported = reader.read("LoRA_type"), _list_lora_types()
    if lora_type not in supported:
        return f'LoRA_type = "{lora_type}": not supported; choose one of {", ".join(supported)}'
    return ""


def _list_lora_types() -> list[str]:
    """List the LoRA types of the GUI whose network module and algorithm are here."""
    return [
        name
        for name, (module, algorithm) in keys.LORA_TYPES.items()
        if module in NETWORK_MODULES and (not algorithm or algorithm in LYCORIS_ALGORITHMS)
    ]


def _read_family(reader: KeyReader) -> None:
    """Read the switches that choose the model; ``v2`` counts where no other one is on."""
    switches = dict.fromkeys(
        name for family in list_trained_families("kohya_gui") for name in list_names("kohya_gui", family)
    )
    chosen = [name for name in switches if name and reader.read(name, False, to_switch)]
    switch = next((name for name in chosen if name != "v2"), chosen[0] if chosen else "")
    reader.result.family = choose_family(find_families("kohya_gui", switch), str(reader.read("model_type", "")))
    if switch == "v2":
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
    family, options = reader.result.family, reader.result.options
    if any(key.endswith("_vae") for key in keys.MODEL_KEYS.get(family, {})):
        options.pop("vae", None)  # a key of its own
    options["objective_defaults"] = "kohya"
    if family == "chroma":
        reader.read_keys.update(("apply_t5_attn_mask", "guidance_scale", "clip_l", "flux1_clip_l"))
    take_script_flags(reader.result, list(_build_model_flags(reader)))
    for option in {"flux": ("clip_l", "t5xxl"), "chroma": ("t5xxl",)}.get(family, ()):
        if option not in options:  # names of earlier versions of the GUI
            reader.take(option, f"flux1_{option}", convert=to_text)
    if family == "sd3":
        options |= {"timestep_sampling": "sigma", "discrete_flow_shift": 1.0, "model_prediction_type": "x0"}
    for suffix in ("", "_to_disk"):
        prefix = {"flux": "flux1", "chroma": "flux1", "lumina2": "lumina"}.get(family, family)
        name = f"{prefix}_cache_text_encoder_outputs{suffix}"
        if reader.read(name, False, to_switch):
            reader.result.set_option(f"cache_text_encoder_outputs{suffix}", True)


def _build_model_flags(reader: KeyReader) -> Iterator[ScriptFlag]:
    """Build the flags that the GUI passes on for the model; 0, false and empty values leave the script's default."""
    table = dict(keys.MODEL_KEYS.get(reader.result.family, {}))
    if "anima_compile" in table and reader.table.get("anima_compile"):
        table |= keys.COMPILE_KEYS
    for key, default in table.items():
        option = re.sub(f"^({'|'.join(keys.OTHER_MODEL_PREFIXES)})", "", key)
        option = keys.SCRIPT_NAMES.get(option, option)
        if isinstance(KOHYA_OPTIONS.get(option), OtherScriptOption):
            continue  # its rule says what happens here
        unset = keys.SCRIPT_DEFAULTS.get(key, default) if key in reader else default
        value = reader.read(key, default, _CONVERTERS[type(default)]) or unset
        if value:
            yield build_flag(key, option, value, is_default=not reader.table.get(key))


_CONVERTERS: Mapping[type, Any] = {str: to_text, bool: to_switch, int: to_integer, float: to_number}


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
        if arguments and scheduler in SCHEDULERS_WITH_ARGS:
            result.set_option("lr_scheduler_args", arguments)
        elif arguments:
            reader.list_harmless("lr_scheduler_args", f"lr_scheduler {scheduler} takes none, there either")
    if scheduler in ("constant", "adafactor") and warmup and not class_name:
        result.list_harmless("lr_warmup", warmup, f"lr_scheduler {scheduler} has no warmup, there either")
    elif warmup:
        result.set_option("lr_warmup_steps", warmup)
    if scheduler in ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay") and cycles > 1:
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
    is_ignored = is_flow and result.family != "sd3"
    if is_ignored and (low or high not in (None, 1000)):
        reason = f"sd-scripts ignores them for {result.family}, too"
        result.list_harmless("min_timestep, max_timestep", [low, high], reason)
    elif not is_ignored:
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
    """Read the flags of ``additional_parameters``, which override everything else."""
    words = shlex.split(str(reader.read("additional_parameters", "")))
    if words:
        take_script_flags(reader.result, split_command_line("additional_parameters", words))


def _drop_overridden(result: ImportedConfig) -> None:
    """Drop options that have no effect beside the others, as their facts say; sd-scripts ignores them, too."""
    options, parsed = result.options, parse_config(build_command_line(result.options))
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
        [*keys.TYPE_KEYS, *keys.UNUSED_MODEL_KEYS],
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
        own: dict[str, Sequence[str]] = {name: keys.DROPOUTS for name in ("Lumina", "Anima", "HunyuanImage-2.1")}
        own["Flux1"] = keys.FLUX_ARGS
        for name in own.get(lora_type, keys.NATIVE_ARGS):
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
    rates = {name: reader.read(name, None, to_positive_number) for name in ("network_dropout", "scale_weight_norms")}
    take_script_flags(result, [build_flag(name, name, value) for name, value in rates.items() if value])
    if algorithm == "lokr" and result.options.get("network_dim", 0) >= FULL_LOKR_DIM:
        result.options["network_alpha"] = float(result.options["network_dim"])  # full matrices have no scale
    if module == "networks.oft_flux" or algorithm in ("diag-oft", "boft"):
        result.options.pop("network_alpha", None)  # OFT and BOFT have no alpha


def _read_conv_args(reader: KeyReader) -> None:
    reader.result.add_network_arg("conv_dim", reader.read("conv_dim", 1, to_integer))
    reader.result.add_network_arg("conv_alpha", reader.read("conv_alpha", 1, to_number))


def _read_lycoris_args(reader: KeyReader, algorithm: str) -> None:
    if reader.result.family not in FLOW_FAMILIES and LYCORIS_ALGORITHMS[algorithm] in RANKED_TYPES:
        _read_conv_args(reader)
    elif "conv_dim" in reader and reader.result.family not in FLOW_FAMILIES:
        reader.list_change("conv_dim", f"only linear layers are trained with {algorithm} here")
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
    if reader.read("conv_dim", 1, to_integer) > 0 and reader.result.family not in FLOW_FAMILIES:
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
    if result.family in ("lumina2", "anima"):
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
