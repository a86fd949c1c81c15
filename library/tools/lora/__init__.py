"""``python -m library lora COMMAND``: inspect, merge, extract, resize, scale and prune LoRA files, edit metadata."""

import re
from collections.abc import Generator, Sequence
from importlib import import_module
from typing import Any

from ...config.options import iter_options
from ...config.parser import ParsedConfig
from ...log import configure_logging
from . import validate_arguments
from .options import (
    BlockArguments,
    ExtractArguments,
    InspectArguments,
    MergeArguments,
    MetadataArguments,
    ResizeArguments,
)

_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
USAGE = "usage: python -m library lora COMMAND FILE ... [--option value ...]"
COMMANDS: dict[str, tuple[str, str, type, Any]] = {
    "inspect": (
        "FILE [FILE ...]",
        "layers, ranks, update norms by block, training facts, who reads it; two files side by side",
        InspectArguments,
        validate_arguments.validate_inspect,
    ),
    "merge": (
        "FILE FILE ... --output FILE",
        "several LoRAs into one, exactly or by SVD; with --model into the weights of a model",
        MergeArguments,
        validate_arguments.validate_merge,
    ),
    "extract": (
        "BASE TUNED --rank N --output FILE",
        "a LoRA, DoRA or LoKr from two models",
        ExtractArguments,
        validate_arguments.validate_extract,
    ),
    "resize": (
        "FILE --rank N --output FILE",
        "to a smaller rank; LoHa and LoKr to LoRA",
        ResizeArguments,
        validate_arguments.validate_resize,
    ),
    "scale": (
        "FILE --blocks NAME=FACTOR ... --output FILE",
        "multiply the updates of blocks",
        BlockArguments,
        validate_arguments.validate_scale,
    ),
    "prune": (
        "FILE --blocks NAME ... --output FILE",
        "remove blocks, or keep only some",
        BlockArguments,
        validate_arguments.validate_prune,
    ),
    "metadata": (
        "FILE [--set KEY=VALUE ... --output FILE]",
        "print the metadata, or write a copy with others",
        MetadataArguments,
        validate_arguments.validate_metadata,
    ),
}


def run_lora(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Run one command."""
    if not argv or argv[0] in ("--help", "-h"):
        return _format_help(), 0
    command, *rest = argv
    validate_arguments.check_lora_command(command, COMMANDS)
    if set(rest) & {"--help", "-h"}:
        return _format_command_help(command), 0
    _, _, arguments, check = COMMANDS[command]
    return _run_command(command, *validate_arguments.parse_arguments(rest, arguments, check))


def _run_command(command: str, files: list[str], parsed: ParsedConfig) -> Generator[str, None, int]:
    configure_logging(simple=True)
    parsed.log_notices()
    commands = import_module(f"{__name__}.commands")  # imports torch
    for text in getattr(commands, f"run_{command}")(files, parsed.config):
        yield _CONTROL_CHARACTER.sub(lambda found: repr(found[0])[1:-1], text)  # metadata must not steer the terminal
    return 0


def _format_help() -> str:
    lines = [USAGE, ""]
    lines += [f"  {name:<10} {what}" for name, (_, what, _, _) in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "python -m library lora COMMAND --help lists the options; docs/lora_tools.md explains them."]
    )


def _format_command_help(command: str) -> str:
    words, what, arguments, _ = COMMANDS[command]
    lines = [f"usage: python -m library lora {command} {words}", "", f"{command}: {what}", ""]
    for option in iter_options(arguments):
        value = "" if option.value_type is bool else f" {option.syntax}"
        lines.append(f"  {'--' + option.name + value:<36} {option.help}")
    return "\n".join(lines)
