"""What saving costs: the share of a run's time that it waits for LoRA files and states, on the built-in model."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..config import load_options
from ..config.options import opt
from .bench_machine import machine

PICTURES, SIDE = 16, 96


@dataclass(frozen=True)
class SaveOptions:
    """How long, and how often is saved."""

    steps: int = opt(200, "steps of each of the two runs", minimum=20)
    every: int = opt(50, "save a LoRA file and a state every n steps", minimum=1)
    json: bool = opt(False, "figures as JSON")


@dataclass(frozen=True)
class _Arguments:
    bench: SaveOptions = field(default_factory=SaveOptions)


def run(argv: Sequence[str]) -> str:
    """One run with saves and one without, in this process; what each save held up is measured, not guessed."""
    options: SaveOptions = cast(Any, load_options(argv, _Arguments).require()).bench
    with tempfile.TemporaryDirectory() as folder:
        data = _pictures(Path(folder))
        _trained(data, Path(folder) / "warm", 10, None)
        plain, _ = _trained(data, Path(folder) / "plain", options.steps, None)
        saving, held_up = _trained(data, Path(folder) / "saving", options.steps, options.every)
    saves = options.steps // options.every
    figures = {
        "steps": options.steps,
        "saves": saves,
        "seconds a step": plain / options.steps,
        "seconds held up by LoRA files, each": held_up["Export"] / saves,
        "seconds held up by states, each": held_up["KeepState"] / saves,
        "share of the run, LoRA files": held_up["Export"] / saving,
        "share of the run, states": held_up["KeepState"] / saving,
        "run with saves / run without": saving / plain,
        "machine": machine(),
    }
    return json.dumps(figures, indent=1) if options.json else _as_text(figures)


def _as_text(figures: dict[str, Any]) -> str:
    shown = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in figures.items()}
    return "\n".join(f"{name:<38} {value}" for name, value in shown.items())


def _pictures(folder: Path) -> Path:
    from PIL import Image

    (folder / "pictures").mkdir()
    for number in range(PICTURES):
        Image.new("RGB", (SIDE, SIDE), (15 * number, 100, 200)).save(folder / "pictures" / f"{number}.png")
        (folder / "pictures" / f"{number}.txt").write_text(f"a picture {number}", "utf-8")
    path = folder / "set.toml"
    path.write_text(f"[general]\ncaption_extension = '.txt'\n[[datasets]]\nresolution = {SIDE}\nbatch_size = 8\n"
                    f"[[datasets.subsets]]\nimage_dir = '{folder / 'pictures'}'\n", "utf-8")  # fmt: skip
    return path


def _trained(data: Path, folder: Path, steps: int, every: int | None) -> tuple[float, dict[str, float]]:
    """Seconds of the steps with what happens between them, and how many of them each kind of saving held up."""
    from ..training import loop, run
    from ..training.export import Export
    from ..training.keep_state import KeepState

    words = ["--dataset_config", str(data), "--output_dir", str(folder), "--max_train_steps", str(steps), "--quiet",
             "--network_dim", "16", "--max_data_loader_n_workers", "1"]  # fmt: skip
    words += ["--save_every_n_steps", str(every), "--save_state"] if every else []
    held_up = {"Export": 0.0, "KeepState": 0.0}
    seconds = [0.0]
    honest: dict[Any, Callable[..., Any]] = {kind: kind.__call__ for kind in (Export, KeepState)}
    train = run.train
    try:
        for kind in honest:
            cast(Any, kind).__call__ = _timed(honest[kind], held_up, kind.__name__)
        run.train = cast(Any, _whole(loop.train, seconds))
        run.run(load_options(words).require())
    finally:
        run.train = train
        for kind, call in honest.items():
            cast(Any, kind).__call__ = call
    return seconds[0], held_up


def _timed(call: Callable[..., Any], held_up: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(self: Any, job: Any) -> None:
        started = time.perf_counter()
        call(self, job)
        if job.state.step < job.plan.steps or name in held_up:
            held_up[name] += time.perf_counter() - started

    return timed


def _whole(train: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(job: Any) -> None:
        started = time.perf_counter()
        train(job)
        seconds[0] = time.perf_counter() - started

    return timed
