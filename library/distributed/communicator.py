"""Communication between the ranks of a run: ``Communicator`` over accelerate's and torch.distributed's collectives."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..errors import RunInterrupted, UserError
from .config_agreement import RankReport, check_rank_reports
from .process_group import KeyValueStore, can_destroy_group_alone, drain_gloo_threads, set_group_timeouts
from .rendezvous import measure_all_reduce_seconds

logger = logging.getLogger(__name__)
STORE_POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 2.0
T = TypeVar("T")


class Communicator:
    """The connection of this rank to the others.

    Every method is a collective unless its docstring says otherwise: all ranks have to call it, in the same order.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.world_size = accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.hostnames = self.all_gather_object(socket.gethostname())
        """The name of the host that each rank runs on."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather_object(None)

    def run_on_main(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the main process while the others wait; an exception there is raised on all ranks."""
        self.run_on_main_and_broadcast(function)

    def run_on_main_and_broadcast(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the main process; return its result, or raise its exception, on all ranks."""
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

    def load_on_main_and_broadcast(self, load: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Load tensors to host memory on the main process, and send them to the others one at a time.

        Of the device memory, and of the host memory beside the result, it needs that of one tensor.
        """
        loaded = dict[str, Tensor]()

        def load_and_describe() -> list[tuple[str, torch.dtype, torch.Size]]:
            loaded.update(load())
            return [(name, tensor.dtype, tensor.shape) for name, tensor in loaded.items()]

        described = self.run_on_main_and_broadcast(load_and_describe)
        if self.world_size == 1:
            return loaded
        for name, dtype, shape in described:
            if self.is_main:
                values = loaded[name].contiguous().reshape(-1).view(torch.uint8).to(self.device)
            else:
                loaded[name] = torch.empty(shape, dtype=dtype)
                values = torch.empty(loaded[name].nbytes, dtype=torch.uint8, device=self.device)
            if values.numel():
                dist.broadcast(values, 0)
            if not self.is_main:
                loaded[name].reshape(-1).view(torch.uint8).copy_(values)
        return loaded

    def run_local_main_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the local main process of each machine, then on its other processes.

        For long work that leaves files on disk.  The waiting ranks poll, so it may take longer than the timeout of the
        process group.  An exception on one rank is raised on all.
        """
        if self.world_size == 1:
            return function()
        work = _BackgroundWork(function) if self.accelerator.is_local_main_process else None
        while True:
            statuses = self.all_gather_object(work.poll() if work is not None else None)
            if _RUNNING not in statuses:
                break
        if work is not None and work.error is not None:
            raise work.error
        for error in statuses:
            if isinstance(error, BaseException):
                if isinstance(error, UserError):
                    error.is_reported = True  # the rank that raised it reports it
                raise error
        return work.results[0] if work is not None else function()

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        values: list[T] = gather_object([value])
        return values

    def all_gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated; they have the same shape."""
        tensors: Tensor = self.accelerator.gather(tensor)
        return tensors

    def all_reduce_sum(self, count: int) -> int:
        """Sum an integer over all ranks; with several ranks it waits for the device."""
        if self.world_size == 1:
            return count
        return int(self.accelerator.reduce(torch.tensor(count, device=self.device), reduction="sum"))

    def assert_equal_across_ranks(self, values: Mapping[str, Any]) -> None:
        """Raise on all ranks if ``values`` differ between them; the message names keys and ranks that differ."""
        if self.world_size > 1:
            by_rank = zip(self.hostnames, self.all_gather_object(dict(values)), strict=True)
            check_rank_reports([RankReport(hostname, values) for hostname, values in by_rank], self.rank)

    def open_key_value_store(self, prefix: str) -> KeyValueStore:
        """Open a store that all ranks share; not a collective, for ranks at different points of their work."""
        return KeyValueStore(prefix)

    def all_ranks_reached(self, event: str, timeout: float) -> bool:
        """Return whether every rank calls this within ``timeout`` seconds; not a collective: ranks may hang in one."""
        store, deadline = self.open_key_value_store("events"), time.monotonic() + timeout
        count = store.add(event, 1)
        while count < self.world_size and time.monotonic() < deadline:
            time.sleep(STORE_POLL_SECONDS)
            count = store.read_counter(event)
        return bool(count >= self.world_size)

    def log_all_reduce_time(self, num_bytes: int) -> None:
        """Measure and log how long an all-reduce of ``num_bytes`` of gradients takes, since every step contains one."""
        if self.world_size > 1:
            num_bytes = max(self.all_gather_object(num_bytes))  # shards of tensor parallelism may be uneven
            seconds = measure_all_reduce_seconds(num_bytes // 4, self.device)
            logger.info("gradient all-reduce: %.3g MB per step, about %.3g ms", num_bytes / 1e6, seconds * 1e3)

    def set_group_timeouts(self) -> None:
        """Give every process group that exists now the timeout of the default group (``--ddp_timeout``)."""
        handler = self.accelerator.init_handler
        if handler is not None and handler.timeout is not None and self.world_size > 1:
            set_group_timeouts(handler.timeout)

    @contextmanager
    def process_group_scope(self) -> Iterator[None]:
        """Destroy the process group on leaving, however the block exits."""
        try:
            yield
        except RunInterrupted:  # raised on all ranks after the same step
            self.destroy_process_group()
            raise
        except BaseException:
            self.destroy_process_group(graceful=False)
            raise
        self.destroy_process_group()

    def destroy_process_group(self, *, graceful: bool = True) -> None:
        """Destroy the process group; unless ``graceful``, other ranks may be waiting for this one in a collective.

        They get an error when its connections close.  A backend whose teardown would wait for them closes its
        connections when the process ends.
        """
        drain_gloo_threads()
        if graceful or can_destroy_group_alone():
            self.accelerator.state.destroy_process_group()


_RUNNING = "running"


class _BackgroundWork(Generic[T]):
    """A function that runs in a thread, while the main thread exchanges its status with the other ranks."""

    def __init__(self, function: Callable[[], T]):
        self.function = function
        self.error: BaseException | None = None
        self.results: list[T] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self.function())
        except BaseException as error:
            self.error = error

    def poll(self) -> BaseException | str | None:
        """Wait a little; return that it runs, its error, or ``None`` when it is done."""
        self.thread.join(HEARTBEAT_SECONDS)
        return _RUNNING if self.thread.is_alive() else self.error
