"""The processes of a run and what they tell each other."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..errors import RunInterrupted, UserError
from .config_agreement import RankReport, check_rank_reports
from .process_group import KeyValueStore, can_destroy_group_alone, drain_gloo_threads, set_group_timeouts
from .rendezvous import measure_all_reduce_seconds
from .trackers import log_images_to_tracker

logger = logging.getLogger(__name__)


EVENT_POLL_SECONDS = 0.1


T = TypeVar("T")


Item = TypeVar("Item")


class Communicator:
    """This process and the others."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.world_size = accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.hostnames: list[str] = (
            gather_object([socket.gethostname()]) if self.world_size > 1 else [socket.gethostname()]
        )
        """The names of the machines, by rank."""

    def set_group_timeouts(self) -> None:
        """In all groups that there are now."""
        settings = self.accelerator.init_handler
        if settings is not None and settings.timeout is not None and self.world_size > 1:
            set_group_timeouts(settings.timeout)

    def run_on_main(self, function: Callable[[], None]) -> None:
        """Do something on one process while the others wait; when it fails there, it fails on all."""
        self.run_on_main_and_broadcast(function)

    def run_on_main_and_broadcast(self, function: Callable[[], T]) -> T:
        """The same, and what came out of it, on all."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        broadcast_object_list(outcome)
        result, failure = outcome
        if failure is None:
            return cast(T, result)
        if isinstance(failure, UserError):
            failure.is_reported = not self.is_main
        raise failure

    def all_reduce_sum(self, count: int) -> int:
        """The sum over all processes; with several of them it waits for the device."""
        if self.world_size == 1:
            return count
        return int(self.accelerator.reduce(torch.tensor(count, device=self.device), reduction="sum"))

    def all_gather_list(self, items: Sequence[Item]) -> list[Item]:
        """The items of all processes in the order of ranks, on each of them."""
        everything: list[Item] = gather_object(list(items))
        return everything

    def open_key_value_store(self, prefix: str) -> KeyValueStore:
        """For processes that work for long and do not wait in a collective."""
        return KeyValueStore(prefix)

    def all_ranks_reached(self, event: str, timeout: float) -> bool:
        """Whether every process comes to ask this within so many seconds; no collective, for some may wait in one."""
        board, deadline = self.open_key_value_store("happens to all"), time.monotonic() + timeout
        count = board.add(event, 1)
        while count < self.world_size and time.monotonic() < deadline:
            time.sleep(EVENT_POLL_SECONDS)
            count = board.read_counter(event)
        return bool(count >= self.world_size)

    def all_gather_object(self, value: T) -> list[T]:
        """What every process has, by rank, on every process; all call it, and soon after each other."""
        values: list[T] = gather_object([value])
        return values

    def assert_equal_across_ranks(self, values: Mapping[str, Any]) -> None:
        """Stop all processes, if these are not the same on all of them; the message names those that differ."""
        if self.world_size > 1:
            words = zip(self.hostnames, self.all_gather_object(dict(values)), strict=True)
            check_rank_reports([RankReport(host, says) for host, says in words], self.rank)

    def log_all_reduce_time(self, num_bytes: int) -> None:
        """Try how long so many bytes of gradients are on their way, and say it, because it is a part of each step."""
        if self.world_size > 1:
            seconds = measure_all_reduce_seconds(num_bytes // 4, self.device)
            logger.info(
                "gradients: %.3g MB between %d processes in each step take %.2g s (%.3g MB/s) when nothing else"
                " is done",
                num_bytes / 1e6,
                self.world_size,
                seconds,
                num_bytes / 1e6 / seconds,
            )

    def run_local_main_first(self, function: Callable[[], T]) -> T:
        """Long work that leaves something on disk: by one process of each machine, then by the others."""
        if self.world_size == 1:
            return function()
        return run_local_first(function, self.accelerator.is_local_main_process, self.all_gather_object)

    def init_trackers(self, project: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
        """Open the trackers that ``prepare_accelerator`` chose, on the main process."""
        self.run_on_main(lambda: self._init_trackers(project, settings, arguments))

    def _init_trackers(self, project: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
        try:
            self.accelerator.init_trackers(project, config=settings, init_kwargs=arguments)
        except Exception as error:  # each tracker has its own kinds
            raise UserError(f"--log_with: the tracker could not start: {type(error).__name__}: {error}") from error

    def end_training(self) -> None:
        """Wait for all, and close the trackers."""
        self.accelerator.wait_for_everyone()
        drain_gloo_threads()
        try:
            self.accelerator.end_training()
        except Exception as error:  # all is done and written by now
            logger.warning("a tracker could not be closed: %s", error)

    @contextmanager
    def process_group_scope(self) -> Iterator[None]:
        """Behind the inside, whatever happens there, this process leaves the others."""
        try:
            yield
        except RunInterrupted:  # all of them, after the same step
            self.destroy_process_group()
            raise
        except BaseException:
            self.destroy_process_group(graceful=False)
            raise
        self.destroy_process_group()

    def destroy_process_group(self, *, graceful: bool = True) -> None:
        """Leave the process group; where all is not well, the others may be waiting for this process.

        They learn of it when its connections close.  With a backend that would wait for them, that is when it ends.
        """
        drain_gloo_threads()
        if graceful or can_destroy_group_alone():
            self.accelerator.state.destroy_process_group()

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Hand figures to the trackers."""
        self.accelerator.log(values, step=step)

    @property
    def has_trackers(self) -> bool:
        """Whether there are trackers; they run on the main process, and all processes know."""
        return bool(self.accelerator.log_with)

    def log_images(self, pictures: Mapping[str, bytes], step: int) -> None:
        """Hand pictures, as PNG files, to the trackers."""
        for tracker in self.accelerator.trackers:
            log_images_to_tracker(tracker, pictures, step)

    def all_gather_tensor(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, one after the other; all have the same shape."""
        everything: Tensor = self.accelerator.gather(tensor)
        return everything

    def gather_for_metrics(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same for several tensors that an evaluation made."""
        everything: tuple[Tensor, ...] = self.accelerator.gather_for_metrics(tensors)
        return everything


HEARTBEAT_SECONDS = 2.0


WorkStatus = BaseException | str | None
"""What went wrong, ``WORKING``, or nothing any more."""


WORKING = "working"


def run_local_first(function: Callable[[], T], is_first: bool, gather: Callable[[WorkStatus], list[WorkStatus]]) -> T:
    """``work()`` on processes that are first, then on the others; when it fails on one, it fails on all.

    ``gather`` brings together what every process has to say, and all have to call it equally often.
    """
    task = _BackgroundTask(function) if is_first else None
    while True:
        signs = gather(task.poll_status() if task is not None else None)
        if WORKING not in signs:
            break
    if task is not None and task.failure is not None:
        raise task.failure
    for sign in signs:
        if isinstance(sign, BaseException):
            if isinstance(sign, UserError):
                sign.is_reported = True  # by the process that hit it
            raise sign
    return task.get_result() if task is not None else function()


class _BackgroundTask(Generic[T]):
    """Work in a thread of its own, while the main thread talks to the other processes."""

    def __init__(self, function: Callable[[], T]):
        self.work = function
        self.failure: BaseException | None = None
        self.results: list[T] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self.work())
        except BaseException as error:
            self.failure = error

    def poll_status(self) -> Any:
        """How it stands, after a little time."""
        self.thread.join(HEARTBEAT_SECONDS)
        return WORKING if self.thread.is_alive() else self.failure

    def get_result(self) -> T:
        return self.results[0]
