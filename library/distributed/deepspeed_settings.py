"""What was asked of DeepSpeed, by our options, by the launcher, and by the user's own file for DeepSpeed; no torch."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config import RunConfig
from .world import World

DEEPSPEED_OPTIONS = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
)
"""Of accelerate; all but the path for the optimizer are ours as well."""


CONFIG_FILE_KEYS = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}
"""Where each stands in the part ``zero_optimization`` of DeepSpeed's file."""


LAUNCHER_VARIABLES = {
    **{f"ACCELERATE_DEEPSPEED_{name.upper()}": name for name in DEEPSPEED_OPTIONS},
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
"""Variables by which ``accelerate launch`` hands on its options, and what these are called."""


BATCH_SIZE_KEYS = ("train_micro_batch_size_per_gpu", "train_batch_size")


PRECISION_SECTIONS = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": None}
"""Parts of the file about precision, and the ``mixed_precision`` that each means; of the last its dtype says it."""


FORBIDDEN_SECTIONS = {
    "optimizer": "write --optimizer_type and --optimizer_args",
    "scheduler": "write --lr_scheduler",
    "data_efficiency": "the dataset file says what is trained on, and when",
    "curriculum_learning": "the dataset file says what is trained on, and when",
    "elasticity": "the global batch is what the options say",
    "compression_training": "adapters are written whole",
    "tensor_parallel": "take stage 3, or --tp_size without DeepSpeed",
    "sequence_parallel_size": "take --cp_size without DeepSpeed",
    "hybrid_engine": "previews are drawn by the model as it is trained",
    "communication_data_type": "gradients travel as they are",
}
"""Parts of the file that would take over what this program does itself."""


UNSUPPORTED_OFFLOAD: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("offload_optimizer", "ratio"): (None, 1, 1.0),
    ("offload_optimizer", "super_offload"): (None, False),
    ("zenflow",): (None,),
}
"""What puts a part of the optimizer where its memory is not looked for, and the values that do not."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed as it was asked for."""

    stage: int = 2
    offload_optimizer_device: str | None = None
    offload_optimizer_path: str | None = None
    offload_param_device: str | None = None
    offload_param_path: str | None = None
    config_file: Mapping[str, Any] = field(default_factory=dict)
    """What else stands in the user's own file."""
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    """What that file says about batches."""

    def build_config(self, *, pin_memory: bool) -> dict[str, Any]:
        """The configuration as DeepSpeed gets it.  A micro-batch is a step to it: accumulation is told it each time."""
        zero = {**self.config_file.get("zero_optimization", {}), "stage": self.stage}
        for part, device, path in (
            ("offload_optimizer", self.offload_optimizer_device, self.offload_optimizer_path),
            ("offload_param", self.offload_param_device, self.offload_param_path),
        ):
            written = zero.pop(part, {})
            if device is not None:
                place = {"nvme_path": path} if path is not None else {}
                zero[part] = {"pin_memory": pin_memory, **written, "device": device, **place}
        return {
            **self.config_file,
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": self.config_file.get("steps_per_print"),
        }

    def format_summary(self, world_size: int) -> str:
        """One line about it."""
        places = {"cpu": "host memory", "nvme": "files"}
        resting = [
            f", {what} in {places[device]}"
            for what, device in (("optimizer", self.offload_optimizer_device), ("model", self.offload_param_device))
            if device
        ]
        return f"DeepSpeed: ZeRO {self.stage}, {world_size} processes{''.join(resting)}"

    def validate_batch_sizes(
        self, batch_sizes: Collection[int], gradient_accumulation_steps: int, world_size: int
    ) -> list[str]:
        """What the file says about batches and the plan does not; ``sizes`` are those of the datasets."""
        real = {
            name: sorted({size * factor for size in batch_sizes})
            for name, factor in zip(BATCH_SIZE_KEYS, (1, gradient_accumulation_steps * world_size), strict=True)
        }
        return [
            f"DeepSpeed's file: {name} is {said}, and it comes to {' and '.join(map(str, real[name]))}; write"
            ' "auto" there'
            for name, said in self.batch_sizes.items()
            if real[name] != [said]
        ]


