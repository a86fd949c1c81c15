"""Prefetching: DataLoader workers that survive signals, are noticed when they die and always end; and threads."""

import atexit
import itertools
import multiprocessing.connection
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..errors import UserError
from ..problems import Problem

SHUTDOWN_TIMEOUT_SECONDS = 10.0
"""Workers that are alive after this are killed."""

_EXIT_TIMEOUT_SECONDS = 1.0  # between a closed sentinel and a known exit code


class SharedMemoryItem(Protocol):
    """An item of a dataset, which can move to shared memory."""

    def share_memory(self) -> "SharedMemoryItem": ...


@dataclass(frozen=True)
class WorkerFailure:
    """The answer of a worker that has no batch to return; it ends the run."""

    problems: Sequence[Problem]


Item = TypeVar("Item", bound=SharedMemoryItem)
Key = TypeVar("Key")
Loaded = TypeVar("Loaded")


class _ReportingDataset(Dataset[Item | WorkerFailure]):
    """Returns what the user has to know instead of raising it, to which DataLoader would add its traceback."""

    def __init__(self, dataset: "Dataset[Item | WorkerFailure]"):
        self.dataset = dataset

    def __getitem__(self, position: int) -> Item | WorkerFailure:
        try:
            return self.dataset[position]
        except UserError as error:
            return WorkerFailure(error.problems)


class PrefetchIterator(Generic[Item]):
    """``dataset[first_position]``, ``dataset[first_position + 1]`` ..., in order for any number of workers."""

    def __init__(
        self,
        dataset: "Dataset[Item | WorkerFailure]",
        first_position: int,
        *,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        multiprocessing_context: str | None = None,
    ):
        self.settings_hint = (
            f"--max_data_loader_n_workers (now {num_workers}) or --prefetch_factor (now {prefetch_factor})"
        )
        loader: DataLoader[Item | WorkerFailure] = DataLoader(
            _ReportingDataset(dataset),
            batch_size=None,  # the batch plan has made the batches
            sampler=_PositionSampler(first_position),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            collate_fn=_move_to_shared_memory,
            worker_init_fn=_ignore_signals,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            pin_memory=pin_memory,
        )
        with _keep_sigchld_handler():
            self.data_iterator: Any = iter(loader)
        self.is_shut_down = False
        self.workers: list[Any] = list(getattr(self.data_iterator, "_workers", ()))
        atexit.register(self.shutdown)  # a kept traceback may keep the iterator alive

    def __iter__(self) -> "PrefetchIterator[Item]":
        return self

    def __next__(self) -> Item:
        try:
            item: Item | WorkerFailure = next(self.data_iterator)
        except Exception as error:
            dead = self._find_dead_workers() if self.workers else []
            if not dead:
                raise
            self.shutdown(kill=True)
            raise UserError(_format_worker_death(dead[0].pid, dead[0].exitcode, self.settings_hint)) from error
        if isinstance(item, WorkerFailure):  # raised here: a worker's traceback would become part of it
            raise UserError(*item.problems)
        return item

    def _find_dead_workers(self) -> list[Any]:
        """Find workers that have exited, which none should."""
        sentinels = {worker.sentinel: worker for worker in self.workers}
        for gone in multiprocessing.connection.wait(list(sentinels), _EXIT_TIMEOUT_SECONDS):
            sentinels[gone].join(_EXIT_TIMEOUT_SECONDS)  # the sentinel closes a moment before the exit code is known
        return [worker for worker in self.workers if worker.exitcode is not None]

    def shutdown(self, *, kill: bool = False) -> None:
        """Stop all workers, and kill those that do not stop, or all with ``kill``.

        Workers ignore SIGTERM, which Python sends at exit, so it would wait forever.  With ``kill``, an orderly
        shutdown could wait for a lock that a dead worker held.
        """
        if self.is_shut_down:  # called again while the interpreter exits
            return
        self.is_shut_down = True
        atexit.unregister(self.shutdown)
        if kill:
            self._kill_workers()
        self._shutdown_gracefully()
        self._kill_workers()

    def _shutdown_gracefully(self) -> None:
        end = getattr(self.data_iterator, "_shutdown_workers", None)
        if end is None:  # there are no workers
            return
        for queue in (self.data_iterator._worker_result_queue, *self.data_iterator._index_queues):
            queue.cancel_join_thread()  # nothing in them is needed
        thread = threading.Thread(target=end, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # some releases of Python 3.12 start no thread while the interpreter exits
            return
        thread.join(SHUTDOWN_TIMEOUT_SECONDS)

    def _kill_workers(self) -> None:
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
        for worker in self.workers:
            worker.join(_EXIT_TIMEOUT_SECONDS)


def prefetch_in_threads(
    load: Callable[[Key], Loaded], keys: Iterable[Key], *, depth: int, num_threads: int = 1
) -> Iterator[Loaded]:
    """``map(load, keys)``, in order, with up to ``depth`` results loaded ahead by threads."""
    pending: deque[Future[Loaded]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for key in keys:
            pending.append(pool.submit(load, key))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _PositionSampler:
    """A sampler of every position from ``first_position`` on, without end."""

    def __init__(self, first_position: int):
        self.first_position = first_position

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first_position)


def _move_to_shared_memory(item: Any) -> Any:
    """Move a batch to shared memory in the worker.

    Otherwise the queue's feeder thread does so; without memory it prints an error, and the main process waits for a
    batch that never comes.
    """
    if get_worker_info() is None or isinstance(item, WorkerFailure):
        return item
    try:
        return item.share_memory()
    except RuntimeError as error:
        fix = f"{_SHARED_MEMORY_HINT}: {error}"
        return WorkerFailure([Problem("", "no shared memory left for prefetched images", fix)])


_SHARED_MEMORY_HINT = "give the container more (docker run --shm-size 8g, or --ipc host), or use fewer workers"


def _ignore_signals(worker_id: int) -> None:
    """Ignore signals in workers: they go to the process group, and the main process still needs its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _keep_sigchld_handler() -> Iterator[None]:
    """Remove torch's SIGCHLD handler again.

    It raises when a worker dies, in the middle of whatever the main thread does.  Without it the death is noticed
    within seconds when the next batch is requested, where it can be reported.
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _format_worker_death(pid: int, exit_code: int, settings_hint: str) -> str:
    """Format how a worker died, and what to do."""
    worker = f"DataLoader worker (pid {pid})"
    death = signal.Signals(-exit_code).name if exit_code < 0 else ""  # on Windows exit codes are never negative
    if death == "SIGKILL":
        return (
            f"{worker} was killed, probably because the system ran out of memory; lower {settings_hint}, or give the"
            " job more memory"
        )
    if death == "SIGBUS":
        return f"{worker}: no shared memory left; {_SHARED_MEMORY_HINT}"
    how = f"died of {death}" if death else f"exited with code {exit_code}"
    return f"{worker} {how}; --max_data_loader_n_workers 0 loads images in the main process and shows where it fails"
