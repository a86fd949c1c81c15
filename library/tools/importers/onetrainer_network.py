"""The adapter and the optimizer of a OneTrainer configuration."""

import math
from collections.abc import Mapping
from typing import Any

from .equivalents import (
    FULL_LOKR_DIM,
    UNET_FAMILIES,
    format_argument,
    keep_only_layers,
    match_containing,
    set_optimizer,
)
from .imported import KeyReader, to_integer, to_number, to_positive_number, to_switch, to_text
from .keys import onetrainer as keys

PROGRAM = "OneTrainer"
FULL_MATRIX_DIM = 9_999_999


def read_network(config: KeyReader) -> None:
    """Adapter type, rank, alpha and layers."""
    result, kind = config.result, config.read("peft_type", "LORA")
    modules = {"LORA": "networks.lora", "LOHA": "networks.loha", "LOKR": "networks.lokr"}
    result.set_option("network_module", modules[kind])
    rank, alpha = config.read("lora_rank", 16, to_integer), config.read("lora_alpha", 1.0, to_number)
    if kind == "LOKR":
        rank, alpha = _read_lokr(config, alpha)
    result.options |= {"network_dim": rank, "network_alpha": alpha}
    is_decomposed = config.read("lora_decompose", False, to_switch)
    by_output = config.read("lora_decompose_output_axis", False, to_switch)
    config.read("lora_decompose_norm_epsilon")
    if is_decomposed and kind == "LORA":
        result.add_network_arg("use_dora", True)
        if not by_output:
            config.list_change(
                "lora_decompose_output_axis", "a magnitude for each output feature here, as in peft", by_output
            )
    dropout = config.read("dropout_probability", None, to_positive_number)
    if dropout and kind == "LORA" and not is_decomposed:
        result.set_option("network_dropout", dropout)
    elif dropout:
        config.list_change("dropout_probability", "only plain LoRA has it here; remove it")
    config.read_keys.update(key for key in config.table if key.startswith(("lokr_", "oft_")))
    _read_layers(config, rank, alpha)


def _read_lokr(config: KeyReader, alpha: float) -> tuple[int, float]:
    result, rank = config.result, config.read("lokr_dim", 16, to_integer)
    result.add_network_arg("factor", config.read("lokr_decompose_factor", -1, to_integer))
    if config.read("lokr_decompose_both", False, to_switch):
        result.add_network_arg("decompose_both", True)
    for name in ("lokr_use_tucker", "lokr_weight_decompose"):
        if config.read(name, False, to_switch):
            config.list_change(name, "not supported for LoKr here; remove it")
    if config.read("lokr_full_matrix", False, to_switch):
        rank = FULL_MATRIX_DIM
    return rank, float(rank) if rank >= FULL_LOKR_DIM else alpha


def _read_layers(config: KeyReader, rank: int, alpha: float) -> None:
    """Which layers of the denoiser are trained: a preset, or names that contain texts."""
    result, family = config.result, config.result.family
    name = config.read("layer_filter_preset", "full", to_text) or "full"
    text = config.read("layer_filter", "", to_text) or ""
    is_regex = config.read("layer_filter_regex", False, to_switch)
    presets = keys.LAYER_PRESETS["unet" if family in UNET_FAMILIES else family]
    if name in presets:
        contained, difference = presets[name]
        if contained:
            keep_only_layers(result, [match_containing(part) for part in contained])
        if difference:
            config.list_change("layer_filter_preset", difference, name)
    elif text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        patterns = [rf"(unet|transformer)\..*({part}).*" for part in parts]
        keep_only_layers(result, patterns if is_regex else [match_containing(part) for part in parts])
    elif family in UNET_FAMILIES:
        result.add_network_arg("conv_dim", rank)
        result.add_network_arg("conv_alpha", alpha)
        reason = "conv_in, conv_out and the layers of time and size embeddings get no adapter here"
        config.list_change("layer_filter_preset", reason, name)


def find_lr_factor(config: KeyReader) -> float:
    """The square root of the batch size, of the accumulation steps, or of both."""
    batch = config.table.get("batch_size") or 1
    accumulation = config.table.get("gradient_accumulation_steps") or 1
    scaler = str(config.read("learning_rate_scaler", "NONE"))
    scales = {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulation, "BOTH": batch * accumulation}
    return math.sqrt(scales.get(scaler.removeprefix("GLOBAL_"), 1))


