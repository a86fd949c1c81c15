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

OPTIONS = ("zero_stage", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device",
           "offload_param_nvme_path")  # fmt: skip
"""Of accelerate; all but the path for the optimizer are ours as well."""
IN_FILE = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
}
"""Where each stands in the part ``zero_optimization`` of DeepSpeed's file."""
LAUNCHED = {
    **{f"ACCELERATE_DEEPSPEED_{name.upper()}": name for name in OPTIONS},
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
"""Variables by which ``accelerate launch`` hands on its options, and what these are called."""
BATCHES = ("train_micro_batch_size_per_gpu", "train_batch_size")
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": None}
"""Parts of the file about precision, and the ``mixed_precision`` that each means; of the last its dtype says it."""
OURS = {
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


ELSEWHERE: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("offload_optimizer", "ratio"): (None, 1, 1.0),
    ("offload_optimizer", "super_offload"): (None, False),
    ("zenflow",): (None,),
}
"""What puts a part of the optimizer where its memory is not looked for, and the values that do not."""


@dataclass(frozen=True)
class ZeroSettings:
    """DeepSpeed as it was asked for."""

    stage: int = 2
    optimizer_device: str | None = None
    optimizer_path: str | None = None
    param_device: str | None = None
    param_path: str | None = None
    file: Mapping[str, Any] = field(default_factory=dict)
    """What else stands in the user's own file."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """What that file says about batches."""

    def handed_over(self, *, pins_memory: bool) -> dict[str, Any]:
        """The configuration as DeepSpeed gets it.  A micro-batch is a step to it: accumulation is told it each time."""
        zero = {**self.file.get("zero_optimization", {}), "stage": self.stage}
        for part, device, path in (("offload_optimizer", self.optimizer_device, self.optimizer_path),
                                   ("offload_param", self.param_device, self.param_path)):  # fmt: skip
            written = zero.pop(part, {})
            if device is not None:
                place = {"nvme_path": path} if path is not None else {}
                zero[part] = {"pin_memory": pins_memory, **written, "device": device, **place}
        return {
            **self.file,
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": self.file.get("steps_per_print"),
        }

    def described(self, processes: int) -> str:
        """One line about it."""
        places = {"cpu": "host memory", "nvme": "files"}
        resting = [f", {what} in {places[device]}" for what, device in
                   (("optimizer", self.optimizer_device), ("model", self.param_device)) if device]  # fmt: skip
        return f"DeepSpeed: ZeRO {self.stage}, {processes} processes{''.join(resting)}"

    def other_batches(self, sizes: Collection[int], accumulation: int, processes: int) -> list[str]:
        """What the file says about batches and the plan does not; ``sizes`` are those of the datasets."""
        real = {name: sorted({size * factor for size in sizes}) for name, factor in
                zip(BATCHES, (1, accumulation * processes), strict=True)}  # fmt: skip
        return [f"DeepSpeed's file: {name} is {said}, and it comes to {' and '.join(map(str, real[name]))}; write"
                ' "auto" there' for name, said in self.batches.items() if real[name] != [said]]  # fmt: skip


def zero_settings(config: RunConfig, world: World) -> tuple[ZeroSettings | None, list[str]]:
    """DeepSpeed as it was asked for, ``None`` where nobody did; and everything that is wrong with it."""
    own, launcher = config.deepspeed.deepspeed, _launcher(world)
    given = {name: value for name in OPTIONS if (value := getattr(config.deepspeed, name, None)) is not None}
    if not own and "DeepSpeed" not in world.engines:
        written = [name for name, value in given.items() if (name, value) != ("zero_stage", 2)]
        return None, [f"--{name}: is about DeepSpeed, which nobody asks for; set --deepspeed" for name in written]
    if own is False:
        return None, ["--no-deepspeed: the launcher asks for DeepSpeed; take it out of one of the two"]
    place = launcher.get("CONFIG_FILE", "none")
    content, problems = _content(place) if place != "none" else ({}, [])
    zero = content.get("zero_optimization", {})
    found: dict[str, Any] = {}
    for name in OPTIONS:
        claims = [(f"--{name}", given.get(name)),
                  (f"accelerate's {name}", _launched(name, launcher)),
                  (f"{place}: zero_optimization.{'.'.join(IN_FILE[name])}", _inside(zero, IN_FILE[name]))]  # fmt: skip
        said = [(where, value) for where, value in claims if value is not None]
        if len({str(value) for _, value in said}) > 1:
            problems.append(f"{'; '.join(f'{where} says {value}' for where, value in said)}; say it once")
        found[name] = said[0][1] if said else None
    settings = ZeroSettings(
        stage=2 if found["zero_stage"] is None else found["zero_stage"],
        optimizer_device=_device(found["offload_optimizer_device"]),
        optimizer_path=found["offload_optimizer_nvme_path"],
        param_device=_device(found["offload_param_device"]),
        param_path=found["offload_param_nvme_path"],
        file=_passed_on(content),
        batches={name: content[name] for name in BATCHES if isinstance(content.get(name), int)},
    )
    return settings, [*problems, *_of_file(content, place, config, world), *_of_launcher(launcher, config),
                      *_impossible(settings, config, world)]  # fmt: skip


def zero_problems(config: RunConfig, world: World) -> list[str]:
    """Everything that keeps DeepSpeed from what was asked of it, before anybody is joined."""
    settings, problems = zero_settings(config, world)
    if settings is not None and find_spec("deepspeed") is None:
        problems.append("--deepspeed: it is not installed; pip install '.[deepspeed]'")
    return problems


def _launcher(world: World) -> dict[str, str]:
    """What the launcher says about DeepSpeed, where it asks for it, by the ends of its variables' names."""
    if "DeepSpeed" not in world.engines:
        return {}
    prefixes = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_")
    return {name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): value for name, value in world.said.items()
            if name.startswith(prefixes)}  # fmt: skip


