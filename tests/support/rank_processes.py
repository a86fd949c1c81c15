"""Run a function in several processes of one gloo group, each forked from a server with warm imports."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

CONTEXT = multiprocessing.get_context(os.environ.get("TEST_START_METHOD", "forkserver"))
CONTEXT.set_forkserver_preload(
    ["tests.support.warm_server"]
)  # needs the repository root as working directory; without it tests are only slower


def run_on_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    seconds: float = 300,
    daemon: bool = True,
) -> list[Any]:
    """Run ``work(*arguments)`` on ``size`` ranks and return the results by rank.

    Processes that are no daemons may start others, such as data workers.  An error that is not a connection error of
    gloo is raised first.  One rank runs without a process group, as a script without a launcher.
    """
    results = CONTEXT.SimpleQueue()
    common_environment = dict(environment or {})
    if size > 1:
        common_environment |= {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
        }
    processes = []
    for rank in range(size):
        rank_environment = common_environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {})
        processes.append(
            CONTEXT.Process(target=_run_rank, args=(results, rank, rank_environment, work, arguments), daemon=daemon)
        )
    for process in processes:
        process.start()
    results_by_rank: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) or not results.empty():
        if not results.empty():
            rank, result, error = results.get()
            results_by_rank[rank] = result
            errors += [error] if error else []
        elif time.monotonic() > deadline:
            errors.append(f"still running after {seconds} s: killed")
            for process in processes:
                process.kill()
            break
        else:
            time.sleep(0.02)
    if errors:
        raise AssertionError(min(errors, key=_is_connection_error))
    if len(results_by_rank) != size:
        raise AssertionError(
            f"{size - len(results_by_rank)} ranks exited without a result: {[p.exitcode for p in processes]}"
        )
    return [results_by_rank[rank] for rank in range(size)]


def build_communicator(timeout_seconds: float) -> Any:
    """Build the ``Communicator`` of this rank; a collective that takes longer than ``timeout_seconds`` fails."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from library.distributed.communicator import Communicator

    group = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return Communicator(Accelerator(cpu=True, kwargs_handlers=[group]))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_connection_error(error: str) -> bool:
    """Whether the error is only a consequence of another rank's failure."""
    return any(word in error for word in ("Connection closed by peer", "Connection reset", "still running"))


def _run_rank(results: Any, rank: int, environment: dict[str, str], work: Callable[..., Any], arguments: tuple) -> None:
    import torch

    gc.freeze()  # keeps the garbage collector from scanning all imported modules again and again
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ |= environment
    try:
        results.put((rank, work(*arguments), None))
    except BaseException:
        results.put((rank, None, f"rank {rank}: {traceback.format_exc()}"))
