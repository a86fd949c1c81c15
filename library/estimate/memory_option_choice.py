"""Choose the memory options of a training run (``--gpu_memory``): those that ``plan --gpu_memory`` advises.

Options that the user set are kept.  A run that goes on from a checkpoint keeps what was chosen for it, so that it
trains the same; with another memory or number of GPUs, it keeps what changes the result and chooses the rest anew.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import ParsedConfig, RunConfig
from ..config.kohya_compat import upgrade_settings
from ..config.options import flatten_config, iter_options
from ..config.types import MemorySize
from ..distributed.devices import supports_bf16
from ..distributed.world import World
from ..errors import ConfigError
from ..problems import Place, Problem
from ..training.checkpoint_dir import CheckpointInfo, find_checkpoints, read_checkpoint_info
from ..training.preflight import find_settings_problems
from .advice import (
    BATCH_OPTIONS,
    CHECKPOINTING_OPTIONS,
    MARGIN,
    STORAGE_OPTIONS,
    GridSearch,
    LayoutEstimate,
    change_config,
)
from .dry_run import build_dry_run
from .full_search import FULL_OPTIONS, FullSearch, build_search
from .layout_search import find_training_batch
from .meta_run_cache import MetaRuns
from .parallel_layouts import LAYOUT_OPTIONS, LayoutFinder, ParallelLayout, format_flags
from .step_time import Devices

logger = logging.getLogger(__name__)
CACHE_OPTIONS = ("cache_latents", "cache_text_encoder_outputs")
FSDP_OPTIONS = ("fsdp", "fsdp_offload_params", "dp_replicate_size")
CHOSEN_OPTIONS = (
    *CACHE_OPTIONS,
    "mixed_precision",
    *CHECKPOINTING_OPTIONS,
    *STORAGE_OPTIONS,
    *BATCH_OPTIONS,
    *FSDP_OPTIONS,
    *FULL_OPTIONS,
)
"""Options that may be chosen; the layout is DDP or FSDP, unless the user set another one."""


@dataclass(frozen=True)
class Choice:
    """Options that were chosen, and what is said of them."""

    options: Mapping[str, Any]
    text: str


def choose_memory_options(loaded: ParsedConfig, world: World | None = None) -> ParsedConfig:
    """Return the settings with the options that fit into ``--gpu_memory``; log them in one line."""
    memory = loaded.config.train.gpu_memory
    if memory is None:
        return loaded
    world = World.from_environment() if world is None else world
    choice = _reuse_choice(loaded, memory, world) or _search(loaded, memory, world)
    flags = format_flags(choice.options)
    logger.info("gpu_memory %s: %s (%s)", memory, f"chose {flags}" if flags else "needs no options", choice.text)
    place = Place(flag=f"--gpu_memory {memory}")
    locations = {**loaded.locations, **dict.fromkeys(choice.options, place)}
    return replace(loaded, config=change_config(loaded.config, choice.options), locations=locations)


def _reuse_choice(loaded: ParsedConfig, memory: MemorySize, world: World) -> Choice | None:
    """Return the options of the checkpoint that the run goes on from, if it was trained with as much memory."""
    checkpoint = _find_checkpoint(loaded.config)
    if checkpoint is None:
        return None
    saved = upgrade_settings(checkpoint.metadata["settings"])
    split = checkpoint.metadata.get("split", [1, 1])
    num_devices = max(1, world.world_size // loaded.config.parallel.model_parallel_size)
    if saved.get("gpu_memory") != str(memory) or split[0] != num_devices:
        return None
    current = flatten_config(loaded.config)
    names = [name for name in CHOSEN_OPTIONS if name not in loaded.explicit and name in saved]
    options = {name: saved[name] for name in names if saved[name] != current[name]}
    return Choice(options, f"as in {checkpoint.path.name}")


def _list_kept_options(loaded: ParsedConfig) -> dict[str, Any]:
    """List what changes the result, such as quantized weights, of the checkpoint that the run goes on from."""
    checkpoint = _find_checkpoint(loaded.config)
    if checkpoint is None:
        return {}
    saved = upgrade_settings(checkpoint.metadata["settings"])
    changing = {option.name for option in iter_options(RunConfig) if option.changes_result}
    return {
        name: saved[name]
        for name in (*STORAGE_OPTIONS, *FULL_OPTIONS)
        if name in changing and name in saved and name not in loaded.explicit
    }


def _find_checkpoint(config: RunConfig) -> CheckpointInfo | None:
    """Find the checkpoint that the run will go on from; what is wrong with it is reported when it is loaded."""
    resume, save = config.state.resume, config.save
    if resume is None and not config.state.auto_resume:
        return None
    is_path = resume is not None and resume != "latest"
    paths = [Path(str(resume))] if is_path else find_checkpoints(Path(save.output_dir), save.output_name)
    infos = [info for path in paths if not isinstance(info := read_checkpoint_info(path), str)]
    return max(infos, key=lambda info: info.sort_key, default=None)


def _search(loaded: ParsedConfig, memory: MemorySize, world: World) -> Choice:
    current, kept = flatten_config(loaded.config), _list_kept_options(loaded)
    place = Place(flag="the checkpoint")
    locations = {**loaded.locations, **dict.fromkeys(kept, place)}
    loaded = replace(loaded, config=change_config(loaded.config, kept), locations=locations)
    finder, runs = _build_finder(loaded, world)
    devices = Devices(world.world_size, memory.num_bytes)
    allows = _build_layout_filter(finder)
    search = build_search(finder, runs, devices, allows, may_change_optimizer=False)
    advice = search.advise((1 - MARGIN) * devices.memory)
    if not advice:
        problem = _explain_contradiction(finder, runs, devices, allows) or _explain_failure(search, memory)
        raise ConfigError(loaded.locate_problems([problem]))
    before = flatten_config(finder.config)
    options = {name: value for name, value in kept.items() if value != current[name]}
    if before["mixed_precision"] not in (current["mixed_precision"], world.mixed_precision):
        options["mixed_precision"] = before["mixed_precision"]
    options |= advice[0].options
    return Choice(options, _describe_estimate(advice[0], memory))


def _describe_estimate(estimate: LayoutEstimate, memory: MemorySize) -> str:
    total = estimate.memory.total
    return f"about {format_gigabytes(total)} of {memory} by an estimate, {estimate.precision}"


def _build_finder(loaded: ParsedConfig, world: World) -> tuple[LayoutFinder, MetaRuns]:
    config, explicit = loaded.config, set(loaded.explicit)
    if config.distributed.mixed_precision is None and (precision := _find_precision(world)) is not None:
        config = change_config(config, {"mixed_precision": precision})
    for engine, option in {"FSDP": "fsdp", "DeepSpeed": "deepspeed"}.items():
        if engine in world.engines and option not in explicit:
            config, explicit = change_config(config, {option: True}), explicit | {option}
    dp = 1 if config.parallel.device_map is not None else world.world_size // config.parallel.model_parallel_size
    dry_run = build_dry_run(config, max(1, dp))
    explicit |= {name for name in CACHE_OPTIONS if name not in explicit and not _can_be_set(loaded, name)}
    finder = LayoutFinder(config, frozenset(explicit), dry_run.detected, world.world_size)
    if problems := finder.find_rejections():
        raise ConfigError(loaded.locate_problems(problems))
    return finder, MetaRuns(dry_run.detected, find_training_batch(dry_run, config.data))


def _find_precision(world: World) -> str | None:
    """Return the launcher's precision; ``no`` is only what it asks for if nothing is said, and ``None`` leaves bf16."""
    if world.mixed_precision not in (None, "no"):
        return world.mixed_precision
    return None if supports_bf16() else "fp16"