def resolve_deepspeed_settings(config: RunConfig, world: World) -> tuple[DeepSpeedSettings | None, list[str]]:
    """DeepSpeed as it was asked for, ``None`` where nobody did; and everything that is wrong with it."""
    own, launcher = config.deepspeed.deepspeed, _read_launcher_variables(world)
    given = {name: value for name in DEEPSPEED_OPTIONS if (value := getattr(config.deepspeed, name, None)) is not None}
    if not own and "DeepSpeed" not in world.engines:
        written = [name for name, value in given.items() if (name, value) != ("zero_stage", 2)]
        return None, [f"--{name}: is about DeepSpeed, which nobody asks for; set --deepspeed" for name in written]
    if own is False:
        return None, ["--no-deepspeed: the launcher asks for DeepSpeed; take it out of one of the two"]
    place = launcher.get("CONFIG_FILE", "none")
    content, problems = _read_config_file(place) if place != "none" else ({}, [])
    zero = content.get("zero_optimization", {})
    found: dict[str, Any] = {}
    for name in DEEPSPEED_OPTIONS:
        claims = [
            (f"--{name}", given.get(name)),
            (f"accelerate's {name}", _parse_launcher_value(name, launcher)),
            (
                f"{place}: zero_optimization.{'.'.join(CONFIG_FILE_KEYS[name])}",
                _get_nested(zero, CONFIG_FILE_KEYS[name]),
            ),
        ]
        said = [(where, value) for where, value in claims if value is not None]
        if len({str(value) for _, value in said}) > 1:
            problems.append(f"{'; '.join(f'{where} says {value}' for where, value in said)}; say it once")
        found[name] = said[0][1] if said else None
    settings = DeepSpeedSettings(
        stage=2 if found["zero_stage"] is None else found["zero_stage"],
        offload_optimizer_device=_parse_device(found["offload_optimizer_device"]),
        offload_optimizer_path=found["offload_optimizer_nvme_path"],
        offload_param_device=_parse_device(found["offload_param_device"]),
        offload_param_path=found["offload_param_nvme_path"],
        config_file=_select_passed_keys(content),
        batch_sizes={name: content[name] for name in BATCH_SIZE_KEYS if isinstance(content.get(name), int)},
    )
    return settings, [
        *problems,
        *_validate_config_file(content, place, config, world),
        *_validate_launcher(launcher, config),
        *_validate_settings(settings, config, world),
    ]


def validate_deepspeed(config: RunConfig, world: World) -> list[str]:
    """Everything that keeps DeepSpeed from what was asked of it, before anybody is joined."""
    settings, problems = resolve_deepspeed_settings(config, world)
    if settings is not None and find_spec("deepspeed") is None:
        problems.append("--deepspeed: it is not installed; pip install '.[deepspeed]'")
    return problems


def _read_launcher_variables(world: World) -> dict[str, str]:
    """What the launcher says about DeepSpeed, where it asks for it, by the ends of its variables' names."""
    if "DeepSpeed" not in world.engines:
        return {}
    prefixes = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_")
    return {
        name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): value
        for name, value in world.launcher_variables.items()
        if name.startswith(prefixes)
    }


def _read_config_file(path: str) -> tuple[dict[str, Any], list[str]]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{path}: DeepSpeed's file cannot be read: {error}"]
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization", {}), dict):
        return {}, [f"{path}: is no configuration of DeepSpeed's"]
    return content, []


def _parse_launcher_value(name: str, variables: Mapping[str, str]) -> Any:
    """What the launcher says; it writes ``none`` where nothing was said."""
    value = variables.get(name.upper())
    if value is None or value.lower() == "none":
        return None
    return int(value) if name == "zero_stage" and value.isdigit() else value


