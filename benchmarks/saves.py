"""Benchmark saving: how long training waits for LoRA files and checkpoints, and what share of the run that is."""

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from library.config import parse_config

from .report import Measurement, add_count_option, compute_ratios
from .synthetic_run import read_intervals, write_dataset


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(repetitions=1)
    add_count_option(parser, "--bench_steps", 200, "steps of each training")
    add_count_option(parser, "--save_interval", 50, "steps between saves")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Train with saves and without, in turn, after a short training of warmup."""
    argv = write_dataset(training_options, directory, options.bench_steps)
    saving = [*argv, "--save_every_n_steps", str(options.save_interval), "--save_state"]
    train_timed([*argv, "--max_train_steps", "10"], directory / "warmup")
    plain, with_saves = [], []
    for repetition in range(options.repetitions):
        plain.append(train_timed(argv, directory / f"plain_{repetition}")["total"])
        with_saves.append(train_timed(saving, directory / f"saves_{repetition}"))
    total = [seconds["total"] for seconds in with_saves]
    saves = math.ceil(options.bench_steps / options.save_interval)  # the last step is saved in any case
    yield Measurement("step time without saves", [seconds / options.bench_steps for seconds in plain], "s")
    for title, callback in (("LoRA file", "SaveAdapter"), ("checkpoint", "SaveCheckpoint")):
        blocked = [seconds[callback] for seconds in with_saves]
        yield Measurement(f"training blocked by one {title}", [seconds / saves for seconds in blocked], "s")
        shares = [100 * share for share in compute_ratios(blocked, total)]
        yield Measurement(f"share of the run blocked by all {title}s", shares, "%")
    yield Measurement("run with saves / run without", compute_ratios(total, plain), "x")


def train_timed(argv: Sequence[str], output: Path) -> dict[str, float]:
    """Train in this process; return the total seconds of all steps, and those spent in each callback that saves."""
    from library.training.checkpoint import SaveCheckpoint
    from library.training.run import run_training as train
    from library.training.save_adapter import SaveAdapter

    seconds = {"SaveAdapter": 0.0, "SaveCheckpoint": 0.0}

    def time_calls(callback: Any) -> Callable[..., None]:
        save = callback.__call__

        def timed(self: Any, run: Any) -> None:
            start = time.perf_counter()
            save(self, run)
            seconds[callback.__name__] += time.perf_counter() - start

        return timed

    with ExitStack() as patches:
        for callback in (SaveAdapter, SaveCheckpoint):
            patches.enter_context(patch.object(callback, "__call__", time_calls(callback)))
        train(parse_config([*argv, "--output_dir", str(output)]).require_valid())
    return {"total": sum(seconds for _, seconds in read_intervals(output)), **seconds}
