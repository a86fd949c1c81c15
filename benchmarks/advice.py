"""Compare what ``plan --gpu_memory`` advises with all combinations of options that it estimates, without a GPU.

For each model and size of GPU, no combination that fits may be better than the advised one: faster and as exact.
Then the ratios of the model of a step's time, beside those that were measured on an H100, which it is fitted to.
"""

import csv
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from library.config import RunConfig
from library.estimate.advice import FEWER_OPTIONS, MARGIN, SAME_SPEED, Candidate, GridSearch, LayoutEstimate
from library.estimate.meta_run import LargestBatch
from library.estimate.meta_run_cache import MetaRuns
from library.estimate.parallel_layouts import LayoutFinder, format_flags
from library.estimate.step_time import Devices
from library.models.detect import detect_model

from .report import Measurement
from .synthetic_run import CAPTION, load_training_options

MODELS = ("sdxl", "flux", "qwen_image", "z_image", "hunyuan_image")
DEFAULT_MODELS = MODELS[:4]
SIZES = (8, 12, 16, 24, 48)
GB = 2**30
ONE_DEVICE = "one device"
"""Name of the layout of one process without distributed training."""
MEASURED = {
    "--gradient_checkpointing": 1.87,
    "--quantize_base fp8": 1.20,
    "--quantize_base nf4": 1.15,
}
"""Step times of Stable Diffusion XL at 1024 with peft's layers, relative to no options (docs/benchmarks.md).

Swapped blocks are not among them: they were measured when each weight was copied on its own.
"""
MAX_SECONDS = 20.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS), help="model families")
    parser.add_argument("--sizes", nargs="+", type=float, default=list(SIZES), help="memory of a GPU in GB")
    parser.add_argument("--processes", type=int, default=1, help="GPUs (1)")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families, at 128 x 128")
    parser.add_argument("--grid", type=Path, help="write every combination with its estimates to this CSV file")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Search each model once, and compare the advice for each size with all combinations."""
    rows: list[list[object]] = []
    for family in options.models:
        started = time.process_time()
        search = build_search(family, options.tiny, options.processes, training_options)
        num_candidates, seconds = len(search.candidates), time.process_time() - started
        for size in options.sizes:
            begun = time.process_time()
            advice = search.advise((1 - MARGIN) * size * GB)
            seconds_once = seconds + time.process_time() - begun
            yield from report_advice(f"{family}, {size:g} GB", search, advice, size)
            if size == options.sizes[0]:
                at_most = None if options.tiny else MAX_SECONDS
                note = f"{num_candidates} combinations; without imports"
                yield Measurement(f"{family}: search for one size", [seconds_once], "processor s", at_most, note)
        rows += [[family, *list_cells(each)] for each in search.candidates]
    if options.grid is not None:
        with options.grid.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["model", "layout", "options", "GB", "seconds", "error"], *rows])
    if not options.tiny and "sdxl" in options.models:
        yield from compare_with_measured_times()


def build_search(family: str, is_tiny: bool, processes: int, more: Sequence[str]) -> GridSearch:
    """Build the search for a model with random weights, LoRA of rank 16, at 1024 x 1024 with a batch size of 1."""
    model, resolution = (f"random:{family}:tiny", "128") if is_tiny else (f"random:{family}", "1024")
    argv = ["--pretrained_model_name_or_path", model, "--resolution", resolution, "--mixed_precision", "bf16", *more]
    return start_search(argv, processes)


def start_search(training_options: Sequence[str], processes: int = 1) -> GridSearch:
    config, explicit = load_training_options(training_options)
    detected, batch = detect_model(config.model), build_batch(config)
    finder = LayoutFinder(config, explicit, detected, processes)
    return GridSearch(finder, MetaRuns(detected, batch), Devices(processes, 2**40))


def build_batch(config: RunConfig) -> LargestBatch:
    assert config.data.resolution is not None
    size = config.data.resolution.width, config.data.resolution.height
    return LargestBatch(size, (CAPTION.format(1),) * config.data.train_batch_size, can_be_split=True)


def report_advice(
    title: str, search: GridSearch, advice: Sequence[LayoutEstimate], size: float
) -> Iterator[Measurement]:
    """Count the combinations that fit and are better than the advised one; those are estimated by their own step."""
    candidates, limit = search.candidates, (1 - MARGIN) * size * GB
    fitting = [each for each in candidates if each.total <= limit]
    name = f"{title}: better combinations that fit"
    if not advice:
        yield Measurement(name, [len(fitting)], at_most=0, note="nothing fits")
        return
    first, fastest = advice[0], max(each.images_per_second for each in candidates)
    note = (
        f"of {len(fitting)}; {first.layout.name} {first.flags}: {first.memory.total / GB:.2f} GB,"
        f" {fastest / first.images_per_second:.2f} x the time of the fastest, {first.precision}"
    )
    better = [each for each in find_better(fitting, first) if search.verify(each).memory.total <= limit]
    yield Measurement(name, [len(better)], at_most=0, note=note)


def find_better(candidates: Sequence[Candidate], advised: LayoutEstimate) -> list[Candidate]:
    """Find what is faster and more exact, as exact and clearly faster, or so much faster that it comes first."""
    return [each for each in candidates if _is_better(each, advised.images_per_second, advised.error)]


def _is_better(candidate: Candidate, speed: float, error: float) -> bool:
    if candidate.error < error:
        return candidate.images_per_second > speed
    tolerance = FEWER_OPTIONS if candidate.error == error else SAME_SPEED + FEWER_OPTIONS
    return (1 - tolerance) * candidate.images_per_second > speed


def list_cells(candidate: Candidate) -> list[object]:
    flags = format_flags(candidate.options)
    seconds = f"{1 / candidate.images_per_second:.3f}"
    return [candidate.layout.name, flags, f"{candidate.total / GB:.2f}", seconds, f"{candidate.error:.4f}"]


def compare_with_measured_times() -> Iterator[Measurement]:
    """Compare the model's ratios with those of the H100, on peft's layers, with which these were measured."""
    search = build_search("sdxl", False, 1, ["--no-fused_layers"])
    devices = [each for each in search.candidates if each.layout.name == ONE_DEVICE]
    seconds = {format_flags(each.options): 1 / each.images_per_second for each in devices}
    for name, measured in MEASURED.items():
        ratio = seconds[name] / seconds[""]
        title = f"sdxl {name}: step by the model / without"
        yield Measurement(title, [ratio], "x", 1.1 * measured, f"measured {measured:.2f} x", 0.9 * measured)
