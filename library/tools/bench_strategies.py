"""The same job in each way of spreading it over processes: pace, bytes sent and memory, beside the first of them.

Each way is a group of processes of its own, which train as always; the ways take turns.  All see the same pictures in
a step: where several processes compute for the same pictures together, each gets as many more.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig, load_options
from ..config.describe import to_toml
from ..config.options import opt, options_of
from ..errors import ConfigError, UserError
from ..log import set_up
from .bench_figure import Figure, reported
from .bench_group import together
from .bench_run import made_up_run, scratch, settings, with_pictures

if TYPE_CHECKING:
    from ..training.job import Run

WORKER = "import sys; from library.tools.bench_strategies import work; raise SystemExit(work(sys.argv[1:]))"
REFUSED = 2
"""Exit code of a process whose way cannot be gone with these settings."""


@dataclass(frozen=True)
class Way:
    """How the work is spread; ``SIZE`` stands for the number of processes."""

    flags: tuple[str, ...] = ()
    more_pictures: str = ""
    """The option that makes up for processes that compute for the same pictures."""


ZERO = ("--deepspeed", "--zero_stage")
WAYS: Mapping[str, Way] = {
    "DDP": Way(),
    "FSDP": Way(("--fsdp",)),
    "ZeRO1": Way((*ZERO, "1")),
    "ZeRO2": Way((*ZERO, "2")),
    "ZeRO3": Way((*ZERO, "3")),
    "PP": Way(("--pp_size", "SIZE"), "gradient_accumulation_steps"),
    "TP": Way(("--tp_size", "SIZE"), "train_batch_size"),
    "CP": Way(("--cp_size", "SIZE"), "train_batch_size"),
}


@dataclass(frozen=True)
class StrategyOptions:
    """What is compared, and how often."""

    world_size: int = opt(2, "processes", minimum=2)
    ways: tuple[str, ...] = opt((), f"which are compared, of {', '.join(WAYS)}; all that this version has")
    bench_steps: int = opt(5, "steps that are measured, after as many that only warm up", minimum=1)
    repetitions: int = opt(3, "how often the ways take turns", minimum=1)
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments(RunConfig):
    bench: StrategyOptions = field(default_factory=StrategyOptions)


@dataclass(frozen=True)
class Measured:
    """One group of processes; of what all have, the most."""

    seconds: float  # of a step
    sent: float | None  # megabytes in a step, of all together
    peak: float  # gigabytes


def run(argv: Sequence[str]) -> str:
    """Measure and report."""
    config, given = settings(argv, Arguments)
    options = config.bench
    ways = _chosen(options, given)
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    impossible: dict[str, str] = {}
    with scratch() as folder:
        settled = _with_enough_pictures(config, folder)
        (folder / "run.toml").write_text(to_toml(settled), "utf-8")
        for _ in range(options.repetitions):
            for name in [name for name in ways if name not in impossible]:
                told = _together(name, _words(config, folder, name), folder, options)
                if isinstance(told, Measured):
                    found[name].append(told)
                else:
                    impossible[name] = told
    figures = list(_figures({name: each for name, each in found.items() if each}))
    if len(impossible) == len(ways):
        raise ConfigError(list(dict.fromkeys(impossible.values())))
    facts = {"processes": str(options.world_size), **{f"{name} is left out": why for name, why in impossible.items()}}
    return reported("strategies", argv, figures, as_values=options.json, **facts)


def _chosen(options: StrategyOptions, given: frozenset[str]) -> list[str]:
    there = {option.name for option in options_of(RunConfig)}
    possible = {name: way for name, way in WAYS.items() if {word[2:] for word in _options(way)} <= there}
    problems = [
        f"--ways: {name!r} is not one of {', '.join(possible)}" for name in options.ways if name not in possible
    ]
    taken = given & {word[2:] for way in WAYS.values() for word in _options(way)}
    problems += [
        f"--{name}: is what this bench compares; choose with --ways, and take it out" for name in sorted(taken)
    ]
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(options.ways)) or list(possible)


def _options(way: Way) -> list[str]:
    return [word for word in way.flags if word.startswith("--")]


def _with_enough_pictures(config: Arguments, folder: Path) -> RunConfig:
    """As many as a step has, so that no batch has to be filled up."""
    options, batch = config.bench, config.data.train_batch_size
    more = replace(config, data=replace(config.data, train_batch_size=batch * options.world_size))
    made = with_pictures(more, folder, 2 * options.bench_steps)
    return replace(made, data=replace(made.data, train_batch_size=batch))


def _words(config: Arguments, folder: Path, name: str) -> list[str]:
    way, size = WAYS[name], config.bench.world_size
    words = [str(size) if word == "SIZE" else word for word in way.flags]
    if way.more_pictures:
        before = {"train_batch_size": config.data.train_batch_size,
                  "gradient_accumulation_steps": config.train.gradient_accumulation_steps}  # fmt: skip
        words += [f"--{way.more_pictures}", str(before[way.more_pictures] * size)]
    return ["--config_file", str(folder / "run.toml"), *words]


def _together(name: str, words: Sequence[str], folder: Path, options: StrategyOptions) -> Measured | str:
    """All processes of one way; or why it cannot be gone."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ended = together(options.world_size, ["-c", WORKER, place, str(options.bench_steps), *words])
        for process in ended:
            if process.code == REFUSED:
                return process.errors.strip().splitlines()[-1]
        for process in ended:
            if process.code:
                raise UserError(f"bench strategies: {name} failed:\n{process.errors[-2000:]}")
        figures = [json.loads((Path(place) / f"{rank}.json").read_text("utf-8")) for rank in range(len(ended))]
    sent = [each["sent"] for each in figures]
    return Measured(max(each["seconds"] for each in figures), None if None in sent else sum(sent),
                    max(each["peak"] for each in figures))  # fmt: skip


