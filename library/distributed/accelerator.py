"""``prepare_accelerator``: from the settings, and from what the launcher says, to accelerate's ``Accelerator``."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    broadcast_object_list,
)

from ..config import RunConfig
from ..config.schema import DistributedConfig, LogConfig
from ..errors import ConfigError, UserError
from . import trackers
from .world import World


def prepare_accelerator(args: RunConfig) -> Accelerator:
    """Join the other processes and build the accelerator; every contradiction is an error, told by all ranks alike."""
    world = World.from_environment()
    if problems := list(conflicts(args, world)):
        raise ConfigError(problems)
    if uses_numa_affinity(world):
        os.environ["ACCELERATE_CPU_AFFINITY"] = "1"  # accelerate's own switch; it has no other
    group = process_group(args.distributed, world)
    # The state comes before the accelerator, because the ranks have to agree on the folder that it is told.
    PartialState(cpu=world.is_cpu, **(group.to_kwargs() if group else {}))
    started = _agreed(time.strftime("%Y%m%d%H%M%S"))
    directory = logging_directory(args.log, started)
    _on_first_rank_only(lambda: trackers.open_folder(args.log, directory))
    accelerator = Accelerator(**accelerator_kwargs(args, world, directory))
    accelerator.state.dynamo_plugin.dynamic = dynamic_shapes(args.distributed, accelerator.state.dynamo_plugin)
    check_what_came(args, world, accelerator)
    return accelerator


def accelerator_kwargs(args: RunConfig, world: World, directory: Path | None) -> dict[str, Any]:
    """The keyword arguments of ``Accelerator`` for these settings in this world; pure."""
    handlers: list[Any] = [ddp_settings(args.distributed)] if world.size > 1 else []
    group = process_group(args.distributed, world)
    return {
        "cpu": world.is_cpu,
        "mixed_precision": args.distributed.mixed_precision,  # None: what the launcher says
        "gradient_accumulation_steps": args.train.gradient_accumulation_steps,
        "log_with": trackers.wanted(args.log),
        "project_dir": str(directory) if directory else None,
        "kwargs_handlers": handlers + ([group] if group else []),
        "dynamo_plugin": dynamo_plugin(args.distributed),
        "step_scheduler_with_optimizer": False,  # the learning rate is a function of the step, nothing steps it
    }


def logging_directory(log: LogConfig, started: str) -> Path | None:
    """``<logging_dir>/<log_prefix><YYYYmmddHHMMSS>``, as in sd-scripts."""
    return Path(log.logging_dir) / f"{log.log_prefix or ''}{started}" if log.logging_dir else None


def process_group(settings: DistributedConfig, world: World) -> InitProcessGroupKwargs | None:
    """How processes find and wait for each other; None for a process alone, whatever devices the machine has."""
    if world.size <= 1:
        return None
    old_store = world.is_windows and world.torch_version >= (2, 4)  # torch for Windows is built without libuv
    timeout = timedelta(minutes=settings.ddp_timeout) if settings.ddp_timeout else None
    return InitProcessGroupKwargs(backend(world), "env://?use_libuv=False" if old_store else None, timeout)


def backend(world: World) -> str | None:
    """What carries messages between processes; None leaves devices of other makers to accelerate."""
    if world.is_cpu or world.is_windows:
        return "gloo"
    return "nccl" if world.device == "cuda" else None


def ddp_settings(settings: DistributedConfig) -> DistributedDataParallelKwargs:
    """Buffers belong to the frozen model and are the same on all ranks, so they are not sent around every step."""
    return DistributedDataParallelKwargs(
        broadcast_buffers=False,
        gradient_as_bucket_view=settings.ddp_gradient_as_bucket_view,
        static_graph=settings.ddp_static_graph,
    )


def dynamo_plugin(settings: DistributedConfig) -> TorchDynamoPlugin | None:
    """How models are compiled; None without torch_compile, so that the launcher decides."""
    if not settings.torch_compile:
        return None
    return TorchDynamoPlugin(
        backend=settings.dynamo_backend,
        mode=settings.dynamo_mode,
        fullgraph=settings.dynamo_fullgraph,
        dynamic=settings.dynamo_dynamic,
        use_regional_compilation=settings.dynamo_use_regional_compilation,
    )


def dynamic_shapes(settings: DistributedConfig, plugin: TorchDynamoPlugin) -> bool | None:
    """accelerate launch writes "not dynamic" where nobody said so, which would compile anew for each bucket.

    So its "no" counts as "not said": torch finds out at the first change of size.
    """
    return settings.dynamo_dynamic if settings.torch_compile else plugin.dynamic or None


def uses_numa_affinity(world: World) -> bool:
    """Binding processes to the cores near their GPU; accelerate knows how for NVIDIA's, and one's own word counts."""
    return world.numa_nodes > 1 and world.device == "cuda" and "ACCELERATE_CPU_AFFINITY" not in world.environment


_ENGINES = {
    "ACCELERATE_USE_FSDP": ("FSDP", "--use_fsdp"),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "--use_deepspeed"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "--use_megatron_lm"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism config", "--use_parallelism_config"),
}


def conflicts(args: RunConfig, world: World) -> Iterator[str]:
    """What the launcher says and cannot be honoured."""
    for name, (engine, flag) in _ENGINES.items():
        if world.says(name):
            yield f"accelerate launch asks for {engine} ({flag}): not yet; use --multi_gpu for several processes"
    said = world.environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if said is not None and said != str(args.train.gradient_accumulation_steps):
        yield (
            f"--gradient_accumulation_steps: {args.train.gradient_accumulation_steps}, but the environment variable "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS says {said} and would win; unset it or make them equal"
        )
    asked = args.distributed.mixed_precision or world.environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked == "fp16" and world.is_cpu:
        yield "mixed_precision fp16: a CPU cannot train in fp16, and accelerate would quietly use fp32; use bf16 or no"
    yield from trackers.problems(args.log)


def check_what_came(args: RunConfig, world: World, accelerator: Accelerator) -> None:
    """accelerate falls back in silence in several cases; none of them may pass for what was asked."""
    came = {
        "processes": (world.size, accelerator.num_processes),
        "rank": (world.rank, accelerator.process_index),
        "kind of device": (world.device, accelerator.device.type),
        "gradient accumulation": (args.train.gradient_accumulation_steps, accelerator.gradient_accumulation_steps),
    }
    if args.distributed.mixed_precision is not None:
        came["precision"] = (args.distributed.mixed_precision, accelerator.mixed_precision)
    if args.distributed.torch_compile:
        came["compiler"] = (args.distributed.dynamo_backend.upper(), accelerator.state.dynamo_plugin.backend.value)
    wrong = [f"{what}: asked for {asked}, got {got}" for what, (asked, got) in came.items() if asked != got]
    if wrong:
        raise UserError("accelerate did not do what was asked:\n" + "\n".join(wrong))


def _agreed(text: str) -> str:
    """Rank 0's word for all."""
    words = [text]
    broadcast_object_list(words)
    return words[0]


def _on_first_rank_only(work: Any) -> None:
    """Rank 0 does it; what goes wrong there goes wrong everywhere."""
    failure: list[UserError | None] = [None]
    if PartialState().is_main_process:
        try:
            work()
        except UserError as error:
            failure[0] = error
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
