"""``python -m library bench NAME``: how fast it is here, with the command and the machine beside the figures."""

from collections.abc import Callable, Sequence

from ..errors import ConfigError
from ..registry import did_you_mean

Bench = Callable[[Sequence[str]], str]
"""From the words behind its name to the report."""


def _data(argv: Sequence[str]) -> str:
    from .bench_data import run

    return run(argv)


def _saves(argv: Sequence[str]) -> str:
    from .bench_saves import run

    return run(argv)


def _compile(argv: Sequence[str]) -> str:
    from .bench_compile import run

    return run(argv)


def _step(argv: Sequence[str]) -> str:
    from .bench_step import run

    return run(argv)


def _startup(argv: Sequence[str]) -> str:
    from .bench_startup import run

    return run(argv)


def _memory(argv: Sequence[str]) -> str:
    from .bench_memory import run

    return run(argv)


def _strategies(argv: Sequence[str]) -> str:
    from .bench_strategies import run

    return run(argv)


BENCHES: dict[str, tuple[str, Bench]] = {
    "data": ("looking at pictures, the second start, memory, latents out of a cache, the batch plan", _data),
    "compile": ("compiling: graphs, seconds to the first step, seconds of a step, for 1, 8 and 24 sizes", _compile),
    "step": ("a step of training beside a bare loop of PyTorch, on any model", _step),
    "startup": ("from the command to the first step, beside a bare script on the same model", _startup),
    "memory": ("what switches that save memory cost in time, on any model", _memory),
    "strategies": (
        "the same job on DDP, FSDP, ZeRO, pipelines and tensor parallel: pace, bytes sent, memory",
        _strategies,
    ),
    "saves": ("LoRA files and states: what saving costs of a run's time", _saves),
}


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Each bench takes ``--help``, ``--json`` and options of its own."""
    if not argv or argv[0] in ("--help", "-h"):
        lines = [f"  {name:<10} {what}" for name, (what, _) in BENCHES.items()]
        return "\n".join(["usage: python -m library bench NAME [--json] [--help]", "", *lines]), 0
    name, *rest = argv
    if name not in BENCHES:
        raise ConfigError([f"no bench {name!r}{did_you_mean(name, BENCHES)}; there are: {', '.join(BENCHES)}"])
    return BENCHES[name][1](rest), 0
