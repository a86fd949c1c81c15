"""Benchmark the data pipeline: scanning a dataset, planning batches, reading cached latents compared to npz files."""

import gc
import shutil
import time
import tracemalloc
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from library.config.schema_data import DataConfig
from library.dataloader.batch_plan import BatchPlan, Bucket
from library.dataloader.prepare import prepare_data
from library.dataset.scan_cache import CACHE_FOLDER

from .report import Measurement, add_count_option, compute_ratios, measure_interleaved, measure_seconds
from .synthetic_run import build_run, write_dataset, write_images

PARTS = ("scan", "plan", "cache")
PIXEL_STEP = 8
SIZES = [(56 + 8 * column, 56 + 8 * row) for column in range(6) for row in range(4)]
CAPTION = "a photo of thing {}, standing, outdoors, blue sky, high quality, detailed, sharp focus, 35 mm"
SETTLE_SECONDS = 2.5
"""The scan cache does not trust the timestamps of files that changed more recently."""
MAX_SCAN_SECONDS, MAX_BYTES_PER_IMAGE, MAX_PLAN_SECONDS = 5.0, 1000.0, 2.0
"""Targets for 100,000 images."""
RANKS, BATCH, BUCKETS = 64, 4, 30
MAX_RATIO_TO_NPZ = 0.1


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (all)")
    add_count_option(parser, "--images", 100_000, "images to scan and plan")
    add_count_option(parser, "--entries", 1_000_000, "samples of a second, larger plan")
    add_count_option(parser, "--cached_images", 256, "images in the cache")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Measure the parts; training options apply to the cache."""
    if "scan" in options.parts:
        yield from measure_scan(directory / "scan", options.images, options.repetitions)
    if "plan" in options.parts:
        for count in (options.images, options.entries):
            yield from measure_plan(count, options.repetitions)
    if "cache" in options.parts:
        yield from measure_cache(directory / "cache", options.cached_images, options.repetitions, training_options)


def measure_scan(directory: Path, count: int, repetitions: int) -> Iterator[Measurement]:
    """Measure a cold scan, a warm one, and one with one changed image; captions and buckets are included."""
    write_images(directory, (SIZES[number % len(SIZES)] for number in range(count)), CAPTION)
    file = directory.with_suffix(".toml")
    table = "resolution = 64\nenable_bucket = true\nbatch_size = 4\nmin_bucket_reso = 64\nbucket_reso_steps = 16"
    subset = f"caption_extension = '.txt'\nimage_dir = '{directory}'"
    file.write_text(f"[[datasets]]\n{table}\n[[datasets.subsets]]\n{subset}\n", encoding="utf-8")
    config = DataConfig(dataset_config=str(file))
    time.sleep(SETTLE_SECONDS)
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "warm, one image changed": []}
    for repetition in range(repetitions):
        shutil.rmtree(directory / CACHE_FOLDER, ignore_errors=True)
        for name, values in seconds.items():
            if "changed" in name:
                with (directory / f"{repetition:07d}.jpg").open("ab") as image:
                    image.write(b"changed")
            values.append(measure_seconds(lambda: prepare_data(config, PIXEL_STEP)))
    for name, values in seconds.items():
        target = MAX_SCAN_SECONDS if name == "warm" and count == 100_000 else None
        yield Measurement(f"scan of {count:,} images, {name}", values, "s", at_most=target)
    stored = sum(path.stat().st_size for path in (directory / CACHE_FOLDER).rglob("*") if path.is_file())
    yield Measurement("scan cache on disk", [stored / count], "bytes/image")
    memory = measure_memory(lambda: prepare_data(config, PIXEL_STEP)) / count
    yield Measurement("memory of the prepared dataset", [memory], "bytes/image", at_most=MAX_BYTES_PER_IMAGE)


def measure_plan(count: int, repetitions: int) -> Iterator[Measurement]:
    """Measure the batch plan of ``count`` samples on 64 ranks."""
    buckets = draw_buckets(count)
    candidates: dict[str, Callable[[], object]] = {
        "first batch": lambda: plan_first_batch(buckets),
        "all batches of an epoch": lambda: count_epoch(plan_first_batch(buckets)),
    }
    title, target = f"plan of {count:,} samples for {RANKS} ranks", MAX_PLAN_SECONDS if count == 100_000 else None
    for name, seconds in measure_interleaved(candidates, repetitions).items():
        yield Measurement(f"{title}: {name}", seconds, "s", at_most=target)
    yield Measurement(f"{title}: memory", [measure_memory(lambda: plan_first_batch(buckets)) / 1e6], "MB")


def draw_buckets(count: int) -> list[Bucket]:
    """Draw a bucket for each sample."""
    numbers = np.random.Generator(np.random.Philox(0)).integers(0, BUCKETS, count)
    samples = [array("q", np.flatnonzero(numbers == bucket).tolist()) for bucket in range(BUCKETS)]
    return [
        Bucket((64 * (bucket + 1), 512), each, array("q", [1] * len(each)), BATCH)
        for bucket, each in enumerate(samples)
    ]


def plan_first_batch(buckets: list[Bucket]) -> BatchPlan:
    plan = BatchPlan(buckets, RANKS, 1, 0)
    plan.get_micro_batch(0)
    return plan


def count_epoch(plan: BatchPlan) -> int:
    """Count the samples of every rank in every batch of an epoch."""
    batches = (batch for step in range(plan.steps_per_epoch) for batch in plan.get_step(step))
    return sum(len(batch.shard(rank, RANKS).sample_indices) for batch in batches for rank in range(RANKS))


def measure_memory(create: Callable[[], object]) -> int:
    """Measure the bytes that Python allocates for an object and everything that it references."""
    gc.collect()
    tracemalloc.start()
    created = create()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del created
    return used


def measure_cache(
    directory: Path, count: int, repetitions: int, training_options: Sequence[str]
) -> Iterator[Measurement]:
    """Measure reading cached latents, alone and with the whole loader, compared to one npz file for each image.

    An npz file holds what sd-scripts stores: latents, those of the mirrored image, the original size and the crop.
    """
    directory.mkdir()
    defaults = f"--resolution 512 --train_batch_size {BATCH} --flip_aug --no-cache_text_encoder_outputs"
    argv = write_dataset([*defaults.split(), *training_options], directory, 1, min_images=count)
    with build_run(argv, directory) as run:
        loader: Any = run.loader
        steps, batch_size = loader.iter_steps(0), run.config.data.train_batch_size
        batches = [range(start, start + batch_size) for start in range(0, count - batch_size + 1, batch_size)]
        mirrored = [number % 2 == 0 for number in range(batch_size)]
        shape = loader.latent_reader.read_moments([0], [False]).mean_and_std.shape[2:]
        latents = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        plain = write_npz(directory / "npz", np.savez, latents, count)
        compressed = write_npz(directory / "compressed", np.savez_compressed, latents, count)
        candidates: dict[str, Callable[[], object]] = {
            "cache, read only": lambda: [loader.latent_reader.read_moments(list(batch), mirrored) for batch in batches],
            "cache, whole loader": lambda: [next(steps) for _ in batches],
            "npz": lambda: [read_npz([plain[index] for index in batch]) for batch in batches],
            "compressed npz": lambda: [read_npz([compressed[index] for index in batch]) for batch in batches],
        }
        seconds = measure_interleaved(candidates, repetitions + 1)
    images = len(batches) * batch_size
    times = {name: [1e6 * each / images for each in values[1:]] for name, values in seconds.items()}  # 0 is warmup
    title = f"latents {tuple(shape)}"
    for name, values in times.items():
        yield Measurement(f"{title}: {name}", values, "us/image")
        for other in ("npz", "compressed npz") if name.startswith("cache") else ():
            ratios = compute_ratios(values, times[other])
            yield Measurement(f"{title}: {name} / {other}", ratios, "x", at_most=MAX_RATIO_TO_NPZ)


def write_npz(directory: Path, save: Callable[..., None], latents: NDArray[np.float32], count: int) -> list[Path]:
    directory.mkdir()
    files = [directory / f"{number:06d}.npz" for number in range(count)]
    size, mirrored = np.array(latents.shape[1:]) * PIXEL_STEP, latents[..., ::-1]
    for file in files:
        save(file, latents=latents, latents_flipped=mirrored, original_size=size, crop_ltrb=np.array([0, 0, *size]))
    return files


def read_npz(files: Sequence[Path]) -> torch.Tensor:
    """Read a batch of latents, every other image mirrored."""
    rows = []
    for number, file in enumerate(files):
        with np.load(file) as arrays:
            latents, mirrored = arrays["latents"], arrays["latents_flipped"]
            arrays["original_size"].tolist(), arrays["crop_ltrb"].tolist()
        rows.append(torch.from_numpy(mirrored if number % 2 else latents))
    return torch.stack(rows)
