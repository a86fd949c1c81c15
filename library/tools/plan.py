"""``python -m library plan --dataset_config x.toml [...]``: what would be trained, without training."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from ..config import RunConfig, parse_config
from ..config.kohya_compat import KOHYA_OPTIONS
from ..config.options import define_option, iter_options
from ..config.parser import COMMAND_OPTIONS
from ..config.schema_data import DataConfig
from ..config.types import MemorySize
from ..dataset.dataset_config import collect_extra_keys, convert_to_sd_scripts, load_dataset_config
from ..dataset.validate import validate_dataset_config
from ..errors import ConfigError
from ..log import configure_logging

PREVIEW_SUFFIXES = (".png", ".jpg", ".webp")


USAGE = "usage: python -m library plan --dataset_config FILE [--option value ...]"


@dataclass(frozen=True)
class PlanOptions:
    """What the tool itself is told."""

    world_size: int = define_option(1, "plan for this many processes", minimum=1)
    json: bool = define_option(False, "everything as JSON: settings, buckets, every picture, steps")
    resolve_only: bool = define_option(
        False, "with json: the dataset file alone, in sd-scripts' names; looks at no folder"
    )
    preview: str | None = define_option(
        None, "draw the pictures as they will be trained into this file (.png, .jpg, .webp)"
    )
    preview_limit: int = define_option(
        12, "pictures of each bucket in the preview, those that lose most first", minimum=1
    )
    gpu_memory: MemorySize | None = define_option(
        None, "estimate which parallel layouts fit on GPUs of this size, such as 24GB"
    )
    gpu_tflops: float = define_option(100.0, "gpu_memory: assumed speed of a GPU, in TFLOP/s", minimum=0.001)
    link_speed: float = define_option(
        25.0, "gpu_memory: assumed bandwidth between GPUs and to the host, in GB/s", minimum=0.001
    )


@dataclass(frozen=True)
class _Arguments:
    plan: PlanOptions = field(default_factory=PlanOptions)


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Takes every option of training beside its own."""
    if set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    mine, theirs = _split_arguments(argv)
    own, training = parse_config(mine, _Arguments), parse_config(theirs)
    options: PlanOptions = cast(Any, own.config).plan
    data = training.config.data
    problems = [*own.problems, *_validate_options(options, frozenset(own.locations)), *training.problems]
    if options.resolve_only:
        return _format_resolved_datasets(data, problems), 0
    from ..models.preflight import validate_model_options

    problems += validate_dataset_config(
        data, training.config.cache, training.config.validate, training.config.train, training.invalid_options
    )
    problems += validate_model_options(training.config, training.locations)
    path = Path(options.preview).expanduser() if options.preview else None
    if path is not None:
        problems += _validate_preview_path(path, data)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    from ..estimate.dry_run import build_dry_run

    if "world_size" in own.locations and training.config.parallel.model_parallel_size > 1:
        _check_parallel_dims(training.config, options.world_size)
    log = training.config.log
    configure_logging(
        level=log.console_log_level, simple=True, quiet=log.quiet
    )  # on standard error, beside what is asked for
    training.log_notices()
    parallel = training.config.parallel
    groups = 1 if parallel.device_map is not None else max(1, options.world_size // parallel.model_parallel_size)
    outlook = build_dry_run(training.config, groups)
    said = (
        outlook.prepared.write_contact_sheet(outlook.plan.batch_plan, path, options.preview_limit)
        if path is not None
        else ""
    )
    if options.gpu_memory is not None:
        from ..estimate.layout_search import Devices, build_report_record, format_report, search_layouts

        speeds = options.gpu_tflops * 1e12, options.link_speed * 1e9
        devices = Devices(options.world_size, options.gpu_memory.num_bytes, *speeds)
        report = search_layouts(training.config, frozenset(training.locations), outlook, devices)
        found, told = build_report_record(report), format_report(report)
    else:
        found, told = {}, ""
    if options.json:
        return json.dumps({**outlook.export_json(), **found}, indent=1), 0
    return "\n".join(filter(None, [outlook.format_summary(), said, told])), 0


def _check_parallel_dims(config: RunConfig, world_size: int) -> None:
    from ..distributed.preflight import validate_parallel_dims  # which takes torch along
    from ..distributed.world import World

    if problems := [*validate_parallel_dims(config, World.build_fake(world_size))]:
        raise ConfigError(problems)


def _format_resolved_datasets(data: DataConfig, problems: list[str]) -> str:
    """The dataset file alone, as JSON."""
    has_file = data.dataset_config is not None and Path(data.dataset_config).is_file()
    reading = load_dataset_config(data) if has_file else None
    problems = [*problems, *(reading.problems if reading else [])]
    if problems or reading is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    records = []
    for dataset, settings in zip(reading.datasets, convert_to_sd_scripts(reading.datasets), strict=True):
        further = collect_extra_keys(dataset)
        records.append({"resolved": settings, **({"beyond": further} if further else {})})
    return json.dumps({"datasets": records}, indent=1)


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the tool and those for training; a misspelt option goes to the one that it resembles."""
    own = {option.name for option in iter_options(_Arguments)}
    training = {*(option.name for option in iter_options(RunConfig)), *KOHYA_OPTIONS, *COMMAND_OPTIONS}
    mine: list[str] = []
    theirs: list[str] = []
    words = theirs
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].removeprefix("no-")
            near = get_close_matches(name, [name] if name in training else [*own, *training], n=1, cutoff=0.7)
            words = mine if near and near[0] in own else theirs
        words.append(word)
    return mine, theirs


def _validate_options(options: PlanOptions, explicit_options: frozenset[str]) -> Iterator[str]:
    if options.resolve_only and not options.json:
        yield "--resolve_only: is told as JSON; add --json"
    if options.resolve_only and options.preview is not None:
        yield "--preview: needs the pictures, which --resolve_only does not look at; take one of the two out"
    if options.resolve_only and "world_size" in explicit_options:
        yield "--world_size: means nothing to --resolve_only, which plans nothing; take one of the two out"
    if options.resolve_only and options.gpu_memory is not None:
        yield "--gpu_memory: needs the pictures, which --resolve_only does not look at; take one of the two out"
    for name in ("gpu_tflops", "link_speed"):
        if name in explicit_options and options.gpu_memory is None:
            yield f"--{name}: no effect without --gpu_memory"
    if "preview_limit" in explicit_options and options.preview is None:
        yield "--preview_limit: there is no preview; name a file with --preview"


def _validate_preview_path(path: Path, data: DataConfig) -> Iterator[str]:
    """Told before the pictures are looked at, which takes its time."""
    if path.suffix.lower() not in PREVIEW_SUFFIXES:
        yield f"--preview: {path}: expected a file that ends in {', '.join(PREVIEW_SUFFIXES)}"
    elif path.is_dir():
        yield f"--preview: {path} is a folder; name a file in it"
    if not path.absolute().parent.is_dir():
        yield f"--preview: {path.absolute().parent} is no folder; make it first"
    if data.dataset_config is None or not Path(data.dataset_config).is_file():
        return
    target = path.resolve().parent
    subsets = [subset for dataset in load_dataset_config(data).datasets for subset in dataset.subsets]
    folders = [
        (folder.resolve(), subset.recursive) for subset in subsets if (folder := subset.resolve_image_dir()) is not None
    ]
    if any(target == folder or (deep and folder in target.parents) for folder, deep in folders):
        yield f"--preview: {path} lies among the pictures and would be trained next time; name another folder"


def _format_help() -> str:
    """Of the options of training only that they exist: they have their own page."""
    lines = [USAGE, "", "What would be trained, without training. Every option of training is understood, and:", ""]
    for option in iter_options(_Arguments):
        value = "" if option.value_type is bool else f" {option.syntax}"
        lines.append(f"  {'--' + option.name + value:<24} {option.help}")
    return "\n".join(lines)
