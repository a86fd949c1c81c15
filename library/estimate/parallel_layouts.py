"""Find the parallel layouts that a run could use: DDP, FSDP, HSDP, ZeRO, PP, TP, CP, device map."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from shlex import quote
from typing import Any

from ..config import RunConfig
from ..config.options import build_config, flatten_config
from ..config.schema_distributed import ParallelConfig
from ..config.types import DeviceMap
from ..config.validate import validate_config
from ..config.validate_full import validate_fused_launch
from ..distributed.deepspeed_settings import DeepSpeedSettings, resolve_deepspeed
from ..distributed.devices import HOST
from ..distributed.fsdp_settings import FSDPSettings, resolve_fsdp
from ..distributed.parallel_dims import ParallelDims, build_parallel_dims
from ..distributed.validate_launch import validate_parallelism
from ..distributed.world import World
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from ..optim.validate_optimizer import validate_elementwise_optimizer, validate_fused_optimizer, validate_optimizer
from ..parallel.deepspeed.engine import DeepSpeedStrategy
from ..problems import Problem
from ..training.validate_model import load_denoiser_on_meta, validate_model_parallel, validate_quantize_offload

SIZE_OPTIONS = {"pp_size": "PP", "tp_size": "TP", "cp_size": "CP"}
LAYOUT_OPTIONS = (
    *SIZE_OPTIONS,
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
    """One way to distribute a run over the devices, resolved as training would resolve it."""

    name: str
    options: Mapping[str, Any]
    """The options that select the layout."""
    config: RunConfig
    dims: ParallelDims
    sharding: FSDPSettings | None
    zero: DeepSpeedSettings | None

    @property
    def world_size(self) -> int:
        return self.dims.dp * self.dims.model_parallel_size


def format_flags(options: Mapping[str, Any]) -> str:
    return " ".join(f"--{name}{_format_value(value)}" for name, value in options.items())


def _format_value(value: Any) -> str:
    """Format the words after a flag: none for a switch, several for a list."""
    words = value if isinstance(value, tuple) else () if value is True else (value,)
    return "".join(f" {quote(str(word))}" for word in words)


@dataclass(frozen=True)
class LayoutFinder:
    """Finds the layouts that the settings and the model of a run allow on ``num_devices`` devices."""

    config: RunConfig
    explicit: frozenset[str]
    """Options that the user set; layouts that contradict them are not considered."""
    model: DetectedModel
    num_devices: int

    def find_layouts(self) -> tuple[list[ParallelLayout], list[Problem]]:
        """Return the layouts that training would accept, and why it would reject the others, each reason once."""
        layouts, reasons = list[ParallelLayout](), dict[Problem, list[str]]()
        model_problems = dict[tuple[ParallelDims, Any], Problem | None]()
        for name, options in self._enumerate_options():
            layout = self._build_layout(name, options)
            problem = next(self._find_layout_rejections(layout), None)
            if problem is None:
                key = layout.dims, layout.config.parallel.device_map
                if key not in model_problems:
                    model_problems[key] = next(self._find_model_rejections(layout.config), None)
                problem = model_problems[key]
            if problem is None:
                layouts.append(layout)
            else:
                reasons.setdefault(problem, []).append(name)
        if len(reasons) == 1:
            return layouts, [*reasons]
        return layouts, [replace(problem, scope=", ".join(names)) for problem, names in reasons.items()]

    def allows(self, name: str) -> bool:
        """Whether training would accept the layout of this name; the model is not looked at."""
        options = next((options for each, options in self._enumerate_options() if each == name), None)
        if options is None:
            return False
        return next(self._find_layout_rejections(self._build_layout(name, options)), None) is None

    def find_rejections(self) -> list[Problem]:
        """List the reasons why training would reject the user's own settings on so many devices."""
        launch = validate_parallelism(self.config, self._build_world(self.config.parallel))
        return [*validate_optimizer(self.config.optim), *launch, *self._find_model_rejections(self.config)]

    def add_options(self, options: Mapping[str, Any]) -> "LayoutFinder | None":
        """Add options to the user's; None if they change nothing or contradict the run."""
        config: RunConfig = build_config(RunConfig, {**flatten_config(self.config), **options})
        explicit = self.explicit | set(options)
        if config == self.config or set(validate_config(config, explicit)) - self._known_rejections:
            return None
        return replace(self, config=config, explicit=explicit)

    @cached_property
    def _known_rejections(self) -> set[Any]:
        return set(validate_config(self.config, self.explicit))

    def _find_model_rejections(self, config: RunConfig) -> Iterator[Problem]:
        family = FAMILIES.get(self.model.family)(config.model)
        return validate_model_parallel(config.parallel, config.optim.optimizer_type, family, lambda: self._denoiser)

    @cached_property
    def _denoiser(self) -> Any:
        return load_denoiser_on_meta(FAMILIES.get(self.model.family)(self.config.model), self.model)

    def _find_layout_rejections(self, layout: ParallelLayout) -> Iterator[Problem]:
        for problem in validate_config(layout.config, self.explicit | set(layout.options)):
            if problem not in self._known_rejections:
                yield problem
        yield from validate_parallelism(layout.config, self._build_world(layout.config.parallel))
        is_replicated = layout.sharding is None and (layout.zero is None or layout.zero.stage < 3)
        has_whole_model = is_replicated and layout.dims.cp == layout.dims.model_parallel_size
        can_quantize = layout.zero is None or layout.zero.stage < 3
        yield from validate_quantize_offload(layout.config.model, layout.config.train, has_whole_model, can_quantize)
        engine = DeepSpeedStrategy.optimizer_sharding_engine if layout.zero is not None else ""
        if layout.config.adapter.is_full and not engine:
            sizes = {"FSDP": layout.sharding is not None, "a pipeline": layout.dims.pp > 1}
            sizes["tensor parallelism"] = layout.dims.tp > 1
            engine = next((name for name, is_used in sizes.items() if is_used), "")
        if engine:
            yield from validate_elementwise_optimizer(layout.config.optim, engine)
        if layout.config.full.fused_backward_pass:
            size, precision = layout.world_size, layout.config.distributed.mixed_precision or "no"
            yield from validate_fused_launch(layout.config, size, "", precision)
            yield from validate_fused_optimizer(layout.config.optim)

    def _build_layout(self, name: str, options: Mapping[str, Any]) -> ParallelLayout:
        defaults = dict.fromkeys(LAYOUT_OPTIONS) | dict.fromkeys(SIZE_OPTIONS, 1)
        defaults["zero_stage"] = flatten_config(RunConfig())["zero_stage"]
        config: RunConfig = build_config(RunConfig, {**flatten_config(self.config), **defaults, **options})
        world = self._build_world(config.parallel)
        sharding = resolve_fsdp(config.sharding, config.parallel.tp_size, world)
        dims, zero = build_parallel_dims(config.parallel, world.world_size), resolve_deepspeed(config.deepspeed, world)
        return ParallelLayout(name=name, options=options, config=config, dims=dims, sharding=sharding, zero=zero)

    def _build_world(self, parallel: ParallelConfig) -> World:
        return World.build_fake(1 if parallel.device_map else self.num_devices, self.num_devices)

    def _enumerate_options(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and options of the layouts that agree with the user's options."""
        values = flatten_config(self.config)
        required = {option: _normalize(option, values[option]) for option in LAYOUT_OPTIONS if option in self.explicit}
        device_map = self.config.parallel.device_map or DeviceMap("balanced")
        for name, options in _enumerate_layouts(self.num_devices, device_map):
            if not self.explicit.issuperset(SIZE_OPTIONS) and options.keys() >= SIZE_OPTIONS.keys():
                continue  # PP x TP x CP is slower than any two of them, and there would be many
            if any(_normalize(option, options.get(option)) != value for option, value in required.items()):
                continue
            is_added = "deepspeed" in options.keys() - self.explicit
            if self.num_devices == 1 and is_added and "offload_param_device" not in options:
                continue  # nothing to shard
            yield name, options


def _normalize(option: str, value: Any) -> Any:
    """Map all values that switch an option off to None."""
    is_off = value in (None, False, "none") or (option.endswith("_size") and value == 1)
    return None if is_off else value


def _enumerate_layouts(num_devices: int, device_map: DeviceMap) -> Iterator[tuple[str, dict[str, Any]]]:
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for sizes in ((pp, tp, cp) for pp in divisors for tp in divisors for cp in divisors):
        if num_devices % prod(sizes):
            continue
        options = {option: size for option, size in zip(SIZE_OPTIONS, sizes, strict=True) if size > 1}
        model_parallel = [f"{SIZE_OPTIONS[option]} {size}" for option, size in options.items()]
        dp = num_devices // prod(sizes)
        data_parallel = [f"DDP {dp}"] if dp > 1 else []
        yield " x ".join([*data_parallel, *model_parallel]) or "one device", options
        if dp > 1 and "pp_size" not in options:
            for fsdp, more in _enumerate_fsdp(dp):
                yield " x ".join([fsdp, *model_parallel]), {**options, "fsdp": True, **more}
    for stage in (1, 2, 3):
        options, offload = {"deepspeed": True, "zero_stage": stage}, {"offload_optimizer_device": HOST.type}
        yield f"ZeRO-{stage} {num_devices}", options
        yield f"ZeRO-{stage} {num_devices}, optimizer offload", {**options, **offload}
        if stage == 3:
            yield f"ZeRO-3 {num_devices}, full offload", {**options, **offload, "offload_param_device": HOST.type}
    if num_devices > 1:
        yield f"device map {num_devices}", {"device_map": device_map}


def _enumerate_fsdp(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"FSDP {ranks}", {}
    for replicas in (size for size in range(2, ranks) if ranks % size == 0):
        yield f"HSDP {replicas}x{ranks // replicas}", {"dp_replicate_size": replicas}
    yield f"FSDP {ranks}, CPU offload", {"fsdp_offload_params": True}
