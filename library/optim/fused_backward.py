"""Fused backward pass (``--fused_backward_pass``): the optimizer updates weights within backward and frees gradients.

A hook on each weight sees its gradient when it is complete.  Some gradients are collected, so that the optimizer takes
many weights at once; then they are clipped, their weights updated, and the gradients freed.  So a step never holds the
gradients of all weights.  What needs all of them is not possible: clipping by the norm of all gradients (each is
clipped by its own norm, as in sd-scripts), and optimizers that compute one step size from all weights.

A weight is updated when no other gradient of this backward needs it any more: autograd runs its hook after all uses.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .stochastic_rounding import StochasticRounding

MAX_COLLECTED_BYTES = 64 * 2**20
COLLECTED_SHARE = 1 / 32
"""Gradients are collected up to this share of all, and at most so many bytes."""


def count_collected_bytes(sizes: Sequence[int]) -> int:
    """Count the gradients that are held at most, of weights of these sizes; backward reaches the last first."""
    limit, held, largest = min(MAX_COLLECTED_BYTES, COLLECTED_SHARE * sum(sizes)), 0, 0
    for size in reversed(sizes):
        held += size
        largest = max(largest, held)
        if held >= limit:
            held = 0
    return largest


class PartialStep:
    """Steps an optimizer for some of its weights at a time, with the result of one step for all of them.

    Counters and sums that an optimizer keeps in its groups change once per step, however many parts it has.
    """

    def __init__(self, optimizer: Optimizer, rounding: StochasticRounding | None = None, *, is_divisible: bool = True):
        """``rounding`` rounds bf16 weights, of which few are held in float32 at once if the step is divisible."""
        self._optimizer, self._rounding, self._is_divisible = optimizer, rounding, is_divisible
        self._group_of = {
            weight: index for index, group in enumerate(optimizer.param_groups) for weight in group["params"]
        }
        self._before: list[dict[str, Any]] = []
        self._after: dict[int, dict[str, Any]] = {}

    def start(self, step: int) -> None:
        """Remember the values of the groups, from which each part of the step of this number starts."""
        if self._rounding is not None:
            self._rounding.start_step(step)
        groups = self._optimizer.param_groups
        self._before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._after = {}

    def update(self, weights: Sequence[Tensor]) -> None:
        """Update these weights, which have gradients."""
        if self._rounding is None:
            self._update(weights, {})
            return
        for part in self._rounding.split(weights) if self._is_divisible else [weights]:
            with self._rounding.hold_in_float32(part) as copies:
                self._update(part, copies)

    def _update(self, weights: Sequence[Tensor], copies: Mapping[Tensor, nn.Parameter]) -> None:
        """Update these weights, or the copies of those that have one."""
        groups = self._optimizer.param_groups
        parts = dict[int, dict[str, Any]]()
        for weight in weights:
            index = self._group_of[weight]
            part = parts.setdefault(index, {"params": [], **copy.deepcopy(self._before[index])})
            part["params"].append(copies.get(weight, weight))
        try:
            self._optimizer.param_groups = list(parts.values())
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        for index, part in parts.items():  # without the copies, which are freed before the next forward
            self._after[index] = {key: value for key, value in part.items() if key != "params"}

    def finish(self) -> None:
        """Take over what the step changed in the groups."""
        for index, values in self._after.items():
            self._optimizer.param_groups[index].update(values)


class WeightPlacement:
    """Where weights, gradients that are added up, and optimizer state are between their uses; here all on the device.

    Block swap has a placement with some of them in host memory.
    """

    def call_before_leaving(self, update_collected: Callable[[], None]) -> None:
        """Call this before weights leave the device, to update those whose gradients are collected."""

    def enter(self, weight: Tensor) -> None:
        """Bring a weight to the device, if it is not there."""

    def is_complete(self, weight: Tensor) -> bool:
        """Whether no other gradient of a weight follows in this backward pass; call it once for each."""
        return True

    def keep_gradient(self, weight: Tensor) -> None:
        """Store a gradient to which others are added."""

    def restore_gradient(self, weight: Tensor) -> None:
        """Add what is stored to the last gradient."""

    def discard_gradients(self) -> None:
        """Forget stored gradients."""

    def iter_unreached(self) -> Iterator[list[Tensor]]:
        """Yield weights for which no last gradient came, on the device with their stored gradients."""
        yield from ()

    @contextmanager
    def hold_state(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> Iterator[None]:
        """Have the optimizer state of weights on the device within the context, which updates them."""
        yield


class FusedBackward:
    """Updates the weights of an optimizer in the backward pass of the last micro-batch of a step.

    Backward passes outside of a step, which try something before training, update nothing: of each gradient only the
    largest magnitude is kept.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_grad_norm: float,
        rounding: StochasticRounding | None = None,
        placement: WeightPlacement | None = None,
    ):
        """``max_grad_norm`` limits the norm of each gradient on its own; 0: no clipping."""
        self._optimizer, self._placement = optimizer, placement or WeightPlacement()
        self._partial_step, self._max_grad_norm = PartialStep(optimizer, rounding), max_grad_norm
        self._weights = weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._max_bytes = min(MAX_COLLECTED_BYTES, COLLECTED_SHARE * sum(weight.nbytes for weight in weights))
        self._action = self._discard
        self._collected: list[Tensor] = []
        self._num_collected_bytes = 0
        self._norms: list[Tensor] = []
        self._trial_magnitudes: dict[Tensor, Tensor] = {}
        self._is_finite = True
        self.num_updated = 0
        """The number of weights that the step has updated."""
        self.is_updating = False
        """Whether a step has begun to update weights and not updated all of them, so that they are those of no step."""
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._handle_gradient)
        self._placement.call_before_leaving(self._update_collected)

    def start_step(self, step: int) -> None:
        """Begin the step of this number; call it before its first backward."""
        self._partial_step.start(step)
        self._placement.discard_gradients()
        self._collected, self._num_collected_bytes = [], 0
        self._norms, self._is_finite, self.num_updated, self.is_updating = [], True, 0, False

    @contextmanager
    def run_micro_batch(self, loss: Tensor, *, is_last: bool) -> Iterator[None]:
        """Add up gradients in backwards within the context, or update weights if this is the last micro-batch.

        A step with a loss that is NaN or Inf updates nothing; this waits for the device.
        """
        self._is_finite &= bool(loss.detach().isfinite().all())
        self._action = self._collect if is_last else self._keep
        try:
            yield
            if is_last:  # the last micro-batch may not reach all weights that others reached
                seen = {*self._collected}
                left = (weight for weight in self._weights if weight.grad is not None and weight not in seen)
                self._collected += left
            self._update_collected()
            for weights in self._placement.iter_unreached() if is_last else ():
                self._collected += weights
                self._update_collected()
        finally:
            self._action = self._discard
        if is_last:
            self._partial_step.finish()
            self.is_updating = not self._is_finite and self.num_updated > 0

    def compute_grad_norm(self) -> Tensor:
        """Compute the norm of the gradients of the step just done, before clipping."""
        if not self._norms:
            return torch.zeros(())
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in self._norms]))
        return norm

    def pop_trial_gradients(self) -> dict[Tensor, Tensor]:
        """Return the largest magnitude in the gradient of each weight in backwards outside of steps, and forget it."""
        found, self._trial_magnitudes = self._trial_magnitudes, {}
        return found

    def _handle_gradient(self, weight: Tensor) -> None:
        self._action(weight)

    def _keep(self, weight: Tensor) -> None:
        """Leave the gradient, to which those of the next micro-batches are added."""
        self._placement.keep_gradient(weight)

    def _discard(self, weight: Tensor) -> None:
        assert weight.grad is not None
        magnitude, known = weight.grad.abs().max(), self._trial_magnitudes.get(weight)
        self._trial_magnitudes[weight] = magnitude if known is None else torch.maximum(known, magnitude)
        weight.grad = None

    def _collect(self, weight: Tensor) -> None:
        if not self._placement.is_complete(weight):
            self._placement.keep_gradient(weight)
            return
        self._placement.enter(weight)
        self._placement.restore_gradient(weight)
        self._collected.append(weight)
        self._num_collected_bytes += weight.nbytes
        if self._num_collected_bytes >= self._max_bytes:
            self._update_collected()

    @torch.no_grad()
    def _update_collected(self) -> None:
        """Clip the collected gradients, update their weights, and free the gradients.

        From the first gradient on that is NaN or Inf nothing more is updated in this step.  This waits for the device.
        """
        weights, self._collected, self._num_collected_bytes = self._collected, [], 0
        if not weights:
            return
        norms = [self._clip(weight) for weight in weights]
        self._norms += norms
        self._is_finite = self._is_finite and bool(torch.stack(norms).isfinite().all())
        if self._is_finite:
            self.is_updating = True
            with self._placement.hold_state(self._optimizer, weights):
                self._partial_step.update(weights)
            self.num_updated += len(weights)
        for weight in weights:
            weight.grad = None

    def _clip(self, weight: Tensor) -> Tensor:
        """Clip a gradient by its own norm; return the norm before clipping."""
        assert weight.grad is not None
        if self._max_grad_norm:
            return nn.utils.clip_grad_norm_([weight], self._max_grad_norm)
        norm: Tensor = torch.linalg.vector_norm(weight.grad)
        return norm
