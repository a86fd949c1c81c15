"""What each switch that saves memory costs in time and gains in memory: ``bench step`` with it and without it.

Each is measured in a program of its own, so that none finds the memory of the one before.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import RunConfig
from ..config.options import opt
from ..errors import ConfigError, UserError
from .bench_count import counted, refuse_sharing, ways
from .bench_figure import Figure, reported
from .bench_group import with_library
from .bench_run import settings

PLAIN = "plain"
STEP, PEAK = "our step", "our peak memory"
"""What ``bench step`` calls them."""
TWICE = ("--gradient_checkpointing",)
SWITCHES: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "checkpointing": TWICE,
    "checkpointing, every 2nd block": (*TWICE, "--gradient_checkpointing_every", "2"),
    "checkpointing, half of the budget": (*TWICE, "--gradient_checkpointing_budget", "0.5"),
    "checkpointing, all of the budget": (*TWICE, "--gradient_checkpointing_budget", "1"),
    "checkpointing, on the host": (*TWICE, "--cpu_offload_checkpointing"),
    "half of the blocks swapped": ("--blocks_to_swap", "HALF"),
    "all blocks swapped": ("--blocks_to_swap", "ALL"),
    "base in fp8": ("--base_storage", "fp8"),
    "base in int8": ("--base_storage", "int8"),
    "base in nf4": ("--base_storage", "nf4"),
    "all that saves most": (*TWICE, "--cpu_offload_checkpointing", "--blocks_to_swap", "ALL", "--base_storage", "nf4"),
}


@dataclass(frozen=True)
class MemoryOptions:
    """How often is measured."""

    bench_steps: int = opt(3, "steps in a row", minimum=1)
    repetitions: int = opt(3, "how often, after a first time that only warms up", minimum=1)
    count: bool = opt(False, "count bytes and operations on a model without numbers, in the place of measuring")
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments(RunConfig):
    bench: MemoryOptions = field(default_factory=MemoryOptions)


def run(argv: Sequence[str]) -> str:
    """Measure and report."""
    config, given = settings(argv, Arguments)
    if taken := given & {word[2:] for words in SWITCHES.values() for word in words if word.startswith("--")}:
        raise ConfigError([f"--{name}: is measured by this bench with and without it; take it out"
                           for name in sorted(taken)])  # fmt: skip
    blocks = _blocks(config)
    numbers = {"HALF": str(blocks // 2), "ALL": str(blocks)}
    switches = ways(SWITCHES, config) if config.bench.count else SWITCHES
    words = [word for word in argv if word != "--json"]
    commands = {name: [*words, *(numbers.get(word, word) for word in switch)] for name, switch in switches.items()}
    if config.bench.count:
        refuse_sharing(given)
        figures = list(counted(commands, Arguments))
    else:
        found = {name: _measured(command, config.bench) for name, command in commands.items()}
        figures = [figure for name in SWITCHES for figure in _figures(name, found)]
    return reported("memory", argv, figures, as_values=config.bench.json)


def _blocks(config: RunConfig) -> int:
    from ..families import FAMILIES
    from ..families.detect import detect
    from ..families.unloaded import unloaded
    from ..training.resting import blocks_of

    detected = detect(config.model)
    denoiser = FAMILIES.get(detected.family).denoiser
    return len(blocks_of(getattr(unloaded(detected, (denoiser,)), denoiser)))


def _measured(words: Sequence[str], options: MemoryOptions) -> dict[str, Any]:
    own = ["--bench_steps", str(options.bench_steps), "--repetitions", str(options.repetitions), "--json"]
    command = [sys.executable, "-m", "library", "bench", "step", *words, *own]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=with_library())
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    said = done.stdout[done.stdout.index('{\n "command"') :]  # some libraries print there
    return {figure["name"]: figure for figure in json.loads(said)["figures"]}


def _figures(name: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Figure]:
    """Seconds by the clock and of the processors, which others at work change less; and memory."""
    for step, title in ((STEP, f"{name}: a step"), (f"{STEP}, processor time", "  processor time")):
        mine, plain = found[name][step], found[PLAIN][step]
        times = "" if name == PLAIN else f"{mine['median'] / plain['median']:.2f} times as long"
        yield Figure(title, tuple(mine["values"]), "s", remark=times)
    mine, plain = found[name][PEAK], found[PLAIN][PEAK]
    saved = "" if name == PLAIN else f"{plain['median'] - mine['median']:+.3f} GB saved"
    yield Figure("  peak memory", (statistics.median(mine["values"]),), "GB", remark=saved)
