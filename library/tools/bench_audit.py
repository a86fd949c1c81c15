"""How long it takes to look at pictures: the first time, again, with one change; by threads and by processes."""

import gc
import multiprocessing
import os
import shutil
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from ..config.schema import DataConfig
from ..data.inspection import look_at
from ..data.prepare import prepare
from ..dataset.scan_cache import CACHE_FOLDER
from .bench_figure import Figure, clocked, interleaved
from .bench_scale import Scale, make_pictures

SIDE = 80
PIXEL_STEP = 8
SECONDS, BYTES = 5.0, 1000.0
"""What a second start on 100,000 pictures may take at most, and the memory that one picture may."""
KINDS = {"small pictures, 80 pixels a side": (80, 4000), "pictures of 1 megapixel": (1000, 240)}


def measured(scale: Scale) -> list[Figure]:
    """Everything up to placed pictures: captions are read and buckets chosen, too."""
    folder = scale.folder / "small"
    config = make_pictures(folder, scale.pictures, SIDE)
    first, second, changed = [], [], []
    for number in range(scale.repetitions):
        shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
        first.append(clocked(lambda: _prepared(config)))
        second.append(clocked(lambda: _prepared(config)))
        (folder / f"{number:07d}.jpg").write_bytes((folder / f"{number + 50:07d}.jpg").read_bytes() + b"changed")
        changed.append(clocked(lambda: _prepared(config)))
    many = f"{scale.pictures:,} pictures"
    return [
        *_start(f"first start, {many}", first, None),
        *_start(f"second start, {many}", second, SECONDS if scale.pictures == 100_000 else None),
        *_start(f"second start with one change, {many}", changed, None),
        Figure("file of what is known", (_size_of(folder / CACHE_FOLDER) / scale.pictures,), "bytes a picture"),
        Figure("memory of placed pictures", (_memory(config, scale.pictures),), "bytes a picture", BYTES),
    ]


def _start(name: str, clocks: Sequence[tuple[float, float]], target: float | None) -> list[Figure]:
    wall, processors = zip(*clocks, strict=True)
    return [Figure(name, wall, "s", target), Figure("  processor time of it", processors, "s")]


def pools_measured(scale: Scale) -> list[Figure]:
    """What the pool of threads gains, and what one of processes would."""
    found = []
    for kind, (side, count) in KINDS.items():
        folder = scale.folder / f"pool_{side}"
        count = min(count, scale.pictures)
        make_pictures(folder, count, side)
        seconds = _by_pools(sorted(folder.glob("*.jpg")), max(5, scale.repetitions))
        found += [Figure(f"{kind}: {way}", tuple(1e6 * value / count for value in values), "µs a picture")
                  for way, values in seconds.items()]  # fmt: skip
    return found


def _by_pools(pictures: Sequence[Path], repetitions: int) -> dict[str, tuple[float, ...]]:
    workers = os.cpu_count() or 1
    pieces = [pictures[start : start + 32] for start in range(0, len(pictures), 32)]
    context = multiprocessing.get_context("spawn")
    with ThreadPoolExecutor(workers) as threads, ProcessPoolExecutor(workers, context) as processes:
        list(processes.map(_look, pieces[: 2 * workers]))  # they start when they are first needed
        ways = {
            "one thread": lambda: _look(pictures),
            f"{workers} threads": lambda: list(threads.map(_look, pieces)),
            f"{workers} processes": lambda: list(processes.map(_look, pieces)),
        }
        return interleaved(ways, repetitions)


def _look(pictures: Sequence[Path]) -> None:
    for picture in pictures:
        look_at(picture)


def _prepared(config: DataConfig) -> object:
    return prepare(config, PIXEL_STEP)


def _memory(config: DataConfig, pictures: int) -> float:
    """Of what stays, as Python counts it; measuring makes everything slow."""
    _prepared(config)
    gc.collect()
    tracemalloc.start()
    kept = _prepared(config)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return used / pictures


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
