"""Why a run does not start: what cannot be had is told before joining the others, what did not come right after."""

from dataclasses import dataclass

from accelerate.utils import DynamoBackend, is_fp8_available

from ..config import RunConfig
from .attention import attention_problems
from .device_map import mapping_problems
from .layout import layout_problems
from .sharding import asked_for
from .world import World
from .zero_settings import zero_problems

NOT_THERE = {"Megatron-LM": "only for language models of its own: Megatron-LM"}
"""Engines that a launcher may ask for in vain, and why."""

RECORDED = ("reduce-overhead", "max-autotune")
"""Modes of dynamo that use CUDA graphs."""


@dataclass(frozen=True)
class Came:
    """What an ``Accelerator`` really has."""

    size: int
    rank: int
    device: str
    kind: str
    precision: str
    accumulation: int
    dynamo: str


def effective_precision(args: RunConfig, world: World) -> str | None:
    """Our own setting; ``None`` leaves it to the launcher.

    A launcher's fp16 becomes ``no`` on a CPU, because that is how accelerate computes there while it still says fp16.
    It is no error: the word may come from a file that was written once for all programs and another machine.
    """
    asked = args.distributed.mixed_precision
    return "no" if asked is None and world.precision == "fp16" and world.device == "cpu" else asked


def before_joining(args: RunConfig, world: World) -> list[str]:
    """Everything that is known to go wrong from settings and surroundings alone.  Pure."""
    asked = args.distributed.mixed_precision or world.precision
    return [
        *_engines(args, world),
        *layout_problems(args, world),
        *mapping_problems(args, world),
        *zero_problems(args, world),
        *_precision(args, world),
        *_accumulation(args, world),
        *_dynamo(args),
        *exchange_problems(args, world),
        *_devices(world),
        *_affinity(world),
        *attention_problems(args.distributed.attn_mode, world, asked),
    ]


def mismatches(args: RunConfig, world: World, came: Came) -> list[str]:
    """Everything in which the ``Accelerator`` is not what was asked for.  Pure."""
    precision = effective_precision(args, world) or world.precision
    compiles = args.distributed.torch_compile
    asked_and_came: dict[str, tuple[object, object]] = {
        "processes": (world.size, came.size),
        "rank": (world.rank, came.rank),
        "device": (world.device, came.device),
        "gradient accumulation": (args.train.gradient_accumulation_steps, came.accumulation),
        "precision": (precision or came.precision, came.precision),
        "dynamo backend": (came.dynamo if compiles is None else args.distributed.dynamo_backend if compiles else "no",
                           came.dynamo),
    }  # fmt: skip
    problems = differences(asked_and_came)
    if args.distributed.full_bf16 and came.precision != "bf16":
        problems.append(f"--full_bf16: needs mixed_precision bf16, and it is {came.precision}")
    if came.kind != "NO" and not came.kind.startswith("MULTI_"):
        problems.append(f"not yet: {came.kind}, which accelerate set up; use --multi_gpu")
    return problems


def differences(asked_and_came: dict[str, tuple[object, object]]) -> list[str]:
    """A line for each thing that is not as asked."""
    ways_out = {
        "processes": "start through accelerate launch --multi_gpu, or torchrun",
        "rank": "start through accelerate launch --multi_gpu, or torchrun",
        "device": "`python -m library doctor` tells what works here",
        "precision": "`python -m library doctor` tells what works here",
    }
    earlier = "an Accelerator made earlier in this process keeps its settings; start a new process"
    return [f"{what}: {asked} was asked for, and accelerate came up with {came}; {ways_out.get(what, earlier)}"
            for what, (asked, came) in asked_and_came.items() if asked != came]  # fmt: skip


def _engines(args: RunConfig, world: World) -> list[str]:
    found = [f"{NOT_THERE[engine]}, which the launcher asks for; use --multi_gpu" for engine in world.engines
             if engine in NOT_THERE]  # fmt: skip
    return found or list(asked_for(args, world).problems)


def _precision(args: RunConfig, world: World) -> list[str]:
    asked, place = args.distributed.mixed_precision or world.precision, "--mixed_precision"
    if args.distributed.mixed_precision is None:
        place = "the launcher's mixed_precision"
    if asked not in (None, "no", "fp16", "bf16", "fp8"):
        return [f"{place}: {asked!r} is not one of no, fp16, bf16, fp8"]
    if asked == "fp16" and world.device == "cpu" and args.distributed.mixed_precision:
        return [f"{place} fp16: a CPU has none, and accelerate would compute in fp32 without a word; use bf16 or no"]
    if asked == "fp8" and world.device != "cuda":
        return [f"{place} fp8: needs a CUDA device, and this is {world.device}; use bf16"]
    if asked == "fp8" and not is_fp8_available():
        return [f"{place} fp8: needs torchao, transformer-engine or MS-AMP; pip install torchao, or use bf16"]
    return []


def _accumulation(args: RunConfig, world: World) -> list[str]:
    ours, theirs = args.train.gradient_accumulation_steps, world.accumulation
    if theirs is None or theirs == ours:
        return []
    return [f"--gradient_accumulation_steps {ours}: the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS "
            f"says {theirs}, and accelerate would follow it; unset it, or say {theirs} in both"]  # fmt: skip


def _dynamo(args: RunConfig) -> list[str]:
    name = args.distributed.dynamo_backend
    if not args.distributed.torch_compile or name.upper() in DynamoBackend.__members__:
        return []
    return [f"--dynamo_backend {name}: this version of accelerate does not know it; pip install -U accelerate"]


def exchange_problems(args: RunConfig, world: World) -> list[str]:
    """Why tokens cannot be exchanged in what is compiled.

    Exchanges are compiled with blocks, whoever asks for that: the options, or else the launcher.
    """
    ours, size = args.distributed, args.parallel.cp_size
    if ours.torch_compile is None:
        backend, mode = world.dynamo or "no", world.dynamo_mode or "default"
    else:
        backend, mode = ours.dynamo_backend if ours.torch_compile else "no", ours.dynamo_mode
    if size == 1 or backend.lower() == "no":
        return []
    problems = []
    if mode in RECORDED:
        problems.append(f"--cp_size {size}: dynamo's mode {mode} records what a device does and repeats it, which an"
                        " exchange with others is not made for; use default or max-autotune-no-cudagraphs")  # fmt: skip
    if args.train.gradient_checkpointing_budget:
        problems.append(
            f"--cp_size {size}: with --gradient_checkpointing_budget the compiler of each process"
            " decides which exchanges it repeats, and others might wait for ever; leave the budget out"
        )
    return problems


def _devices(world: World) -> list[str]:
    if world.size == 1 or world.device == "cpu":
        return []
    if world.device == "mps":
        return [f"{world.size} processes cannot share the device mps; start one, or set ACCELERATE_USE_CPU=true"]
    if world.local_size > world.machine.device_count:
        return [f"{world.local_size} processes on this machine, but {world.machine.device_count} devices "
                f"({world.device}); start one process for each device"]  # fmt: skip
    return []


def _affinity(world: World) -> list[str]:
    obstacle = world.machine.affinity_obstacle
    if world.affinity and world.device == "cuda" and "missing" in obstacle:
        return [f"NUMA affinity is switched on, but {obstacle}"]
    return []
