"""Command-line tools, ``python -m library NAME``: from arguments to text and exit code."""

from collections.abc import Callable, Generator, Sequence

Tool = Callable[[Sequence[str]], tuple[str, int] | Generator[str, None, int]]
"""A tool that takes long yields its lines as they are known, and returns the exit code."""


def _run_doctor(argv: Sequence[str]) -> Generator[str, None, int]:
    from .doctor import run

    return run(argv)


def _run_plan(argv: Sequence[str]) -> tuple[str, int]:
    from .plan import run

    return run(argv)


def _run_cache(argv: Sequence[str]) -> tuple[str, int]:
    from .cache import run

    return run(argv)


def _run_convert(argv: Sequence[str]) -> tuple[str, int]:
    from .convert import run

    return run(argv)


def _run_launch(argv: Sequence[str]) -> tuple[str, int]:
    from .launch import run

    return run(argv)


def _run_options(argv: Sequence[str]) -> tuple[str, int]:
    from ..config.help import format_options_page

    return format_options_page(), 0


TOOLS: dict[str, tuple[str, Tool]] = {
    "doctor": ("check packages, devices and a launch command", _run_doctor),
    "plan": ("what would be trained, without training", _run_plan),
    "cache": ("latents and captions kept on disk: build, verify, repair, prune, info", _run_cache),
    "convert": ("a LoRA file with the names of another program", _run_convert),
    "launch": ("accelerate launch or torchrun with signal forwarding and exit codes", _run_launch),
    "options": ("the page docs/options.md", _run_options),
}
