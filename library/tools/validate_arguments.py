"""Checks of the tools' own arguments, together with the checks of the training options that they take."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.parser import ParsedConfig
from ..config.schema_data import DataConfig
from ..dataset.dataset_config import can_load_datasets, load_dataset_config
from ..errors import ConfigError
from ..name_suggestions import suggest_name
from ..problems import Problem, report_argument, report_file
from ..training.preflight import find_settings_problems

if TYPE_CHECKING:
    from ..distributed.launch_command import LaunchCommand
    from .caption import CaptionOptions
    from .plan import PlanOptions
    from .tags import TagsOptions
    from .web import WebOptions

PREVIEW_SUFFIXES = (".png", ".jpg", ".webp")


def check_plan_arguments(options: "PlanOptions", own: ParsedConfig, training: ParsedConfig) -> None:
    """Raise with all problems of ``plan``'s options and of the training options that it uses."""
    data = training.config.data
    problems = [*own.problems, *own.drop_consequences(validate_plan_options(options))]
    if options.resolve_only:
        problems += [*training.problems, *(load_dataset_config(data).problems if can_load_datasets(data) else ())]
        if not can_load_datasets(data) and not problems:
            problems.append(Problem("dataset_config", f"{data.dataset_config or 'missing'}: no such file"))
    else:
        problems += find_settings_problems(training)
    if options.gpu_memory is not None and training.config.adapter.trains_embedding:
        text = "memory is estimated for weights, not for new words"
        problems.append(Problem("gpu_memory", text, "remove it", others=("train",)))
    if options.preview:
        problems += validate_preview_path(Path(options.preview).expanduser(), data)
    if not problems and "world_size" in own.locations and training.config.parallel.model_parallel_size > 1:
        from ..distributed.parallel_dims import validate_parallel_dims  # imports torch
        from ..distributed.world import World

        problems += validate_parallel_dims(training.config, World.build_fake(options.world_size))
    if problems:
        raise ConfigError(problems)


def validate_plan_options(options: "PlanOptions") -> Iterator[Problem]:
    if options.resolve_only and not options.json:
        yield Problem("resolve_only", "prints JSON only", "add --json")
    if options.resolve_only:
        for name in ("preview", "gpu_memory"):
            if getattr(options, name) is not None:
                yield Problem(name, "needs the images, which --resolve_only does not read", "remove one of the two")


def validate_preview_path(path: Path, data: DataConfig) -> Iterator[Problem]:
    if path.suffix.lower() not in PREVIEW_SUFFIXES:
        yield Problem("preview", f"{path}: expected a file name ending in {', '.join(PREVIEW_SUFFIXES)}")
    elif path.is_dir():
        yield Problem("preview", f"{path} is a folder", "give a file name")
    if not path.absolute().parent.is_dir():
        yield Problem("preview", f"{path.absolute().parent}: no such folder")
    if not can_load_datasets(data):
        return
    folder = path.resolve().parent
    for subset in (subset for dataset in load_dataset_config(data).datasets for subset in dataset.subsets):
        image_dir = subset.resolve_image_dir()
        if image_dir is None:
            continue
        if folder == image_dir.resolve() or (subset.recursive and image_dir.resolve() in folder.parents):
            yield Problem(
                "preview", f"{path} is in an image folder, so the next run would train on it", "use another folder"
            )
            return


def check_cache_command(command: str, commands: Collection[str]) -> None:
    """Raise unless it is one of the commands of ``cache``."""
    if command not in commands:
        hint = suggest_name(command, commands) or f"; choose from {', '.join(commands)}"
        raise ConfigError([report_argument("cache", f"unknown command {command!r}{hint}")])


def check_cache_arguments(command: str, confirm_flag: str, loaded: ParsedConfig, argv: Sequence[str]) -> None:
    """Raise with all problems of the training options, and of a confirmation of something that deletes nothing."""
    problems = find_settings_problems(loaded)
    if confirm_flag in argv and command != "prune":
        problems.append(report_argument(confirm_flag, "only with prune"))
    if problems:
        raise ConfigError(problems)


