"""Pre-flight checks of launcher, devices and distributed settings: what is known to fail before the ranks connect."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DynamoBackend, LoggerType, is_fp8_available

from ..config import RunConfig
from ..config.schema_distributed import DeepSpeedConfig, DistributedConfig
from ..config.schema_output import LogConfig
from ..config.types import DeviceMap
from ..config.validate_distributed import validate_attention_package
from ..problems import Place, Problem
from ..trackers import is_wandb_ready, resolve_tracker
from .launch_command import ACCELERATE, format_multi_process_command
from .launcher_settings import find_config_file_settings, find_flags
from .parallel_dims import validate_parallel_dims
from .validate_sharding import validate_deepspeed, validate_fsdp
from .world import World

UNSUPPORTED_ENGINES = {"Megatron-LM": "supports language models only"}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of dynamo that use CUDA graphs."""

HALF_PRECISION_ATTENTION = ("flash", "flash3", "cudnn")


def validate_distributed(config: RunConfig, world: World) -> list[Problem]:
    """Return every problem that settings, launcher and machine show.  Pure."""
    ours = config.distributed
    return [
        *_validate_launch_command(config.train.gradient_accumulation_steps, world),
        *_validate_gradient_accumulation(config.train.gradient_accumulation_steps, world),
        *_validate_engines(world),
        *validate_parallelism(config, world),
        *_validate_deepspeed_package(config.deepspeed, world),
        *_validate_mixed_precision(ours.mixed_precision, world),
        *_validate_dynamo_backend(ours),
        *_validate_main_address(world),
        *_validate_device_count(world),
        *_validate_numa_affinity(world),
        *validate_attention_support(ours.attn_mode, world, ours.mixed_precision or world.mixed_precision),
        *_validate_deterministic_attention(ours),
    ]


def validate_parallelism(config: RunConfig, world: World) -> Iterator[Problem]:
    """Check parallel dimensions and engines against the world size and each other; also for estimated worlds."""
    yield from validate_fsdp(config.sharding, config.train, config.parallel.tp_size, world)
    yield from validate_deepspeed(config, world)
    yield from validate_parallel_dims(config, world)
    yield from validate_device_map_launch(config.parallel.device_map, config.distributed, world)
    has_budget = bool(config.train.activation_memory_budget)
    yield from _validate_compiled_context_parallel(config.parallel.cp_size, has_budget, config.distributed, world)


def validate_device_map_launch(
    device_map: DeviceMap | None, distributed: DistributedConfig, world: World
) -> Iterator[Problem]:
    """Check what --device_map needs of launcher and machine."""
    count = world.machine.device_count
    if device_map is None:
        return
    if world.world_size > 1:
        yield Problem(
            "device_map",
            f"needs a single process with several devices, but the world size is {world.world_size}",
            "start one process, or use --pp_size, --tp_size or --fsdp",
        )
    for engine in world.engines:
        yield Problem("device_map", f"the launcher requests {engine}", "use one of the two")
    if world.dynamo_backend not in (None, "no", "NO") and distributed.torch_compile is None:
        yield Problem(
            "device_map", "the launcher requests torch.compile, which its hooks do not allow", "add --no-torch_compile"
        )
    if world.device_type == "cpu" or count < 2:
        yield Problem("device_map", f"needs several accelerators, and this process sees {count}", "remove it")
    elif unknown := sorted({index for _, index in device_map.device_by_module if index >= count}):
        yield Problem("device_map", f"there is no device {unknown[0]}", f"this process sees devices 0 to {count - 1}")


def _validate_compiled_context_parallel(
    cp_size: int, has_checkpointing_budget: bool, distributed: DistributedConfig, world: World
) -> Iterator[Problem]:
    """Check whether all-to-alls inside compiled blocks are safe, whether options or launcher request compiling."""
    if distributed.torch_compile is None:
        backend, mode = world.dynamo_backend or "no", world.dynamo_mode or "default"
    else:
        backend, mode = distributed.dynamo_backend if distributed.torch_compile else "no", distributed.dynamo_mode
    if cp_size == 1 or backend.lower() == "no":
        return
    if mode in CUDA_GRAPH_MODES:
        yield Problem(
            "cp_size",
            f"dynamo's mode {mode} uses CUDA graphs, which cannot capture the all-to-all",
            "use default or max-autotune-no-cudagraphs",
            value=str(cp_size),
        )
    if has_checkpointing_budget:
        yield Problem(
            "cp_size",
            "with --activation_memory_budget each rank's compiler decides which all-to-alls to"
            " recompute, and ranks could deadlock",
            "remove the budget",
            value=str(cp_size),
        )


