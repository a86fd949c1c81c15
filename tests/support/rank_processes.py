"""Run a function in several processes that form one gloo group, each a fork of a warm and idle server."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.support.warm_server"]
)  # found where pytest is started; without it all is only slower


def on_ranks(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    seconds: float = 300,
) -> list[Any]:
    """``work(*arguments)`` on ``size`` ranks; the results by rank.  The first error that is none of gloo's is raised.

    One rank is a run without any process group, as when a script is started alone.
    """
    results = CONTEXT.SimpleQueue()
    base = dict(environment or {})
    if size > 1:
        base |= {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
    processes = []
    for rank in range(size):
        own = base | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {})
        processes.append(CONTEXT.Process(target=_one, args=(results, rank, own, work, arguments), daemon=True))
    for process in processes:
        process.start()
    done: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) or not results.empty():
        if not results.empty():
            rank, result, error = results.get()
            done[rank] = result
            errors += [error] if error else []
        elif time.monotonic() > deadline:
            errors.append(f"still running after {seconds} s: killed")
            for process in processes:
                process.kill()
            break
        else:
            time.sleep(0.02)
    if errors:
        raise AssertionError(min(errors, key=_is_transport))
    if len(done) != size:
        raise AssertionError(f"{size - len(done)} ranks ended without a word: {[p.exitcode for p in processes]}")
    return [done[rank] for rank in range(size)]


def join_ranks(timeout_seconds: float) -> Any:
    """Called on a rank: its ``Communicator``; a collective that takes longer than ``timeout_seconds`` fails."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from library.distributed.communicator import Communicator

    group = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return Communicator(Accelerator(cpu=True, kwargs_handlers=[group]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_transport(error: str) -> bool:
    """A rank whose partner died says only that the connection closed."""
    return any(word in error for word in ("Connection closed by peer", "Connection reset", "still running"))


def _one(results: Any, rank: int, environment: dict[str, str], work: Callable[..., Any], arguments: tuple) -> None:
    import torch

    gc.freeze()  # or all that was imported would be looked through again and again
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ |= environment
    try:
        results.put((rank, work(*arguments), None))
    except BaseException:
        results.put((rank, None, f"rank {rank}: {traceback.format_exc()}"))
