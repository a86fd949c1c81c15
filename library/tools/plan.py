"""``python -m library plan --dataset_config FILE [...]``: print buckets, steps and memory, without training."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import RunConfig, parse_config
from ..config.kohya_compat import KOHYA_OPTIONS
from ..config.options import define_option, iter_options
from ..config.parser import COMMAND_OPTIONS
from ..config.schema_data import DataConfig
from ..config.types import MemorySize
from ..dataset.dataset_config import can_load_datasets, collect_extra_keys, convert_to_sd_scripts, load_dataset_config
from ..errors import ConfigError
from ..log import configure_logging
from ..training.preflight import find_settings_problems, load_settings

if TYPE_CHECKING:
    from ..config.parser import ParsedConfig
    from ..estimate.dry_run import DryRun
    from ..estimate.layout_search import LayoutReport

PREVIEW_SUFFIXES = (".png", ".jpg", ".webp")
USAGE = "usage: python -m library plan --dataset_config FILE [--option value ...]"


@dataclass(frozen=True)
class PlanOptions:
    """The options of this tool."""

    world_size: int = define_option(1, "plan for this many processes", minimum=1)
    json: bool = define_option(False, "print JSON: settings, buckets, every image, steps")
    resolve_only: bool = define_option(
        False, "with --json: only resolve the dataset file, under sd-scripts' names; no image folder is scanned"
    )
    preview: str | None = define_option(
        None, "draw a contact sheet of the images as they will be trained into this file (.png, .jpg, .webp)"
    )
    preview_limit: int = define_option(
        12, "images per bucket on the contact sheet, those that lose most by cropping first", minimum=1
    )
    gpu_memory: MemorySize | None = define_option(
        None, "estimate which parallel layouts fit on GPUs with this much memory, such as 24GB"
    )
    gpu_tflops: float = define_option(100.0, "gpu_memory: assumed speed of a GPU, in TFLOP/s", minimum=0.001)
    link_speed: float = define_option(
        25.0, "gpu_memory: assumed bandwidth between GPUs and to the host, in GB/s", minimum=0.001
    )


@dataclass(frozen=True)
class _Arguments:
    plan: PlanOptions = field(default_factory=PlanOptions)


def run_plan(argv: Sequence[str]) -> tuple[str, int]:
    """Print the plan of a run; every training option is accepted."""
    if set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    tool_argv, training_argv = _split_arguments(argv)
    own, training = parse_config(tool_argv, _Arguments), load_settings(training_argv)
    options: PlanOptions = cast(Any, own.config).plan
    data = training.config.data
    problems = [*own.problems, *_validate_options(options, frozenset(own.locations))]
    if options.resolve_only:
        return _format_resolved_datasets(data, [*problems, *training.problems]), 0
    problems += find_settings_problems(training)
    if options.preview:
        problems += _validate_preview_path(Path(options.preview).expanduser(), data)
    if not problems and "world_size" in own.locations and training.config.parallel.model_parallel_size > 1:
        from ..distributed.preflight import validate_parallel_dims  # imports torch
        from ..distributed.world import World

        problems += validate_parallel_dims(training.config, World.build_fake(options.world_size))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    log = training.config.log
    configure_logging(level=log.console_log_level, simple=True, quiet=log.quiet)  # to stderr
    training.log_notices()
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
    from ..estimate.layout_search import Devices, find_largest_batch, search_layouts
    from ..estimate.parallel_layouts import LayoutFinder

    speeds = options.gpu_tflops * 1e12, options.link_speed * 1e9
    devices = Devices(options.world_size, options.gpu_memory.num_bytes, *speeds)
    finder = LayoutFinder(training.config, frozenset(training.locations), dry_run.detected, devices.count)
    plan = dry_run.plan.batch_plan
    captions = dry_run.prepared.list_first_epoch_captions(plan, dry_run.plan.steps)
    return search_layouts(finder, find_largest_batch(plan, captions), devices)


def _format_resolved_datasets(data: DataConfig, problems: list[str]) -> str:
    """Format the resolved dataset file as JSON, without any image."""
    reading = load_dataset_config(data) if can_load_datasets(data) else None
    problems = [*problems, *(reading.problems if reading else [])]
    if problems or reading is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    records = []
    for dataset, settings in zip(reading.datasets, convert_to_sd_scripts(reading.datasets), strict=True):
        extra_keys = collect_extra_keys(dataset)
        records.append({"resolved": settings, **({"other_keys": extra_keys} if extra_keys else {})})
    return json.dumps({"datasets": records}, indent=1)


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into the tool's arguments and those of training; a misspelt option goes to the one that it resembles."""
    own = {option.name for option in iter_options(_Arguments)}
    training = {*(option.name for option in iter_options(RunConfig)), *KOHYA_OPTIONS, *COMMAND_OPTIONS}
    tool_argv, training_argv = list[str](), list[str]()
    target = training_argv
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].removeprefix("no-")
            closest = get_close_matches(name, [name] if name in training else [*own, *training], n=1, cutoff=0.7)
            target = tool_argv if closest and closest[0] in own else training_argv
        target.append(word)
    return tool_argv, training_argv


def _validate_options(options: PlanOptions, explicit: frozenset[str]) -> Iterator[str]:
    if options.resolve_only and not options.json:
        yield "--resolve_only: prints JSON only; add --json"
    if options.resolve_only:
        for name in ("preview", "gpu_memory"):
            if getattr(options, name) is not None:
                yield f"--{name}: needs the images, which --resolve_only does not read; remove one of the two"
        if "world_size" in explicit:
            yield "--world_size: no effect with --resolve_only; remove one of the two"
    for name in ("gpu_tflops", "link_speed"):
        if name in explicit and options.gpu_memory is None:
            yield f"--{name}: no effect without --gpu_memory"
    if "preview_limit" in explicit and options.preview is None:
        yield "--preview_limit: no effect without --preview"


def _validate_preview_path(path: Path, data: DataConfig) -> Iterator[str]:
    if path.suffix.lower() not in PREVIEW_SUFFIXES:
        yield f"--preview: {path}: expected a file name ending in {', '.join(PREVIEW_SUFFIXES)}"
    elif path.is_dir():
        yield f"--preview: {path} is a folder; give a file name"
    if not path.absolute().parent.is_dir():
        yield f"--preview: {path.absolute().parent}: no such folder"
    if not can_load_datasets(data):
        return
    folder = path.resolve().parent
    for subset in (subset for dataset in load_dataset_config(data).datasets for subset in dataset.subsets):
        image_dir = subset.resolve_image_dir()
        if image_dir is None:
            continue
        if folder == image_dir.resolve() or (subset.recursive and image_dir.resolve() in folder.parents):
            yield f"--preview: {path} is in an image folder, so the next run would train on it; use another folder"
            return


def _format_help() -> str:
    lines = [USAGE, "", "Print what would be trained, without training. Takes every training option, and:", ""]
    for option in iter_options(_Arguments):
        value = "" if option.value_type is bool else f" {option.syntax}"
        lines.append(f"  {'--' + option.name + value:<24} {option.help}")
    return "\n".join(lines)