def _content(place: str) -> tuple[dict[str, Any], list[str]]:
    try:
        content = json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{place}: DeepSpeed's file cannot be read: {error}"]
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization", {}), dict):
        return {}, [f"{place}: is no configuration of DeepSpeed's"]
    return content, []


def _launched(name: str, launcher: Mapping[str, str]) -> Any:
    """What the launcher says; it writes ``none`` where nothing was said."""
    value = launcher.get(name.upper())
    if value is None or value.lower() == "none":
        return None
    return int(value) if name == "zero_stage" and value.isdigit() else value


def _inside(table: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "auto" else value


def _device(name: str | None) -> str | None:
    return None if name == "none" else name


def _passed_on(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file without what is ours to say, and without what was left to be filled in."""
    kept = {name: value for name, value in content.items() if name not in (*OURS, *PRECISIONS, *BATCHES)}
    return {name: _filled(value) for name, value in kept.items() if value != "auto"}


def _filled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _filled(inside) for name, inside in value.items() if inside != "auto"}


def _of_file(content: Mapping[str, Any], place: str, config: RunConfig, world: World) -> Iterator[str]:
    if content and _inside(content, ("zero_optimization", "stage")) is None:
        yield f"{place}: zero_optimization.stage is missing; write 1, 2 or 3"
    for name, way_out in OURS.items():
        if name in content:
            yield f"{place}: {name}: is not DeepSpeed's to say here; take it out and {way_out}"
    if _inside(content, ("aio", "use_gds")):
        yield f"{place}: aio.use_gds: weights come from files through host memory here; take it out"
    for keys, usual in ELSEWHERE.items():
        if _inside(content, ("zero_optimization", *keys)) not in usual:
            yield f"{place}: zero_optimization.{'.'.join(keys)}: not yet: an optimizer in several places; take it out"
    asked = config.distributed.mixed_precision or world.precision or "no"
    for name, means in PRECISIONS.items():
        part = content.get(name)
        if isinstance(part, dict) and part.get("enabled") is True:
            means = means or {"float16": "fp16"}.get(part.get("dtype", ""), "bf16")
            if means != asked:
                yield f"{place}: {name} says {means}, and mixed_precision is {asked}; say the same, or take it out"
    said = {"gradient_accumulation_steps": config.train.gradient_accumulation_steps,
            "gradient_clipping": config.optim.max_grad_norm}  # fmt: skip
    for name, ours in said.items():
        theirs = content.get(name, "auto")
        if theirs not in ("auto", ours):
            option = "max_grad_norm" if name == "gradient_clipping" else name
            yield f'{place}: {name} is {theirs}, and --{option} is {ours}; write "auto" there'


def _of_launcher(launcher: Mapping[str, str], config: RunConfig) -> Iterator[str]:
    if launcher.get("MOE_LAYER_CLS_NAMES", "none").lower() != "none":
        yield "accelerate's deepspeed_moe_layer_cls_names: no model here has such layers; leave it out"
    clipping = launcher.get("GRADIENT_CLIPPING", "auto")
    if clipping not in ("auto", "none") and float(clipping) != config.optim.max_grad_norm:
        yield (f"accelerate's gradient_clipping is {clipping}, and --max_grad_norm is {config.optim.max_grad_norm}; say"
               " it once, as --max_grad_norm behind the script")  # fmt: skip


def _impossible(settings: ZeroSettings, config: RunConfig, world: World) -> Iterator[str]:
    if settings.stage not in (1, 2, 3):
        yield (f"DeepSpeed's zero_stage {settings.stage}: divides nothing; take 1, 2 or 3, or start with --multi_gpu"
               " and without DeepSpeed")  # fmt: skip
    if settings.param_device and settings.stage != 3:
        yield "--offload_param_device: only zero_stage 3 divides the model; set --zero_stage 3"
    for name, device, path in (("optimizer", settings.optimizer_device, settings.optimizer_path),
                               ("param", settings.param_device, settings.param_path)):  # fmt: skip
        if device == "nvme" and name == "param":
            yield from _unfit(path)
        elif device == "nvme":
            yield ("--offload_optimizer_device nvme: what is remembered of an adapter is small, and a copy of it is in"
                   " host memory all the time, to go back to; take cpu")  # fmt: skip
        elif device not in (None, "cpu"):
            yield f"--offload_{name}_device {device}: is not one of none, cpu, nvme"
        elif path is not None:
            yield f"--offload_{name}_nvme_path: nothing is kept in files; take it out"
    if (config.distributed.mixed_precision or world.precision) == "fp16" and world.device != "cpu":
        yield "--mixed_precision fp16: not yet: with DeepSpeed; take bf16 or no"
    for name, size in config.parallel.sizes.items():
        if size > 1:
            yield f"--{name} {size}: together with DeepSpeed it is not there; take one of the two"
    if config.sharding.fsdp or "FSDP" in world.engines:
        place = "--fsdp" if config.sharding.fsdp else "the launcher's FSDP"
        yield f"{place}: DeepSpeed is asked for, too; take one of the two"
    if config.distributed.full_bf16:
        yield "--full_bf16: DeepSpeed keeps adapters in fp32; take it out, mixed_precision bf16 stays"
    if config.train.on_oom == "ladder":
        yield ("--on_oom ladder: DeepSpeed exchanges in every backward, where a process that finds no memory"
               " would leave the others waiting; take it out, or train without DeepSpeed")  # fmt: skip
    yield from _compiled(settings, config, world)


def _unfit(path: str | None) -> Iterator[str]:
    """What is wrong with the folder for a model that rests in files."""
    if path is None:
        yield "--offload_param_device nvme: set --offload_param_nvme_path, a folder on a fast disk of each machine"
    elif not Path(path).is_dir() or not os.access(path, os.W_OK):
        yield f"--offload_param_nvme_path {path}: is no folder that can be written to on this machine"


def _compiled(settings: ZeroSettings, config: RunConfig, world: World) -> Iterator[str]:
    own = config.distributed
    compiles = own.torch_compile if own.torch_compile is not None else (world.dynamo or "no").lower() != "no"
    if compiles and settings.stage == 3:
        yield "--torch_compile: zero_stage 3 fetches and drops weights inside of blocks; take --fsdp, or stage 1 or 2"
