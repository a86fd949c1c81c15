"""The page of LoRA files: ``python -m library lora`` and ``convert`` as processes that can be stopped."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..config.options import define_option, iter_options
from ..errors import UserError
from ..models.model_configs import MODULAR_INDEX
from ..tools.convert import FORMAT_DESCRIPTIONS
from ..tools.lora import COMMANDS
from ..tools.lora.options import RULES
from .folders import OpenedFolders
from .picture_pages import take_json
from .run_form import FormField, build_arguments
from .validate_requests import find_path_problems
from .workbench import JSONAnswer, get_workbench, render_page

SHOWN = {"inspect": 1, "convert": 1, "merge": 2, "merge into a model": 1, "extract": 0, "resize": 1, "scale": 1} | {
    "prune": 1,
    "metadata": 1,
}
"""The commands, and how many LoRA files each needs."""

HIDDEN = {"json", "output", "model"}
"""Options that the page sets itself."""

MODEL_CHOICES: Mapping[str, Mapping[str, str]] = {
    "merge into a model": {"model": "the model whose weights get the LoRAs"},
    "extract": {"base": "the model before", "tuned": "the model after"},
}
"""Commands that read models, and what each is for."""

WITHOUT: Mapping[str, frozenset[str]] = {
    "merge": frozenset({"math"}),
    "merge into a model": frozenset({"family", "to", "method", "rank", "conv_rank", *RULES}),
}
"""Options without an effect in a command."""

ADAPTER_KEYS = (b"lora_", b"lokr_", b"hada_", b"oft_", b"dora_scale", b".diff", b"glora")
EMBEDDING_KEYS = (b'"emb_params":', b'"clip_l":')
HEADER_BYTES = 2**16
MAX_FILES = 500


@dataclass(frozen=True)
class ConvertOptions:
    """The options of ``convert``."""

    to: str | None = define_option(
        None, "; ".join(f"{name}: {what}" for name, what in FORMAT_DESCRIPTIONS.items()) + " (required)"
    )
    family: str | None = define_option(None, "model family, where names and sizes of the layers fit several")


@dataclass(frozen=True)
class ConvertArguments:
    """The option of ``convert``, whose formats are explained by the tool."""

    convert: ConvertOptions = field(default_factory=ConvertOptions)


@dataclass(frozen=True)
class LoraCommand:
    """A command with its options as fields."""

    name: str
    help: str
    fields: list[FormField]
    writes: bool
    arguments: type
    num_files: int = 1
    """The number of LoRA files that the command needs."""

    @property
    def models(self) -> Mapping[str, str]:
        """The models that are needed."""
        return MODEL_CHOICES.get(self.name, {})


def list_commands() -> list[LoraCommand]:
    """List the commands that the page offers."""
    tools = {name: (what, arguments) for name, (_, what, arguments, _) in COMMANDS.items()}
    tools |= {
        "convert": ("another program's key names", ConvertArguments),
        "merge": ("several LoRAs into one, exactly or by SVD", tools["merge"][1]),
        "merge into a model": ("into a copy of the weights of a model", tools["merge"][1]),
    }
    commands = []
    for name, num_files in SHOWN.items():
        what, arguments = tools[name]
        options = list(iter_options(arguments))
        hidden = HIDDEN | WITHOUT.get(name, set())
        fields = [FormField(option) for option in options if option.name not in hidden]
        writes = name == "convert" or any(option.name == "output" for option in options)
        commands.append(
            LoraCommand(name=name, help=what, fields=fields, writes=writes, arguments=arguments, num_files=num_files)
        )
    return commands


def show_files(request: Request) -> Response:
    folders = get_workbench(request).folders
    files = sorted(find_lora_files(folders), key=lambda entry: -entry[1].st_mtime)
    rows = [
        {"key": folders.make_key(path), "name": path.name, "folder": folders.format_path(path.parent)}
        | {"size": status.st_size, "changed_at": status.st_mtime}
        for path, status in files[:MAX_FILES]
    ]
    models = [(folders.make_key(path), folders.format_path(path)) for path in find_models(folders)]
    values = {"title": "LoRA files", "files": rows, "num_hidden": max(0, len(files) - MAX_FILES), "models": models}
    return render_page(request, "lora.html", {**values, "commands": list_commands()})


def run_command(request: Request, body: Mapping[str, Any]) -> Response:
    """Start a command on files; the output is written beside the first one."""
    workbench = get_workbench(request)
    commands = {command.name: command for command in list_commands()}
    command, keys, values = commands.get(str(body.get("command"))), body.get("files"), body.get("values")
    if command is None or not isinstance(keys, list) or not isinstance(values, dict):
        raise UserError("choose one or more files, and what to do")
    if command.num_files and not keys:
        raise UserError("choose one or more files, and what to do")
    chosen_models = body.get("models") or {}
    if not isinstance(chosen_models, dict) or not all(chosen_models.get(name) for name in command.models):
        raise UserError(f"choose {' and '.join(command.models.values())}")
    files = [workbench.folders.resolve_key(str(key)) for key in (keys if command.num_files else ())]
    models = {name: workbench.folders.resolve_key(str(chosen_models[name])) for name in command.models}
    known = {field.option.name for field in command.fields}
    chosen = {name: value for name, value in values.items() if name in known}
    problems = list(find_path_problems(workbench.folders, chosen))
    if problems:
        raise UserError(*problems)
    flags = build_arguments(chosen, command.arguments)
    words = [sys.executable, "-m", "library.web.background"]
    if command.writes:
        first = [*files, *models.values()][-1 if models else 0]
        output = _resolve_output(workbench.folders, first, str(body.get("output", "")), is_model="model" in models)
    if command.name == "convert":
        words += ["convert", *map(str, [*files, output]), *(word for flag in flags for word in flag.split("=", 1))]
    else:
        tool = "merge" if "model" in models else command.name
        inputs = [*files, *(path for name, path in models.items() if name != "model")]
        words += ["lora", tool, *map(str, inputs), *flags]
        words += [f"--model={models['model']}"] if "model" in models else []
        words += [f"--output={output}"] if command.writes else []
    return JSONAnswer({"id": workbench.commands.start(words)})


def find_lora_files(folders: OpenedFolders) -> Iterator[tuple[Path, os.stat_result]]:
    """Find the .safetensors files that hold an adapter, by the names in their headers; checkpoints are none."""
    for folder, entries in folders.walk():
        names = [] if folder.name.endswith("-state") else [entry.name for entry in entries if entry.is_file()]
        for path in (folder / name for name in names if name.endswith(".safetensors")):
            if folders.contains(path) and _holds_adapter(path):
                yield path, path.stat()


def find_models(folders: OpenedFolders) -> list[Path]:
    """Find diffusers folders, and .safetensors files elsewhere that hold no adapter."""
    found = list[Path]()
    for folder, entries in folders.walk():
        names = {entry.name for entry in entries}
        if {"model_index.json", MODULAR_INDEX} & names:
            found.append(folder)
        elif not folder.name.endswith("-state") and not any(parent in found for parent in folder.parents):
            paths = [folder / name for name in sorted(names) if name.endswith(".safetensors")]
            found += [path for path in paths if folders.contains(path) and _holds_adapter(path) is False]
    return found[:MAX_FILES]


def _holds_adapter(path: Path) -> bool | None:
    """Whether the header has names of an adapter; None if it is no safetensors file, or has the vectors of a word."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return None
    if header[8:9] != b"{" or any(key in header for key in EMBEDDING_KEYS):
        return None
    return any(key in header for key in ADAPTER_KEYS)


def _resolve_output(folders: OpenedFolders, first: Path, name: str, *, is_model: bool) -> Path:
    """The new file, beside the first one, or the new folder of a model; the tool itself refuses to overwrite."""
    file_name = name.strip()
    if not file_name:
        raise UserError("give a name for the new file")
    if not file_name.endswith(".safetensors") and not (is_model and first.is_dir()):
        file_name += ".safetensors"
    if file_name != Path(file_name).name or file_name.startswith((".", "-")):
        raise UserError(f"{file_name!r}: expected a file name without folders; it is written beside {first.name}")
    return folders.resolve(first.parent / file_name)


ROUTES = (
    Route("/lora", show_files),
    Route("/api/lora", take_json(run_command), methods=["POST"]),
)
