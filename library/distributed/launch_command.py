"""Parse ``accelerate launch`` and ``torchrun`` commands with their own parsers; find the one above this process."""

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil

from ..config.operating_systems import join_words
from ..errors import ConfigError
from ..problems import Problem

ACCELERATE, TORCHRUN = "accelerate launch", "torchrun"

LAUNCHERS: Mapping[tuple[str, ...], str] = {
    ("accelerate", "launch"): ACCELERATE,
    ("accelerate-launch",): ACCELERATE,
    ("-m", "accelerate.commands.launch"): ACCELERATE,
    ("-m", "accelerate.commands.accelerate_cli", "launch"): ACCELERATE,
    ("torchrun",): TORCHRUN,
    ("-m", "torch.distributed.run"): TORCHRUN,
    ("-m", "torch.distributed.launch"): TORCHRUN,
}
"""The ways to write each launcher, programs without their directory."""

_UNSET = object()
"""The value of an option that was not written, which a parser's default value would not show."""


@dataclass(frozen=True)
class LaunchCommand:
    """``accelerate launch --multi_gpu train_lora.py --seed 1``, in its parts."""

    launcher: str
    program: tuple[str, ...]
    flags: tuple[str, ...]
    """The launcher's own flags as they were written."""
    options: Mapping[str, Any]
    """The parsed values of ``flags``: only what was written, no defaults."""
    script: str
    script_args: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment that the launcher itself was started with."""


def split_assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split ``NAME=value ... command`` into environment variables and command, as a shell does."""
    rest = list(words)
    assignments: dict[str, str] = {}
    while rest and (rest[0] == "env" or ("=" in rest[0] and rest[0].partition("=")[0].isidentifier())):
        name, equals, value = rest.pop(0).partition("=")
        assignments |= {name: value} if equals else {}
    return assignments, rest


def parse_launch_command(words: Sequence[str], environment: Mapping[str, str]) -> LaunchCommand | None:
    """Parse a command; ``None`` if it starts no launcher.  Flags that the launcher refuses are a ``ConfigError``."""
    assignments, words = split_assignments(words)
    if (match := _match_launcher(words)) is None:
        return None
    launcher, start = match
    parser = _build_parser(launcher)
    names = set(vars(parser.parse_args(["script.py"]))) - {"nondefault"}  # accelerate collects names there
    args = vars(parser.parse_args(words[start:], SimpleNamespace(**dict.fromkeys(names, _UNSET))))
    options = {name: value for name, value in args.items() if value is not _UNSET and name != "nondefault"}
    script, script_args = options.pop("training_script"), tuple(options.pop("training_script_args", None) or ())
    flags = tuple(words[start : len(words) - len(script_args) - 1])
    environment = {**environment, **assignments}
    return LaunchCommand(
        launcher=launcher,
        program=tuple(words[:start]),
        flags=flags,
        options=options,
        script=script,
        script_args=script_args,
        environment=environment,
    )


def find_launch_command() -> LaunchCommand | None:
    """Return the command of the launcher that started this process."""
    try:
        launcher = find_launcher_process()
        if launcher is None:
            return None
        environment: dict[str, str] = {}
        with suppress(psutil.Error, OSError, NotImplementedError):  # a process of another user
            environment = launcher.environ()
        return parse_launch_command(launcher.cmdline(), environment)
    except (psutil.Error, ConfigError):  # not allowed to look, or a launcher of another version
        return None


def find_launcher_process() -> psutil.Process | None:
    """Return the launcher that started this process; shells, mpirun and the like in between are skipped."""
    try:
        process = psutil.Process()
        own = process.cmdline()
        for parent in process.parents():
            words = parent.cmdline()
            if _match_launcher(words) is not None:
                return parent
            is_python = bool(words) and _strip_directory(words[0]).startswith("python")
            if is_python and words[1:] != own[1:]:  # on Windows a virtual environment starts Python twice
                return None
    except psutil.Error:  # not allowed to look
        return None
    return None


def format_multi_process_command(command: LaunchCommand, *, on_cpu: bool) -> str:
    """Format the same training as a command for which accelerate starts several processes."""
    program = command.program if "-m" in command.program else ACCELERATE.split()
    flags = ["--multi_gpu", *(flag for flag in command.flags if flag not in ("--cpu", "--multi_gpu", "--multi-gpu"))]
    line = join_words([*program, *flags, command.script, *command.script_args])
    if not on_cpu:
        return line
    return f"set ACCELERATE_USE_CPU=true && {line}" if sys.platform == "win32" else f"ACCELERATE_USE_CPU=true {line}"


