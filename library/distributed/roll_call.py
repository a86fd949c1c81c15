"""Before anything slow: every process says what it is about to do, and those that say something else are named.

The words lie on the store through which processes find each other, so this works before they are connected, and says
who has not come.
"""

import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..config.options import flat
from ..errors import ConfigError, UserError
from .board import Board
from .code_version import code_version, package_versions
from .refusals import effective_precision
from .words import SHOWN_RANKS, ranks_in_words
from .world import World

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_UNTIL_TOLD = 30.0
SECONDS_TO_READ = 5.0
"""How long a process stays that cannot start, so that the others learn why."""
PLACES = {
    *("pretrained_model_name_or_path", "vae", "clip_l", "clip_g", "t5xxl", "text_encoder", "ae", "tokenizer_cache_dir"),
    *("network_weights", "base_weights", "dataset_config", "cache_dir", "output_dir", "resume"),
    *("sample_prompts", "logging_dir", "log_tracker_config", "metadata_thumbnail", "compile_cache_dir"),
    "offload_param_nvme_path",
}
"""Settings that name a place, which may be another on each machine; what is found there is compared itself."""
OWN = {"max_data_loader_n_workers", "prefetch_factor", "quiet", "console_log_level", "console_log_file",
       "console_log_simple"}  # fmt: skip
"""Settings by which a machine may differ from the others."""
WAYS_OUT = {
    "code": "give every machine the same version of this program",
    "model": "give every machine the same files of it",
    "network_weights": "give every machine the same file",
    "base_weights": "give every machine the same files",
    "prompts": "give every machine the same file for --sample_prompts",
    "pictures, captions or dataset settings": "give every machine the same files, by a shared folder or exact copies",
}
"""Of what is compared by a hash, which says nothing to anybody; of all else the values are shown."""


@dataclass(frozen=True)
class Word:
    """What one process has to say."""

    host: str
    says: Mapping[str, Any]
    problems: tuple[str, ...] = ()


def own_word(args: RunConfig, world: World, problems: Iterable[str] = ()) -> Word:
    """Code, settings and what the launcher said."""
    says = {
        "code": code_version(),
        **package_versions(),
        "device": world.device,
        "precision": effective_precision(args, world) or world.precision or "no",
        "dynamo backend of the launcher": world.dynamo or "no",
        "engines": " and ".join(world.engines) or "DDP",
        **settings_that_must_agree(args),
    }
    return Word(socket.gethostname(), says, tuple(problems))


def settings_that_must_agree(args: RunConfig) -> dict[str, Any]:
    """By name; of those that name a place, whether they do."""
    return {name: value is not None and value != () if name in PLACES else _plain(value)
            for name, value in flat(args).items() if name not in OWN}  # fmt: skip


def call(board: Board, rank: int, size: int, word: Word, seconds: float) -> list[str]:
    """The machines of all processes, by rank.

    An error for the user when some do not come in this time, cannot start, or are about to do something else.
    """
    board.tell(f"word {rank}", json.dumps([word.host, dict(word.says), word.problems]))
    board.add("come", 1)
    _wait_for_all(board, rank, size, word, seconds)
    if rank == 0:  # one reads them all, and everybody what came of it: with hundreds of processes that is much less
        found = [json.loads(board.told(f"word {other}") or "") for other in range(size)]
        words = [Word(host, says, tuple(problems)) for host, says, problems in found]
        board.tell("outcome", json.dumps([[word.host for word in words], all_that_is_wrong(words)]))
    while (outcome := board.told("outcome")) is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    hosts, problems = json.loads(outcome)
    _leave(board, rank, size)
    _stop(problems, rank)
    return list(hosts)


def _wait_for_all(board: Board, rank: int, size: int, word: Word, seconds: float) -> None:
    began, told_at = time.monotonic(), 0.0
    while board.count("come") < size:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        waited = time.monotonic() - began
        if word.problems and waited > SECONDS_TO_READ:
            raise ConfigError(word.problems)
        if waited - told_at < min(SECONDS_UNTIL_TOLD, seconds):
            continue
        told_at = waited
        absent = [other for other in range(size) if board.told(f"word {other}") is None]
        is_first = rank == min(set(range(size)) - set(absent))
        who = f"{len(absent)} of {size} processes have not come: {ranks_in_words(absent)}"
        if waited >= seconds:
            error = UserError(f"{who} within {seconds:.0f} s. Are all machines started, with another --machine_rank"
                              " each and the same --main_process_ip and --main_process_port? One that ended says"
                              " why")  # fmt: skip
            error.is_told = not is_first
            raise error
        if is_first:
            logger.log(logging.ERROR if rank else logging.WARNING, "waiting for %.0f s: %s", waited, who)


def _leave(board: Board, rank: int, size: int) -> None:
    """The first process may keep the store, so it stays until the others have read what they need."""
    gone, began = board.add("gone", 1), time.monotonic()
    while rank == 0 and gone < size and time.monotonic() - began < SECONDS_TO_READ:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        gone = board.count("gone")


def refuse(words: Sequence[Word], rank: int) -> None:
    """Stop all processes, for the same reason told by one, when they are not alike."""
    _stop(all_that_is_wrong(words), rank)


def all_that_is_wrong(words: Sequence[Word]) -> list[str]:
    """Why some cannot start, and in what some differ."""
    return [*_those_that_cannot(words), *disagreements(words)]


def _stop(problems: list[str], rank: int) -> None:
    if problems:
        error = ConfigError(problems)
        error.is_told = rank != 0
        raise error


def disagreements(words: Sequence[Word]) -> list[str]:
    """A line for each thing in which some process is not like most of them."""
    hosts, problems = [word.host for word in words], []
    for name in dict.fromkeys(name for word in words for name in word.says):
        values = [json.dumps(word.says.get(name)) for word in words]
        common = most_common(values)
        others: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            if value != common:
                others.setdefault(value, []).append(rank)
        for value, ranks in others.items():
            where = ranks_in_words(ranks, hosts)
            rest = "rank 0" if len(words) == 2 else "most others"
            if name in WAYS_OUT:
                problems.append(f"{name}: {where}: not the same as on {rest}; {WAYS_OUT[name]}")
            else:
                problems.append(f"{name}: {_shown(value)} on {where}, {_shown(common)} on {rest}; start all of them"
                                " with the same")  # fmt: skip
    return problems


def most_common(values: Sequence[str]) -> str:
    """What most say; where there is no most, what rank 0 says."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value == values[0]))


def layout(hosts: Sequence[str]) -> str:
    """Which processes are where."""
    names = list(dict.fromkeys(hosts))
    parts = [ranks_in_words([rank for rank, host in enumerate(hosts) if host == name]) + f" on {name}"
             for name in names[:SHOWN_RANKS]]  # fmt: skip
    more = f" and {len(names) - SHOWN_RANKS} more machines" if len(names) > SHOWN_RANKS else ""
    machines = "1 machine" if len(names) == 1 else f"{len(names)} machines"
    return f"{len(hosts)} processes on {machines}: {'; '.join(parts)}{more}"


def _those_that_cannot(words: Sequence[Word]) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        for problem in word.problems:
            reasons.setdefault(problem, []).append(rank)
    hosts = [word.host for word in words]
    return [problem if len(ranks) == len(words) else f"{ranks_in_words(ranks, hosts)}: {problem}"
            for problem, ranks in reasons.items()]  # fmt: skip


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _shown(value: str) -> str:
    return "not set" if value == "null" else value
