"""Programs beside training, each started as ``python -m library NAME``; a tool turns arguments into text and a code."""

from collections.abc import Callable, Sequence

Tool = Callable[[Sequence[str]], tuple[str, int]]


def _doctor(argv: Sequence[str]) -> tuple[str, int]:
    from .doctor import run

    return run(list(argv))


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
    "doctor": ("what works on this machine, and which of several settings counts", _doctor),
    "plan": ("what would be trained, without training", _plan),
    "cache": ("latents and captions kept on disk: build, verify, repair, prune, info", _cache),
    "convert": ("a LoRA file with the names of another program", _convert),
    "launch": ("accelerate launch or torchrun, with the exit code that a scheduler needs", _launch),
    "options": ("the page docs/options.md", _options),
}