def _figures(found: Mapping[str, Sequence[Measured]]) -> Iterator[Figure]:
    """Of each way; its pace beside the first one's is taken turn by turn."""
    first_name, first = next(iter(found.items()), ("", ()))
    for name, turns in found.items():
        yield Figure(f"{name}: steps a second", tuple(1 / turn.seconds for turn in turns), "")
        if turns is not first:
            pairs = zip(first, turns, strict=True)
            yield Figure(f"  beside {first_name}", tuple(one.seconds / turn.seconds for one, turn in pairs), "times")
        sent = tuple(turn.sent for turn in turns if turn.sent is not None)
        if len(sent) == len(turns):
            yield Figure("  sent by all processes", sent, "MB a step")
        yield Figure("  peak memory of a process", tuple(turn.peak for turn in turns), "GB")


def work(argv: Sequence[str]) -> int:
    """One of the processes: train, and write down how it went."""
    place, steps, *words = argv
    set_up(quiet=True, simple=True)
    loaded = load_options(words)
    folder = Path(place) / os.environ["RANK"]
    folder.mkdir()
    try:
        with made_up_run(loaded.require(), frozenset(loaded.places), folder) as job:
            marks = Marks(int(steps))
            job.actions = [marks]
            from ..training.loop import train

            train(job)
    except ConfigError as error:
        sys.stderr.write(f"{'; '.join(error.problems)}\n")
        return REFUSED
    (Path(place) / f"{os.environ['RANK']}.json").write_text(json.dumps(marks.figures()), "utf-8")
    return 0


class Marks:
    """Comes when the run is warm, and again at its end."""

    can_wait = False

    def __init__(self, each: int):
        self.each = each
        self.marks: list[tuple[float, int | None]] = []
        self.peak = 0

    def is_due(self, run: "Run") -> bool:
        return run.state.step % self.each == 0

    def __call__(self, run: "Run") -> None:
        from ..distributed.devices import forget_peak, peak_memory, wait_for

        wait_for(run.strategy.device)
        self.peak = peak_memory(run.strategy.device)
        self.marks.append((time.perf_counter(), None))
        forget_peak(run.strategy.device)

    def figures(self) -> dict[str, Any]:
        (started, before), (ended, after) = self.marks
        sent = None if before is None or after is None else (after - before) / self.each / 1e6
        return {"seconds": (ended - started) / self.each, "sent": sent, "peak": self.peak / 1e9}
