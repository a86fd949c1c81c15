"""Benchmark datasets of clips: planning and caching many, and reading cached windows beside files of musubi-tuner.

Clips are made here, small and all different; planning and caching are commands of their own processes, so that their
processor time and peak memory are what a user pays.
"""

import os
import struct
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import av
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from library.cache.format import stack_tensors
from library.cache.keys import stack_keys
from library.cache.readers import MOMENTS_TENSOR
from library.cache.store import CacheStore
from library.cache.writer import CacheWriter
from library.dataloader.batch import Moments
from library.errors import UserError

from .processes import ROOT, TAIL
from .report import Measurement, add_count_option, compute_ratios, measure_interleaved

PARTS = ("plan", "cache", "read")
SIDE, RATE, MIN_FRAMES, NUM_LENGTHS = 64, 16, 17, 20
ENCODED = 200
"""Clips that are really encoded; each of the others is one of them with a number at its end, so no two are equal."""
FEW_CLIPS = 10
MODEL = "random:wan:tiny"
LATENTS = (16, 21, 60, 104)
"""The latents of Wan for 81 frames of 832 x 480 pixels."""
SETTLE_SECONDS = 2.5
"""The scan does not trust the timestamps of files that changed more recently."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (all)")
    add_count_option(parser, "--clips", 10_000, "clips to plan")
    add_count_option(parser, "--cached_clips", 2_000, "clips to cache, with a tiny Wan")
    add_count_option(parser, "--windows", 48, "windows of 81 frames of 832 x 480 pixels to read")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Measure the parts; training options apply to planning and caching."""
    if "plan" in options.parts:
        yield from measure_plan(directory / "plan", options.clips, training_options)
    if "cache" in options.parts:
        yield from measure_cache(directory / "cache", options.cached_clips, training_options)
    if "read" in options.parts:
        yield from measure_reading(directory / "read", options.windows, options.repetitions)


def measure_plan(directory: Path, count: int, training_options: Sequence[str]) -> Iterator[Measurement]:
    """Measure ``library plan``: the first, which reads every clip, and later ones; and the memory of each clip."""
    few = write_clips(directory / "few", FEW_CLIPS)
    many = write_clips(directory / "many", count)
    time.sleep(SETTLE_SECONDS)
    _, base = run_library("plan", few, training_options)
    for name in ("first", "later"):
        seconds, peak = run_library("plan", many, training_options)
        title = f"plan of {count:,} clips, {name}"
        yield Measurement(f"{title}: processor time", [seconds], "s")
        yield Measurement(f"{title}: peak memory", [peak / 1e6], "MB")
    yield Measurement(f"memory of a clip, beside a plan of {FEW_CLIPS}", [(peak - base) / count / 1e3], "kB/clip")


def measure_cache(directory: Path, count: int, training_options: Sequence[str]) -> Iterator[Measurement]:
    """Measure ``library cache build``: processor time, peak memory, and what it leaves on the disk."""
    dataset = write_clips(directory, count)
    time.sleep(SETTLE_SECONDS)
    seconds, peak = run_library("cache", dataset, ["build", *training_options])
    stored = sum(path.stat().st_size for path in directory.rglob("*.shard"))
    yield Measurement(f"cache of {count:,} clips, latents and captions: processor time", [seconds], "s")
    yield Measurement("processor time of a clip", [1e3 * seconds / count], "ms/clip")
    yield Measurement("peak memory", [peak / 1e6], "MB")
    yield Measurement("cache on disk", [stored / count / 1e6], "MB/clip")
    later, _ = run_library("cache", dataset, ["build", *training_options])
    yield Measurement("cache that is complete: processor time", [later], "s")


