"""Streams on a CPU that find races: every operation is checked against the events that order it with others."""

from collections import Counter
from contextlib import contextmanager
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WITHOUT_ACCESS = {
    *(torch.ops.aten.detach.default, torch.ops.aten.empty_like.default, torch.ops.aten.view.default),
    *(torch.ops.aten.view.dtype, torch.ops.aten.slice.Tensor, torch.ops.aten.as_strided.default),
    *(torch.ops.aten.t.default, torch.ops.aten.transpose.int),
}
"""Operations that read and write no memory of a device."""


class Stream:
    """A queue of operations; ``known`` is how much of every stream is done before its next operation."""

    def __init__(self, device=None):
        self.known = Counter()

    def wait_stream(self, other):
        self.known |= other.known

    def wait_event(self, event):
        self.known |= event.known


class Event:
    def __init__(self):
        self.known = Counter()

    def record(self, stream):
        self.known = stream.known.copy()

    def synchronize(self):
        """The host has no queue of its own here: what it reads counts as work of the compute stream."""


class FakeStreams:
    """Replaces torch's module of a device type (``torch.cuda``)."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.computing = self.active = Stream()

    def current_stream(self, device):
        return self.computing

    @contextmanager
    def stream(self, stream):
        self.active, former = stream, self.active
        try:
            yield
        finally:
            self.active = former


class RaceDetector(TorchDispatchMode):
    """Records reads and writes of each storage, and lists those that no event orders.

    Memory belongs to the compute stream: it is reused as soon as a tensor is freed, except pinned buffers, for
    whose copies the allocator waits.
    """

    def __init__(self, streams):
        super().__init__()
        self.streams, self.races, self.copy_count = streams, [], 0
        self._accesses, self._pinned = {}, set()

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        output, stream = function(*arguments, **(kwargs or {})), self.streams.active
        if function in WITHOUT_ACCESS:
            self._find_accesses(output.untyped_storage())
            return output
        written = {id(leaf.untyped_storage()) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in tree_leaves((arguments, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        stream.known[stream] += 1
        self.copy_count += stream is not self.streams.computing
        for storage in {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values():
            accesses = self._find_accesses(storage)
            for other, time, was_written in accesses:
                if (was_written or id(storage) in written) and time > stream.known[other]:
                    self.races.append(f"{function} before an earlier operation is done")
            accesses.append((stream, stream.known[stream], id(storage) in written))
        return output

    def _find_accesses(self, storage):
        if id(storage) not in self._accesses:
            self._accesses[id(storage)] = []
            finalize(storage, self._free, id(storage))
        return self._accesses[id(storage)]

    def mark_pinned(self, tensor):
        self._pinned.add(id(tensor.untyped_storage()))
        return tensor

    def _free(self, key):
        accesses = self._accesses.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
        elif any(time > self.streams.computing.known[stream] for stream, time, _ in accesses):
            self.races.append("memory is freed before a copy is done")
