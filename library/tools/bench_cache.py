"""How fast latents come out of a cache: this program's beside one npz file for each picture, side by side.

The other way is that of sd-scripts: np.load of a picture's own file, whose arrays are the latents, those of the mirror
image, the original size and the crop; with np.savez, or compressed.  Ours is measured twice: reading alone, which is
the same work, and the whole loader of training, which also decides what comes when, how and with which caption, and
keeps twice as many numbers of each picture.  All of them end in a batch of tensors, in one process without workers.
The rounds are interleaved, so that whatever else the machine does meets all of them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..config.schema import DataConfig, TrainConfig
from ..data.cache.latents import MOMENTS, LatentReader
from ..data.cache.loader import CachedLoader
from ..data.cache.records import as_bytes
from ..data.cache.store import Store
from ..data.cache.wanted import wanted_pictures
from ..data.cache.writer import Writer
from ..data.prepare import Prepared, prepare
from ..data.showing import Showing
from .bench_figure import Figure, interleaved
from .bench_scale import Scale

BATCH = 4
SHRINKS = 8
DTYPES = {"float": torch.float32, "fp16": torch.float16}
READING, LOADER, NPZ, COMPRESSED = "cache, reading alone", "cache, whole loader", "npz files", "npz files, compressed"
TIMES_AS_FAST = 10.0
Latents = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """What is kept of how many pictures."""

    pictures: int
    size: int  # of a side, in pixels
    channels: int
    precision: str  # of ours; npz files hold float32

    def __str__(self) -> str:
        return f"latents of {self.size} x {self.size} pixels, {self.channels} channels, {self.precision}"


KINDS = (Kind(512, 512, 4, "float"), Kind(256, 1024, 4, "float"), Kind(256, 1024, 4, "fp16"))


def measured(scale: Scale) -> list[Figure]:
    """Each kind by itself; the first round of each only warms up."""
    found = []
    for number, kind in enumerate(KINDS):
        kind = replace(kind, pictures=min(kind.pictures, scale.pictures))
        seconds = _seconds(scale.folder / f"latents_{number}", kind, max(5, scale.repetitions) + 1)
        each = {name: tuple(1e6 * value / kind.pictures for value in values[1:]) for name, values in seconds.items()}
        found += [Figure(f"{kind}: {name}", values, "µs a picture") for name, values in each.items()]
        for name in (READING, LOADER):
            for other in (NPZ, COMPRESSED):
                ratio = statistics.median(each[other]) / statistics.median(each[name])
                found.append(Figure(f"  {name} beside {other}", (ratio,), "times as fast", at_least=TIMES_AS_FAST))
    return found


def _seconds(folder: Path, kind: Kind, rounds: int) -> dict[str, tuple[float, ...]]:
    """Of each way and round, to read every picture once."""
    prepared = _prepared(folder, kind.pictures, kind.size)
    shape = (kind.channels, kind.size // SHRINKS, kind.size // SHRINKS)
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    reader, showing = _kept(folder / "cache", prepared, latents, DTYPES[kind.precision])
    plan = prepared.batch_plan(1, TrainConfig())
    order = np.random.default_rng(1).permutation(kind.pictures).tolist()
    steps = CachedLoader(showing, plan, 0, reader, None, pin_memory=False).steps(0)
    plain, compressed = (_npz(folder / save.__name__, save, latents, order) for save in (np.savez, np.savez_compressed))
    ways: dict[str, Callable[[], Iterator[int]]] = {
        READING: lambda: _alone(reader, order),
        LOADER: lambda: (len(batch) for work in steps for batch in work.batches),
        NPZ: lambda: _from_npz(plain),
        COMPRESSED: lambda: _from_npz(compressed),
    }
    return interleaved({name: partial(_all_read, way, kind.pictures) for name, way in ways.items()}, rounds)


def _all_read(way: Callable[[], Iterator[int]], pictures: int) -> None:
    batches, count = way(), 0
    while count < pictures:
        count += next(batches)


def _prepared(folder: Path, pictures: int, size: int) -> Prepared:
    (folder / "pictures").mkdir(parents=True)
    for number in range(pictures):
        colour = (number % 256, number // 256 % 256, number // 256**2)
        Image.new("RGB", (size, size), colour).save(folder / "pictures" / f"{number:06d}.png", compress_level=1)
        (folder / "pictures" / f"{number:06d}.txt").write_text(f"a picture, number {number}, of one colour", "utf-8")
    (folder / "set.toml").write_text(
        f"[[datasets]]\nresolution = {size}\nbatch_size = {BATCH}\n[[datasets.subsets]]\nimage_dir = 'pictures'\n"
        "caption_extension = '.txt'\nflip_aug = true\n",
        encoding="utf-8",
    )
    return prepare(DataConfig(dataset_config=str(folder / "set.toml")), SHRINKS)


def _kept(folder: Path, prepared: Prepared, latents: Latents, dtype: torch.dtype) -> tuple[LatentReader, Showing]:
    """Both ways round of each picture in a cache."""
    showing = Showing(prepared.manifest, prepared.placements, 0, 0)
    wanted = wanted_pictures(showing, "")
    both = torch.from_numpy(np.stack([latents, latents])).to(dtype)
    with Writer(folder) as writer:
        for key in wanted.keys:
            writer.put(as_bytes(key), {MOMENTS: both}, "")
    return LatentReader(Store([folder]), wanted, len(prepared.manifest.samples)), showing


def _npz(folder: Path, save: Callable[..., None], latents: Latents, order: Sequence[int]) -> list[Path]:
    """A file for each picture, in the order in which they are to be read."""
    folder.mkdir()
    side = latents.shape[1] * SHRINKS
    files = [folder / f"{number:06d}.npz" for number in range(len(order))]
    for file in files:
        save(file, latents=latents, latents_flipped=latents[..., ::-1], original_size=np.array([side, side]),
             crop_ltrb=np.array([0, 0, side, side]))  # fmt: skip
    return [files[number] for number in order]


def _alone(reader: LatentReader, order: Sequence[int]) -> Iterator[int]:
    for first in range(0, len(order), BATCH):
        samples = order[first : first + BATCH]
        yield len(reader.moments(samples, [number % 2 == 0 for number in samples]).both)


def _from_npz(files: Sequence[Path]) -> Iterator[int]:
    for first in range(0, len(files), BATCH):
        rows: list[torch.Tensor] = []
        for file in files[first : first + BATCH]:
            with np.load(file) as arrays:
                straight, mirrored = arrays["latents"], arrays["latents_flipped"]
                arrays["original_size"].tolist(), arrays["crop_ltrb"].tolist()
            rows.append(torch.from_numpy(mirrored if len(rows) % 2 else straight))
        yield len(torch.stack(rows))
