"""Which code runs here: this package by its sources, others by their versions."""

import hashlib
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import RunConfig
from ..config.options import flatten_config
from ..errors import ConfigError, UserError
from .preflight import resolve_mixed_precision
from .process_group import KeyValueStore
from .world import MAX_RANKS_SHOWN, World, format_ranks

COMPARED_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")


PACKAGE_DIR = Path(__file__).resolve().parents[1]


def compute_code_version() -> str:
    """The version, and a hash of every source file, because a clone may be of any day."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(PACKAGE_DIR.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE_DIR).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")  # as git writes them on another system
        digest.update(f"{path.relative_to(PACKAGE_DIR).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return f"{__version__} {digest.hexdigest()}"


def get_package_versions() -> dict[str, str]:
    """Those that change what is computed, without what they were built for: machines may have other devices."""
    return {name: metadata.version(name).partition("+")[0] for name in COMPARED_PACKAGES}


logger = logging.getLogger(__name__)


POLL_SECONDS = 0.1


NOTICE_SECONDS = 30.0


READ_GRACE_SECONDS = 5.0
"""How long a process stays that cannot start, so that the others learn why."""


PATH_OPTIONS = {
    *("pretrained_model_name_or_path", "vae", "clip_l", "clip_g", "t5xxl", "text_encoder", "ae", "tokenizer_cache_dir"),
    *("network_weights", "base_weights", "dataset_config", "cache_dir", "output_dir", "resume"),
    *("sample_prompts", "logging_dir", "log_tracker_config", "metadata_thumbnail", "compile_cache_dir"),
    "offload_param_nvme_path",
}
"""Settings that name a place, which may be another on each machine; what is found there is compared itself."""


PER_MACHINE_OPTIONS = {
    "max_data_loader_n_workers",
    "prefetch_factor",
    "quiet",
    "console_log_level",
    "console_log_file",
    "console_log_simple",
}
"""Settings by which a machine may differ from the others."""


HASH_MISMATCH_FIXES = {
    "code": "give every machine the same version of this program",
    "model": "give every machine the same files of it",
    "network_weights": "give every machine the same file",
    "base_weights": "give every machine the same files",
    "prompts": "give every machine the same file for --sample_prompts",
    "pictures, captions or dataset settings": "give every machine the same files, by a shared folder or exact copies",
}
"""Of what is compared by a hash, which says nothing to anybody; of all else the values are shown."""


@dataclass(frozen=True)
class RankReport:
    """What one process has to say."""

    host: str
    settings: Mapping[str, Any]
    problems: tuple[str, ...] = ()


def build_rank_report(config: RunConfig, world: World, problems: Iterable[str] = ()) -> RankReport:
    """Code, settings and what the launcher said."""
    says = {
        "code": compute_code_version(),
        **get_package_versions(),
        "device": world.device_type,
        "precision": resolve_mixed_precision(config, world) or world.mixed_precision or "no",
        "dynamo backend of the launcher": world.dynamo_backend or "no",
        "engines": " and ".join(world.engines) or "DDP",
        **collect_agreed_settings(config),
    }
    return RankReport(socket.gethostname(), says, tuple(problems))


def collect_agreed_settings(config: RunConfig) -> dict[str, Any]:
    """By name; of those that name a place, whether they do."""
    return {
        name: value is not None and value != () if name in PATH_OPTIONS else _to_json_value(value)
        for name, value in flatten_config(config).items()
        if name not in PER_MACHINE_OPTIONS
    }


def exchange_rank_reports(
    key_value_store: KeyValueStore, rank: int, world_size: int, report: RankReport, timeout_seconds: float
) -> list[str]:
    """The machines of all processes, by rank.

    An error for the user when some do not come in this time, cannot start, or are about to do something else.
    """
    key_value_store.set(f"word {rank}", json.dumps([report.host, dict(report.settings), report.problems]))
    key_value_store.add("come", 1)
    _wait_for_all_ranks(key_value_store, rank, world_size, report, timeout_seconds)
    if rank == 0:  # one reads them all, and everybody what came of it: with hundreds of processes that is much less
        found = [json.loads(key_value_store.get(f"word {other}") or "") for other in range(world_size)]
        words = [RankReport(host, says, tuple(problems)) for host, says, problems in found]
        key_value_store.set("outcome", json.dumps([[word.host for word in words], find_report_problems(words)]))
    while (outcome := key_value_store.get("outcome")) is None:
        time.sleep(POLL_SECONDS)
    hosts, problems = json.loads(outcome)
    _wait_until_read(key_value_store, rank, world_size)
    _raise_on_every_rank(problems, rank)
    return list(hosts)


def _wait_for_all_ranks(
    key_value_store: KeyValueStore, rank: int, world_size: int, report: RankReport, timeout_seconds: float
) -> None:
    began, told_at = time.monotonic(), 0.0
    while key_value_store.read_counter("come") < world_size:
        time.sleep(POLL_SECONDS)
        waited = time.monotonic() - began
        if report.problems and waited > READ_GRACE_SECONDS:
            raise ConfigError(report.problems)
        if waited - told_at < min(NOTICE_SECONDS, timeout_seconds):
            continue
        told_at = waited
        absent = [other for other in range(world_size) if key_value_store.get(f"word {other}") is None]
        is_first = rank == min(set(range(world_size)) - set(absent))
        who = f"{len(absent)} of {world_size} processes have not come: {format_ranks(absent)}"
        if waited >= timeout_seconds:
            error = UserError(
                f"{who} within {timeout_seconds:.0f} s. Are all machines started, with another --machine_rank"
                " each and the same --main_process_ip and --main_process_port? One that ended says"
                " why"
            )
            error.is_reported = not is_first
            raise error
        if is_first:
            logger.log(logging.ERROR if rank else logging.WARNING, "waiting for %.0f s: %s", waited, who)


def _wait_until_read(key_value_store: KeyValueStore, rank: int, world_size: int) -> None:
    """The first process may keep the store, so it stays until the others have read what they need."""
    gone, began = key_value_store.add("gone", 1), time.monotonic()
    while rank == 0 and gone < world_size and time.monotonic() - began < READ_GRACE_SECONDS:
        time.sleep(POLL_SECONDS)
        gone = key_value_store.read_counter("gone")


def check_rank_reports(reports: Sequence[RankReport], rank: int) -> None:
    """Stop all processes, for the same reason told by one, when they are not alike."""
    _raise_on_every_rank(find_report_problems(reports), rank)


def find_report_problems(reports: Sequence[RankReport]) -> list[str]:
    """Why some cannot start, and in what some differ."""
    return [*_collect_rank_problems(reports), *find_disagreements(reports)]


def _raise_on_every_rank(problems: list[str], rank: int) -> None:
    if problems:
        error = ConfigError(problems)
        error.is_reported = rank != 0
        raise error


def find_disagreements(reports: Sequence[RankReport]) -> list[str]:
    """A line for each thing in which some process is not like most of them."""
    hosts, problems = [word.host for word in reports], []
    for name in dict.fromkeys(name for word in reports for name in word.settings):
        values = [json.dumps(word.settings.get(name)) for word in reports]
        common = find_majority(values)
        others: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            if value != common:
                others.setdefault(value, []).append(rank)
        for value, ranks in others.items():
            where = format_ranks(ranks, hosts)
            rest = "rank 0" if len(reports) == 2 else "most others"
            if name in HASH_MISMATCH_FIXES:
                problems.append(f"{name}: {where}: not the same as on {rest}; {HASH_MISMATCH_FIXES[name]}")
            else:
                problems.append(
                    f"{name}: {_format_value(value)} on {where}, {_format_value(common)} on {rest}; start all of them"
                    " with the same"
                )
    return problems


def find_majority(values: Sequence[str]) -> str:
    """What most say; where there is no most, what rank 0 says."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == values[0]))


def format_rank_placement(hostnames: Sequence[str]) -> str:
    """Which processes are where."""
    names = list(dict.fromkeys(hostnames))
    parts = [
        format_ranks([rank for rank, host in enumerate(hostnames) if host == name]) + f" on {name}"
        for name in names[:MAX_RANKS_SHOWN]
    ]
    more = f" and {len(names) - MAX_RANKS_SHOWN} more machines" if len(names) > MAX_RANKS_SHOWN else ""
    machines = "1 machine" if len(names) == 1 else f"{len(names)} machines"
    return f"{len(hostnames)} processes on {machines}: {'; '.join(parts)}{more}"


def _collect_rank_problems(reports: Sequence[RankReport]) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for rank, word in enumerate(reports):
        for problem in word.problems:
            reasons.setdefault(problem, []).append(rank)
    hosts = [word.host for word in reports]
    return [
        problem if len(ranks) == len(reports) else f"{format_ranks(ranks, hosts)}: {problem}"
        for problem, ranks in reasons.items()
    ]


def _to_json_value(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _format_value(value: str) -> str:
    return "not set" if value == "null" else value
