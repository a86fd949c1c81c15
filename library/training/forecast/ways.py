"""The ways in which so many processes can share the work of a run; those that a run would refuse are not among them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...config import RunConfig
from ...config.checks import conflicts
from ...config.options import build, flat
from ...distributed.devices import HOST
from ...distributed.layout import Layout, layout_of, layout_problems
from ...distributed.sharding import Sharding, asked_for
from ...distributed.world import World
from ...distributed.zero_settings import ZeroSettings, zero_settings
from ...errors import ConfigError
from ...families import FAMILIES
from ...families.detect import Detected
from ...optim.elementwise import refuse_whole_tensors
from ..parallel_fit import misfits
from ..resting import is_wanted

Values = Mapping[str, Any]
IN_HOST_MEMORY = {"offload_optimizer_device": HOST.type}
OPTIONS = ("pp_size", "tp_size", "fsdp", "fsdp_offload_params", "dp_replicate_size", "deepspeed", "zero_stage",
           "offload_optimizer_device", "offload_param_device")  # fmt: skip
"""By these ways differ; where somebody wrote one of them down, only ways that agree with it are looked at."""


@dataclass(frozen=True)
class Way:
    """One of them, with what it is called and how it is asked for."""

    name: str
    values: Values
    config: RunConfig
    layout: Layout
    sharding: Sharding | None = None
    zero: ZeroSettings | None = None

    @property
    def words(self) -> str:
        """As they are written behind the script."""
        said = (f"--{name}" if value is True else f"--{name} {value}" for name, value in self.values.items())
        return " ".join(said)


def ways(config: RunConfig, given: frozenset[str], processes: int, model: Detected) -> list[Way]:
    """All that this model and these settings allow."""
    found, fits = [], dict[tuple[int, int], bool]()
    for name, values in _thinkable(processes):
        wanted = {option: _said(option, flat(config)[option]) for option in OPTIONS if option in given}
        if any(_said(option, values.get(option)) != value for option, value in wanted.items()):
            continue
        way = _way(name, values, config, given, processes)
        if way is None:
            continue
        cut = way.layout.stages, way.layout.parts
        if cut not in fits:
            family = FAMILIES.get(model.family)(config.model)
            fits[cut] = way.layout.together == 1 or not [*misfits(way.config, family, model)]
        if fits[cut]:
            found.append(way)
    return found


def _said(option: str, value: Any) -> Any:
    """All ways to say that something is not wanted are one."""
    is_unwanted = value in (None, False, "none") or (option.endswith("_size") and value == 1)
    return None if is_unwanted else value


def _thinkable(processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options; one more kind of cut is one more factor of ``together``."""
    for together in _divisors(processes):
        for parts in _divisors(together):
            stages, groups = together // parts, processes // together
            cut = _named(f"pipeline {stages}" if stages > 1 else "", f"tensor {parts}" if parts > 1 else "")
            base = {"pp_size": stages, "tp_size": parts}
            plain = "" if groups == 1 and cut else f"DDP {groups}" if groups > 1 else "one device"
            yield _named(plain, cut), base
            if groups > 1 and stages == 1:
                yield from _sharded(groups, cut, base)
    if processes > 1:
        yield from _divided(processes)


def _sharded(groups: int, cut: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    spread = {**base, "fsdp": True}
    for replicas in _divisors(groups)[:-1]:
        name = f"FSDP {groups}" if replicas == 1 else f"HSDP {replicas} x {groups // replicas}"
        yield _named(name, cut), spread if replicas == 1 else {**spread, "dp_replicate_size": replicas}
    yield _named(f"FSDP {groups} from host memory", cut), {**spread, "fsdp_offload_params": True}


def _divided(processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    base = {"pp_size": 1, "tp_size": 1, "deepspeed": True}
    for stage in (1, 2, 3):
        own = {**base, "zero_stage": stage}
        yield f"ZeRO {stage}, {processes}", own
        yield f"ZeRO {stage}, {processes}, optimizer in host memory", {**own, **IN_HOST_MEMORY}
    yield (f"ZeRO 3, {processes}, all in host memory",
           {**base, "zero_stage": 3, **IN_HOST_MEMORY, "offload_param_device": HOST.type})  # fmt: skip


def _way(name: str, values: Values, config: RunConfig, given: frozenset[str], processes: int) -> Way | None:
    """Nothing where training would refuse to start so."""
    usual = {option: None for option in OPTIONS} | {"zero_stage": flat(RunConfig())["zero_stage"]}
    own: RunConfig = build(RunConfig, {**flat(config), **usual, **values})
    world = World.imagined(processes)
    asked, (zero, problems) = asked_for(own, world), zero_settings(own, world)
    written = {option for option, value in values.items() if value != 1 or option not in ("pp_size", "tp_size")}
    new = set(conflicts(own, given | written)) - set(conflicts(config, given))
    found = [*asked.problems, *problems, *layout_problems(own, world), *new]
    is_plain = asked.sharding is None and zero is None and own.parallel.together == 1
    if found or (is_wanted(own) and not is_plain) or (zero is not None and _looks_at_whole_tensors(own)):
        return None
    said = {option: value for option, value in values.items() if option in written}
    return Way(name, said, own, layout_of(own, world), asked.sharding, zero)


def _looks_at_whole_tensors(config: RunConfig) -> bool:
    try:
        refuse_whole_tensors(config.optim, "", "")
    except ConfigError:
        return True
    return False


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _named(*parts: str) -> str:
    return " x ".join(filter(None, parts))
