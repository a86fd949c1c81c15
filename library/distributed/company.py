"""The processes of a run and what they tell each other."""

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from ..errors import Stopped, UserError
from .backend import can_leave_alone, wait_equally_long
from .board import Board
from .meeting import exchange_seconds
from .roll_call import Word, refuse
from .tracker_pictures import hand_over
from .turns import first_here

logger = logging.getLogger(__name__)

SECONDS_TO_LET_GO = 0.2
SECONDS_BETWEEN_LOOKS = 0.1
T = TypeVar("T")
Item = TypeVar("Item")


def let_go_of_messages() -> None:
    """Give the threads that carry messages the time to drop the last one; call it before the process group ends.

    A gloo thread needs Python's lock to drop a message that holds a tensor, and the end of the group waits for the
    thread while it holds that lock: a process that ends too soon after its last message can wait forever.
    """
    time.sleep(SECONDS_TO_LET_GO)


class Company:
    """This process and the others."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank = accelerator.process_index
        self.size = accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.hosts: list[str] = gather_object([socket.gethostname()]) if self.size > 1 else [socket.gethostname()]
        """The names of the machines, by rank."""

    def have_patience(self) -> None:
        """In all groups that there are now."""
        settings = self.accelerator.init_handler
        if settings is not None and settings.timeout is not None and self.size > 1:
            wait_equally_long(settings.timeout)

    def on_main(self, work: Callable[[], None]) -> None:
        """Do something on one process while the others wait; when it fails there, it fails on all."""
        self.from_main(work)

    def from_main(self, work: Callable[[], T]) -> T:
        """The same, and what came out of it, on all."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        broadcast_object_list(outcome)
        result, failure = outcome
        if failure is None:
            return cast(T, result)
        if isinstance(failure, UserError):
            failure.is_told = not self.is_main
        raise failure

    def total(self, count: int) -> int:
        """The sum over all processes; with several of them it waits for the device."""
        if self.size == 1:
            return count
        return int(self.accelerator.reduce(torch.tensor(count, device=self.device), reduction="sum"))

    def from_all(self, items: Sequence[Item]) -> list[Item]:
        """The items of all processes in the order of ranks, on each of them."""
        everything: list[Item] = gather_object(list(items))
        return everything

    def board(self, topic: str) -> Board:
        """For processes that work for long and do not wait in a collective."""
        return Board(topic)

    def happens_to_all(self, what: str, seconds: float) -> bool:
        """Whether every process comes to ask this within so many seconds; no collective, for some may wait in one."""
        board, deadline = self.board("happens to all"), time.monotonic() + seconds
        count = board.add(what, 1)
        while count < self.size and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            count = board.count(what)
        return bool(count >= self.size)

    def gather(self, value: T) -> list[T]:
        """What every process has, by rank, on every process; all call it, and soon after each other."""
        values: list[T] = gather_object([value])
        return values

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Stop all processes, if these are not the same on all of them; the message names those that differ."""
        if self.size > 1:
            words = zip(self.hosts, self.gather(dict(facts)), strict=True)
            refuse([Word(host, says) for host, says in words], self.rank)

    def tell_exchange(self, size: int) -> None:
        """Try how long so many bytes of gradients are on their way, and say it, because it is a part of each step."""
        if self.size > 1:
            seconds = exchange_seconds(size // 4, self.device)
            logger.info("gradients: %.3g MB between %d processes in each step take %.2g s (%.3g MB/s) when nothing else"
                        " is done", size / 1e6, self.size, seconds, size / 1e6 / seconds)  # fmt: skip

    def first_on_each_machine(self, work: Callable[[], T]) -> T:
        """Long work that leaves something on disk: by one process of each machine, then by the others."""
        if self.size == 1:
            return work()
        return first_here(work, self.accelerator.is_local_main_process, self.gather)

    def start_trackers(self, project: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
        """Open the trackers that ``prepare_accelerator`` chose, on the main process."""
        self.on_main(lambda: self._start_trackers(project, settings, arguments))

    def _start_trackers(self, project: str, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
        try:
            self.accelerator.init_trackers(project, config=settings, init_kwargs=arguments)
        except Exception as error:  # each tracker has its own kinds
            raise UserError(f"--log_with: the tracker could not start: {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        """Wait for all, and close the trackers."""
        self.accelerator.wait_for_everyone()
        let_go_of_messages()
        try:
            self.accelerator.end_training()
        except Exception as error:  # all is done and written by now
            logger.warning("a tracker could not be closed: %s", error)

    @contextmanager
    def until_left(self) -> Iterator[None]:
        """Behind the inside, whatever happens there, this process leaves the others."""
        try:
            yield
        except Stopped:  # all of them, after the same step
            self.leave()
            raise
        except BaseException:
            self.leave(is_well=False)
            raise
        self.leave()

    def leave(self, *, is_well: bool = True) -> None:
        """Leave the process group; where all is not well, the others may be waiting for this process.

        They learn of it when its connections close.  With a backend that would wait for them, that is when it ends.
        """
        let_go_of_messages()
        if is_well or can_leave_alone():
            self.accelerator.state.destroy_process_group()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Hand figures to the trackers."""
        self.accelerator.log(values, step=step)

    @property
    def is_tracked(self) -> bool:
        """Whether there are trackers; they run on the main process, and all processes know."""
        return bool(self.accelerator.log_with)

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """Hand pictures, as PNG files, to the trackers."""
        for tracker in self.accelerator.trackers:
            hand_over(tracker, pictures, step)

    def gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, one after the other; all have the same shape."""
        everything: Tensor = self.accelerator.gather(tensor)
        return everything

    def measured(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same for several tensors that an evaluation made."""
        everything: tuple[Tensor, ...] = self.accelerator.gather_for_metrics(tensors)
        return everything
