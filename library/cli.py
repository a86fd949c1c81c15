"""Entry points of training and tools: the only module that prints to stdout and decides the exit code."""

import logging
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .distributed.slurm_and_mpi import export_rank_variables
from .errors import ConfigError, CrashError, RunInterrupted, UserError, format_error, write_traceback
from .problems import Problem

if TYPE_CHECKING:
    from .config import ParsedConfig

EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Train; return the exit code."""
    if "--help" in argv or "-h" in argv:
        from .config.help import format_help

        _print_text(format_help("accelerate launch train_lora.py"))
        return 0
    try:
        export_rank_variables()
        return _run_training(argv)
    except UserError as error:
        _report_user_error(error)
        return EXIT_USER_ERROR
    except RunInterrupted as stopped:
        if _get_rank("RANK") == 0:
            print(f"train_lora: {stopped}", file=sys.stderr, flush=True)
        from .distributed.signals import report_exit_code

        return report_exit_code(stopped.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except CrashError as crash:
        if not crash.is_reported:
            _report_crash("train_lora", str(crash))
        return EXIT_BUG
    except Exception as error:
        # The process group does not exist yet; an error this early occurs on all ranks.
        if _get_rank("LOCAL_RANK") == 0:
            report = write_traceback(error, Path("train_lora.error.txt"))
            _report_crash("train_lora", f"{format_error(error)}\n{report}")
        return EXIT_BUG


def run_tool(argv: Sequence[str]) -> int:
    """Run ``python -m library NAME ...``; return the exit code."""
    from .name_suggestions import suggest_name
    from .tools import TOOLS

    if not argv or argv[0] in ("--help", "-h"):
        tools = "\n".join(f"  {name:<10} {what}" for name, (what, _) in TOOLS.items())
        _print_text(
            f"usage: python -m library TOOL ...\n\n{tools}\n\n"
            "To train: accelerate launch train_lora.py --dataset_config x.toml"
        )
        return 0
    name, *rest = argv
    if name == "bench":
        print("library bench: the benchmarks have moved; run python -m benchmarks NAME in a checkout", file=sys.stderr)
        return EXIT_USER_ERROR
    if name not in TOOLS:
        print(f"library: no tool {name!r}{suggest_name(name, TOOLS)}; available: {', '.join(TOOLS)}", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        export_rank_variables()
        result = TOOLS[name][1](rest)
        text, code = result if isinstance(result, tuple) else ("", _print_lines(result))
    except UserError as error:
        if not _is_reported(error):
            print(f"library {name}:\n{_indent_lines(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"library {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        report = write_traceback(error, Path(f"library-{name}.error.txt"))
        _report_crash(f"library {name}", f"{format_error(error)}\n{report}")
        return EXIT_BUG
    if text:
        _print_text(text)
    return code


def _run_training(argv: Sequence[str]) -> int:
    from .config.help import format_config_as_toml
    from .config.musubi_compat import explain_caching_command
    from .registry import pause_garbage_collection
    from .training.preflight import (
        check_output_files,
        find_installation_problems,
        find_settings_problems,
        load_settings,
    )

    if answer := explain_caching_command(argv):
        if _get_rank("RANK") == 0:
            _print_text(answer)
        return 0
    loaded = load_settings(argv)
    if loaded.output_config:
        return _write_config(loaded.config_file, format_config_as_toml(loaded.config), loaded.problems)
    config = loaded.config
    problems, missing = find_settings_problems(loaded), find_installation_problems(loaded)
    if problems or (missing and not config.train.dry_run):
        raise ConfigError(problems + missing)
    rank = _get_rank("RANK")
    _configure_logging(loaded, rank)
    for problem in missing:
        logging.getLogger(__name__).warning("a run would stop on this machine: %s", problem)
    try:
        if config.train.gpu_memory is not None:
            loaded = _choose_memory_options(loaded)
            config = loaded.config
        if config.train.dry_run:
            from .estimate.dry_run import build_dry_run

            dp_size = max(1, int(os.environ.get("WORLD_SIZE", "1")) // config.parallel.model_parallel_size)
            text = build_dry_run(config, dp_size).format_summary()
            if rank == 0:
                _print_text(text)
            return 0
        with pause_garbage_collection():
            from .training.run import run_training

        has_ema = config.optim.ema_decay is not None
        run_training(
            config,
            loaded.locations,
            lambda: check_output_files(config.save, config.state, config.train, has_ema),
        )
    except ConfigError as error:  # found later, such as warmup steps beyond the run: name the line of the run TOML
        error.args = tuple(loaded.locate_problems(error.problems))
        raise
    return 0


def _configure_logging(loaded: "ParsedConfig", rank: int) -> None:
    """Configure logging as the run wants it, and log the notices of its settings."""
    from .log import configure_logging

    log = loaded.config.log
    configure_logging(
        level=log.console_log_level,
        file=log.console_log_file,
        simple=log.console_log_simple,
        quiet=log.quiet,
        rank=rank,
    )
    loaded.log_notices()


def _choose_memory_options(loaded: "ParsedConfig") -> "ParsedConfig":
    from .registry import pause_garbage_collection

    with pause_garbage_collection():
        from .estimate.memory_option_choice import choose_memory_options

    return choose_memory_options(loaded)


def _write_config(path: Path | None, text: str, problems: Sequence[Problem]) -> int:
    """``--output_config``: write the settings to a file and exit, as in sd-scripts."""
    from .config.validate import MISSING_DATASET

    if path is None:
        problems = [*problems, Problem("output_config", "needs --config_file, the file to write")]
    elif path.exists():
        problems = [*problems, Problem("output_config", f"{path} already exists", "it is not overwritten")]
    problems = [problem for problem in problems if problem != MISSING_DATASET]
    if path is None or problems:
        raise ConfigError(problems)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem("config_file", f"{path} cannot be written: {error.strerror}")]) from None
    print(f"settings written to {path}")
    return 0


def _print_text(text: str) -> None:
    """Print text; file names may hold bytes that the terminal cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_lines(lines: Generator[str, None, int]) -> int:
    """Print each line as soon as it is yielded; return the exit code that the generator returns."""
    while True:
        try:
            _print_text(next(lines))
        except StopIteration as stop:
            return int(stop.value)


def _get_rank(variable: str) -> int:
    """Read a launcher's variable for the choice of who reports; a wrong value is a problem of its own."""
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else 0


def _is_reported(error: UserError) -> bool:
    """Config errors occur on all ranks and are printed by one per node; other errors by the rank where they occur."""
    return error.is_reported or (isinstance(error, ConfigError) and _get_rank("LOCAL_RANK") != 0)


def _report_user_error(error: UserError) -> None:
    if _is_reported(error):
        return
    rank = _get_rank("RANK")
    where = f" on rank {rank}" if rank else ""
    count = f"{len(error.problems)} problems:" if len(error.problems) > 1 else ""
    _print_error(f"train_lora: stopped{where}. {count}".rstrip(), _indent_lines(error))


def _print_error(*lines: str) -> None:
    """Print to stderr; accelerate launch adds a traceback of its own below."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by accelerate launch for the programs it starts
        lines += ("(accelerate launch reports below that this program ended; the cause is above.)",)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _report_crash(program: str, text: str) -> None:
    """Print the cause, the rank, what was saved and what to do."""
    rank = _get_rank("RANK")
    where = f" on rank {rank}" if rank else ""
    _print_error(f"{program}: ended{where} by an error.", _indent_lines(text))


def _indent_lines(error: UserError | str) -> str:
    return "\n".join(f"  {line}" for line in str(error).splitlines())
