"""Processes that read ahead: started once for a run, deaf to signals, never awaited in vain and never left behind."""

import atexit
import itertools
import multiprocessing.connection
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..errors import UserError

SECONDS_TO_END = 10.0
"""Workers that have not ended by then are killed."""
_SECONDS_TO_DIE = 1.0  # between the first sign of a death and its being known


class Shareable(Protocol):
    """What a reader makes: it can move to memory that other processes see."""

    def share_memory(self) -> "Shareable": ...


@dataclass(frozen=True)
class Unreadable:
    """What a reader hands over in the place of a batch; it ends the run."""

    problem: str


Item = TypeVar("Item", bound=Shareable)


class ReadAhead(Generic[Item]):
    """``reader[first]``, ``reader[first + 1]`` and so on, without end, in this order whatever the number of workers."""

    def __init__(self, reader: "Dataset[Item | Unreadable]", first: int, *, workers: int, prefetch: int,
                 pin_memory: bool, start_method: str | None = None):  # fmt: skip
        self.settings = f"--max_data_loader_n_workers (now {workers}) or --prefetch_factor (now {prefetch})"
        loader: DataLoader[Item | Unreadable] = DataLoader(
            reader,
            batch_size=None,  # the plan made the batches
            sampler=_Positions(first),
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            collate_fn=_shared,
            worker_init_fn=_leave_signals_to_the_main_process,
            multiprocessing_context=start_method if workers else None,
            pin_memory=pin_memory,
        )
        with _deaths_found_when_reading():
            self.items: Any = iter(loader)
        self.has_ended = False
        self.workers: list[Any] = list(getattr(self.items, "_workers", ()))
        atexit.register(self.stop)  # a traceback that somebody keeps is enough for an iterator never to be closed

    def __iter__(self) -> "ReadAhead[Item]":
        return self

    def __next__(self) -> Item:
        try:
            item: Item | Unreadable = next(self.items)
        except Exception as error:
            dead = self._dead() if self.workers else []
            if not dead:
                raise
            self.stop(at_once=True)
            raise UserError(_obituary(dead[0].pid, dead[0].exitcode, self.settings)) from error
        if isinstance(item, Unreadable):  # raised here and not in a worker, whose traceback would become part of it
            raise UserError(item.problem)
        return item

    def _dead(self) -> list[Any]:
        """Workers that ended by themselves, which none should."""
        sentinels = {worker.sentinel: worker for worker in self.workers}
        for gone in multiprocessing.connection.wait(list(sentinels), _SECONDS_TO_DIE):
            sentinels[gone].join(_SECONDS_TO_DIE)  # what it had open is closed a moment before its end is known
        return [worker for worker in self.workers if worker.exitcode is not None]

    def stop(self, *, at_once: bool = False) -> None:
        """End all workers; those that do not end, or all of them ``at_once``, are killed.

        They ignore SIGTERM, with which Python ends what is left of them at its own end, and it would wait for ever.
        A worker that was killed may have held a lock for which the orderly end would wait, too.
        """
        if self.has_ended:  # when the interpreter goes it closes what it finds, and much is gone by then
            return
        self.has_ended = True
        atexit.unregister(self.stop)
        if at_once:
            self._kill()
        self._end_in_order()
        self._kill()

    def _end_in_order(self) -> None:
        end = getattr(self.items, "_shutdown_workers", None)
        if end is None:  # there are no workers
            return
        for queue in (self.items._worker_result_queue, *self.items._index_queues):
            queue.cancel_join_thread()  # what is still in them interests nobody
        thread = threading.Thread(target=end, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter goes, and some releases of Python 3.12 start no thread then
            return
        thread.join(SECONDS_TO_END)

    def _kill(self) -> None:
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
        for worker in self.workers:
            worker.join(_SECONDS_TO_DIE)


class _Positions:
    """Every position from ``first`` on."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


def _shared(item: Any) -> Any:
    """Moved to shared memory by the worker itself.

    Otherwise the thread that sends it does so, which prints an error and goes on when there is no memory, while the
    main process waits for a batch that never comes.
    """
    if get_worker_info() is None or isinstance(item, Unreadable):
        return item
    try:
        return item.share_memory()
    except RuntimeError as error:
        return Unreadable(f"no shared memory left for pictures that are read ahead; {_MORE_SHARED_MEMORY}: {error}")


_MORE_SHARED_MEMORY = "give the container more of it (docker run --shm-size 8g, or --ipc host), or use fewer workers"


def _leave_signals_to_the_main_process(worker: int) -> None:
    """A signal goes to the whole process group; the main process decides what it means, and needs its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _deaths_found_when_reading() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD out.

    It raises when a worker dies, in the middle of whatever the main thread is doing.  Without it the death is found
    within seconds when the next batch is wanted, which is where something can be said about it.
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _obituary(pid: int, code: int, settings: str) -> str:
    """What became of a worker, and what can be done."""
    who = f"a process that reads pictures (pid {pid})"
    if code == -signal.SIGKILL:
        return (f"{who} was killed, most likely by the system because memory ran out; lower {settings}, or give the job"
                " more memory")  # fmt: skip
    if code == -signal.SIGBUS:
        return f"{who} found no shared memory left; {_MORE_SHARED_MEMORY}"
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{who} {how}; with --max_data_loader_n_workers 0 the main process reads, and shows where it happens"
