"""``python -m library import FILE...``: turn another program's training configuration into a run and a dataset file."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import parse_config, validate_adapter, validate_objective
from ..config.options import iter_options
from ..config.parser import ParsedConfig
from ..config.schema import RunConfig
from ..config.types import is_prompt_text
from ..config.unused_options import ModelTraits, find_unused_options
from ..config.validate import MISSING_DATASET
from ..dataloader.sample_prompts import load_prompts
from ..dataset.schema import DATASET_KEYS
from ..dataset.validate import validate_dataset_config
from ..errors import ConfigError, UserError
from ..models.own_families import get_family_facts
from ..models.validate_options import validate_model_options
from ..problems import Place, Problem, report_argument, report_file
from .importers.imported import ImportedConfig, UntakenKey
from .importers.programs import import_sources
from .importers.source_file import SourceFile, read_source

USAGE = "usage: python -m library import FILE... [--output_dir DIR] [--overwrite]"
HELP = f"""{USAGE}

  FILE          the configuration of another program, and its dataset files if they are not where it says:
                kohya_ss GUI (.json), ai-toolkit (.yaml), OneTrainer (.json, concepts, samples),
                diffusion-pipe (.toml, dataset), SimpleTuner (config.json or config.env, multidatabackend.json)
  --output_dir  folder for NAME.toml and NAME.dataset.toml; default: the working directory
  --overwrite   replace files of these names

NAME.toml is for --config_file, and names NAME.dataset.toml. See docs/import.md."""
TRAINED_PART_OPTIONS = {"network_train_unet_only", "network_train_text_encoder_only"}
NO_DATASET = Problem(
    "dataset_config",
    "no image folder was found in the file",
    "write a dataset TOML (docs/datasets.md) and set dataset_config",
)
"""What a file without image folders lacks."""
NO_MODEL = Problem(
    "pretrained_model_name_or_path",
    "no model was found in the file; the built-in demo model would be trained",
    "set it to the file, folder or hub id of the model",
)
"""What a file without a model lacks."""


def run_import_config(argv: Sequence[str]) -> tuple[str, int]:
    """Import one configuration."""
    if not argv or set(argv) & {"--help", "-h"}:
        return HELP, 0
    paths, output_dir, is_overwriting = _parse_arguments(list(argv))
    sources = [read_source(path) for path in paths]
    main, result = import_sources(sources)
    if result.problems:
        raise UserError(
            *(replace(each, place=replace(each.place or Place(), file=str(main.path))) for each in result.problems)
        )
    name = choose_name(main)
    files = build_files(result, output_dir, name, main.path)
    existing = [path for path in files if path.exists()]
    if existing and not is_overwriting:
        raise UserError(*(report_file(path, "already exists", "add --overwrite to replace it") for path in existing))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(Problem("output_dir", f"cannot write to {output_dir}: {error.strerror}")) from None
    problems = check_written_files(output_dir / f"{name}.toml", result.family)
    return format_report(result, list(files), problems), 0


def _parse_arguments(argv: list[str]) -> tuple[list[Path], Path, bool]:
    problems, output_dir = [], Path()
    if "--output_dir" in argv:
        at = argv.index("--output_dir")
        values = argv[at + 1 : at + 2]
        if not values or values[0].startswith("--"):
            problems.append(Problem("output_dir", "expects a folder"))
        else:
            output_dir = Path(values[0]).expanduser()
        del argv[at : at + 2]
    flags = [word for word in argv if word.startswith("--")]
    problems += [report_argument(word, "unknown option", USAGE) for word in flags if word != "--overwrite"]
    paths = [Path(word).expanduser() for word in argv if not word.startswith("--")]
    if not paths:
        problems.append(Problem("", "no file", USAGE))
    if problems:
        raise UserError(*problems)
    return paths, output_dir, "--overwrite" in flags


def choose_name(main: SourceFile) -> str:
    """The name of the output files: that of the file, or of its folder where files are always called config."""
    stem = main.path.resolve().parent.name if main.path.stem == "config" else main.path.stem
    return re.sub(r"[^\w.+-]+", "_", stem).strip("_.") or "imported"


def build_files(result: ImportedConfig, output_dir: Path, name: str, source: Path) -> dict[Path, str]:
    """Return the text of each file to write."""
    files: dict[Path, str] = {}
    options = dict(result.options)
    if not TRAINED_PART_OPTIONS & options.keys():
        options["network_train_unet_only"] = True  # the other programs train text encoders only where they say so
    is_file = str(options.get("pretrained_model_name_or_path", "")).endswith(".safetensors")
    if is_file and get_family_facts(result.family).pipeline.kind == "edit":
        options["family"] = result.family  # its file is like that of the model that it comes from
    if not result.datasets:  # the settings of all images are options of the run, too
        options |= {DATASET_KEYS[key].flag or key: value for key, value in result.general.items()}
    run_path, dataset_path = output_dir / f"{name}.toml", output_dir / f"{name}.dataset.toml"
    if result.datasets:
        options["dataset_config"] = str(dataset_path)
    prompts_path = None
    if result.prompts:
        is_text = "line" in result.prompts[0]
        prompts_path = output_dir / f"{name}.prompts.{'txt' if is_text else 'json'}"
        options["sample_prompts"] = str(prompts_path)
    files[run_path] = format_run_file(options, result, source)
    if result.datasets:
        files[dataset_path] = format_dataset_file(result, source)
    if prompts_path is not None:
        lines = [str(prompt["line"]) for prompt in result.prompts if "line" in prompt]
        text = "\n".join(lines) or json.dumps(result.prompts, indent=2, ensure_ascii=False)
        files[prompts_path] = f"{text}\n"
    return files


def format_run_file(options: Mapping[str, Any], result: ImportedConfig, source: Path) -> str:
    """Format the run TOML, by groups; what was not taken over is in comments."""
    lines = [f"# Imported from {source.name} of {result.program}. Not taken over:", *format_untaken(result, "# ")]
    groups: dict[str, list[str]] = {}
    for option in iter_options(RunConfig):
        if option.name in options:
            groups.setdefault(option.group, []).append(f"{option.name} = {format_toml(options[option.name])}")
    for group, settings in groups.items():
        lines += ["", f"[{group}]", *settings]
    return "\n".join(lines) + "\n"


def format_dataset_file(result: ImportedConfig, source: Path) -> str:
    """Format the dataset TOML."""
    lines = [f"# Imported from {source.name} of {result.program}."]
    if result.general:
        lines += ["", "[general]", *_format_keys(result.general)]
    for dataset in result.datasets:
        own = {key: value for key, value in dataset.items() if key != "subsets"}
        lines += ["", "[[datasets]]", *_format_keys(own)]
        for subset in dataset["subsets"]:
            lines += ["", "  [[datasets.subsets]]", *(f"  {line}" for line in _format_keys(subset))]
    return "\n".join(lines) + "\n"


def _format_keys(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {format_toml(value)}" for key, value in table.items()]


def format_toml(value: Any) -> str:
    """Format a value of TOML: texts as in JSON, which is a subset but for the character DEL."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def format_untaken(result: ImportedConfig, indent: str) -> list[str]:
    """Format two lists of keys that were not taken over: those that change the result, and those that do not."""
    lines = []
    for title, changes in (("changes the result", True), ("no effect on the result", False)):
        listed = [item for item in dict.fromkeys(map(_freeze, result.untaken)) if item[0] is changes]
        lines.append(f"{indent}{title} ({len(listed)}){':' if listed else ''}")
        lines += [f"{indent}  {text}" for _, text in listed]
    return lines


