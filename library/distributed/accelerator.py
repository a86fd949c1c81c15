"""The one place that builds an ``Accelerator``: a thin call over pure functions of the settings and the world."""

import logging
import os
from dataclasses import replace
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
    broadcast_object_list,
    set_numa_affinity,
)

from ..config import RunConfig
from ..config.schema import DistributedConfig
from ..errors import ConfigError
from .backend import can_leave_alone, process_group
from .engines import hidden_from_accelerate
from .launcher_settings import find_launch_problems
from .meeting import meet
from .refusals import Came, before_joining, differences, effective_precision, mismatches
from .trackers import open_folder, run_folder, tracker_of, tracker_problems
from .world import World, now

logger = logging.getLogger(__name__)


def prepare_accelerator(args: RunConfig) -> Accelerator:
    """Join the other processes, agree with them, and build the ``Accelerator``; stop when less came than was asked.

    The process group, folders of trackers, ``WANDB_DIR`` and the processors that it may use are its side effects.
    """
    world = World.from_environment()
    problems = [*before_joining(args, world), *find_launch_problems(args, world)]
    with hidden_from_accelerate():
        # The ranks meet here, before the Accelerator: the folder that its constructor takes needs a time they agree on.
        state = meet(args, world, problems)
        if binds_to_numa_node(world):
            bind(state.local_process_index)
        try:
            return _with_others(args, world, state)
        except ConfigError:
            if can_leave_alone():
                state.destroy_process_group()
            raise


def _with_others(args: RunConfig, world: World, state: PartialState) -> Accelerator:
    _refuse(differences({"processes": (world.size, state.num_processes), "rank": (world.rank, state.process_index)}))
    world = replace(world, started=_agree(args, state))
    accelerator = Accelerator(**accelerator_kwargs(args, world))
    _refuse(mismatches(args, world, came_of(accelerator)))
    return accelerator


def accelerator_kwargs(args: RunConfig, world: World) -> dict[str, Any]:
    """The keyword arguments of ``Accelerator`` for these settings in this world.  Pure."""
    return {
        "mixed_precision": effective_precision(args, world),
        "gradient_accumulation_steps": args.train.gradient_accumulation_steps,
        "cpu": world.device == "cpu",
        "log_with": tracker_of(args.log),
        "project_dir": run_folder(args.log, world.started),
        "dynamo_plugin": dynamo_plugin(args.distributed),
        "kwargs_handlers": handlers(args, world),
        "step_scheduler_with_optimizer": False,
    }


def handlers(args: RunConfig, world: World) -> list[KwargsHandler]:
    """The process group and DDP, as far as there are other processes."""
    group = process_group(world, args.distributed.ddp_timeout)
    if group is None:
        return []
    ddp = DistributedDataParallelKwargs(
        # Buffers belong to the frozen model and are the same everywhere.  Sending them before each forward costs time
        # and stops everything where one depends on the size of the pictures.
        broadcast_buffers=False,
        gradient_as_bucket_view=args.distributed.ddp_gradient_as_bucket_view,
        static_graph=args.distributed.ddp_static_graph,
    )
    return [group, ddp]


def dynamo_plugin(distributed: DistributedConfig) -> TorchDynamoPlugin | None:
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


def bind(local_rank: int) -> None:
    """To the NUMA node of the device; nobody asked for it, so where it cannot be done the run goes on without.

    Containers may have a driver's library that tells nothing, or none of the node's processors.
    """
    try:
        set_numa_affinity(local_rank)
    except Exception as error:  # the driver's library has kinds of its own
        logger.warning("this process is not bound to the NUMA node of its device: %s", error)


def binds_to_numa_node(world: World) -> bool:
    """Whether to use accelerate's NUMA affinity though nobody asked for it; what the environment says is followed."""
    return world.affinity is None and world.machine.numa_nodes > 1 and not world.machine.affinity_obstacle


def came_of(accelerator: Accelerator) -> Came:
    """What the Accelerator really has."""
    return Came(
        size=accelerator.num_processes,
        rank=accelerator.process_index,
        device=accelerator.device.type,
        kind=str(accelerator.distributed_type.value),
        precision=str(accelerator.mixed_precision),
        accumulation=accelerator.gradient_accumulation_steps,
        dynamo=str(accelerator.state.dynamo_plugin.backend.value).lower(),
    )


def _agree(args: RunConfig, state: PartialState) -> str:
    """One start time for all ranks; and what is wrong with the main rank's trackers stops all of them."""
    word: list[tuple[str, list[str]]] = [("", [])]
    if state.is_main_process:
        started = now()
        problems = tracker_problems(args.log, os.environ)
        word = [(started, problems or open_folder(run_folder(args.log, started), args.log))]
    if state.num_processes > 1:
        broadcast_object_list(word)
    started, problems = word[0]
    _refuse(problems)
    return started


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)