def _validate_launch_command(gradient_accumulation_steps: int, world: World) -> Iterator[Problem]:
    """Check for flags of ``accelerate launch`` that do not do what they say; suggest the command that does."""
    command = world.launch_command
    if command is None or command.launcher != ACCELERATE:
        return
    flags, in_file = find_flags(command), find_config_file_settings(command)
    requested = flags.get("num_processes") or in_file.get("num_processes")
    if requested is not None and requested.value not in ("0", "1", str(world.world_size)):
        on_cpu = world.machine.device_type == "cpu" or "device" in flags or "device" in in_file
        needed = "--multi_gpu, on a CPU together with ACCELERATE_USE_CPU=true" if on_cpu else "--multi_gpu"
        yield Problem(
            "",
            f"num_processes: {requested.value} ({requested.location}), but accelerate launch starts {world.world_size}",
            f"several processes need {needed}:\n  {format_multi_process_command(command, on_cpu=on_cpu)}",
        )
    steps = flags.get("gradient_accumulation_steps")
    if steps is not None and steps.value != str(gradient_accumulation_steps):
        yield Problem(
            "",
            f"gradient_accumulation_steps: {steps.value} ({steps.location}) is only passed to"
            f" DeepSpeed, training uses {gradient_accumulation_steps}",
            f"move the flag behind {command.script}",
        )


def _validate_gradient_accumulation(steps: int, world: World) -> Iterator[Problem]:
    if world.gradient_accumulation_steps not in (None, steps):
        yield Problem(
            "gradient_accumulation_steps",
            "the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS is"
            f" {world.gradient_accumulation_steps}, and accelerate would use that",
            "unset it, or make them equal",
            value=str(steps),
        )


def _validate_engines(world: World) -> Iterator[Problem]:
    for engine in world.engines:
        if engine in UNSUPPORTED_ENGINES:
            yield Problem("", f"the launcher requests {engine}, which {UNSUPPORTED_ENGINES[engine]}", "use --multi_gpu")


def _validate_deepspeed_package(deepspeed: DeepSpeedConfig, world: World) -> Iterator[Problem]:
    is_requested = deepspeed.deepspeed or ("DeepSpeed" in world.engines and deepspeed.deepspeed is None)
    if is_requested and find_spec("deepspeed") is None:
        yield Problem("deepspeed", "the package deepspeed is not installed", "pip install '.[deepspeed]'")


def _validate_mixed_precision(ours: str | None, world: World) -> Iterator[Problem]:
    precision = ours or world.mixed_precision
    name, place = "mixed_precision", Place(flag="the launcher's mixed_precision") if ours is None else None
    if precision not in (None, "no", "fp16", "bf16", "fp8"):
        yield Problem(name, f"{precision!r} is not one of no, fp16, bf16, fp8", place=place)
    elif precision == "fp16" and world.device_type == "cpu" and ours:
        text = "not supported on a CPU, accelerate would silently compute in fp32"
        yield Problem(name, text, "use bf16 or no", place, value=precision)
    elif precision == "fp8" and world.device_type != "cuda":
        text = f"needs a CUDA device, and this is {world.device_type}"
        yield Problem(name, text, "use bf16", place, value=precision)
    elif precision == "fp8" and not is_fp8_available():
        text, fix = "needs torchao, transformer-engine or MS-AMP", "pip install torchao, or use bf16"
        yield Problem(name, text, fix, place, value=precision)


def _validate_dynamo_backend(distributed: DistributedConfig) -> Iterator[Problem]:
    name = distributed.dynamo_backend
    if distributed.torch_compile and name.upper() not in DynamoBackend.__members__:
        yield Problem(
            "dynamo_backend",
            "not supported by this version of accelerate",
            "pip install -U accelerate",
            value=name,
        )


def _validate_main_address(world: World) -> Iterator[Problem]:
    if world.world_size > 1 and not world.has_main_address:
        yield Problem(
            "",
            f"not set for {world.world_size} processes",
            "set it to the host of rank 0, and MASTER_PORT to a free port there (mpirun -x"
            " MASTER_ADDR=HOST -x MASTER_PORT=29500 ...)",
            Place(flag="MASTER_ADDR"),
        )


def _validate_device_count(world: World) -> Iterator[Problem]:
    if world.world_size == 1 or world.device_type == "cpu":
        return
    if world.device_type == "mps":
        yield Problem(
            "", f"{world.world_size} processes cannot share the device mps", "start one, or set ACCELERATE_USE_CPU=true"
        )
    elif world.local_world_size > world.machine.device_count and not world.has_bound_device:
        yield Problem(
            "",
            f"{world.local_world_size} processes on this machine, but {world.machine.device_count}"
            f" devices ({world.device_type})",
            "start one process per device",
        )


