"""A command that starts training through accelerate or torchrun, taken apart; and the one that started this process."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import psutil

from ..errors import ConfigError

ACCELERATE, TORCHRUN = "accelerate launch", "torchrun"

MODULES = {
    ("accelerate.commands.launch",): ACCELERATE,
    ("accelerate.commands.accelerate_cli", "launch"): ACCELERATE,
    ("torch.distributed.run",): TORCHRUN,
    ("torch.distributed.launch",): TORCHRUN,
}
"""Words behind ``python -m``."""

PROGRAMS = {("accelerate", "launch"): ACCELERATE, ("accelerate-launch",): ACCELERATE, ("torchrun",): TORCHRUN}

UNSAID = object()
"""Stands where an option was not written; the parsers' own defaults say nothing about who chose them."""


@dataclass(frozen=True)
class LaunchCommand:
    """``accelerate launch --multi_gpu train_lora.py --seed 1``, in its parts."""

    launcher: str
    program: tuple[str, ...]
    words: tuple[str, ...]
    """The launcher's own options as they were written."""
    given: Mapping[str, Any]
    """The same, parsed: only what was written."""
    script: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the launcher itself was started with."""

    def __str__(self) -> str:
        return shlex.join([*self.program, *self.words, *self.script, *self.arguments])


def parse_launch(words: Sequence[str], environment: Mapping[str, str]) -> LaunchCommand | None:
    """Take a command apart; ``NAME=value`` before it counts as environment.  ``None``: it starts no launcher."""
    found = _launcher_in(words)
    if found is None:
        return None
    launcher, behind = found
    assignments = [word for word in words[:behind] if "=" in word and word.partition("=")[0].isidentifier()]
    program = tuple(word for word in words[:behind] if word not in assignments and word != "env")
    given = _parsed(launcher, list(words[behind:]))
    arguments = tuple(given.pop("training_script_args", None) or ())
    script = (given.pop("training_script"),)
    own = tuple(words[behind : len(words) - len(arguments) - 1])
    return LaunchCommand(launcher, program, own, given, script, arguments,
                         {**environment, **dict(word.split("=", 1) for word in assignments)})  # fmt: skip


def working_command(launch: LaunchCommand, processes: int, *, on_cpu: bool) -> str:
    """The same training, so that accelerate really starts several processes."""
    dropped = {"--cpu": 0, "--multi_gpu": 0, "--multi-gpu": 0, "--num_processes": 1, "--num-processes": 1}
    kept: list[str] = []
    words = list(launch.words)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in dropped:
            del words[: 0 if equals else dropped[name]]
        else:
            kept.append(word)
    command = shlex.join([*_spoken(launch.program), "--multi_gpu", "--num_processes", str(processes), *kept,
                          *launch.script, *launch.arguments])  # fmt: skip
    if not on_cpu:
        return command
    prefix = "set ACCELERATE_USE_CPU=true && " if sys.platform == "win32" else "ACCELERATE_USE_CPU=true "
    return prefix + command


def launch_of_this_process() -> LaunchCommand | None:
    """The launcher above this process; shells, mpirun and the like between the two are passed over."""
    process = psutil.Process()
    own = _words(process)
    try:
        parents = process.parents()
    except psutil.Error:
        return None
    for parent in parents:
        words = _words(parent)
        if _launcher_in(words) is not None:
            try:
                return parse_launch(words, _environment(parent))
            except ConfigError:
                return None  # options that this version of the launcher does not know: it has its own say on them
        if _is_python(words) and words[1:] != own[1:]:  # on Windows a virtual environment starts Python twice
            return None
    return None


def _launcher_in(words: Sequence[str]) -> tuple[str, int] | None:
    """Which launcher a command starts, and where its own options begin."""
    for at, word in enumerate(words):
        name = PurePath(word.replace("\\", "/")).name.lower().removesuffix(".exe").removesuffix("-script.py")
        for table, first, names in ((PROGRAMS, name, at), (MODULES, word, at)):
            if table is MODULES and (at == 0 or words[at - 1] != "-m"):
                continue
            for key, launcher in table.items():
                if key == (first, *words[names + 1 : names + len(key)]):
                    return launcher, at + len(key)
    return None


def _parsed(launcher: str, words: list[str]) -> dict[str, Any]:
    """What was written, by the launcher's own parser."""
    parser = _parser(launcher)

    def refuse(message: str) -> None:
        raise ConfigError([f"{launcher}: {message}"])

    parser.error = refuse
    parser.print_help = lambda: refuse("--help starts nothing")
    names = set(vars(parser.parse_args(["script.py"]))) - {"nondefault"}  # accelerate keeps a list of its own there
    seen = vars(parser.parse_args(words, SimpleNamespace(**dict.fromkeys(names, UNSAID))))
    return {name: value for name, value in seen.items() if value is not UNSAID and name != "nondefault"}


def _parser(launcher: str) -> Any:
    if launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command_parser

        return launch_command_parser()
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    """What the launcher was started with; another user's process does not tell."""
    try:
        return dict(process.environ())
    except (psutil.Error, OSError, NotImplementedError):
        return {}


def _is_python(words: Sequence[str]) -> bool:
    return bool(words) and PurePath(words[0].replace("\\", "/")).name.lower().startswith("python")


def _spoken(program: Sequence[str]) -> list[str]:
    """``python /somewhere/bin/accelerate launch`` is written ``accelerate launch``."""
    names = [os.path.basename(word) for word in program]
    for start in ("accelerate", "accelerate-launch", "torchrun"):
        if start in names:
            return names[names.index(start) :]
    return list(program)
