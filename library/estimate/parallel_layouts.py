"""Parallel layouts that a run could use on a number of devices: DDP, FSDP, HSDP, ZeRO, PP, TP, CP, device maps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import Any

from ..config import RunConfig
from ..config.options import build_config, flatten_config
from ..config.types import DeviceMap
from ..config.validate import validate_config
from ..distributed.deepspeed_settings import DeepSpeedSettings, resolve_deepspeed
from ..distributed.devices import HOST
from ..distributed.fsdp_settings import FSDPSettings, resolve_fsdp
from ..distributed.parallel_dims import ParallelDims, build_parallel_dims
from ..distributed.preflight import validate_parallelism
from ..distributed.world import World
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from ..optim.preflight import validate_elementwise_optimizer
from ..parallel.deepspeed import DeepSpeedStrategy
from ..training.preflight import validate_model_parallel, validate_quantize_offload

SIZES = {"pp_size": "PP", "tp_size": "TP", "cp_size": "CP"}


OPTIONS = (
    *SIZES,
    "device_map",
    "fsdp",
    "fsdp_offload_params",
    "dp_replicate_size",
    "deepspeed",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
)
"""Layouts differ in these; those that the user set restrict the search."""


@dataclass(frozen=True)
class ParallelLayout:
    """A way to use the devices, as training would set it up."""

    name: str
    options: Mapping[str, Any]
    """That select it."""
    config: RunConfig
    dims: ParallelDims
    sharding: FSDPSettings | None
    zero: DeepSpeedSettings | None

    @property
    def ranks(self) -> int:
        return self.dims.dp * self.dims.model_parallel_size


def format_flags(options: Mapping[str, Any]) -> str:
    items = options.items()
    return " ".join(f"--{name}" if value is True else f"--{name} {quote(str(value))}" for name, value in items)


def find_layouts(
    config: RunConfig, given: frozenset[str], world_size: int, model: DetectedModel
) -> tuple[list[ParallelLayout], list[str]]:
    """Find what this model and these settings allow; also the reasons against the others, each once.

    ``given`` are the options that the user set; layouts that contradict them are not considered.
    """
    layouts, reasons = list[ParallelLayout](), dict[str, list[str]]()
    model_problems = dict[tuple[ParallelDims, Any], str | None]()
    family = FAMILIES.get(model.family)(config.model)
    for name, options in _enumerate_options(config, given, world_size):
        layout = _build_layout(name, options, config, world_size)
        problem = next(_find_conflicts(layout, config, given, world_size), None)
        key = layout.dims, layout.config.parallel.device_map
        if problem is None:
            if key not in model_problems:
                model_problems[key] = next(validate_model_parallel(layout.config, family, model), None)
            problem = model_problems[key]
        if problem is None:
            layouts.append(layout)
        else:
            reasons.setdefault(problem, []).append(name)
    if len(reasons) == 1:
        return layouts, [*reasons]
    return layouts, [f"{', '.join(names)}: {problem}" for problem, names in reasons.items()]


def find_conflicts(config: RunConfig, world_size: int) -> list[str]:
    """Why training would refuse these settings on so many devices."""
    world = _build_world(config, world_size)
    return [*validate_parallelism(config, world)]


def _find_conflicts(layout: ParallelLayout, config: RunConfig, given: frozenset[str], world_size: int) -> Iterator[str]:
    known = set(validate_config(config, given))
    for problem in validate_config(layout.config, given | set(layout.options)):
        if problem not in known:
            yield f"--{problem[0][0]}: {problem[1]}"
    yield from find_conflicts(layout.config, world_size)
    is_sharded = layout.sharding is not None or layout.zero is not None
    yield from validate_quantize_offload(
        layout.config, not is_sharded and layout.dims.cp == layout.dims.model_parallel_size
    )
    if layout.zero is not None:
        yield from validate_elementwise_optimizer(layout.config.optim, DeepSpeedStrategy.optimizer_sharding_engine)


def _build_layout(name: str, options: Mapping[str, Any], config: RunConfig, world_size: int) -> ParallelLayout:
    defaults = {option: None for option in OPTIONS} | {"zero_stage": flatten_config(RunConfig())["zero_stage"]}
    own: RunConfig = build_config(
        RunConfig, {**flatten_config(config), **defaults, **dict.fromkeys(SIZES, 1), **options}
    )
    world = _build_world(own, world_size)
    sharding = resolve_fsdp(own.sharding, own.parallel.tp_size, world)
    dims, zero = build_parallel_dims(own.parallel, world.world_size), resolve_deepspeed(own.deepspeed, world)
    return ParallelLayout(name, options, own, dims, sharding, zero)


def _build_world(config: RunConfig, world_size: int) -> World:
    return World.build_fake(1 if config.parallel.device_map else world_size, world_size)


def _enumerate_options(
    config: RunConfig, given: frozenset[str], world_size: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options of layouts that agree with the options that the user set."""
    values = flatten_config(config)
    required = {option: _normalize(option, values[option]) for option in OPTIONS if option in given}
    device_map = config.parallel.device_map or DeviceMap("balanced")
    for name, options in _enumerate_all(world_size, device_map):
        if not given.issuperset(SIZES) and options.keys() >= SIZES.keys():
            continue  # slower than any two of them, and there would be many
        if any(_normalize(option, options.get(option)) != value for option, value in required.items()):
            continue
        if world_size == 1 and "deepspeed" in options.keys() - given and "offload_param_device" not in options:
            continue  # nothing to shard with
        yield name, options


def _normalize(option: str, value: Any) -> Any:
    """All values that switch an option off are equal."""
    is_off = value in (None, False, "none") or (option.endswith("_size") and value == 1)
    return None if is_off else value


def _enumerate_all(world_size: int, device_map: DeviceMap) -> Iterator[tuple[str, dict[str, Any]]]:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for sizes in ((pp, tp, cp) for pp in divisors for tp in divisors for cp in divisors):
        if world_size % prod(sizes):
            continue
        options = {option: size for option, size in zip(SIZES, sizes, strict=True) if size > 1}
        parts = [f"{SIZES[option]} {size}" for option, size in options.items()]
        replicas = world_size // prod(sizes)
        data_parallel = [f"DDP {replicas}"] if replicas > 1 else []
        yield " x ".join([*data_parallel, *parts]) or "one device", options
        if replicas > 1 and "pp_size" not in options:
            for sharded, more in _enumerate_fsdp(replicas):
                yield " x ".join([sharded, *parts]), {**options, "fsdp": True, **more}
    for stage in (1, 2, 3):
        options, offload = {"deepspeed": True, "zero_stage": stage}, {"offload_optimizer_device": HOST.type}
        yield f"ZeRO-{stage} {world_size}", options
        yield f"ZeRO-{stage} {world_size}, optimizer offload", {**options, **offload}
        if stage == 3:
            yield f"ZeRO-3 {world_size}, full offload", {**options, **offload, "offload_param_device": HOST.type}
    if world_size > 1:
        yield f"device map {world_size}", {"device_map": device_map}


def _enumerate_fsdp(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"FSDP {ranks}", {}
    for replicas in (size for size in range(2, ranks) if ranks % size == 0):
        yield f"HSDP {replicas}x{ranks // replicas}", {"dp_replicate_size": replicas}
    yield f"FSDP {ranks}, CPU offload", {"fsdp_offload_params": True}