def _validate_numa_affinity(world: World) -> Iterator[Problem]:
    machine = world.machine
    if world.numa_affinity and world.device_type == "cuda" and machine.lacks_numa_package:
        yield Problem("", f"NUMA affinity is enabled, but {machine.numa_affinity_problem}")


def validate_attention_support(mode: str, world: World, precision: str | None) -> list[Problem]:
    """Check whether this machine supports an attention mode; torch's own choice (sdpa) works everywhere."""
    if mode in ("sdpa", "torch", "math"):
        return []
    problems = list(validate_attention_package(mode))
    if world.device_type != "cuda":
        problems.append(
            Problem("attn_mode", f"needs a CUDA device, and this is {world.device_type}", "use sdpa", value=mode)
        )
    if mode in HALF_PRECISION_ATTENTION and precision not in ("bf16", "fp16"):
        problems.append(
            Problem("attn_mode", "supports half precision only", "set mixed_precision bf16, or use sdpa", value=mode)
        )
    return problems


def _validate_deterministic_attention(config: DistributedConfig) -> Iterator[Problem]:
    """flash-attn and xformers do not ask torch, and torch has no deterministic backward of cuDNN's attention."""
    if config.deterministic and config.attn_mode in ("flash", "flash3", "cudnn", "xformers"):
        yield Problem(
            "attn_mode", "has no deterministic backward", "use sdpa with --deterministic", value=config.attn_mode
        )


def validate_trackers(log: LogConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Check whether the trackers can start; for the main process, which runs them."""
    name = resolve_tracker(log)
    if name is None:
        return []
    names = [str(item) for item in get_available_trackers()] if name == "all" else [name]
    return [problem for item in names for problem in _validate_tracker(item, log, environment)]


def _validate_tracker(name: str, log: LogConfig, environment: Mapping[str, str]) -> Iterator[Problem]:
    if name not in LoggerType:
        text, fix = f"this version of accelerate does not support {name}", "pip install -U accelerate"
    elif LoggerType(name) not in get_available_trackers():
        text, fix = f"the package {name} is not installed", f"pip install {name}"
    elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and log.logging_dir is None:
        text, fix = f"{name} writes to a directory", "set --logging_dir"
    elif name == "wandb" and not is_wandb_ready(environment):
        text, fix = "not logged in to wandb", "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
    else:
        return
    option = "log_with" if log.log_with else "logging_dir"
    yield Problem(option, text, fix, value=str(getattr(log, option)))


@dataclass(frozen=True)
class AcceleratorFacts:
    """What an ``Accelerator`` really has."""

    world_size: int
    rank: int
    device_type: str
    distributed_type: str
    mixed_precision: str
    gradient_accumulation_steps: int
    dynamo_backend: str


def validate_accelerator(
    distributed: DistributedConfig, gradient_accumulation_steps: int, world: World, actual: AcceleratorFacts
) -> list[Problem]:
    """Compare the ``Accelerator`` with the settings.  Pure."""
    compiles = distributed.torch_compile
    dynamo_backend = distributed.dynamo_backend if compiles else "no"
    precision = world.resolve_mixed_precision(distributed.mixed_precision) or world.mixed_precision
    problems = find_mismatches(
        {
            "world size": (world.world_size, actual.world_size),
            "rank": (world.rank, actual.rank),
            "device": (world.device_type, actual.device_type),
            "gradient accumulation": (gradient_accumulation_steps, actual.gradient_accumulation_steps),
            "mixed precision": (precision or actual.mixed_precision, actual.mixed_precision),
            "dynamo backend": (actual.dynamo_backend if compiles is None else dynamo_backend, actual.dynamo_backend),
        }
    )
    if distributed.full_bf16 and actual.mixed_precision != "bf16":
        problems.append(Problem("full_bf16", f"needs mixed_precision bf16, not {actual.mixed_precision}"))
    if actual.distributed_type != "NO" and not actual.distributed_type.startswith("MULTI_"):
        problems.append(
            Problem("", f"accelerate set up {actual.distributed_type}, which is not supported", "use --multi_gpu")
        )
    return problems


def find_mismatches(expected_and_actual: Mapping[str, tuple[object, object]]) -> list[Problem]:
    """Return a problem for each difference."""
    fixes = {
        "world size": "start through accelerate launch --multi_gpu, or torchrun",
        "rank": "start through accelerate launch --multi_gpu, or torchrun",
        "device": "`python -m library doctor` shows what works here",
        "mixed precision": "`python -m library doctor` shows what works here",
    }
    default = "an Accelerator built earlier in this process keeps its settings; start a new process"
    return [
        Problem("", f"{name}: expected {expected}, but accelerate has {actual}", fixes.get(name, default))
        for name, (expected, actual) in expected_and_actual.items()
        if expected != actual
    ]
