"""``python -m library bench data``: the way of pictures from a folder into the plan, measured on made-up pictures."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..config import load_options
from ..config.options import opt
from ..errors import ConfigError, UserError
from . import bench_audit, bench_plan
from .bench_figure import Figure, reported
from .bench_scale import Scale


def _latents(scale: Scale) -> list[Figure]:
    from .bench_cache import measured  # and torch with it

    return measured(scale)


PARTS: dict[str, tuple[str, Callable[[Scale], list[Figure]]]] = {
    "audit": ("looking at pictures: the first start, the second, one change; memory", bench_audit.measured),
    "pool": ("decoding by one thread, by threads and by processes", bench_audit.pools_measured),
    "cache": ("latents out of a cache, beside one npz file for each picture", _latents),
    "plan": ("the batch plan for 64 processes, and one of many entries", bench_plan.measured),
}


_TOLD = "; ".join(f"{name} ({what})" for name, (what, _) in PARTS.items())


@dataclass(frozen=True)
class BenchOptions:
    """How much is measured."""

    pictures: int = opt(100_000, "small pictures to make and look at", minimum=100)
    entries: int = opt(1_000_000, "entries of the large plan", minimum=1000)
    repetitions: int = opt(3, "how often each thing is measured", minimum=1)
    only: tuple[str, ...] = opt((), f"parts to measure, all without it: {_TOLD}")
    folder: str | None = opt(None, "make the pictures in this folder, in one of their own; it is removed afterwards")
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments:
    bench: BenchOptions = field(default_factory=BenchOptions)


def run(argv: Sequence[str]) -> str:
    """Measure and report."""
    loaded = load_options(list(argv), Arguments)
    options: BenchOptions = cast(Any, loaded.config).bench
    problems = [*loaded.problems, *_problems(options)]
    if problems:
        raise ConfigError(problems)
    parts = options.only or tuple(PARTS)
    with _folder(options.folder) as folder:
        scale = Scale(folder, options.pictures, options.entries, options.repetitions)
        figures = [figure for name in parts for figure in PARTS[name][1](scale)]
    return reported("data", argv, figures, as_values=options.json)


def _problems(options: BenchOptions) -> Iterator[str]:
    for name in options.only:
        if name not in PARTS:
            yield f"--only: {name!r} is not one of {', '.join(PARTS)}"
    if options.folder is not None and not Path(options.folder).is_dir():
        yield f"--folder: {options.folder} is no folder; make it first"


@contextmanager
def _folder(parent: str | None) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="lorikeet-bench-", dir=parent) as name:
            yield Path(name)
    except OSError as error:
        raise UserError(f"--folder: no pictures can be made in {parent or tempfile.gettempdir()}: {error}") from error