def read_optimizer(config: KeyReader) -> None:
    """Optimizer, learning rate and its schedule."""
    result = config.result
    result.options["learning_rate"] = config.read("learning_rate", 3e-6, to_number) * find_lr_factor(config)
    if str(config.read("learning_rate_scaler", "NONE")).startswith("GLOBAL_"):
        config.list_change("learning_rate_scaler", "scaled for one GPU; multiply the rates by the root of their number")
    optimizer = config.read("optimizer", {})
    table = KeyReader(optimizer if isinstance(optimizer, dict) else {"optimizer": optimizer}, result, "optimizer.")
    name = str(table.read("optimizer", "ADAMW"))
    given: dict[str, Any] = {key: table.read(key) for key in keys.ARGUMENT_NAMES}
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    betas = [table.read(f"beta{number}") for number in (1, 2)]
    if name.lower() in ("adafactor",):
        given = _describe_adafactor(table, given, betas[0])
    elif any(beta is not None for beta in betas):
        defaults = (0.9, 0.99) if name in ("LION", "PRODIGY_PLUS_SCHEDULE_FREE") else (0.9, 0.999)
        given["betas"] = tuple(default if beta is None else beta for beta, default in zip(betas, defaults, strict=True))
    set_optimizer(result, "optimizer.optimizer", name, keys.OPTIMIZERS, _keep_accepted(name, given))
    for key, value in table.table.items():
        if key not in table.read_keys and key not in keys.OPTIMIZER_SPEED and value not in (None, False, 0, True):
            table.list_change(
                key, "an argument that is not taken over; add it to optimizer_args if the optimizer has it"
            )
    table.read_keys.update(table.table)
    result.set_option("max_grad_norm", config.read("clip_grad_norm", 0.0 if "clip_grad_norm" in config.table else 1.0))
    _read_schedule(config, "schedule_free" in name.lower())


def _keep_accepted(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as OneTrainer passes them on: an infinite growth rate is the default, amsgrad is torch's only."""
    dropped = {"growth_rate"} if given.get("growth_rate") in (None, "inf", float("inf")) else set()
    if not name.lower().startswith("adam"):
        dropped.add("amsgrad")
    if name.lower() in ("lion", "lion_8bit", "sgd"):
        dropped.add("eps")
    if not name.lower().startswith(("sgd", "dadapt", "schedule_free_sgd")):
        dropped |= {"momentum", "nesterov", "dampening"}
    if not name.lower().startswith(("prodigy", "dadapt")):
        dropped |= {"d0", "d_coef", "growth_rate", "decouple", "use_bias_correction", "safeguard_warmup"}
    if name.lower() != "adafactor":
        dropped |= {"relative_step", "scale_parameter", "warmup_init", "clip_threshold", "decay_rate"}
    return {key: value for key, value in given.items() if key not in dropped}


def _describe_adafactor(table: KeyReader, given: Mapping[str, Any], beta1: Any) -> dict[str, Any]:
    arguments = dict(given)
    eps2 = table.read("eps2")
    if "eps" in arguments or eps2 is not None:
        arguments["eps"] = (arguments.get("eps", 1e-30), 1e-3 if eps2 is None else eps2)
    if beta1 is not None:
        arguments["beta1"] = beta1
    return arguments


def _read_schedule(config: KeyReader, is_schedule_free: bool) -> None:
    result, accumulation = config.result, config.table.get("gradient_accumulation_steps") or 1
    name = config.read("learning_rate_scheduler", "CONSTANT")
    warmup = config.read("learning_rate_warmup_steps", 200.0, to_number)
    ratio = config.read("learning_rate_min_factor", 0.0, to_number)
    cycles = config.read("learning_rate_cycles", 1.0, to_number)
    class_name, parameters = config.read("custom_learning_rate_scheduler"), config.read("scheduler_params", [])
    if is_schedule_free or name == "CONSTANT":
        has_warmup = warmup > 0 and not is_schedule_free
        result.options["lr_scheduler"] = "constant_with_warmup" if has_warmup else "constant"
    elif name == "COSINE" and ratio > 0:
        result.options |= {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": ratio}
    elif name in ("LINEAR", "COSINE", "REX"):
        result.options["lr_scheduler"] = name.lower()
        if ratio > 0:
            config.list_change("learning_rate_min_factor", f"{name.lower()} ends at 0 here; use COSINE")
        if name == "REX":
            config.list_change("learning_rate_scheduler", "(1 - p) / (1 - p / 2) here, (1 - p) / (1 - 0.9 p) there")
    elif name in ("COSINE_WITH_HARD_RESTARTS", "COSINE_WITH_RESTARTS"):
        result.options["lr_scheduler"] = "cosine_with_restarts"
        result.set_option("lr_scheduler_num_cycles", max(1, round(cycles)))
        if name == "COSINE_WITH_RESTARTS" or ratio > 0 or cycles != round(cycles):
            config.list_change("learning_rate_scheduler", "starts again at the peak and ends at 0 here")
    elif name == "ADAFACTOR":
        result.options["lr_scheduler"] = "adafactor"
    elif name == "CUSTOM" and class_name:
        words = [f"{item['key']}={_fill(item['value'], config)}" for item in parameters or []]
        result.options |= {"lr_scheduler_type": class_name, "lr_scheduler_args": words}
        if warmup > 0:
            config.list_change("learning_rate_warmup_steps", "no warmup with a scheduler class here", warmup)
        return
    else:
        config.list_change("learning_rate_scheduler", "no such schedule here; constant is used")
    if warmup > 0 and not is_schedule_free and name != "ADAFACTOR":
        # above 1 micro-batches, else a ratio of the run
        result.options["lr_warmup_steps"] = int(warmup / accumulation) if warmup > 1 else f"{100 * warmup:g}%"


def _fill(value: Any, config: KeyReader) -> str:
    """Fill in what OneTrainer knows before training; steps are listed."""
    known = {"%LR%": config.result.options["learning_rate"], "%EPOCHS%": config.table.get("epochs", 100)}
    if str(value).startswith("%") and value not in known:
        config.list_change("scheduler_params", f"{value} is not known before the images are counted; set the number")
    return format_argument(known[value]) if value in known else str(value)
