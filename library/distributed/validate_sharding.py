"""Pre-flight checks of FSDP and DeepSpeed settings, and of what does not work together with them."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.schema import TrainConfig
from ..config.schema_distributed import ShardingConfig
from ..config.types import parse_env_bool
from ..problems import Place, Problem, report_file
from .deepspeed_settings import (
    BATCH_SIZE_KEYS,
    FORBIDDEN_SECTIONS,
    PRECISION_SECTIONS,
    ZERO_OPTION_KEYS,
    DeepSpeedSettings,
    DeepSpeedSources,
    get_config_value,
)
from .fsdp_settings import (
    FSDP_OPTION_VARIABLES,
    UNSUPPORTED_VARIABLES,
    format_launcher_option,
    read_fsdp_variables,
    resolve_fsdp,
)
from .world import World

UNSUPPORTED_OFFLOAD: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("offload_optimizer", "ratio"): (None, 1, 1.0),
    ("offload_optimizer", "super_offload"): (None, False),
    ("zenflow",): (None,),
}
"""Keys of ``zero_optimization`` that split the optimizer state between devices, and the values that do not."""


def validate_fsdp(sharding: ShardingConfig, train: TrainConfig, tp_size: int, world: World) -> list[Problem]:
    """Compare options, launcher settings and world size."""
    is_launched, variables = "FSDP" in world.engines, read_fsdp_variables(world)
    if sharding.fsdp is False and is_launched:
        return [Problem("fsdp", "the launcher requests FSDP", "remove one of the two", Place(flag="--no-fsdp"))]
    if not (sharding.fsdp or is_launched):
        sizes = [name for name, size in variables.items() if name.endswith("_SIZE") and size != "1"]
        places = [Place(flag=f"the launcher's {format_launcher_option(size)}") for size in sizes]
        return [Problem("", "no effect without FSDP", "add --fsdp", place) for place in places]
    problems = [
        *_validate_fsdp_variables(sharding, variables),
        *_validate_fsdp_combinations(train, world, variables),
    ]
    return problems or [*_validate_fsdp_mesh(sharding, tp_size, world)]


def _validate_fsdp_variables(sharding: ShardingConfig, variables: Mapping[str, str]) -> Iterator[Problem]:
    for name, (allowed, reason) in UNSUPPORTED_VARIABLES.items():
        if name in variables and variables[name] not in allowed:
            place = Place(flag=f"the launcher's {format_launcher_option(name)}")
            yield Problem("", reason, place=place, value=variables[name])
    for name, (variable, default) in FSDP_OPTION_VARIABLES.items():
        ours, launched = getattr(sharding, name), variables.get(variable, default)
        if ours is not None and launched != default and str(ours).lower() != launched:
            yield Problem(name, f"the launcher sets {launched}", "set it once", value=str(ours).lower())


def _validate_fsdp_combinations(train: TrainConfig, world: World, variables: Mapping[str, str]) -> Iterator[Problem]:
    if parse_env_bool(variables.get("FSDP_ACTIVATION_CHECKPOINTING")) and not train.gradient_checkpointing:
        yield Problem("", "the launcher's fsdp_activation_checkpointing true: use --gradient_checkpointing instead")
    if train.on_oom != "fail":
        yield Problem(
            "on_oom",
            "every forward under FSDP is a collective, so no rank can retry a step alone",
            "use --on_oom fail",
            value=train.on_oom,
        )
    if not world.needs_process_group:
        yield Problem("", "FSDP: needs several processes, and this is a single one", "start several, or turn FSDP off")
    if "DeepSpeed" in world.engines:
        yield Problem("", "FSDP: the launcher requests DeepSpeed as well", "remove one of the two")


def _validate_fsdp_mesh(sharding: ShardingConfig, tp_size: int, world: World) -> Iterator[Problem]:
    settings = resolve_fsdp(sharding, tp_size, world)
    assert settings is not None
    replicas, shards, world_size = settings.dp_replicate, settings.dp_shard, world.world_size
    if replicas * shards != world_size // tp_size:
        divided = f" / {tp_size} (tp_size)" if tp_size > 1 else ""
        yield Problem(
            "",
            f"FSDP: dp_replicate_size x dp_shard_size is {replicas} x {shards}, but the world size is"
            f" {world_size}{divided}",
        )
    elif world_size // tp_size == 1 and world_size > 1:
        yield Problem("", f"FSDP: --tp_size {tp_size} takes all {world_size} processes", "start more, or turn FSDP off")
    elif shards == 1 and world_size > 1:
        tensor_parallel = f" x tp_size {tp_size}" if tp_size > 1 else ""
        yield Problem(
            "",
            f"FSDP: dp_replicate_size {replicas}{tensor_parallel} takes all {world_size} processes, nothing is sharded",
            "make it smaller, or turn FSDP off",
        )


def validate_deepspeed(config: RunConfig, world: World) -> Iterator[Problem]:
    """Compare options, launcher settings and the JSON file; check what does not work together with DeepSpeed."""
    ours, distributed, is_launched = config.deepspeed, config.distributed, "DeepSpeed" in world.engines
    if not (ours.deepspeed or is_launched):
        return
    if ours.deepspeed is False:
        place = Place(flag="--no-deepspeed")
        yield Problem("deepspeed", "the launcher requests DeepSpeed", "remove one of the two", place)
        return
    sources = DeepSpeedSources.read(ours, world)
    if sources.file_problem is not None:
        yield sources.file_problem
    for name in ZERO_OPTION_KEYS:
        values = sources.find_values(name)
        if len({str(value) for _, value in values}) > 1:
            yield Problem("", "; ".join(f"{location} is {value}" for location, value in values), "set it once")
    settings = sources.resolve()
    yield from _validate_config_file(sources, distributed.mixed_precision or world.mixed_precision or "no")
    yield from _validate_config_values(sources, config.train.gradient_accumulation_steps, config.optim.max_grad_norm)
    yield from _validate_offload(settings, is_full=config.adapter.is_full)
    if (distributed.mixed_precision or world.mixed_precision) == "fp16" and world.device_type != "cpu":
        yield Problem("mixed_precision", "not supported with DeepSpeed", "use bf16 or no", value="fp16")
    for name, size in config.parallel.model_parallel_sizes.items():
        if size > 1:
            yield Problem(name, "not supported with DeepSpeed", "use one of the two", value=str(size))
    if config.sharding.fsdp or "FSDP" in world.engines:
        launched = None if config.sharding.fsdp else Place(flag="the launcher's FSDP")
        yield Problem("fsdp", "DeepSpeed is requested as well", "use one of the two", launched)
    if distributed.full_bf16:
        kept = "trained weights" if config.adapter.is_full else "adapters"
        yield Problem("full_bf16", f"DeepSpeed keeps {kept} in fp32", "remove it, and use --mixed_precision bf16")
    if config.train.on_oom != "fail":
        yield Problem(
            "on_oom",
            "DeepSpeed reduces gradients in every backward, so no rank can retry a step alone",
            "use --on_oom fail",
            value=config.train.on_oom,
        )
    compiles = (
        distributed.torch_compile
        if distributed.torch_compile is not None
        else world.dynamo_backend not in (None, "no", "NO")
    )
    if compiles and settings.stage == 3:
        yield Problem("torch_compile", "ZeRO stage 3 gathers weights inside the blocks", "use --fsdp, or stage 1 or 2")


def _validate_config_file(sources: DeepSpeedSources, mixed_precision: str) -> Iterator[Problem]:
    content, path = sources.content, sources.path
    if content and get_config_value(content, "zero_optimization", "stage") is None:
        yield report_file(path, "zero_optimization.stage is missing", "set it to 1, 2 or 3")
    for name, alternative in FORBIDDEN_SECTIONS.items():
        if name in content:
            yield Problem(
                "", "not supported in DeepSpeed's file", f"remove it, {alternative}", place=Place(path, key=name)
            )
    if get_config_value(content, "aio", "use_gds"):
        yield Problem("", "weights are read through host memory here", "remove it", Place(path, key="aio.use_gds"))
    for keys, allowed in UNSUPPORTED_OFFLOAD.items():
        if get_config_value(content, "zero_optimization", *keys) not in allowed:
            yield Problem(
                "",
                "a split optimizer state is not supported",
                "remove it",
                Place(path, key=f"zero_optimization.{'.'.join(keys)}"),
            )
    for name, value in PRECISION_SECTIONS.items():
        section = content.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            value = value or {"float16": "fp16"}.get(section.get("dtype", ""), "bf16")
            if value != mixed_precision:
                yield report_file(
                    path, f"{name} enables {value}, but mixed_precision is {mixed_precision}", "make them equal"
                )


def _validate_config_values(
    sources: DeepSpeedSources, gradient_accumulation_steps: int, max_grad_norm: float
) -> Iterator[Problem]:
    content, variables = sources.content, sources.variables
    for name, option, ours in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps", gradient_accumulation_steps),
        ("gradient_clipping", "max_grad_norm", max_grad_norm),
    ):
        if content.get(name, "auto") not in ("auto", ours):
            yield report_file(
                sources.path, f"{name} is {content[name]}, but --{option} is {ours}", 'set it to "auto" in the file'
            )
    if variables.get("MOE_LAYER_CLS_NAMES", "none").lower() != "none":
        yield Problem("", "accelerate's deepspeed_moe_layer_cls_names: no model here has MoE layers", "remove it")
    clipping = variables.get("GRADIENT_CLIPPING", "auto")
    if clipping not in ("auto", "none") and float(clipping) != max_grad_norm:
        yield Problem(
            "", f"accelerate's gradient_clipping is {clipping}, but --max_grad_norm is {max_grad_norm}", "remove it"
        )


def validate_deepspeed_batch_sizes(
    settings: DeepSpeedSettings, batch_sizes: Collection[int], gradient_accumulation_steps: int, world_size: int
) -> list[Problem]:
    """Compare the JSON file's batch sizes with the batch plan; ``batch_sizes`` are those of the datasets."""
    factors = zip(BATCH_SIZE_KEYS, (1, gradient_accumulation_steps * world_size), strict=True)
    planned = {name: sorted({size * factor for size in batch_sizes}) for name, factor in factors}
    return [
        Problem(
            "",
            f"DeepSpeed's file: {name} is {value}, but the batch plan has {' and '.join(map(str, planned[name]))}",
            'set it to "auto"',
        )
        for name, value in settings.batch_sizes.items()
        if planned[name] != [value]
    ]


