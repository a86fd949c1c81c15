"""Resolve launcher settings: which of flags, run file, launcher, accelerate's config file and environment sets each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.options import flatten_config
from ..config.types import parse_env_bool
from ..errors import ConfigError, FileError
from ..problems import Place, report_file
from .launch_command import ACCELERATE, TORCHRUN, LaunchCommand
from .slurm_and_mpi import find_world_size_variable
from .world import World


@dataclass(frozen=True)
class Setting:
    """A setting by the name that it has as a flag of ``accelerate launch`` and as a key in accelerate's config file."""

    name: str
    variable: str
    """The environment variable in which the training script finds it."""
    default: str = "false"
    option: str = ""
    """The option of this program that has the same meaning."""
    torchrun: str = ""
    """The flag of torchrun that has the same meaning."""
    is_inherited: bool = False
    """Whether ``accelerate launch`` passes the variable on as it was; it overwrites the others."""


STEPS = "gradient_accumulation_steps"
REGIONAL = "dynamo_use_regional_compilation"

SETTINGS = (
    Setting("mixed_precision", "ACCELERATE_MIXED_PRECISION", "no", "mixed_precision"),
    Setting("num_processes", "WORLD_SIZE", torchrun="nproc_per_node"),
    Setting("num_machines", "GROUP_WORLD_SIZE", torchrun="nnodes"),
    Setting("machine_rank", "GROUP_RANK", "0", torchrun="node_rank"),
    Setting("main_process_ip", "MASTER_ADDR", "127.0.0.1", torchrun="master_addr"),
    Setting("main_process_port", "MASTER_PORT", "29500", torchrun="master_port"),
    Setting("device", "ACCELERATE_USE_CPU", is_inherited=True),
    Setting(STEPS, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", STEPS, is_inherited=True),
    Setting("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY", is_inherited=True),
    Setting("num_cpu_threads_per_process", "OMP_NUM_THREADS", "all cores", is_inherited=True),
    Setting("dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", "no", "dynamo_backend"),
    Setting("dynamo_mode", "ACCELERATE_DYNAMO_MODE", "default", "dynamo_mode"),
    Setting("dynamo_use_fullgraph", "ACCELERATE_DYNAMO_USE_FULLGRAPH", option="dynamo_fullgraph"),
    Setting("dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", "auto", "compile_dynamic"),
    Setting(REGIONAL, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", option=REGIONAL),
    Setting("use_deepspeed", "ACCELERATE_USE_DEEPSPEED", option="deepspeed", is_inherited=True),
    Setting("use_fsdp", "ACCELERATE_USE_FSDP", option="fsdp", is_inherited=True),
    Setting("use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM", is_inherited=True),
    Setting("use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", is_inherited=True),
)

ENGINE_FLAGS = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Flags with which ``accelerate launch`` ignores ``distributed_type`` in its config file."""


@dataclass(frozen=True)
class SettingSource:
    """A place that sets something, and the value there."""

    location: str
    value: str
    is_launch_flag: bool = field(default=False, compare=False)
    """Whether it is a flag of ``accelerate launch``."""
    in_config_file: bool = field(default=False, compare=False)
    """Whether it is accelerate's config file, which the flags of ``accelerate launch`` are meant to override."""


@dataclass(frozen=True)
class ResolvedSetting:
    """The value that training uses, its source, and the sources that it overrides."""

    name: str
    value: str
    source: str
    overridden: tuple[SettingSource, ...] = ()
    warning: str = ""
    """A warning about sources that disagree; empty if they agree."""


Sources = dict[str, SettingSource]
"""The values that one place sets, by name."""


def find_overridden_settings(config: RunConfig, locations: Mapping[str, Place]) -> list[str]:
    """Return a warning for each setting of this run that several sources set to different values.

    ``locations`` says where each of our options was written.
    """
    settings = resolve_settings(flatten_config(config), locations, World.from_environment(), os.environ)
    return [setting.warning for setting in settings if setting.warning]


def read_accelerate_config(path: Path) -> dict[str, Any]:
    """Read what is written in accelerate's config file, by the names of its launch flags."""
    import yaml  # type: ignore[import-untyped, unused-ignore]
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(str(path))
        content = {name: value for name, value in yaml.safe_load(path.read_text("utf-8")).items() if value is not None}
    except Exception as error:  # whatever is wrong with a hand-written file, it is the file that has to be changed
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FileError([report_file(path, f"accelerate cannot read its config file: {reason}")]) from None
    dynamo = content.pop("dynamo_config", {})
    return {**content, **{f"dynamo_{name.removeprefix('dynamo_')}": value for name, value in dynamo.items()}}


def get_accelerate_config_path() -> Path:
    """Return where ``accelerate config`` writes, and ``accelerate launch`` reads unless it is given another file."""
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file)


def resolve_settings(
    options: Mapping[str, Any], locations: Mapping[str, Place], world: World, environment: Mapping[str, str]
) -> list[ResolvedSetting]:
    """Resolve everything that a launcher can set; ``environment`` is that of the training script."""
    own = _find_own_options(options, locations)
    layers, unread = _find_launcher_sources(world, environment)
    first = {name: layers[-1][name] for name in (STEPS,) if name in layers[-1]}  # accelerate prefers it to the code
    if device := environment.get("ACCELERATE_TORCH_DEVICE"):
        first["device"] = SettingSource("environment variable ACCELERATE_TORCH_DEVICE", device)
    resolved = []
    for name, value in _read_values(world, environment, {**own, **first}).items():
        found = list(dict.fromkeys(layer[name] for layer in (first, own, *layers) if name in layer))
        setting = _resolve(name, value, found, [unread[name]] if name in unread else [])
        resolved.append(_check_machine(setting, world) if name not in own else setting)
    return resolved


def _find_own_options(options: Mapping[str, Any], locations: Mapping[str, Place]) -> Sources:
    own = {}
    for setting in SETTINGS:
        location = locations.get(setting.option)
        value = _normalize(options.get(setting.option))
        if setting.name.startswith("dynamo_"):
            if options["torch_compile"] is None:
                continue
            location = location or locations.get("torch_compile", Place(flag="--torch_compile"))
            value = value if options["torch_compile"] else "no"
        if location is not None:
            own[setting.name] = SettingSource(str(location.without_key()), value)
    return own


def _find_launcher_sources(world: World, environment: Mapping[str, str]) -> tuple[list[Sources], Sources]:
    """Return what launcher and environment set, by precedence, and what is set where nothing reads it."""
    command = world.launch_command
    before = (command.environment if command is not None else {}) or environment
    variables = _find_variables(before, {setting.name: setting.variable for setting in SETTINGS})
    if command is None:
        sizes = _find_variables(before, {"num_processes": find_world_size_variable(before)})
        return [{**variables, **sizes}], {}
    flags = find_flags(command)
    if command.launcher == TORCHRUN:
        names = {setting.name: f"PET_{setting.torchrun.upper()}" for setting in SETTINGS if setting.torchrun}
        variables = {name: source for name, source in variables.items() if name not in names}
        return [flags, _find_variables(before, names), variables], {}
    in_file = find_config_file_settings(command)
    ignored = [(variables, s.name, "overwritten by accelerate launch") for s in SETTINGS if not s.is_inherited]
    ignored.append((flags, STEPS, "only passed to DeepSpeed"))
    ignored.append((in_file, "enable_cpu_affinity", "not read by accelerate"))
    if world.world_size > 1:
        ignored.append((in_file, "device", "not read for several processes"))
    else:
        ignored.append((variables, "device", "overwritten by accelerate launch"))
    unread = {}
    for layer, name, reason in ignored:
        if (source := layer.pop(name, None)) is not None:
            unread[name] = replace(source, location=f"{source.location}, {reason}")
    return [flags, in_file, variables], unread


def find_flags(command: LaunchCommand) -> Sources:
    flags = {}
    for name, value in command.options.items():
        flags[name] = SettingSource(
            f"{command.launcher} --{name}", _normalize(value), is_launch_flag=command.launcher == ACCELERATE
        )
    if command.launcher == TORCHRUN:
        return {setting.name: flags[setting.torchrun] for setting in SETTINGS if setting.torchrun in flags}
    return {**flags, "device": replace(flags["cpu"], value="cpu")} if "cpu" in flags else flags


def find_config_file_settings(command: LaunchCommand) -> Sources:
    """Return what accelerate's file sets; what is wrong with a broken one is said by ``accelerate launch``."""
    path = Path(command.options.get("config_file") or get_accelerate_config_path())
    if "config_file" not in command.options and (not path.is_file() or command.options.get("cpu")):
        return {}  # with --cpu, accelerate does not read its default file
    try:
        content = read_accelerate_config(path)
    except ConfigError:
        return {}
    if not any(command.options.get(flag) for flag in ENGINE_FLAGS):
        content[f"use_{content.get('distributed_type', 'NO')}".lower()] = True
        content |= {"use_parallelism_config": True} if content.get("parallelism_config") else {}
    content |= {"device": "cpu"} if content.get("use_cpu") else {}
    return {name: SettingSource(str(path), _normalize(value), in_config_file=True) for name, value in content.items()}


def _find_variables(environment: Mapping[str, str], names: Mapping[str, str]) -> Sources:
    found = {}
    for name, variable in names.items():
        value = environment.get(variable, "")
        if name == "device":
            value = "cpu" if parse_env_bool(value) else ""
        if value:
            found[name] = SettingSource(f"environment variable {variable}", _normalize(value))
    return found


def _read_values(world: World, environment: Mapping[str, str], own: Sources) -> dict[str, str]:
    """Return the value of each setting that means something here."""
    machine = world.machine
    binds = (
        machine.numa_nodes > 1 and not machine.numa_affinity_problem
        if world.numa_affinity is None
        else world.numa_affinity
    )
    values = {
        setting.name: _normalize(environment.get(setting.variable, "")) or setting.default for setting in SETTINGS
    }
    values |= {name: source.value for name, source in own.items()}
    values |= {
        "num_processes": str(world.world_size),
        "num_machines": str(world.num_machines),
        "device": world.device_type,
    }
    values["enable_cpu_affinity"] = _normalize(binds)
    values["main_process_port"] = values["main_process_port"] if values["main_process_port"] != "0" else "a free port"
    unused = {"main_process_port"} if world.world_size == 1 else set()
    unused |= {"machine_rank", "main_process_ip"} if world.num_machines == 1 else set()
    if values["dynamo_backend"] == "no":
        unused |= {name for name in values if name.startswith("dynamo_")} - {"dynamo_backend"}
    return {name: value for name, value in values.items() if name not in unused}


def _resolve(name: str, value: str, sources: list[SettingSource], unread: list[SettingSource]) -> ResolvedSetting:
    """Take the first source; the others, and those that nothing reads, are overridden."""
    winner, *others = sources or [SettingSource("detected" if name == "device" else "default", value)]
    different = []
    for source in (*others, *unread):
        is_flag_over_file = source.in_config_file and winner.is_launch_flag
        if source.value != winner.value and not is_flag_over_file:
            different.append(f"{source.value} ({source.location})")
    warning = f"{name}: {winner.value} ({winner.location}); overridden: {', '.join(different)}" if different else ""
    return ResolvedSetting(name, value, winner.location, (*others, *unread), warning)


def _check_machine(setting: ResolvedSetting, world: World) -> ResolvedSetting:
    """Warn of what the launcher asks for and this machine cannot do."""
    name, obstacle = setting.name, world.machine.numa_affinity_problem
    if (name, setting.value, world.device_type) == ("mixed_precision", "fp16", "cpu"):
        overridden = (SettingSource(setting.source, setting.value), *setting.overridden)
        warning = f"{name}: fp16 ({setting.source}) is not supported on a CPU; training uses fp32"
        return ResolvedSetting(name, "no", f"device {world.device_type}", overridden, warning)
    if name == "enable_cpu_affinity" and world.numa_affinity and obstacle:
        return replace(setting, warning=f"{name}: true ({setting.source}) has no effect: {obstacle}")
    return setting


def _normalize(value: Any) -> str:
    """Format a value for comparison: accelerate writes True and true, INDUCTOR and inductor."""
    text = str(value).strip()
    return text.lower() if text.lower() in ("true", "false") or text.isupper() else text