def _get_nested(table: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "auto" else value


def _parse_device(name: str | None) -> str | None:
    return None if name == "none" else name


def _select_passed_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file without what is ours to say, and without what was left to be filled in."""
    kept = {
        name: value
        for name, value in content.items()
        if name not in (*FORBIDDEN_SECTIONS, *PRECISION_SECTIONS, *BATCH_SIZE_KEYS)
    }
    return {name: _drop_auto_values(value) for name, value in kept.items() if value != "auto"}


def _drop_auto_values(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _drop_auto_values(inside) for name, inside in value.items() if inside != "auto"}


def _validate_config_file(content: Mapping[str, Any], path: str, config: RunConfig, world: World) -> Iterator[str]:
    if content and _get_nested(content, ("zero_optimization", "stage")) is None:
        yield f"{path}: zero_optimization.stage is missing; write 1, 2 or 3"
    for name, way_out in FORBIDDEN_SECTIONS.items():
        if name in content:
            yield f"{path}: {name}: is not DeepSpeed's to say here; take it out and {way_out}"
    if _get_nested(content, ("aio", "use_gds")):
        yield f"{path}: aio.use_gds: weights come from files through host memory here; take it out"
    for keys, usual in UNSUPPORTED_OFFLOAD.items():
        if _get_nested(content, ("zero_optimization", *keys)) not in usual:
            yield f"{path}: zero_optimization.{'.'.join(keys)}: not yet: an optimizer in several places; take it out"
    asked = config.distributed.mixed_precision or world.mixed_precision or "no"
    for name, means in PRECISION_SECTIONS.items():
        part = content.get(name)
        if isinstance(part, dict) and part.get("enabled") is True:
            means = means or {"float16": "fp16"}.get(part.get("dtype", ""), "bf16")
            if means != asked:
                yield f"{path}: {name} says {means}, and mixed_precision is {asked}; say the same, or take it out"
    said = {
        "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "gradient_clipping": config.optim.max_grad_norm,
    }
    for name, ours in said.items():
        theirs = content.get(name, "auto")
        if theirs not in ("auto", ours):
            option = "max_grad_norm" if name == "gradient_clipping" else name
            yield f'{path}: {name} is {theirs}, and --{option} is {ours}; write "auto" there'


def _validate_launcher(variables: Mapping[str, str], config: RunConfig) -> Iterator[str]:
    if variables.get("MOE_LAYER_CLS_NAMES", "none").lower() != "none":
        yield "accelerate's deepspeed_moe_layer_cls_names: no model here has such layers; leave it out"
    clipping = variables.get("GRADIENT_CLIPPING", "auto")
    if clipping not in ("auto", "none") and float(clipping) != config.optim.max_grad_norm:
        yield (
            f"accelerate's gradient_clipping is {clipping}, and --max_grad_norm is {config.optim.max_grad_norm}; say"
            " it once, as --max_grad_norm behind the script"
        )


def _validate_settings(settings: DeepSpeedSettings, config: RunConfig, world: World) -> Iterator[str]:
    if settings.stage not in (1, 2, 3):
        yield (
            f"DeepSpeed's zero_stage {settings.stage}: divides nothing; take 1, 2 or 3, or start with --multi_gpu"
            " and without DeepSpeed"
        )
    if settings.offload_param_device and settings.stage != 3:
        yield "--offload_param_device: only zero_stage 3 divides the model; set --zero_stage 3"
    for name, device, path in (
        ("optimizer", settings.offload_optimizer_device, settings.offload_optimizer_path),
        ("param", settings.offload_param_device, settings.offload_param_path),
    ):
        if device == "nvme" and name == "param":
            yield from _validate_nvme_path(path)
        elif device == "nvme":
            yield (
                "--offload_optimizer_device nvme: what is remembered of an adapter is small, and a copy of it is in"
                " host memory all the time, to go back to; take cpu"
            )
        elif device not in (None, "cpu"):
            yield f"--offload_{name}_device {device}: is not one of none, cpu, nvme"
        elif path is not None:
            yield f"--offload_{name}_nvme_path: nothing is kept in files; take it out"
    if (config.distributed.mixed_precision or world.mixed_precision) == "fp16" and world.device_type != "cpu":
        yield "--mixed_precision fp16: not yet: with DeepSpeed; take bf16 or no"
    for name, size in config.parallel.model_parallel_sizes.items():
        if size > 1:
            yield f"--{name} {size}: together with DeepSpeed it is not there; take one of the two"
    if config.sharding.fsdp or "FSDP" in world.engines:
        place = "--fsdp" if config.sharding.fsdp else "the launcher's FSDP"
        yield f"{place}: DeepSpeed is asked for, too; take one of the two"
    if config.distributed.full_bf16:
        yield "--full_bf16: DeepSpeed keeps adapters in fp32; take it out, mixed_precision bf16 stays"
    if config.train.on_oom == "recover":
        yield (
            "--on_oom recover: DeepSpeed exchanges in every backward, where a process that finds no memory"
            " would leave the others waiting; take it out, or train without DeepSpeed"
        )
    yield from _validate_compile(settings, config, world)


def _validate_nvme_path(path: str | None) -> Iterator[str]:
    """What is wrong with the folder for a model that rests in files."""
    if path is None:
        yield "--offload_param_device nvme: set --offload_param_nvme_path, a folder on a fast disk of each machine"
    elif not Path(path).is_dir() or not os.access(path, os.W_OK):
        yield f"--offload_param_nvme_path {path}: is no folder that can be written to on this machine"


def _validate_compile(settings: DeepSpeedSettings, config: RunConfig, world: World) -> Iterator[str]:
    own = config.distributed
    compiles = own.torch_compile if own.torch_compile is not None else (world.dynamo_backend or "no").lower() != "no"
    if compiles and settings.stage == 3:
        yield "--torch_compile: zero_stage 3 fetches and drops weights inside of blocks; take --fsdp, or stage 1 or 2"
