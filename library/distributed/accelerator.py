"""The one place that builds an ``Accelerator``: a thin call over pure functions of the settings and the world."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
    broadcast_object_list,
    set_numa_affinity,
)

from ..config import RunConfig
from ..config.schema_distributed import DistributedConfig
from ..errors import ConfigError
from .launcher_settings import validate_launch_command
from .preflight import (
    AcceleratorFacts,
    find_launch_problems,
    format_mismatches,
    resolve_mixed_precision,
    validate_accelerator,
)
from .process_group import build_process_group_kwargs, can_destroy_group_alone
from .rendezvous import join_process_group
from .trackers import create_tracker_dir, resolve_tracker, resolve_tracker_dir, validate_trackers
from .world import ENGINE_VARIABLES, World, format_timestamp

logger = logging.getLogger(__name__)


def prepare_accelerator(args: RunConfig) -> Accelerator:
    """Join the other processes, agree with them, and build the ``Accelerator``; stop when less came than was asked.

    The process group, folders of trackers, ``WANDB_DIR`` and the processors that it may use are its side effects.
    """
    world = World.from_environment()
    problems = [*find_launch_problems(args, world), *validate_launch_command(args, world)]
    with hide_engine_variables():
        # The ranks meet here, before the Accelerator: the folder that its constructor takes needs a time they agree on.
        state = join_process_group(args, world, problems)
        if should_bind_to_numa_node(world):
            bind_to_numa_node(state.local_process_index)
        try:
            return _build_accelerator(args, world, state)
        except ConfigError:
            if can_destroy_group_alone():
                state.destroy_process_group()
            raise


def _build_accelerator(config: RunConfig, world: World, state: PartialState) -> Accelerator:
    _raise_problems(
        format_mismatches(
            {"processes": (world.world_size, state.num_processes), "rank": (world.rank, state.process_index)}
        )
    )
    world = replace(world, started_at=_agree_on_start_time(config, state))
    accelerator = Accelerator(**build_accelerator_kwargs(config, world))
    _raise_problems(validate_accelerator(config, world, read_accelerator_facts(accelerator)))
    return accelerator


def build_accelerator_kwargs(config: RunConfig, world: World) -> dict[str, Any]:
    """The keyword arguments of ``Accelerator`` for these settings in this world.  Pure."""
    return {
        "mixed_precision": resolve_mixed_precision(config, world),
        "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "cpu": world.device_type == "cpu",
        "log_with": resolve_tracker(config.log),
        "project_dir": resolve_tracker_dir(config.log, world.started_at),
        "dynamo_plugin": build_dynamo_plugin(config.distributed),
        "kwargs_handlers": build_kwargs_handlers(config, world),
        "step_scheduler_with_optimizer": False,
    }


def build_kwargs_handlers(config: RunConfig, world: World) -> list[KwargsHandler]:
    """The process group and DDP, as far as there are other processes."""
    group = build_process_group_kwargs(world, config.distributed.ddp_timeout)
    if group is None:
        return []
    ddp = DistributedDataParallelKwargs(
        # Buffers belong to the frozen model and are the same everywhere.  Sending them before each forward costs time
        # and stops everything where one depends on the size of the pictures.
        broadcast_buffers=False,
        gradient_as_bucket_view=config.distributed.ddp_gradient_as_bucket_view,
        static_graph=config.distributed.ddp_static_graph,
    )
    return [group, ddp]


def build_dynamo_plugin(distributed: DistributedConfig) -> TorchDynamoPlugin | None:
    """What ``torch_compile`` asks for; ``None`` leaves it to the launcher."""
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
    # The plugin takes the launcher's value, and accelerate launch always gives one: false.
    plugin.dynamic = None
    return plugin


def bind_to_numa_node(local_rank: int) -> None:
    """To the NUMA node of the device; nobody asked for it, so where it cannot be done the run goes on without.

    Containers may have a driver's library that tells nothing, or none of the node's processors.
    """
    try:
        set_numa_affinity(local_rank)
    except Exception as error:  # the driver's library has kinds of its own
        logger.warning("this process is not bound to the NUMA node of its device: %s", error)


def should_bind_to_numa_node(world: World) -> bool:
    """Whether to use accelerate's NUMA affinity though nobody asked for it; what the environment says is followed."""
    return world.numa_affinity is None and world.machine.numa_nodes > 1 and not world.machine.numa_affinity_problem


def read_accelerator_facts(accelerator: Accelerator) -> AcceleratorFacts:
    """What the Accelerator really has."""
    return AcceleratorFacts(
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
        device_type=accelerator.device.type,
        distributed_type=str(accelerator.distributed_type.value),
        mixed_precision=str(accelerator.mixed_precision),
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
        dynamo_backend=str(accelerator.state.dynamo_plugin.backend.value).lower(),
    )


def _agree_on_start_time(config: RunConfig, state: PartialState) -> str:
    """One start time for all ranks; and what is wrong with the main rank's trackers stops all of them."""
    word: list[tuple[str, list[str]]] = [("", [])]
    if state.is_main_process:
        started = format_timestamp()
        problems = validate_trackers(config.log, os.environ)
        word = [(started, problems or create_tracker_dir(resolve_tracker_dir(config.log, started), config.log))]
    if state.num_processes > 1:
        broadcast_object_list(word)
    started, problems = word[0]
    _raise_problems(problems)
    return started


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


@contextmanager
def hide_engine_variables() -> Iterator[None]:
    """Inside, the environment asks for no engine, so that an ``Accelerator`` is one of plain data parallel."""
    hidden = {name: os.environ.pop(name) for name in ENGINE_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def unset_fsdp_variable() -> None:
    """Have nobody else act on it later: transformers would load weights on one process and none on the others."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def set_deepspeed_device(device: torch.device) -> None:
    """Keep DeepSpeed, which accelerate imports wherever it is installed, from looking for one itself and saying so."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", device.type)