def _validate_offload(settings: DeepSpeedSettings, *, is_full: bool) -> Iterator[Problem]:
    if settings.stage not in (1, 2, 3):
        yield Problem(
            "", f"DeepSpeed's zero_stage {settings.stage}: shards nothing", "use 1, 2 or 3, or --multi_gpu instead"
        )
    if settings.offload_param_device and settings.stage != 3:
        yield Problem("offload_param_device", "only ZeRO stage 3 shards the model", "set --zero_stage 3")
    for name, device, path in (
        ("optimizer", settings.offload_optimizer_device, settings.offload_optimizer_path),
        ("param", settings.offload_param_device, settings.offload_param_path),
    ):
        if device == "nvme" and name == "optimizer" and not is_full:
            text = "a LoRA's optimizer state is small, and a copy of it stays in host memory for rolling back"
            yield Problem("offload_optimizer_device", f"not supported: {text}", "use cpu", value="nvme")
        elif device == "nvme" and name == "optimizer" and settings.stage != 3:
            text = "checkpoints of ZeRO stages 1 and 2 need the optimizer state in memory"
            yield Problem("offload_optimizer_device", text, "set --zero_stage 3, or use cpu", value="nvme")
        elif device == "nvme":
            yield from _validate_nvme_path(name, path)
        elif device not in (None, "cpu"):
            yield Problem("", f"--offload_{name}_device {device}: expected none, cpu or nvme")
        elif path is not None:
            yield Problem(
                "", f"--offload_{name}_nvme_path: no effect without --offload_{name}_device nvme", "remove it"
            )


def _validate_nvme_path(name: str, path: str | None) -> Iterator[Problem]:
    option = f"offload_{name}_nvme_path"
    if path is None:
        text = f"set --{option}, a directory on a fast disk of each machine"
        yield Problem(f"offload_{name}_device", text, value="nvme")
    elif not Path(path).is_dir() or not os.access(path, os.W_OK):
        yield Problem(option, "not a writable directory on this machine", value=path)
