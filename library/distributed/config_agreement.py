"""Config agreement: before anything slow, all ranks exchange code version and settings, and stop where they differ.

This goes over the key-value store, before the process group exists: a collective cannot say which rank is missing.
"""

import hashlib
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.options import iter_options
from ..config.schema import RunConfig
from ..errors import ConfigError, UserError
from ..problems import Problem, load_problem
from .process_group import KeyValueStore
from .world import MAX_RANKS_SHOWN, World, format_ranks

logger = logging.getLogger(__name__)
COMPARED_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
PACKAGE_DIR = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1
NOTICE_SECONDS = 30.0
READ_GRACE_SECONDS = 5.0
"""The time that a rank which cannot start stays, so that the others can read why."""

HASH_MISMATCH_FIXES = {
    "code": "install the same version of this program on every machine",
    "model": "copy the same model files to every machine",
    "network_weights": "copy the same file to every machine",
    "base_weights": "copy the same files to every machine",
    "training_adapter": "copy the same file to every machine",
    "source of the family": "copy the same module to every machine",
    "prompts": "use the same --sample_prompts file on every machine",
    "images, captions or dataset settings": "use the same files on every machine: a shared folder, or exact copies",
}
"""Fixes for values that are compared by hash, which the message does not show."""

NF4_KERNEL = "nf4 kernel"
MISMATCH_FIXES = {NF4_KERNEL: "install the same version of bitsandbytes on every machine, or remove it from all"}
"""Fixes for values that no option sets."""


@dataclass(frozen=True)
class RankReport:
    """The report that a rank publishes before it joins the process group."""

    hostname: str
    settings: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()


def build_rank_report(options: Mapping[str, Any], world: World, problems: Iterable[Problem] = ()) -> RankReport:
    """Collect code version, package versions, launcher settings and options."""
    settings = {
        "code": compute_code_version(),
        **get_package_versions(),
        "device": world.device_type,
        "mixed precision": world.resolve_mixed_precision(options["mixed_precision"]) or world.mixed_precision or "no",
        "dynamo backend of the launcher": world.dynamo_backend or "no",
        "engines": " and ".join(world.engines) or "DDP",
        **collect_agreed_settings(options),
    }
    return RankReport(socket.gethostname(), settings, tuple(problems))


def compute_code_version() -> str:
    """Return the version and a hash of every source file, since a git clone may be at any commit."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(PACKAGE_DIR.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE_DIR).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")  # as git checks out on Windows
        digest.update(f"{path.relative_to(PACKAGE_DIR).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return f"{__version__} {digest.hexdigest()}"


def get_package_versions() -> dict[str, str]:
    """Return versions without build tags such as ``+cu128``, since devices may differ between machines."""
    return {name: metadata.version(name).partition("+")[0] for name in COMPARED_PACKAGES}


def collect_agreed_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have to be equal on all ranks; of a path, whether it is set.

    The contents of files are compared instead of their paths, which may differ between machines.
    """
    return {
        option.name: options[option.name] not in (None, ()) if option.is_path else _to_json_value(options[option.name])
        for option in iter_options(RunConfig)
        if not option.is_per_machine
    }


def exchange_rank_reports(
    key_value_store: KeyValueStore, rank: int, world_size: int, report: RankReport, timeout_seconds: float
) -> list[str]:
    """Publish this rank's report and wait for all others; return the hostnames by rank.

    Raise on all ranks when some do not arrive in time, cannot start, or have other settings.
    """
    key_value_store.set(f"report {rank}", json.dumps(_export_report(report)))
    key_value_store.add("arrived", 1)
    _wait_for_all_ranks(key_value_store, rank, world_size, report, timeout_seconds)
    if rank == 0:  # compares for all: every rank reading every report would be quadratic
        raw = [json.loads(key_value_store.get(f"report {other}") or "") for other in range(world_size)]
        reports = [_load_report(*values) for values in raw]
        problems = [problem.export_json() for problem in find_report_problems(reports)]
        outcome = [[report.hostname for report in reports], problems]
        key_value_store.set("outcome", json.dumps(outcome))
    while (message := key_value_store.get("outcome")) is None:
        time.sleep(POLL_SECONDS)
    hostnames, problems = json.loads(message)
    _wait_until_read(key_value_store, rank, world_size)
    _raise_on_every_rank(list(map(load_problem, problems)), rank)
    return list(hostnames)


def _export_report(report: RankReport) -> tuple[str, Mapping[str, Any], list[Mapping[str, Any]]]:
    return report.hostname, dict(report.settings), [problem.export_json() for problem in report.problems]


def _load_report(hostname: str, settings: Mapping[str, Any], problems: Iterable[Mapping[str, Any]]) -> RankReport:
    return RankReport(hostname, settings, tuple(map(load_problem, problems)))


