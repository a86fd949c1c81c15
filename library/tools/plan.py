"""``python -m library plan --dataset_config FILE [...]``: print buckets, steps and memory, without training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import parse_config
from ..config.option_needs import IsSet, IsUnset
from ..config.options import define_option, iter_options
from ..config.types import MemorySize
from ..dataset.dataset_config import collect_extra_keys, convert_to_sd_scripts, load_dataset_config
from ..dataset.schema import DatasetConfig
from ..log import configure_logging
from ..registry import pause_garbage_collection
from ..training.preflight import load_settings
from .argument_split import split_arguments
from .validate_arguments import check_plan_arguments

if TYPE_CHECKING:
    from ..config.parser import ParsedConfig
    from ..estimate.dry_run import DryRun
    from ..estimate.layout_search import LayoutReport

USAGE = "usage: python -m library plan --dataset_config FILE [--option value ...]"


@dataclass(frozen=True)
class PlanOptions:
    """The options of this tool."""

    world_size: int = define_option(1, "plan for this many processes", minimum=1, needs=(IsUnset("resolve_only"),))
    json: bool = define_option(False, "print JSON: settings, buckets, every image, steps")
    resolve_only: bool = define_option(
        False, "with --json: only resolve the dataset file, under sd-scripts' names; no image folder is scanned"
    )
    preview: str | None = define_option(
        None, "draw a contact sheet of the images as they will be trained into this file (.png, .jpg, .webp)"
    )
    preview_limit: int = define_option(
        12,
        "images per bucket on the contact sheet, those that lose most by cropping first",
        minimum=1,
        needs=(IsSet("preview"),),
    )
    gpu_memory: MemorySize | None = define_option(
        None, "estimate which parallel layouts fit on GPUs with this much memory, such as 24GB"
    )
    gpu_tflops: float = define_option(
        100.0, "gpu_memory: assumed speed of a GPU, in TFLOP/s", minimum=0.001, needs=(IsSet("gpu_memory"),)
    )
    link_speed: float = define_option(
        25.0,
        "gpu_memory: assumed bandwidth between GPUs and to the host, in GB/s",
        minimum=0.001,
        needs=(IsSet("gpu_memory"),),
    )


@dataclass(frozen=True)
class _Arguments:
    plan: PlanOptions = field(default_factory=PlanOptions)


def run_plan(argv: Sequence[str]) -> tuple[str, int]:
    """Print the plan of a run; every training option is accepted."""
    if set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    tool_argv, training_argv = split_arguments(argv, _Arguments)
    training = load_settings(training_argv)
    if (memory := training.config.train.gpu_memory) is not None and not any(
        "--gpu_memory" in each for each in tool_argv
    ):
        tool_argv = [*tool_argv, "--gpu_memory", str(memory)]
    own = parse_config(tool_argv, _Arguments)
    options: PlanOptions = cast(Any, own.config).plan
    check_plan_arguments(options, own, training)
    if options.resolve_only:
        configure_logging(simple=True)  # to stderr
        own.log_notices()
        return _format_resolved_datasets(load_dataset_config(training.config.data).datasets), 0
    log = training.config.log
    configure_logging(level=log.console_log_level, simple=True, quiet=log.quiet)  # to stderr
    training.log_notices()
    own.log_notices()
    return _format_plan(options, training), 0


def _format_plan(options: PlanOptions, training: "ParsedConfig") -> str:
    from ..estimate.dry_run import build_dry_run

    parallel = training.config.parallel
    dp = 1 if parallel.device_map is not None else max(1, options.world_size // parallel.model_parallel_size)
    dry_run = build_dry_run(training.config, dp)
    contact_sheet = ""
    if options.preview:
        path = Path(options.preview).expanduser()
        contact_sheet = dry_run.prepared.write_contact_sheet(dry_run.plan.batch_plan, path, options.preview_limit)
    report = _search_layouts(options, training, dry_run)
    if options.json:
        return json.dumps({**dry_run.export_json(), **(report.export_json() if report else {})}, indent=1)
    return "\n".join(filter(None, [dry_run.format_summary(), contact_sheet, report.format_text() if report else ""]))


def _search_layouts(options: PlanOptions, training: "ParsedConfig", dry_run: "DryRun") -> "LayoutReport | None":
    if options.gpu_memory is None:
        return None
    with pause_garbage_collection():
        from ..estimate.layout_search import find_training_batch, search_layouts
        from ..estimate.parallel_layouts import LayoutFinder
        from ..estimate.step_time import Devices

    speeds = options.gpu_tflops * 1e12, options.link_speed * 1e9
    devices = Devices(options.world_size, options.gpu_memory.num_bytes, *speeds)
    finder = LayoutFinder(training.config, frozenset(training.locations), dry_run.detected, devices.count)
    return search_layouts(finder, find_training_batch(dry_run, training.config.data), devices)


def _format_resolved_datasets(datasets: Sequence[DatasetConfig]) -> str:
    """Format the resolved dataset file as JSON, without any image."""
    records = []
    for dataset, settings in zip(datasets, convert_to_sd_scripts(datasets), strict=True):
        extra_keys = collect_extra_keys(dataset)
        records.append({"resolved": settings, **({"other_keys": extra_keys} if extra_keys else {})})
    return json.dumps({"datasets": records}, indent=1)


def _format_help() -> str:
    lines = [USAGE, "", "Print what would be trained, without training. Takes every training option, and:", ""]
    for option in iter_options(_Arguments):
        value = "" if option.value_type is bool else f" {option.syntax}"
        lines.append(f"  {'--' + option.name + value:<24} {option.help}")
    return "\n".join(lines)
