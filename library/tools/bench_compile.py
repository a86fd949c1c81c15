"""``python -m library bench compile``: what compiling costs before the first step and brings in each step."""

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ..config import load_options
from ..config.options import opt
from ..errors import UserError
from .bench_figure import Figure, reported
from .bench_group import started

TRAIN = "import sys; from library.cli import main; sys.exit(main(sys.argv[1:]))"
SECONDS_BETWEEN_LOOKS = 0.02
SHARE_OF_COLD = 1 / 3
COLD, WARM = "empty cache", "full cache"
Told = dict[str, list[float]]
COMPILING = ("compile/seconds", "compile/graphs")


@dataclass(frozen=True)
class CompileOptions:
    """What is compiled, and how often."""

    model: str = opt("random:sd1:tiny", "the model, as for pretrained_model_name_or_path")
    resolution: int = opt(96, "pictures have about the area of a square of so many pixels a side", minimum=64)
    batch: int = opt(2, "pictures in a step", minimum=1)
    sizes: tuple[int, ...] = opt((1, 8, 24), "numbers of different sizes of pictures", minimum=1)
    ways: tuple[Literal["eager", "static", "dynamic"], ...] = opt(("eager", "static", "dynamic"), "what is compared")
    steps: int = opt(31, "steps of each run", minimum=11)
    repetitions: int = opt(1, "how often everything is done, in turn", minimum=1)
    backend: str = opt("inductor", "what is compiled with, as for dynamo_backend")
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments:
    bench: CompileOptions = field(default_factory=CompileOptions)


def run(argv: Sequence[str]) -> str:
    """Each run is a process of its own; the first of each way begins with an empty cache, the second with its."""
    options: CompileOptions = cast(Any, load_options(argv, Arguments).require()).bench
    figures = list[Figure]()
    for count in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            figures += _measured(options, count, Path(folder))
    return reported("compile", argv, figures, as_values=options.json)


def _measured(options: CompileOptions, count: int, folder: Path) -> Iterator[Figure]:
    data = _pictures(folder, _sizes(options.resolution, count), options.batch)
    found: dict[tuple[str, str], Told] = {}
    for repetition in range(options.repetitions):
        for way in options.ways:
            for start in (COLD,) if way == "eager" else (COLD, WARM):
                told = _trained(options, way, data, folder / f"{way}-{repetition}")
                for name, numbers in told.items():
                    found.setdefault((way, start), {}).setdefault(name, []).extend(numbers)
    for (kind, start), values in found.items():
        title = f"{count} sizes, {kind}" if kind == "eager" else f"{count} sizes, {kind}, {start}"
        yield Figure(f"{title}: to the first step", tuple(values["first"]), "s")
        if kind != "eager":
            graphs = f"{values['compile/graphs'][0]:.0f} graphs"
            yield Figure(f"{title}: compiling", tuple(values["compile/seconds"]), "s", remark=graphs)
        if start == WARM and options.backend == "inductor":
            pairs = zip(values["compile/seconds"], found[kind, COLD]["compile/seconds"], strict=True)
            yield Figure("  beside an empty cache", tuple(warm / cold for warm, cold in pairs), "", SHARE_OF_COLD)
        if start == COLD:
            yield from _steps(title, values["step"], found.get(("eager", COLD)))


def _steps(title: str, seconds: list[float], eager: Told | None) -> Iterator[Figure]:
    yield Figure(f"{title}: a step", tuple(1000 * each for each in seconds), "ms")
    if eager is not None and eager["step"] is not seconds:
        gain = statistics.median(eager["step"]) / statistics.median(seconds)
        yield Figure("  times as fast as eager", (gain,), "")


def _trained(options: CompileOptions, way: str, data: Path, folder: Path) -> Told:
    """Seconds from the start of the process to its first step, what the run says of compiling, seconds of steps."""
    from ..training.metrics import read_lines

    folder.mkdir(exist_ok=True)
    out = folder / f"out-{time.monotonic_ns()}"
    words = ["--pretrained_model_name_or_path", options.model, "--dataset_config", str(data), "--output_dir", str(out),
             "--max_train_steps", str(options.steps), "--max_data_loader_n_workers", "0", "--quiet"]  # fmt: skip
    if way != "eager":
        words += ["--torch_compile", "--dynamo_backend", options.backend, "--compile_shapes", way,
                  "--compile_cache_dir", str(folder / "compiled")]  # fmt: skip
    metrics, since, first = out / "lora.metrics.jsonl", time.monotonic(), math.nan
    with started(["-c", TRAIN, *words], [{}], folder) as (process,):
        while process.poll() is None:
            if math.isnan(first) and any(line["step"] for line in read_lines(metrics)):
                first = time.monotonic() - since
            time.sleep(SECONDS_BETWEEN_LOOKS)
    if process.returncode:
        errors = (folder / "errors-0").read_text("utf-8", errors="replace")
        raise UserError(f"bench compile: the run failed: {errors[-2000:]}")
    lines = read_lines(metrics)
    told: Told = {name: [line[name]] for line in lines for name in COMPILING if name in line}
    paces = [line["speed/steps_per_second"] for line in lines if "speed/steps_per_second" in line]
    return {"first": [first], "step": [1 / pace for pace in paces[1:]], **told}


def _sizes(resolution: int, count: int) -> list[tuple[int, int]]:
    """Those whose areas are nearest, the square first; multiples of 16, and of 64 where pictures are large."""
    step = 64 if resolution >= 512 else 16
    sides = range(step, 3 * resolution, step)
    every = [(width, height) for width in sides for height in sides if max(width, height) <= 3 * min(width, height)]
    return sorted(every, key=lambda size: (abs(math.log(size[0] * size[1] / resolution**2)), size))[:count]


def _pictures(folder: Path, sizes: Sequence[tuple[int, int]], batch: int) -> Path:
    from PIL import Image

    tables = ['[general]\ncaption_extension = ".txt"\n']
    for number, (width, height) in enumerate(sizes):
        place = folder / f"pictures-{number:02d}"
        place.mkdir()
        for count in range(batch):
            Image.new("RGB", (width, height), (9 * number, 50 * count % 255, 128)).save(place / f"{count}.png")
            (place / f"{count}.txt").write_text(f"picture {count} of size {number}", "utf-8")
        tables.append(f"[[datasets]]\nresolution = [{width}, {height}]\nbatch_size = {batch}\n[[datasets.subsets]]\n"
                      f"image_dir = {str(place)!r}\n")  # fmt: skip
    path = folder / "set.toml"
    path.write_text("".join(tables), "utf-8")
    return path
