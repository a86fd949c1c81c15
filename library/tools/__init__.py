"""Command-line tools, ``python -m library NAME``: from arguments to text and exit code."""

from collections.abc import Callable, Generator, Sequence

Tool = Callable[[Sequence[str]], tuple[str, int] | Generator[str, None, int]]
"""A tool that takes long yields its lines as they are known, and returns the exit code."""


def _doctor(argv: Sequence[str]) -> Generator[str, None, int]:
    from .doctor import run

    return run(argv)


def _plan(argv: Sequence[str]) -> tuple[str, int]:
    from .plan import run

    return run(argv)


def _cache(argv: Sequence[str]) -> tuple[str, int]:
    from .cache import run

    return run(argv)


def _convert(argv: Sequence[str]) -> tuple[str, int]:
    from .convert import run

    return run(argv)


def _launch(argv: Sequence[str]) -> tuple[str, int]:
    from .launch import run

    return run(argv)


def _options(argv: Sequence[str]) -> tuple[str, int]:
    from ..config.describe import options_page

    return options_page(), 0


TOOLS: dict[str, tuple[str, Tool]] = {
    "doctor": ("check packages, devices and a launch command", _doctor),
    "plan": ("what would be trained, without training", _plan),
    "cache": ("latents and captions kept on disk: build, verify, repair, prune, info", _cache),
    "convert": ("a LoRA file with the names of another program", _convert),
    "launch": ("accelerate launch or torchrun with signal forwarding and exit codes", _launch),
    "options": ("the page docs/options.md", _options),
}
