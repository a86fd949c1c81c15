"""Copies of tensors in host memory, made without making anybody wait."""

from typing import Any

import torch


class HostCopy:
    """A nest of dicts, lists and tensors as it was; on an accelerator its memory there is not touched.

    Copies go to pinned memory in the order of the device's own work, so the program does not wait for them; the
    buffers are kept from one copy to the next.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self._devices = set[torch.device]()

    def take(self, tree: Any) -> None:
        """Copy ``tree`` as it is now in the device's order of work."""
        self._copy = _copied(tree, self._copy)
        self._devices = _devices_in(tree)

    def give(self) -> Any:
        """The copy; wait until it is complete.  What is inside belongs to this object."""
        for device in self._devices:  # by name, for each thread has its own current device
            torch.accelerator.synchronize(device)
        return self._copy


def _devices_in(tree: Any) -> set[torch.device]:
    """Where tensors are, but for the host, which is never waited for."""
    if isinstance(tree, torch.Tensor):
        return set() if tree.device.type == "cpu" else {tree.device}
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return {device for value in inside for device in _devices_in(value)}


def _copied(tree: Any, old: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        fits = isinstance(old, torch.Tensor) and old.shape == tree.shape and old.dtype == tree.dtype
        with torch.no_grad():
            target = old if fits else torch.empty_like(tree, device="cpu", pin_memory=tree.device.type == "cuda")
            return target.copy_(tree.detach(), non_blocking=True)
    if isinstance(tree, dict):
        before = old if isinstance(old, dict) else {}
        return {key: _copied(value, before.get(key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        olds = old if isinstance(old, (list, tuple)) and len(old) == len(tree) else [None] * len(tree)
        return type(tree)(_copied(value, before) for value, before in zip(tree, olds, strict=True))
    return tree


class LateWord:
    """One number on its way from the device; whoever reads it waits for what the device did until then, no more."""

    def __init__(self, number: torch.Tensor):
        self._event = None
        self._copy = number.detach()
        if number.device.type != "cpu":
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(self._copy, non_blocking=True)
            self._event = torch.Event(number.device)
            self._event.record()

    def read(self) -> float:
        """The number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy)