def _wait_for_all_ranks(
    key_value_store: KeyValueStore, rank: int, world_size: int, report: RankReport, timeout_seconds: float
) -> None:
    start, last_notice = time.monotonic(), 0.0
    while key_value_store.read_counter("arrived") < world_size:
        time.sleep(POLL_SECONDS)
        waited = time.monotonic() - start
        if report.problems and waited > READ_GRACE_SECONDS:
            raise ConfigError(report.problems)
        if waited - last_notice < min(NOTICE_SECONDS, timeout_seconds):
            continue
        last_notice = waited
        missing = [other for other in range(world_size) if key_value_store.get(f"report {other}") is None]
        is_reporter = rank == min(set(range(world_size)) - set(missing))
        summary = f"{len(missing)} of {world_size} processes have not connected: {format_ranks(missing)}"
        if waited >= timeout_seconds:
            error = UserError(
                f"{summary} within {timeout_seconds:.0f} s. Are all machines started, each with its own --machine_rank"
                " and the same --main_process_ip and --main_process_port? If one stopped, its own log shows why"
            )
            error.is_reported = not is_reporter
            raise error
        if is_reporter:
            logger.log(logging.ERROR if rank else logging.WARNING, "waiting for %.0f s: %s", waited, summary)


def _wait_until_read(key_value_store: KeyValueStore, rank: int, world_size: int) -> None:
    """Keep rank 0, which may host the store, until the others have read the outcome."""
    count, start = key_value_store.add("read", 1), time.monotonic()
    while rank == 0 and count < world_size and time.monotonic() - start < READ_GRACE_SECONDS:
        time.sleep(POLL_SECONDS)
        count = key_value_store.read_counter("read")


def check_rank_reports(reports: Sequence[RankReport], rank: int) -> None:
    """Raise on all ranks if their reports differ; only rank 0 prints the error."""
    _raise_on_every_rank(find_report_problems(reports), rank)


def find_report_problems(reports: Sequence[RankReport]) -> list[Problem]:
    """Return the problems of single ranks, and the settings that differ."""
    return [*_collect_rank_problems(reports), *find_disagreements(reports)]


def _raise_on_every_rank(problems: list[Problem], rank: int) -> None:
    if problems:
        error = ConfigError(problems)
        error.is_reported = rank != 0
        raise error


def find_disagreements(reports: Sequence[RankReport]) -> list[Problem]:
    """Return a problem for each setting in which some rank differs from the majority."""
    hostnames, problems = [report.hostname for report in reports], list[Problem]()
    options = {option.name for option in iter_options(RunConfig)}
    reference = "rank 0" if len(reports) == 2 else "most others"
    for name in dict.fromkeys(name for report in reports for name in report.settings):
        values = [json.dumps(report.settings.get(name)) for report in reports]
        common = find_majority(values)
        for value in dict.fromkeys(value for value in values if value != common):
            ranks = format_ranks([rank for rank, other in enumerate(values) if other == value], hostnames)
            if name in HASH_MISMATCH_FIXES:
                problems.append(
                    Problem("", f"{name}: {ranks}: not the same as on {reference}", HASH_MISMATCH_FIXES[name])
                )
            else:
                fix = MISMATCH_FIXES.get(name, "start all of them with the same value")
                text = f"{_format_value(value)} on {ranks}, {_format_value(common)} on {reference}"
                is_option = name in options
                problems.append(Problem(name, text, fix) if is_option else Problem("", f"{name}: {text}", fix))
    return problems


def find_majority(values: Sequence[str]) -> str:
    """Return the most frequent value; in a tie, that of rank 0."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == values[0]))


def format_rank_placement(hostnames: Sequence[str]) -> str:
    """Format which ranks run on which machine."""
    names = list(dict.fromkeys(hostnames))
    parts = [
        format_ranks([rank for rank, hostname in enumerate(hostnames) if hostname == name]) + f" on {name}"
        for name in names[:MAX_RANKS_SHOWN]
    ]
    more = f" and {len(names) - MAX_RANKS_SHOWN} more machines" if len(names) > MAX_RANKS_SHOWN else ""
    machines = "1 machine" if len(names) == 1 else f"{len(names)} machines"
    return f"{len(hostnames)} processes on {machines}: {'; '.join(parts)}{more}"


def _collect_rank_problems(reports: Sequence[RankReport]) -> list[Problem]:
    ranks_by_problem: dict[Problem, list[int]] = {}
    for rank, report in enumerate(reports):
        for problem in report.problems:
            ranks_by_problem.setdefault(problem, []).append(rank)
    hostnames = [report.hostname for report in reports]
    return [
        problem if len(ranks) == len(reports) else replace(problem, scope=format_ranks(ranks, hostnames))
        for problem, ranks in ranks_by_problem.items()
    ]


def _to_json_value(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _format_value(value: str) -> str:
    return "not set" if value == "null" else value