def _freeze(item: UntakenKey) -> tuple[bool, str]:
    return item.changes_result, str(item)


def format_report(result: ImportedConfig, files: Sequence[Path], problems: Sequence[Problem]) -> str:
    """Format what was written, what was not taken over, and what our own checks say."""
    subsets = sum(len(dataset["subsets"]) for dataset in result.datasets)
    lines = [f"{result.program}, {result.family}: {len(result.options)} options, {subsets} image folders"]
    lines += [f"  {path}" for path in files]
    lines += ["not taken over:", *format_untaken(result, "  ")]
    lines.append(f"to fix before training ({len(problems)}){':' if problems else ''}")
    lines += [f"  {problem}" for problem in problems]
    lines.append(f"differences that no key shows: docs/import.md ({result.program})")
    return "\n".join(lines)


def check_written_files(run_path: Path, family: str) -> list[Problem]:
    """Run our own checks of the written files, without loading a model or asking the hub."""
    loaded = parse_config(["--config_file", str(run_path)])
    config = loaded.config
    problems = [
        *(NO_DATASET if problem == MISSING_DATASET else problem for problem in loaded.problems),
        *validate_dataset_config(config.data, config.cache, config.train, loaded.invalid_options),
    ]
    model = config.model.pretrained_model_name_or_path
    if not model:
        problems.append(NO_MODEL)
    if model is not None and Path(model).expanduser().exists():
        return [*problems, *validate_model_options(config, loaded.locations)]
    prompts = config.preview.sample_prompts
    try:
        if prompts and not is_prompt_text(prompts) and Path(prompts).is_file():
            load_prompts(Path(prompts))
    except ConfigError as error:
        problems += error.problems
    return [*problems, *_check_family(loaded, family)]


def _check_family(loaded: ParsedConfig, family: str) -> list[Problem]:
    """Check the options for a family, without a model; those that have no effect on it are no problems."""
    facts = get_family_facts(family)
    prediction = (
        "flow" if not facts.options.network.is_unet else "v" if loaded.config.noise.v_parameterization else "epsilon"
    )
    own = {*facts.options.extra, *facts.options.components}
    model = ModelTraits(facts.title, prediction, "guidance_scale" in own, bool(facts.lora.text_encoders), own)
    loaded = loaded.without_unused(find_unused_options(loaded.config, loaded.explicit, model))
    config = loaded.config
    conflicts = [
        *validate_objective.validate_objective_for_model(config.noise, config.loss, facts.title, prediction),
        *validate_adapter.validate_adapter_for_model(
            config.adapter,
            config.optim,
            facts.options.network,
            title=facts.title,
            text_encoders=tuple(facts.lora.text_encoders),
            t5=facts.text.t5_encoder,
        ),
    ]
    return loaded.locate_problems(conflicts)
