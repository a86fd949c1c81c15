"""A real training run on synthetic images, up to its first step.

A benchmark takes every training option besides its own, so that whatever a user would switch on can be measured.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from library.config import RunConfig, parse_config
from library.errors import ConfigError
from library.problems import Problem

if TYPE_CHECKING:
    from library.parallel.strategy import Strategy
    from library.training.state import TrainingRun

DEFAULT_OPTIONS = (
    *"--pretrained_model_name_or_path random:sd1:tiny --resolution 256 --network_dim 16".split(),
    *"--cache_latents --cache_text_encoder_outputs --network_train_unet_only".split(),
)
"""The encoders run before the first step, so that a step is the denoiser's alone."""
MIN_IMAGES = 8
CAPTION = "an image, number {}"
SET_HERE = ("dataset_config", "resolution_schedule", "max_train_steps", "max_train_epochs", "output_dir")


def load_training_options(argv: Sequence[str]) -> tuple[RunConfig, frozenset[str]]:
    """Load training options, before there is a dataset; return the names of those that are set, too."""
    loaded = parse_config([*DEFAULT_OPTIONS, *argv])
    if rejected := [name for name in SET_HERE if name in loaded.locations]:
        raise ConfigError([Problem(name, "set by the benchmark", "remove it") for name in rejected])
    return loaded.config, frozenset(loaded.locations)


def write_dataset(
    argv: Sequence[str],
    directory: Path,
    steps: int,
    *,
    world_size: int = 1,
    sizes: Sequence[tuple[int, int]] = (),
    min_images: int = MIN_IMAGES,
    caption: str = CAPTION,
) -> list[str]:
    """Write images of each size, or of ``--resolution``, for a run of ``steps`` steps; return all of its options."""
    config, _ = load_training_options(argv)
    assert config.data.resolution is not None
    sizes = sizes or [(config.data.resolution.width, config.data.resolution.height)]
    global_batch = config.data.train_batch_size * config.train.gradient_accumulation_steps * world_size
    count = global_batch * math.ceil(min_images / global_batch / len(sizes))  # whole batches: none has to be padded
    tables = ["[general]\ncaption_extension = '.txt'\n"]
    for width, height in sizes:
        images = directory / f"images_{width}x{height}"
        write_images(images, [(width, height)] * count, caption)
        tables.append(f"[[datasets]]\nresolution = [{width}, {height}]\n")
        tables.append(f"[[datasets.subsets]]\nimage_dir = '{images}'\n")
    dataset = directory / "dataset.toml"
    dataset.write_text("".join(tables), encoding="utf-8")
    paths = ["--dataset_config", str(dataset), "--output_dir", str(directory / "output")]
    return [*DEFAULT_OPTIONS, *argv, *paths, "--max_train_steps", str(steps)]


def write_images(directory: Path, sizes: Iterable[tuple[int, int]], caption: str = CAPTION) -> None:
    """Write a JPEG file of smooth noise for each size, no two alike, each with a caption that has its number."""
    directory.mkdir(parents=True)
    for number, size in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(noise).resize(size).save(directory / f"{number:07d}.jpg", quality=90)
        (directory / f"{number:07d}.txt").write_text(caption.format(number), encoding="utf-8")


@contextmanager
def build_run(argv: Sequence[str], directory: Path) -> Iterator["TrainingRun"]:
    """Build the run as training has it before its first step; its metrics go to a file in ``directory``."""
    from accelerate.state import AcceleratorState

    from library.parallel.strategy_registry import build_strategy

    # accelerate keeps the settings of the first Accelerator of a process, torch.compile's as well.
    AcceleratorState._reset_state(reset_partial_state=True)
    config = parse_config(argv).require_valid()
    strategy = build_strategy(config)
    with strategy.comm.process_group_scope(), closing(strategy):
        yield _assemble_run(config, strategy, directory)


def _assemble_run(config: RunConfig, strategy: "Strategy", directory: Path) -> "TrainingRun":
    """Do what ``library.training.run`` does up to the first step, without saving and resuming."""
    from library.cache.frozen_encoders import FrozenEncoders
    from library.cache.latent_cache import cache_latents
    from library.cache.readers import CacheReaders
    from library.cache.text_encoder_cache import cache_text_encoder_outputs
    from library.dataloader.run_plan import RunPlan
    from library.log import ProgressBar
    from library.models.detect import detect_model
    from library.models.families import FAMILIES
    from library.models.trained_components import list_cached_text_components
    from library.trackers import Trackers
    from library.training.metrics import MetricsFile, TrainingLogger
    from library.training.network_weights import read_initial_weights
    from library.training.preflight import RunFacts, check_run_settings
    from library.training.setup import build_run, load_training_pipeline, prepare_dataset

    detected = detect_model(config.model)
    family = FAMILIES.get(detected.family)(config.model)
    check_run_settings(config, RunFacts.from_strategy(strategy, family, detected))
    starts = read_initial_weights(config.adapter, family, detected)
    prepared = prepare_dataset(config.data, config.cache, strategy.comm, detected)
    plan = RunPlan.from_config(
        prepared.build_batch_plan(strategy.data_parallel_size, config.train), config.train, config.optim
    )
    text_components = list_cached_text_components(config.adapter, config.optim, family.facts)
    encoders = FrozenEncoders(strategy, family, detected, config.model, config.cache, text_components)
    prepared, latents = cache_latents(encoders, prepared)
    cached = CacheReaders(latents, cache_text_encoder_outputs(encoders, prepared, plan, (), config.preservation))
    pipe = load_training_pipeline(config, strategy, family, detected, cached, ())
    run, _ = build_run(config, strategy, family, pipe, prepared, plan, cached, starts)
    metrics = MetricsFile(directory / "metrics.jsonl", 0) if strategy.comm.is_main else None
    run.metric_logger = TrainingLogger(
        ProgressBar(plan.steps, 0, "benchmark", enabled=False), metrics, Trackers(strategy.comm.accelerator)
    )
    return run


def read_intervals(output: Path) -> list[tuple[int, float]]:
    """Read the intervals at which a finished run has logged its throughput: steps and seconds of each."""
    from library.report.metric_series import read_metrics

    intervals, last_step = [], 0
    for line in read_metrics(output / "lora.metrics.jsonl"):
        if "speed/steps_per_second" in line:
            steps = line["step"] - last_step
            intervals.append((steps, steps / line["speed/steps_per_second"]))
            last_step = line["step"]
    return intervals


def release_memory(device: torch.device) -> None:
    """Give back the memory of the run before, whose model is part of reference cycles."""
    from library.distributed.device_memory import has_device_memory

    gc.collect()
    if has_device_memory(device):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset what ``peak_memory`` reads: the allocator's peak, on a CPU that of the process, where Linux allows it."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
