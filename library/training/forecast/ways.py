"""The ways in which so many processes can share the work of a run; those that a run would refuse are not among them."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from ...config import RunConfig
from ...config.checks import conflicts
from ...config.options import build, flat
from ...config.values import DeviceMap
from ...distributed.device_map import mapping_problems
from ...distributed.devices import HOST
from ...distributed.layout import Layout, layout_of, layout_problems
from ...distributed.refusals import exchange_problems
from ...distributed.sharding import Sharding, asked_for
from ...distributed.world import World
from ...distributed.zero import Zero
from ...distributed.zero_settings import ZeroSettings, zero_settings
from ...families import FAMILIES
from ...families.detect import Detected
from ...optim.elementwise import whole_tensor_problems
from ..parallel_fit import misfits
from ..resting import spread_problems

Values = Mapping[str, Any]
IN_HOST_MEMORY = {"offload_optimizer_device": HOST.type}
SIZES = ("pp_size", "tp_size", "cp_size")
OPTIONS = (*SIZES, "device_map", "fsdp", "fsdp_offload_params", "dp_replicate_size", "deepspeed", "zero_stage",
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
    def cut(self) -> Hashable:
        """Ways of which it is the same cut the model alike."""
        layout = self.layout
        return layout.stages, layout.parts, layout.contexts, self.config.parallel.device_map

    @property
    def words(self) -> str:
        """As they are written behind the script."""
        said = (
            f"--{name}" if value is True else f"--{name} {quote(str(value))}" for name, value in self.values.items()
        )
        return " ".join(said)


def ways(config: RunConfig, given: frozenset[str], processes: int, model: Detected) -> list[Way]:
    """All that this model and these settings allow."""
    return [way for way, obstacle in _considered(config, given, processes, model) if obstacle is None]


def obstacles(config: RunConfig, given: frozenset[str], processes: int, model: Detected) -> list[str]:
    """Why none is allowed, each reason once; where all have the same, without their names."""
    found = dict[str, list[str]]()
    for way, why in _considered(config, given, processes, model):
        if why is not None:
            found.setdefault(why, []).append(way.name)
    if not found:
        said = [option for option in OPTIONS if option in given]
        return [f"{', '.join(f'--{option}' for option in said)}: no way that can be foretold is asked for like this;"
                " leave out what says how the run is spread"]  # fmt: skip
    return [*found] if len(found) == 1 else [f"{', '.join(names)}: {why}" for why, names in found.items()]


def _considered(
    config: RunConfig, given: frozenset[str], processes: int, model: Detected
) -> Iterator[tuple[Way, str | None]]:
    """Ways that agree with what somebody wrote down, each with the first thing that speaks against it."""
    wanted = {option: _said(option, flat(config)[option]) for option in OPTIONS if option in given}
    misfit = dict[Hashable, str | None]()
    for name, values in _thinkable(processes, config.parallel.device_map or DeviceMap("balanced")):
        if not set(SIZES) <= given and all(values[name] > 1 for name in SIZES):
            continue  # slower than any two of them, and there would be many
        if any(_said(option, values.get(option)) != value for option, value in wanted.items()):
            continue
        is_alone = processes == 1 and "deepspeed" in values and "deepspeed" not in given
        if is_alone and "offload_param_device" not in values:
            continue  # it has nobody to share with, and gains next to nothing
        way = _way(name, values, config, processes)
        obstacle = next(_obstacles(way, values, config, given, processes), None)
        if obstacle is None:
            if way.cut not in misfit:
                family = FAMILIES.get(model.family)(config.model)
                misfit[way.cut] = next(misfits(way.config, family, model), None)
            obstacle = misfit[way.cut]
        yield way, obstacle


def refusals(config: RunConfig, processes: int) -> list[str]:
    """Why a run could not be spread over so many devices as its settings say."""
    world = _world(config, processes)
    _, problems = zero_settings(config, world)
    return [*asked_for(config, world).problems, *problems, *layout_problems(config, world),
            *mapping_problems(config, world), *exchange_problems(config, world)]  # fmt: skip


def _world(config: RunConfig, processes: int) -> World:
    return World.imagined(1 if config.parallel.device_map else processes, processes)


def _said(option: str, value: Any) -> Any:
    """All ways to say that something is not wanted are one."""
    is_unwanted = value in (None, False, "none") or (option.endswith("_size") and value == 1)
    return None if is_unwanted else value


def _thinkable(processes: int, dealt: DeviceMap) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options; one more kind of cut is one more factor of ``together``."""
    for together in _divisors(processes):
        for stages, parts, contexts in _factors(together):
            groups = processes // together
            kinds = {"pipeline": stages, "tensor": parts, "context": contexts}
            cut = _named(*(f"{kind} {size}" for kind, size in kinds.items() if size > 1))
            base = dict(zip(SIZES, (stages, parts, contexts), strict=True))
            plain = "" if groups == 1 and cut else f"DDP {groups}" if groups > 1 else "one device"
            yield _named(plain, cut), base
            if groups > 1 and stages == 1:
                yield from _sharded(groups, cut, base)
    yield from _divided(processes)
    if processes > 1:
        yield f"device map {processes}", {**dict.fromkeys(SIZES, 1), "device_map": dealt}


