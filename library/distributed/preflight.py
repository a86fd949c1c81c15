"""Which ways to compute attention this machine has; asked before any model is loaded, and without importing them."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from accelerate.utils import DynamoBackend, is_fp8_available

from ..config import RunConfig
from .deepspeed_settings import validate_deepspeed
from .fsdp_settings import resolve_fsdp
from .parallel_dims import validate_parallel_dims
from .world import World

ATTENTION_PACKAGES = {
    "flash": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
    "xformers": ("xformers", "xformers"),
}
"""Way -> the module it needs, and the package to install."""


HALF_PRECISION_ATTENTION = ("flash", "flash3", "cudnn")


def validate_attention_support(mode: str, world: World, precision: str | None) -> list[str]:
    """Everything that keeps ``mode`` from working here; torch's own choice (sdpa) works everywhere."""
    if mode in ("sdpa", "torch", "math"):
        return []
    problems = []
    if mode in ATTENTION_PACKAGES and find_spec(ATTENTION_PACKAGES[mode][0]) is None:
        problems.append(
            f"--attn_mode {mode}: it is not installed; pip install {ATTENTION_PACKAGES[mode][1]}, or use sdpa"
        )
    if world.device_type != "cuda":
        problems.append(f"--attn_mode {mode}: needs a CUDA device, and this is {world.device_type}; use sdpa")
    if mode in HALF_PRECISION_ATTENTION and precision not in ("bf16", "fp16"):
        problems.append(f"--attn_mode {mode}: computes in half precision only; set mixed_precision bf16, or use sdpa")
    return problems


def validate_device_map_launch(config: RunConfig, world: World) -> Iterator[str]:
    """Why blocks cannot be dealt out over devices here, and what can be had instead."""
    wanted, count = config.parallel.device_map, world.machine.device_count
    if wanted is None:
        return
    if world.world_size > 1:
        yield (
            f"--device_map: it is for one process with several devices, and this is one of {world.world_size}; start one"
            " process, or use --pp_size, --tp_size or --fsdp"
        )
    for engine in world.engines:
        yield f"--device_map: the launcher asks for {engine}; take one of the two"
    if world.dynamo_backend not in (None, "no", "NO") and config.distributed.torch_compile is None:
        yield "--device_map: the launcher asks for dynamo, and hooks cannot be compiled; add --no-torch_compile"
    if world.device_type == "cpu" or count < 2:
        yield f"--device_map: this process sees {count} accelerators, and there is nothing to deal out; leave it out"
    elif beyond := sorted({number for _, number in wanted.device_by_module if number >= count}):
        yield f"--device_map: there is no device {beyond[0]}; this process sees devices 0 to {count - 1}"


UNSUPPORTED_ENGINES = {"Megatron-LM": "only for language models of its own: Megatron-LM"}
"""Engines that a launcher may ask for in vain, and why."""


CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of dynamo that use CUDA graphs."""


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


def resolve_mixed_precision(config: RunConfig, world: World) -> str | None:
    """Our own setting; ``None`` leaves it to the launcher.

    A launcher's fp16 becomes ``no`` on a CPU, because that is how accelerate computes there while it still says fp16.
    It is no error: the word may come from a file that was written once for all programs and another machine.
    """
    asked = config.distributed.mixed_precision
    return "no" if asked is None and world.mixed_precision == "fp16" and world.device_type == "cpu" else asked


def find_launch_problems(config: RunConfig, world: World) -> list[str]:
    """Everything that is known to go wrong from settings and surroundings alone.  Pure."""
    asked = config.distributed.mixed_precision or world.mixed_precision
    return [
        *_validate_engines(config, world),
        *validate_parallel_dims(config, world),
        *validate_device_map_launch(config, world),
        *validate_deepspeed(config, world),
        *_validate_mixed_precision(config, world),
        *_validate_gradient_accumulation(config, world),
        *_validate_dynamo_backend(config),
        *validate_compiled_context_parallel(config, world),
        *_validate_device_count(world),
        *_validate_numa_affinity(world),
        *validate_attention_support(config.distributed.attn_mode, world, asked),
    ]


def validate_accelerator(config: RunConfig, world: World, actual: AcceleratorFacts) -> list[str]:
    """Everything in which the ``Accelerator`` is not what was asked for.  Pure."""
    precision = resolve_mixed_precision(config, world) or world.mixed_precision
    compiles = config.distributed.torch_compile
    asked_and_came: dict[str, tuple[object, object]] = {
        "processes": (world.world_size, actual.world_size),
        "rank": (world.rank, actual.rank),
        "device": (world.device_type, actual.device_type),
        "gradient accumulation": (config.train.gradient_accumulation_steps, actual.gradient_accumulation_steps),
        "precision": (precision or actual.mixed_precision, actual.mixed_precision),
        "dynamo backend": (
            actual.dynamo_backend if compiles is None else config.distributed.dynamo_backend if compiles else "no",
            actual.dynamo_backend,
        ),
    }
    problems = format_mismatches(asked_and_came)
    if config.distributed.full_bf16 and actual.mixed_precision != "bf16":
        problems.append(f"--full_bf16: needs mixed_precision bf16, not {actual.mixed_precision}")
    if actual.distributed_type != "NO" and not actual.distributed_type.startswith("MULTI_"):
        problems.append(f"not yet: {actual.distributed_type}, which accelerate set up; use --multi_gpu")
    return problems


def format_mismatches(expected_and_actual: dict[str, tuple[object, object]]) -> list[str]:
    """A line for each thing that is not as asked."""
    ways_out = {
        "processes": "start through accelerate launch --multi_gpu, or torchrun",
        "rank": "start through accelerate launch --multi_gpu, or torchrun",
        "device": "`python -m library doctor` tells what works here",
        "precision": "`python -m library doctor` tells what works here",
    }
    earlier = "an Accelerator made earlier in this process keeps its settings; start a new process"
    return [
        f"{what}: {asked} was asked for, and accelerate came up with {came}; {ways_out.get(what, earlier)}"
        for what, (asked, came) in expected_and_actual.items()
        if asked != came
    ]


def _validate_engines(config: RunConfig, world: World) -> list[str]:
    found = [
        f"{UNSUPPORTED_ENGINES[engine]}, which the launcher asks for; use --multi_gpu"
        for engine in world.engines
        if engine in UNSUPPORTED_ENGINES
    ]
    return found or list(resolve_fsdp(config, world).problems)


def _validate_mixed_precision(config: RunConfig, world: World) -> list[str]:
    asked, place = config.distributed.mixed_precision or world.mixed_precision, "--mixed_precision"
    if config.distributed.mixed_precision is None:
        place = "the launcher's mixed_precision"
    if asked not in (None, "no", "fp16", "bf16", "fp8"):
        return [f"{place}: {asked!r} is not one of no, fp16, bf16, fp8"]
    if asked == "fp16" and world.device_type == "cpu" and config.distributed.mixed_precision:
        return [f"{place} fp16: a CPU has none, and accelerate would compute in fp32 without a word; use bf16 or no"]
    if asked == "fp8" and world.device_type != "cuda":
        return [f"{place} fp8: needs a CUDA device, and this is {world.device_type}; use bf16"]
    if asked == "fp8" and not is_fp8_available():
        return [f"{place} fp8: needs torchao, transformer-engine or MS-AMP; pip install torchao, or use bf16"]
    return []


def _validate_gradient_accumulation(config: RunConfig, world: World) -> list[str]:
    ours, theirs = config.train.gradient_accumulation_steps, world.gradient_accumulation_steps
    if theirs is None or theirs == ours:
        return []
    return [
        f"--gradient_accumulation_steps {ours}: the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS "
        f"says {theirs}, and accelerate would follow it; unset it, or say {theirs} in both"
    ]


def _validate_dynamo_backend(config: RunConfig) -> list[str]:
    name = config.distributed.dynamo_backend
    if not config.distributed.torch_compile or name.upper() in DynamoBackend.__members__:
        return []
    return [f"--dynamo_backend {name}: this version of accelerate does not know it; pip install -U accelerate"]


def validate_compiled_context_parallel(config: RunConfig, world: World) -> list[str]:
    """Why tokens cannot be exchanged in what is compiled.

    Exchanges are compiled with blocks, whoever asks for that: the options, or else the launcher.
    """
    ours, size = config.distributed, config.parallel.cp_size
    if ours.torch_compile is None:
        backend, mode = world.dynamo_backend or "no", world.dynamo_mode or "default"
    else:
        backend, mode = ours.dynamo_backend if ours.torch_compile else "no", ours.dynamo_mode
    if size == 1 or backend.lower() == "no":
        return []
    problems = []
    if mode in CUDA_GRAPH_MODES:
        problems.append(
            f"--cp_size {size}: dynamo's mode {mode} records what a device does and repeats it, which an"
            " exchange with others is not made for; use default or max-autotune-no-cudagraphs"
        )
    if config.train.activation_memory_budget:
        problems.append(
            f"--cp_size {size}: with --activation_memory_budget the compiler of each process"
            " decides which exchanges it repeats, and others might wait for ever; leave the budget out"
        )
    return problems


def _validate_device_count(world: World) -> list[str]:
    if world.world_size == 1 or world.device_type == "cpu":
        return []
    if world.device_type == "mps":
        return [f"{world.world_size} processes cannot share the device mps; start one, or set ACCELERATE_USE_CPU=true"]
    if world.local_world_size > world.machine.device_count:
        return [
            f"{world.local_world_size} processes on this machine, but {world.machine.device_count} devices "
            f"({world.device_type}); start one process for each device"
        ]
    return []


def _validate_numa_affinity(world: World) -> list[str]:
    obstacle = world.machine.numa_affinity_problem
    if world.numa_affinity and world.device_type == "cuda" and "missing" in obstacle:
        return [f"NUMA affinity is switched on, but {obstacle}"]
    return []