def measure_reading(directory: Path, count: int, repetitions: int) -> Iterator[Measurement]:
    """Measure reading windows from this cache, and from one file of latents each, as musubi-tuner has them.

    Its files have one sample of the latents in the dtype of the VAE, mostly bf16; this cache has mean and deviation.
    """
    directory.mkdir(parents=True)
    latents = torch.randn(LATENTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys = [number.to_bytes(16, "big") for number in range(count)]
    files = [directory / f"{number:06d}_00000-081_0832x0480_wan.safetensors" for number in range(count)]
    name = f"latents_{'x'.join(map(str, LATENTS[1:]))}_bf16"
    with CacheWriter(directory) as writer:
        for key, file in zip(keys, files, strict=True):
            writer.put(key, {MOMENTS_TENSOR: torch.stack([latents, latents])}, file.name)
            save_file({name: latents}, file)
    store = CacheStore([directory])
    rows = store.find_rows(stack_keys(keys))
    candidates: dict[str, Callable[[], object]] = {
        "cache": lambda: [read_window(store, int(row)) for row in rows],
        "musubi-tuner's files": lambda: [torch.stack([load_file(file)[name]]) for file in files],  # a batch
    }
    seconds = measure_interleaved(candidates, repetitions + 1)
    times = {each: [1e3 * value / count for value in values[1:]] for each, values in seconds.items()}  # 0 is warmup
    stored = {
        "cache": sum(path.stat().st_size for path in directory.glob("*.shard")),
        "musubi-tuner's files": sum(file.stat().st_size for file in files),
    }
    for each, values in times.items():
        yield Measurement(f"window of 832x480x81, {each}: time", values, "ms/window")
        yield Measurement(f"window of 832x480x81, {each}: size", [stored[each] / count / 1e6], "MB/window")
    yield Measurement(
        "time for each MB, cache / musubi-tuner's files",
        [
            ratio * stored["musubi-tuner's files"] / stored["cache"]
            for ratio in compute_ratios(times["cache"], times["musubi-tuner's files"])
        ],
        "x",
    )


def read_window(store: CacheStore, row: int) -> Moments:
    """Read one window as training does."""
    values = stack_tensors([store.read_blob(row)], MOMENTS_TENSOR)
    assert isinstance(values, torch.Tensor)
    return Moments(values)


def write_clips(directory: Path, count: int) -> Path:
    """Write clips of 17 to 36 frames with captions, and the file of their dataset; return that file."""
    clips = directory / "clips"
    clips.mkdir(parents=True)
    encoded = [encode_clip(clips / f"{number:06d}.mp4", number) for number in range(min(count, ENCODED))]
    for number in range(count):
        if number >= ENCODED:
            free = struct.pack(">I4sI", 12, b"free", number)  # a part of an MP4 file that players skip
            (clips / f"{number:06d}.mp4").write_bytes(encoded[number % ENCODED] + free)
        (clips / f"{number:06d}.txt").write_text(f"clip {number}, something that moves", encoding="utf-8")
    file = directory / "dataset.toml"
    file.write_text(
        f"[[datasets]]\nresolution = {SIDE}\nbatch_size = 2\ncaption_extension = '.txt'\n"
        f"[[datasets.subsets]]\nvideo_dir = '{clips}'\ntarget_frames = [17]\n",
        encoding="utf-8",
    )
    return file


def encode_clip(path: Path, number: int) -> bytes:
    """Write a clip of noise that moves; return its bytes."""
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "ultrafast", "threads": "1"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for shift in range(MIN_FRAMES + number % NUM_LENGTHS):
            frame = av.VideoFrame.from_ndarray(np.roll(noise, 2 * shift, axis=1), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return path.read_bytes()


def run_library(tool: str, dataset: Path, more: Sequence[str]) -> tuple[float, int]:
    """Run a command of ``python -m library``; return its processor time, and its peak memory in bytes."""
    if sys.platform == "win32":
        raise UserError("Windows does not tell the peak memory of a process that ended; use --parts read")
    command, options = ([more[0]], more[1:]) if tool == "cache" else ([], more)
    settings = ["--dataset_config", str(dataset), "--pretrained_model_name_or_path", MODEL, "--max_train_steps", "1"]
    paths = ["--output_dir", str(dataset.parent / "output")]
    process = subprocess.Popen(
        [sys.executable, "-m", "library", tool, *command, *settings, *paths, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{tool} failed:\n{errors.decode()[-TAIL:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit
