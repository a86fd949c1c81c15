"""``prepare_accelerator``: join the process group and build the ``Accelerator``, its handlers, dynamo and tracker.

accelerate sets up neither FSDP nor DeepSpeed, though the launcher's variables for them are read: it would wrap whole
models, on some devices only, and go on silently on others.

With ``mixed_precision`` fp16 accelerate creates the GradScaler; gradients are unscaled in
``parallel.gradient_clipping`` and steps skipped in ``parallel.strategy``.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
    broadcast_object_list,
    set_numa_affinity,
)

from ..config import RunConfig
from ..config.options import flatten_config
from ..config.schema_distributed import DistributedConfig
from ..config.schema_output import LogConfig
from ..errors import ConfigError
from ..problems import Problem
from ..trackers import create_tracker_dir, resolve_tracker, resolve_tracker_dir
from .config_agreement import build_rank_report
from .devices import disable_cudnn_attention, enable_deterministic_kernels
from .process_group import build_process_group_kwargs, can_destroy_group_alone
from .rendezvous import build_partial_state_kwargs, join_process_group
from .slurm_and_mpi import export_rank_variables
from .validate_launch import (
    AcceleratorFacts,
    find_mismatches,
    validate_accelerator,
    validate_distributed,
    validate_trackers,
)
from .world import ENGINE_VARIABLES, World, format_timestamp

logger = logging.getLogger(__name__)


def prepare_accelerator(args: RunConfig) -> Accelerator:
    """Join the process group, agree on the settings, and build the ``Accelerator``; raise if it differs from them.

    Side effects: the process group, tracker directories, ``WANDB_DIR``, this process's CPU affinity, and which kernels
    torch may choose.
    """
    export_rank_variables()
    world = World.from_environment()
    disable_cudnn_attention()
    if args.distributed.deterministic:
        enable_deterministic_kernels()
    problems = validate_distributed(args, world)
    with hide_engine_variables():
        # Before the Accelerator is built: the tracker directory that it takes needs a start time that all ranks share.
        if world.world_size > 1:
            report = build_rank_report(flatten_config(args), world, problems)
            state = join_process_group(world, args.distributed.ddp_timeout, report)
        else:
            _raise_problems(problems)
            state = PartialState(**build_partial_state_kwargs(world, args.distributed.ddp_timeout))
        if should_bind_to_numa_node(world):
            bind_to_numa_node(state.local_process_index)
        try:
            ranks = {"world size": (world.world_size, state.num_processes), "rank": (world.rank, state.process_index)}
            _raise_problems(find_mismatches(ranks))
            world = replace(world, started_at=_agree_on_start_time(args.log, state))
            steps = args.train.gradient_accumulation_steps
            arguments = build_accelerator_kwargs(args.distributed, args.log, steps, world)
            if args.adapter.is_full:
                # The cache would hold a copy in half precision of every trained weight until forward has ended, which
                # gradient checkpointing, FSDP and the fused backward pass have no memory for.
                arguments["kwargs_handlers"] += [AutocastKwargs(cache_enabled=False)]
            accelerator = Accelerator(**arguments)
            facts = read_accelerator_facts(accelerator)
            _raise_problems(validate_accelerator(args.distributed, steps, world, facts))
            return accelerator
        except ConfigError:
            if can_destroy_group_alone():
                state.destroy_process_group()
            raise


def build_accelerator_kwargs(
    distributed: DistributedConfig, log: LogConfig, gradient_accumulation_steps: int, world: World
) -> dict[str, Any]:
    """Build the keyword arguments of ``Accelerator``.  Pure."""
    return {
        "mixed_precision": world.resolve_mixed_precision(distributed.mixed_precision),
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "cpu": world.device_type == "cpu",
        "log_with": resolve_tracker(log),
        "project_dir": resolve_tracker_dir(log, world.started_at),
        "dynamo_plugin": build_dynamo_plugin(distributed),
        "kwargs_handlers": build_kwargs_handlers(distributed, world),
        "step_scheduler_with_optimizer": False,
    }


def build_kwargs_handlers(distributed: DistributedConfig, world: World) -> list[KwargsHandler]:
    """Build the handlers of process group and DDP; none for a single process."""
    group = build_process_group_kwargs(world, distributed.ddp_timeout)
    if group is None:
        return []
    ddp = DistributedDataParallelKwargs(
        # Buffers belong to the frozen model and are equal on all ranks.  Broadcasting them before each forward costs
        # time, and fails where the shape of one depends on the image size.
        broadcast_buffers=False,
        gradient_as_bucket_view=distributed.ddp_gradient_as_bucket_view,
        static_graph=distributed.ddp_static_graph,
    )
    return [group, ddp]


def build_dynamo_plugin(distributed: DistributedConfig) -> TorchDynamoPlugin | None:
    """Build the plugin that ``torch_compile`` asks for; ``None`` leaves it to the launcher."""
    if distributed.torch_compile is None:
        return None
    if not distributed.torch_compile:
        return TorchDynamoPlugin(backend="no", mode="default", fullgraph=False, use_regional_compilation=False)
    plugin = TorchDynamoPlugin(
        backend=distributed.dynamo_backend,
        mode=distributed.dynamo_mode,
        fullgraph=distributed.dynamo_fullgraph,
        use_regional_compilation=distributed.dynamo_use_regional_compilation,
    )
    # The plugin reads ACCELERATE_DYNAMO_USE_DYNAMIC, which accelerate launch always sets: to false.
    plugin.dynamic = None
    return plugin


def should_bind_to_numa_node(world: World) -> bool:
    """Whether to use accelerate's NUMA affinity by default; ``ACCELERATE_CPU_AFFINITY`` overrides it either way."""
    return world.numa_affinity is None and world.machine.numa_nodes > 1 and not world.machine.numa_affinity_problem


def bind_to_numa_node(local_rank: int) -> None:
    """Bind this process to the NUMA node of its device; a failure is only a warning, since nobody requested it.

    In a container the driver's library may report nothing, or the node's CPUs may not be available.
    """
    try:
        set_numa_affinity(local_rank)
    except Exception as error:  # the driver's library has exception types of its own
        logger.warning("this process is not bound to the NUMA node of its device: %s", error)


def read_accelerator_facts(accelerator: Accelerator) -> AcceleratorFacts:
    """Read the settings that accelerate applied, for the comparison with the run's own in ``validate_accelerator``."""
    return AcceleratorFacts(
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
        device_type=accelerator.device.type,
        distributed_type=str(accelerator.distributed_type.value),
        mixed_precision=str(accelerator.mixed_precision),
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
        dynamo_backend=str(accelerator.state.dynamo_plugin.backend.value).lower(),
    )


def _agree_on_start_time(log: LogConfig, state: PartialState) -> str:
    """Broadcast the main process's start time; problems with its trackers are raised on all ranks."""
    message: list[tuple[str, list[Problem]]] = [("", [])]
    if state.is_main_process:
        started_at = format_timestamp()
        problems = validate_trackers(log, os.environ)
        message = [(started_at, problems or create_tracker_dir(resolve_tracker_dir(log, started_at), log))]
    if state.num_processes > 1:
        broadcast_object_list(message)
    started_at, problems = message[0]
    _raise_problems(problems)
    return started_at


def _raise_problems(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


@contextmanager
def hide_engine_variables() -> Iterator[None]:
    """Hide the launcher's engine variables, so that accelerate sets up plain data parallelism."""
    hidden = {name: os.environ.pop(name) for name in ENGINE_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def unset_fsdp_variable() -> None:
    """Unset ``ACCELERATE_USE_FSDP``: transformers would load weights on the main process only."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def set_deepspeed_device(device: torch.device) -> None:
    """Tell DeepSpeed to use the CPU; accelerate imports it where it is installed, and it would probe and warn."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", device.type)