def _sharded(groups: int, cut: str, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    spread = {**base, "fsdp": True}
    for replicas in _divisors(groups)[:-1]:
        name = f"FSDP {groups}" if replicas == 1 else f"HSDP {replicas} x {groups // replicas}"
        yield _named(name, cut), spread if replicas == 1 else {**spread, "dp_replicate_size": replicas}
    yield _named(f"FSDP {groups} from host memory", cut), {**spread, "fsdp_offload_params": True}


def _divided(processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    base = {**dict.fromkeys(SIZES, 1), "deepspeed": True}
    for stage in (1, 2, 3):
        own = {**base, "zero_stage": stage}
        yield f"ZeRO {stage}, {processes}", own
        yield f"ZeRO {stage}, {processes}, optimizer in host memory", {**own, **IN_HOST_MEMORY}
    yield (f"ZeRO 3, {processes}, all in host memory",
           {**base, "zero_stage": 3, **IN_HOST_MEMORY, "offload_param_device": HOST.type})  # fmt: skip


def _way(name: str, values: Values, config: RunConfig, processes: int) -> Way:
    usual = {option: None for option in OPTIONS} | {"zero_stage": flat(RunConfig())["zero_stage"]}
    own: RunConfig = build(RunConfig, {**flat(config), **usual, **values})
    world = _world(own, processes)
    said = {option: values[option] for option in _written(values)}
    return Way(name, said, own, layout_of(own, world), asked_for(own, world).sharding, zero_settings(own, world)[0])


def _written(values: Values) -> list[str]:
    return [option for option, value in values.items() if value != 1 or option not in SIZES]


def _obstacles(way: Way, values: Values, config: RunConfig, given: frozenset[str], processes: int) -> Iterator[str]:
    """Why training would refuse to start so."""
    known = set(conflicts(config, given))
    for problem in conflicts(way.config, given | set(_written(values))):
        if problem not in known:
            yield f"--{problem[0][0]}: {problem[1]}"
    yield from refusals(way.config, processes)
    is_divided = way.sharding is not None or way.zero is not None
    yield from spread_problems(way.config, not is_divided and way.layout.contexts == way.layout.together)
    if way.zero is not None:
        yield from whole_tensor_problems(way.config.optim, Zero.divides_optimizer)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _factors(number: int) -> list[tuple[int, int, int]]:
    """All three numbers of which it is the product."""
    return [(one, two, number // one // two) for one in _divisors(number) for two in _divisors(number // one)]


def _named(*parts: str) -> str:
    return " x ".join(filter(None, parts))