def predict_script_environment(command: LaunchCommand, *, is_running: bool = False) -> dict[str, str]:
    """Return the environment that the launcher would give to its script, by the launcher's own code.

    What the launcher refuses is a ``ConfigError``.  With ``is_running`` the launcher itself may hold its port.
    """
    logger = logging.getLogger("accelerate.commands.launch")  # it advises to write every flag
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = _build_parser(command.launcher).parse_args([*command.flags, command.script, *command.script_args])
            if command.launcher == ACCELERATE:
                return _predict_accelerate(args, is_running)
            environment = {**os.environ, **_predict_torchrun(args)}
            if environment["LOCAL_WORLD_SIZE"] != "1":
                environment.setdefault("OMP_NUM_THREADS", "1")
            return environment
    except Exception as error:  # accelerate and torch raise errors of any type for settings that they refuse
        raise ConfigError([Problem("", f"{command.launcher}: {str(error) or type(error).__name__}")]) from None
    finally:
        logger.disabled = was_disabled


def _predict_accelerate(args: Any, is_running: bool) -> dict[str, str]:
    """Follow ``accelerate.commands.launch.launch_command`` up to where it starts processes."""
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils import launch

    options = {**vars(args), "deepspeed_fields_from_accelerate_config": ""}
    args, _, _ = _validate_launch_command(SimpleNamespace(**options))
    port = {"MASTER_PORT": "0"} if args.main_process_port == 0 else {}
    rank = {}
    if is_running and args.num_machines > 1:  # as another machine: the first one would refuse a port in use
        rank = {"GROUP_RANK": str(args.machine_rank)}
        args = SimpleNamespace(**{**vars(args), "machine_rank": 1})
    if args.cpu or not (args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu):
        environment: dict[str, str] = launch.prepare_simple_launcher_cmd_env(args)[1]
        return {**environment, **({"WORLD_SIZE": str(args.num_processes)} if args.mpirun_hostfile else {})}
    if args.use_deepspeed:
        environment = launch.prepare_deepspeed_cmd_env(args)[1]
    else:
        environment = launch.prepare_multi_gpu_env(args)
    return {
        **environment,
        **_predict_torchrun(args),
        **port,
        **rank,
    }  # accelerate starts it with what these wrote into args


def _predict_torchrun(args: Any) -> dict[str, str]:
    """Return the variables that torchrun sets for its first process."""
    from torch.distributed import run

    defaults = vars(run.get_args_parser().parse_args(["script.py"]))
    args = SimpleNamespace(**{name: getattr(args, name, default) for name, default in defaults.items()})
    nodes, local = run.parse_min_max_nnodes(args.nnodes)[1], run.determine_local_world_size(args.nproc_per_node)
    endpoint = "127.0.0.1:0" if args.standalone else str(run.get_rdzv_endpoint(args))  # type: ignore[no-untyped-call]
    address, _, port = endpoint.removesuffix(":None").partition(":")
    return {
        "WORLD_SIZE": str(nodes * local),
        "LOCAL_WORLD_SIZE": str(local),
        "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": str(nodes),
        "GROUP_RANK": str(args.node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,  # empty: torchrun's default
    }


def _match_launcher(words: Sequence[str]) -> tuple[str, int] | None:
    """Return which launcher a command starts, and the index at which the launcher's flags begin."""
    names = [_strip_directory(word) for word in words]
    for index in range(len(names)):
        for key, launcher in LAUNCHERS.items():
            if tuple(names[index : index + len(key)]) == key:
                return launcher, index + len(key)
    return None


def _strip_directory(word: str) -> str:
    name = PurePath(word.replace("\\", "/")).name
    return name.lower().removesuffix(".exe").removesuffix("-script.py")


def _build_parser(launcher: str) -> Any:
    if launcher == ACCELERATE:
        from accelerate.commands.launch import launch_command_parser as build
    else:
        from torch.distributed.run import get_args_parser as build

    def fail(message: str) -> NoReturn:
        raise ConfigError([Problem("", f"{launcher}: {message}")])

    parser: Any = build()
    parser.error = fail
    parser.print_help = lambda: fail("--help starts no training")
    return parser
