"""How fast latents come out of a cache: this program's beside one npz file for each picture, side by side.

The other way is that of sd-scripts: np.load of a picture's own file, whose arrays are the latents, those of the mirror
image, the original size and the crop; with np.savez, or compressed.  Ours is measured twice: reading alone, which is
the same work, and the whole loader of training, which also decides what comes when, how and with which caption, and
keeps twice as many numbers of each picture.  All of them end in a batch of tensors, in one process without workers.
The rounds are interleaved, so that whatever else the machine does meets all of them.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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

BATCH = 4
SHRINKS = 8
DTYPES = {"float": torch.float32, "fp16": torch.float16}
Latents = NDArray[np.float32]
Way = Callable[[], Iterator[int]]
"""Reads batches and tells how many pictures are in each."""


@dataclass(frozen=True)
class CacheBench:
    """Pictures a second, the median of the rounds."""

    pictures: int
    size: int  # of a side, in pixels
    channels: int
    precision: str  # of ours; npz files hold float32
    rounds: int
    reading: float
    loader: float
    npz: float
    npz_compressed: float

    def record(self) -> dict[str, Any]:
        """As plain data, with how often ours is another's."""
        ratios = {f"{ours}_times_{other}": getattr(self, ours) / getattr(self, other)
                  for ours in ("reading", "loader") for other in ("npz", "npz_compressed")}  # fmt: skip
        return {**asdict(self), **ratios}

    def text(self) -> str:
        """In words."""
        head = (f"latents of {self.pictures} pictures of {self.size} x {self.size} with {self.channels} channels, kept"
                f" in {self.precision}, one process, median of {self.rounds} rounds")  # fmt: skip
        names = {"reading": "cache, reading alone", "loader": "cache, whole loader", "npz": "npz files",
                 "npz_compressed": "npz, compressed"}  # fmt: skip
        return "\n".join([head, *(self._line(name, getattr(self, key)) for key, name in names.items())])

    def _line(self, name: str, speed: float) -> str:
        return (f"  {name:<21} {speed:8.0f} pictures/s, {speed / self.npz:5.1f} x npz,"
                f" {speed / self.npz_compressed:5.1f} x compressed")  # fmt: skip


def measure(folder: Path, *, pictures: int = 512, size: int = 512, channels: int = 4,
            precision: Literal["float", "fp16"] = "float", rounds: int = 7) -> CacheBench:  # fmt: skip
    """Make the pictures and all kinds of files in ``folder``, which is empty, and read them."""
    prepared = _prepared(folder, pictures, size)
    shape = (channels, size // SHRINKS, size // SHRINKS)
    latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    reader, showing = _kept(folder / "cache", prepared, latents, DTYPES[precision])
    plan = prepared.batch_plan(1, TrainConfig())
    order = np.random.default_rng(1).permutation(pictures).tolist()
    steps = CachedLoader(showing, plan, 0, reader, None, pin_memory=False).steps(0)
    plain, compressed = (_npz(folder / save.__name__, save, latents, order) for save in (np.savez, np.savez_compressed))
    ways: dict[str, Way] = {
        "reading": lambda: _alone(reader, order),
        "loader": lambda: (len(batch) for work in steps for batch in work.batches),
        "npz": lambda: _from_npz(plain),
        "npz_compressed": lambda: _from_npz(compressed),
    }
    return CacheBench(pictures, size, channels, precision, rounds, **_raced(ways, pictures, rounds))


def _raced(ways: dict[str, Way], pictures: int, rounds: int) -> dict[str, float]:
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            started, batches, count = time.perf_counter(), way(), 0
            while count < pictures:
                count += next(batches)
            if round_:  # the first one only warms up
                speeds[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in speeds.items()}


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