def _can_be_set(loaded: ParsedConfig, name: str) -> bool:
    """Whether the images allow an option: latents of random crops, for example, cannot be cached."""
    known = set(map(str, find_settings_problems(loaded)))
    changed = replace(loaded, config=change_config(loaded.config, {name: True}))
    return known.issuperset(map(str, find_settings_problems(changed)))


def _build_layout_filter(finder: LayoutFinder) -> Callable[[ParallelLayout], bool]:
    wanted = finder.explicit & {*LAYOUT_OPTIONS}

    def is_wanted(layout: ParallelLayout) -> bool:
        return bool(wanted) or not layout.options.keys() - {*FSDP_OPTIONS}

    return is_wanted


def _explain_contradiction(
    finder: LayoutFinder, runs: MetaRuns, devices: Devices, allows: Callable[[ParallelLayout], bool]
) -> Problem | None:
    """Name the options of the user that would have to change; None if that is not enough."""
    memory, names = MemorySize(devices.memory), finder.explicit & {*CHOSEN_OPTIONS} - {*BATCH_OPTIONS}
    defaults = {name: value for name, value in flatten_config(RunConfig()).items() if name in names}
    released = replace(finder, config=change_config(finder.config, defaults), explicit=finder.explicit - names)
    if not names:
        return None
    search = build_search(released, runs, devices, allows, may_change_optimizer=False)
    if not (advice := search.advise((1 - MARGIN) * devices.memory)):
        return None
    before, found = flatten_config(finder.config), flatten_config(change_config(released.config, advice[0].options))
    changed = [name for name in CHOSEN_OPTIONS if name in names and found[name] != before[name]]
    values = ", ".join(f"{name} {_format_value(found[name])}" for name in changed)
    return Problem(
        changed[0],
        f"with this, the run does not fit into gpu_memory {memory}",
        f"it fits with {values} ({_describe_estimate(advice[0], memory)}: {advice[0].flags})",
        others=("gpu_memory", *changed[1:]),
    )


def _explain_failure(search: GridSearch | FullSearch, memory: MemorySize) -> Problem:
    """Say how much memory the smallest of all combinations needs."""
    smallest = search.find_smallest()
    if smallest is None:
        return Problem("gpu_memory", "no layout of these settings can be estimated", "remove it", value=str(memory))
    needed, flags = format_gigabytes(smallest.memory.total / (1 - MARGIN)), smallest.flags or "its options"
    return Problem(
        "gpu_memory",
        f"{memory} is too little: the run needs {needed}, {MARGIN:.0%} of it free, with {flags}",
        "use a larger GPU or several, or "
        + ("Adafactor" if smallest.layout.config.adapter.is_full else "a smaller resolution or network_dim"),
    )


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def format_gigabytes(num_bytes: float) -> str:
    """Round up, so that a memory of this size is enough."""
    return f"{math.ceil(100 * num_bytes / 2**30) / 100:.2f} GB"
