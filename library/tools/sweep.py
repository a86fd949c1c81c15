"""``python -m library sweep SWEEP.toml``: train the runs of a file one after another, and compare them."""

import shlex
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import parse_config
from ..config.options import define_option, iter_options
from ..errors import ConfigError
from ..log import configure_logging
from ..problems import Problem, report_argument

if TYPE_CHECKING:
    from .sweeps.check_runs import CheckedRun
    from .sweeps.sweep_file import Sweep

USAGE = "usage: python -m library sweep SWEEP.toml [--option value ...]"
HELP = f"""{USAGE}

Train the runs of a sweep file one after another: every combination of the values of its axes, and the runs that it
lists. Each is an ordinary run in a folder of its own; all read the same caches. A sweep that was stopped goes on with
the same command; a run that another one is clearly ahead of is stopped early. At the end the runs are compared, with
confidence intervals. See docs/sweeps.md.

"""


@dataclass(frozen=True)
class SweepOptions:
    """The options of this tool."""

    list_runs: bool = define_option(False, "check the file, print the runs and their commands, and train nothing")
    continue_run: str | None = define_option(None, "let a run that was stopped as hopeless go on")
    compare_only: bool = define_option(False, "compare what has been trained so far, and train nothing")


@dataclass(frozen=True)
class _Arguments:
    sweep: SweepOptions = field(default_factory=SweepOptions)


def run_sweep(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Train and compare the runs of a file."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    count = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    own = parse_config(argv[count:], _Arguments)
    options: SweepOptions = cast(Any, own.config).sweep
    problems = list(own.problems)
    if count != 1:
        problems.append(report_argument(" ".join(argv[:count]), "expected one sweep file"))
    elif not Path(argv[0]).expanduser().is_file():
        problems.append(report_argument(argv[0], "no such file"))
    if problems:
        raise ConfigError(problems)
    configure_logging(simple=True)
    own.log_notices()
    return _run_file(Path(argv[0]).expanduser(), options)


def _run_file(path: Path, options: SweepOptions) -> Generator[str, None, int]:
    from .sweeps.check_runs import check_sweep
    from .sweeps.run_queue import hold_sweep_lock
    from .sweeps.sweep_file import read_sweep

    sweep = read_sweep(path)
    runs = check_sweep(sweep)
    if options.list_runs:
        yield f"{len(runs)} runs"
        for each in runs:
            yield f"{each.run.name}: train_lora.py {shlex.join(each.argv)}"
        return 0
    with nullcontext() if options.compare_only else hold_sweep_lock(sweep.output_dir):
        return (yield from _train_and_compare(sweep, runs, options))


def _train_and_compare(
    sweep: "Sweep", runs: "Sequence[CheckedRun]", options: SweepOptions
) -> Generator[str, None, int]:
    from .sweeps.run_queue import FAILED, STOPPED, RunQueue, mark_for_retry
    from .sweeps.sweep_result import write_sweep_result

    queue = RunQueue(sweep, runs)
    if (name := options.continue_run) is not None:
        if queue.state.get(name).status != STOPPED:
            raise ConfigError([Problem("continue_run", f"no run {name} that was stopped as hopeless")])
        mark_for_retry(queue.state, name)
    if not options.compare_only:
        yield from queue.run_all()
    if queue.received is not None:
        return 128 + queue.received
    yield from write_sweep_result(sweep, runs, queue.state)
    failed = [each.run.name for each in runs if queue.state.get(each.run.name).status == FAILED]
    if failed:
        yield f"failed: {', '.join(failed)}; the same command tries them again"
    return 1 if failed else 0


def _format_help() -> str:
    lines = [f"  --{option.name:<20} {option.syntax:<12} {option.help}" for option in iter_options(_Arguments)]
    return HELP + "\n".join(lines)
