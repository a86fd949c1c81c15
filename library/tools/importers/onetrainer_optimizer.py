"""The optimizer, learning rate and schedule of a OneTrainer configuration."""

import math
from typing import Any

from .equivalents import format_argument, set_optimizer
from .imported import KeyReader, is_among, to_number
from .keys import onetrainer as keys


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
    set_optimizer(result, "optimizer.optimizer", name, keys.OPTIMIZERS, _read_arguments(table, name.lower()))
    _list_other_arguments(table, config.table.get("lora_weight_dtype") == "BFLOAT_16")
    result.set_option("max_grad_norm", config.read("clip_grad_norm", 0.0 if "clip_grad_norm" in config.table else 1.0))
    _read_schedule(config, "schedule_free" in name.lower())


def _read_arguments(table: KeyReader, name: str) -> dict[str, Any]:
    """Arguments that the optimizer has, by our names; those at its own default are left out."""
    given = {key: table.read(key) for key in keys.OPTIMIZER_ARGUMENTS.get(name, "eps weight_decay").split()}
    given = {
        key: value for key, value in given.items() if value is not None and (value is not False or key == "decouple")
    }
    if str(given.get("growth_rate", "inf")).lower() in ("inf", "infinity"):
        given.pop("growth_rate", None)
    defaults = keys.OPTIMIZER_BETAS.get(name, (0.9, 0.999))
    betas = [table.read(f"beta{number}") for number in range(1, len(defaults) + 1)]
    if any(beta is not None for beta in betas):
        given["betas"] = tuple(default if beta is None else beta for beta, default in zip(betas, defaults, strict=True))
    eps = {"adafactor": (1e-30, 1e-3), "came": (1e-30, 1e-16)}.get(name)
    if eps:
        pair = tuple(table.read(key, default) for key, default in zip(("eps", "eps2"), eps, strict=True))
        given |= {} if pair == eps else {"eps": pair} if name == "adafactor" else {"eps1": pair[0], "eps2": pair[1]}
    return given


def _list_other_arguments(table: KeyReader, has_bf16_weights: bool) -> None:
    if table.read("stochastic_rounding") and has_bf16_weights:
        table.list_change("stochastic_rounding", "weights in bf16 are rounded to the nearest value here")
    for key, value in table.table.items():
        if key in table.read_keys or is_among(value, (None, False, 0, keys.NEUTRAL_ARGUMENTS.get(key))):
            continue
        if key in keys.OPTIMIZER_SPEED:
            table.list_harmless(key, "speed or memory of the optimizer")
        else:
            table.list_change(key, "not taken over; add it to optimizer_args if the optimizer has such an argument")
    table.read_keys.update(table.table)


def _read_schedule(config: KeyReader, is_schedule_free: bool) -> None:
    result, accumulation = config.result, config.table.get("gradient_accumulation_steps") or 1
    name = config.read("learning_rate_scheduler", "CONSTANT")
    warmup = config.read("learning_rate_warmup_steps", 200.0, to_number)
    ratio = config.read("learning_rate_min_factor", 0.0, to_number)
    cycles = config.read("learning_rate_cycles", 1.0, to_number)
    class_name, parameters = config.read("custom_learning_rate_scheduler"), config.read("scheduler_params", [])
    if is_schedule_free or name == "CONSTANT":
        result.options["lr_scheduler"] = "constant_with_warmup" if warmup > 0 and not is_schedule_free else "constant"
        if is_schedule_free and warmup >= 1:  # of the optimizer itself
            words = result.options.get("optimizer_args", [])
            result.options["optimizer_args"] = [*words, f"warmup_steps={int(warmup)}"]
    elif name == "COSINE" and ratio > 0:
        result.options |= {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": ratio}
    elif name in ("LINEAR", "COSINE", "REX"):
        result.options["lr_scheduler"] = name.lower()
        if name == "REX":
            result.options["lr_scheduler_args"] = ["rex_alpha=0.1", "rex_beta=0.9"]
            result.set_option("lr_scheduler_min_lr_ratio", ratio or None)
            if ratio > 0 and warmup > 0:
                config.list_change("learning_rate_warmup_steps", "begins at the minimum here, at 0 there", warmup)
        elif ratio > 0:
            config.list_change("learning_rate_min_factor", f"{name.lower()} ends at 0 here; use COSINE")
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
