"""What saving costs: the share of a run's time that it waits for LoRA files and states, on the built-in model."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..config import load_options
from ..config.options import opt
from .bench_figure import Figure, reported

PICTURES, SIDE = 16, 96


@dataclass(frozen=True)
class SaveOptions:
    """How long, and how often is saved."""

    steps: int = opt(200, "steps of each of the two runs", minimum=20)
    every: int = opt(50, "save a LoRA file and a state every n steps", minimum=1)
    json: bool = opt(False, "figures as JSON")


@dataclass(frozen=True)
class Arguments:
    bench: SaveOptions = field(default_factory=SaveOptions)


def run(argv: Sequence[str]) -> str:
    """One run with saves and one without, in this process; what each save held up is measured, not guessed."""
    options: SaveOptions = cast(Any, load_options(argv, Arguments).require()).bench
    with tempfile.TemporaryDirectory() as folder:
        data = _pictures(Path(folder))
        _trained(data, Path(folder) / "warm", 10, None)
        plain, _ = _trained(data, Path(folder) / "plain", options.steps, None)
        saving, held_up = _trained(data, Path(folder) / "saving", options.steps, options.every)
    saves = options.steps // options.every
    figures = [
        Figure("a step", (plain / options.steps,), "s"),
        Figure("held up by a LoRA file", (held_up["Export"] / saves,), "s"),
        Figure("held up by a state", (held_up["KeepState"] / saves,), "s", remark="the rest is written meanwhile"),
        Figure("LoRA files, share of the run", (100 * held_up["Export"] / saving,), "%"),
        Figure("states, share of the run", (100 * held_up["KeepState"] / saving,), "%"),
        Figure("run with saves / run without", (saving / plain,), ""),
    ]
    return reported("saves", argv, figures, as_values=options.json)


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
    from ..training.export import Export
    from ..training.keep_state import KeepState
    from ..training.run import run as train

    words = ["--dataset_config", str(data), "--output_dir", str(folder), "--max_train_steps", str(steps), "--quiet",
             "--network_dim", "16", "--max_data_loader_n_workers", "1"]  # fmt: skip
    words += ["--save_every_n_steps", str(every), "--save_state"] if every else []
    held_up = {"Export": 0.0, "KeepState": 0.0}
    kinds: list[Any] = [Export, KeepState]
    honest = [kind.__call__ for kind in kinds]
    try:
        for kind, call in zip(kinds, honest, strict=True):
            kind.__call__ = _timed(call, held_up, kind.__name__)
        train(load_options(words).require())
    finally:
        for kind, call in zip(kinds, honest, strict=True):
            kind.__call__ = call
    return _seconds(folder / "lora.metrics.jsonl"), held_up


def _timed(call: Callable[..., None], held_up: dict[str, float], name: str) -> Callable[..., None]:
    def timed(self: Any, job: Any) -> None:
        started = time.perf_counter()
        call(self, job)
        held_up[name] += time.perf_counter() - started

    return timed


def _seconds(metrics: Path) -> float:
    """From reading to reading, as the run itself measured them."""
    from ..training.metrics import read_lines

    seconds, since = 0.0, 0
    for line in read_lines(metrics):
        if "speed/steps_per_second" in line:
            seconds += (line["step"] - since) / line["speed/steps_per_second"]
            since = line["step"]
    return seconds
