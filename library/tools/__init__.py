"""Command-line tools, ``python -m library NAME``: from arguments to text and exit code."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

Tool = Callable[[Sequence[str]], tuple[str, int] | Generator[str, None, int]]
"""Returns text and exit code; a slow tool yields its lines one by one and returns the exit code."""


def _run_tool(name: str, argv: Sequence[str]) -> Any:
    """Import a tool only when it is run: most of them import torch."""
    return getattr(import_module(f"{__name__}.{name}"), f"run_{name}")(argv)


def _run_options(argv: Sequence[str]) -> tuple[str, int]:
    from ..config.help import format_options_page

    return format_options_page(), 0


TOOLS: dict[str, tuple[str, Tool]] = {
    "demo": ("train a LoRA on the built-in model", partial(_run_tool, "demo")),
    "doctor": ("check packages, devices and a launch command", partial(_run_tool, "doctor")),
    "plan": ("print buckets, steps, samples and estimated memory, without training", partial(_run_tool, "plan")),
    "cache": ("cached latents and captions: build, verify, repair, prune, info", partial(_run_tool, "cache")),
    "caption": ("write captions or tags with a model", partial(_run_tool, "caption")),
    "tags": ("count and edit tags, find images that are alike", partial(_run_tool, "tags")),
    "convert": ("convert a LoRA file to another program's key names", partial(_run_tool, "convert")),
    "lora": ("inspect, merge, extract, resize, scale and prune LoRA files", partial(_run_tool, "lora")),
    "evaluate": (
        "which step of a run, and which of several runs, has the best LoRA file",
        partial(_run_tool, "evaluate"),
    ),
    "sweep": ("train the runs of a file one after another, and compare them", partial(_run_tool, "sweep")),
    "import": (
        "turn another program's configuration into a run and a dataset file",
        partial(_run_tool, "import_config"),
    ),
    "launch": ("accelerate launch or torchrun with signal forwarding and exit codes", partial(_run_tool, "launch")),
    "models": ("list the models that can be trained", partial(_run_tool, "models")),
    "web": ("a page in the browser: runs, pictures, new runs, LoRA files", partial(_run_tool, "web")),
    "test": ("linter, types and tests of a checkout", partial(_run_tool, "test")),
    "options": ("print docs/options.md", _run_options),
}
