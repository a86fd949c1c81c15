"""The page of LoRA files: ``python -m library lora`` and ``convert`` as processes that can be stopped."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..config.options import define_option, iter_options
from ..errors import UserError
from ..tools.convert import FORMAT_DESCRIPTIONS
from ..tools.lora import COMMANDS
from .folders import OpenedFolders
from .picture_pages import take_json
from .preflight import find_path_problems
from .run_form import FormField, build_arguments
from .workbench import get_workbench, render_page

SHOWN = ("inspect", "convert", "merge", "resize", "scale", "prune", "metadata")
HIDDEN = {"json", "output", "device", "model", "math"}
"""Options that the page sets itself, or that are for models rather than files."""

ADAPTER_KEYS = (b"lora_", b"lokr_", b"hada_", b"oft_", b"dora_scale", b".diff", b"glora")
HEADER_BYTES = 2**16
MAX_FILES = 500


@dataclass(frozen=True)
class ConvertOptions:
    """The option of ``convert``."""

    to: str | None = define_option(
        None, "; ".join(f"{name}: {what}" for name, what in FORMAT_DESCRIPTIONS.items()) + " (required)"
    )


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


def list_commands() -> list[LoraCommand]:
    """List the commands that the page offers."""
    tools = {name: (what, arguments) for name, (_, what, arguments, _) in COMMANDS.items()}
    tools["convert"] = ("another program's key names", ConvertArguments)
    commands = []
    for name in SHOWN:
        what, arguments = tools[name]
        options = list(iter_options(arguments))
        fields = [FormField(option) for option in options if option.name not in HIDDEN]
        writes = name == "convert" or any(option.name == "output" for option in options)
        commands.append(LoraCommand(name, what, fields, writes, arguments))
    return commands


def show_files(request: Request) -> Response:
    folders = get_workbench(request).folders
    files = sorted(find_lora_files(folders), key=lambda entry: -entry[1].st_mtime)
    rows = [
        {"key": folders.make_key(path), "name": path.name, "folder": folders.format_path(path.parent)}
        | {"size": status.st_size, "changed_at": status.st_mtime}
        for path, status in files[:MAX_FILES]
    ]
    values = {"title": "LoRA files", "files": rows, "num_hidden": max(0, len(files) - MAX_FILES)}
    return render_page(request, "lora.html", {**values, "commands": list_commands()})


def run_command(request: Request, body: Mapping[str, Any]) -> Response:
    """Start a command on files; the output is written beside the first one."""
    workbench = get_workbench(request)
    commands = {command.name: command for command in list_commands()}
    command, keys, values = commands.get(str(body.get("command"))), body.get("files"), body.get("values")
    if command is None or not isinstance(keys, list) or not keys or not isinstance(values, dict):
        raise UserError("choose one or more files, and what to do")
    files = [workbench.folders.resolve_key(str(key)) for key in keys]
    known = {field.option.name for field in command.fields}
    chosen = {name: value for name, value in values.items() if name in known}
    problems = list(find_path_problems(workbench.folders, chosen))
    if problems:
        raise UserError("\n".join(problems))
    flags = build_arguments(chosen, command.arguments)
    output = [_resolve_output(workbench.folders, files[0], str(body.get("output", "")))] if command.writes else []
    words = [sys.executable, "-m", "library"]
    if command.name == "convert":
        words += ["convert", *map(str, [*files, *output]), *(word for flag in flags for word in flag.split("=", 1))]
    else:
        words += ["lora", command.name, *map(str, files), *flags, *(f"--output={path}" for path in output)]
    return JSONResponse({"id": workbench.commands.start(words)})


def find_lora_files(folders: OpenedFolders) -> Iterator[tuple[Path, os.stat_result]]:
    """Find the .safetensors files that hold an adapter, by the names in their headers; states are none."""
    for folder, entries in folders.walk():
        names = [] if folder.name.endswith("-state") else [entry.name for entry in entries]
        for path in (folder / name for name in names if name.endswith(".safetensors")):
            if folders.contains(path) and _holds_adapter(path):
                yield path, path.stat()


def _holds_adapter(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return False
    return header[8:9] == b"{" and any(key in header for key in ADAPTER_KEYS)


def _resolve_output(folders: OpenedFolders, first: Path, name: str) -> Path:
    """The new file, beside the first one; the tool itself refuses to overwrite."""
    if not name.strip():
        raise UserError("give a name for the new file")
    file_name = name.strip() if name.strip().endswith(".safetensors") else f"{name.strip()}.safetensors"
    if file_name != Path(file_name).name or file_name.startswith((".", "-")):
        raise UserError(f"{file_name!r}: expected a file name without folders; it is written beside {first.name}")
    return folders.resolve(first.parent / file_name)


ROUTES = (
    Route("/lora", show_files),
    Route("/api/lora", take_json(run_command), methods=["POST"]),
)