def check_caption_arguments(options: "CaptionOptions", folders: Sequence[Path], own: ParsedConfig, usage: str) -> None:
    """Raise with all problems of ``caption``'s arguments."""
    problems = [*own.problems, *_find_folder_problems(folders, options.caption_extension, usage)]
    if options.model is None:
        fix = "a folder, a hub id, or with --api_base the name of the server's model"
        problems += own.drop_consequences([Problem("model", "missing", fix)])
    if options.api_base is not None and not options.api_base.startswith(("http://", "https://")):
        problems.append(
            Problem("api_base", f"{options.api_base}: expected an address such as http://127.0.0.1:8080/v1")
        )
    if problems:
        raise ConfigError(problems)


def check_tags_arguments(
    command: str,
    commands: Collection[str],
    options: "TagsOptions",
    folders: Sequence[Path],
    own: ParsedConfig,
    usage: str,
) -> None:
    """Raise with all problems of ``tags``'s arguments."""
    problems = [*own.problems, *_find_folder_problems(folders, options.caption_extension, usage)]
    if command not in commands:
        problems.insert(
            0, report_argument("tags", f"unknown command {command!r}{suggest_name(command, commands)}", usage)
        )
    problems += [Problem("replace", f'{text!r}: expected "old=new"') for text in options.replace if "=" not in text]
    edits = ("replace", "remove", "prepend", "append", "deduplicate", "sort")
    if command == "edit" and not own.problems and not any(name in own.locations for name in edits):
        problems.append(
            report_argument("tags edit", "nothing to do", f"give one of {', '.join(f'--{name}' for name in edits)}")
        )
    if not options.caption_separator.strip():
        problems.append(Problem("caption_separator", "expected a character other than a space"))
    if problems:
        raise ConfigError(problems)


def _find_folder_problems(folders: Sequence[Path], extension: str, usage: str) -> Iterator[Problem]:
    if not folders:
        yield Problem("", "no folder given", usage)
    if not extension.startswith(".") or len(extension) < 2:
        yield Problem("caption_extension", f"{extension!r}: expected an extension such as .txt")


def check_convert_arguments(words: Sequence[str], file_format: str, formats: Collection[str], usage: str) -> None:
    """Raise unless ``words`` are a LoRA file and a new file, and the format is known."""
    problems = list[Problem]()
    if file_format not in formats:
        hint = suggest_name(file_format, formats)
        text = f"unknown format {file_format!r}{hint}" if file_format else "missing"
        problems.append(Problem("to", text, f"choose from {', '.join(formats)}"))
    problems += [report_argument(word, "unknown option") for word in words if word.startswith("--")]
    paths = [Path(word).expanduser() for word in words if not word.startswith("--")]
    if len(paths) != 2:
        problems.append(Problem("", f"expected two files, got {len(paths)}", usage))
    elif paths[1].exists():
        problems.append(report_file(paths[1], "already exists", "it is not overwritten"))
    elif paths[1].suffix != ".safetensors":
        problems.append(report_file(paths[1], "expected a file name ending in .safetensors"))
    if problems:
        raise ConfigError(problems)


def check_web_arguments(options: "WebOptions", problems: Sequence[Problem]) -> None:
    """Raise with all problems of ``web``'s options, of which each folder has to exist."""
    missing = [name for name in options.root if not Path(name).expanduser().is_dir()]
    if found := [*problems, *(Problem("root", f"{name}: no such folder") for name in missing)]:
        raise ConfigError(found)


def check_doctor_arguments(words: Sequence[str], usage: str) -> None:
    """Raise for anything but ``--json`` before the ``--``."""
    if unknown := [word for word in words if word != "--json"]:
        raise ConfigError([report_argument(unknown[0], "unexpected argument", usage)])


def find_training_arguments(words: Sequence[str], launch: "LaunchCommand | None") -> list[str]:
    """Return the arguments of the training script in a command; raise if it starts none."""
    if launch is not None:
        return list(launch.script_args)
    for index, word in enumerate(words):
        if Path(word).name == "train_lora.py":
            return list(words[index + 1 :])
    expected = "expected accelerate launch, torchrun, or python train_lora.py"
    raise ConfigError([Problem("", f"not a training command: {' '.join(words)}", expected)])
