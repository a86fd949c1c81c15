"""Memory of an optimizer: its state, and what a step allocates for a while, measured on one tensor of each shape.

A step on the meta device is enough for most optimizers.  Those that read values take a real one, a shape at a time.
The state of 8-bit optimizers, whose steps need a GPU, follows from the sizes of the weights.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..config.schema_optim import OptimConfig
from ..errors import UserError
from ..optim.optimizers import ParamGroup, build_optimizer, resolve_optimizer
from ..optim.stochastic_rounding import MAX_ELEMENTS
from ..optim.validate_optimizer import is_divisible
from ..parallel.trained_block_swap import is_large_state
from ..problems import Problem
from .meta_memory_meter import MemoryMeter

BITSANDBYTES_STATES = {"Adam": 2, "AdamW": 2, "Lion": 1, "SGD": 1}
"""Moments of each weight, by the start of the optimizer's name."""
MIN_8BIT_SIZE, QUANTIZATION_BLOCK = 4096, 256
"""bitsandbytes keeps the state of smaller weights in float32, and has a float32 scale for each block of larger ones."""


ROUNDING_BYTES = 24
"""Bytes for each element of a weight while it is rounded: positions, random bits, and copies of both."""


WeightKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a weight."""


def count_kinds(weights: Iterable[Tensor]) -> Counter[WeightKind]:
    """Count the weights of each kind."""
    return Counter((tuple(each.shape), each.dtype) for each in weights)


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes that an optimizer needs for all trained weights of a run."""

    state: int
    temporaries: int = 0
    """The most that a step over all weights allocates."""
    largest_temporary: int = 0
    """The most that a step over one weight allocates."""
    is_foreach: bool = False
    """Whether a step allocates for all its weights at once."""
    elements: int = 0
    """Elements of all weights, where they are rounded stochastically."""
    largest: int = 0
    """Elements of the largest of them."""
    is_divisible: bool = True
    """Whether few weights are held in float32 at once; an optimizer of one step size for all needs all of them."""
    large_state: Mapping[WeightKind, int] = field(default_factory=dict)
    """Bytes of the state of a weight of each kind that block swap keeps in host memory."""

    def count_large_state(self, counts: Mapping[WeightKind, int]) -> int:
        """Count the state of so many weights of each kind that block swap keeps in host memory."""
        return sum(count * self.large_state[kind] for kind, count in counts.items())

    def count_temporaries(self, share: float = 1.0) -> int:
        """Count what a step over a share of the weights allocates."""
        if not self.elements:
            return self._count_own(share)
        held = max(self.largest, round(share * self.elements))
        if self.is_divisible:
            held = min(max(MAX_ELEMENTS, self.largest), held)
        copies = round(held * (8 + self.state / self.elements))  # weights and gradients in float32, and the moments
        return copies + max(2 * self._count_own(held / self.elements), ROUNDING_BYTES * self.largest)

    def _count_own(self, share: float) -> int:
        """Count what the optimizer itself allocates."""
        if not self.is_foreach:
            return self.temporaries
        return max(self.largest_temporary, round(share * self.temporaries))


class _MeasuredSteps(NamedTuple):
    """The state of weights, what of it block swap keeps in host memory, and the most that a step allocates."""

    state: int
    large_state: int
    peak: int


def measure_optimizer(
    config: OptimConfig, groups: Sequence[ParamGroup], *, is_on_gpu: bool = True, is_rounded: bool = False
) -> OptimizerMemory:
    """Measure state and temporaries; ``is_on_gpu``: torch's optimizers update lists of tensors at once there.

    ``is_rounded``: weights are rounded stochastically, and held in float32 for that, some at a time.
    """
    found = _measure(config, groups, is_on_gpu=is_on_gpu)
    sizes = [each.numel() for group in groups for each in group.parameters]
    if not is_rounded:
        return found
    return replace(found, elements=sum(sizes), largest=max(sizes), is_divisible=is_divisible(config))


def _measure(config: OptimConfig, groups: Sequence[ParamGroup], *, is_on_gpu: bool) -> OptimizerMemory:
    counts = count_kinds(each for group in groups for each in group.parameters)
    name = resolve_optimizer(config.optimizer_type).import_path
    if name.startswith("bitsandbytes.optim."):
        kind = name.rpartition(".")[2]
        sizes = {key: _count_bitsandbytes_state(kind, key) for key in counts}
        # Pages of paged state move by themselves.
        large = dict.fromkeys(counts, 0) if kind.startswith("Paged") else sizes
        return OptimizerMemory(sum(count * sizes[key] for key, count in counts.items()), large_state=large)
    group = _build_optimizer(config, [torch.zeros(2, 2, dtype=dtype) for _, dtype in counts]).param_groups[0]
    is_fused, prefers_foreach = bool(group.get("fused")), is_on_gpu and group.get("foreach", False) is None
    dtype = next((dtype for _, dtype in counts if dtype != torch.float32), torch.float32)
    is_foreach = not is_fused and _allocates_for_all(config, dtype, is_foreach=prefers_foreach)
    measured = {key: _measure_shape(config, *key, is_foreach=is_foreach, is_fused=is_fused) for key in counts}
    temporaries = [0 if is_fused else each.peak for each in measured.values()]
    together = sum(count * peak for count, peak in zip(counts.values(), temporaries, strict=True))
    return OptimizerMemory(
        state=sum(count * measured[key].state for key, count in counts.items()),
        temporaries=together if is_foreach else max(temporaries),
        largest_temporary=max(temporaries),
        is_foreach=is_foreach,
        large_state={key: each.large_state for key, each in measured.items()},
    )


def _build_optimizer(config: OptimConfig, values: Sequence[Tensor]) -> Any:
    weights = [nn.Parameter(each) for each in values]
    return build_optimizer(config, [ParamGroup("weights", weights, config.learning_rate)])


def _allocates_for_all(config: OptimConfig, dtype: torch.dtype, *, is_foreach: bool) -> bool:
    """Whether a step over two weights allocates more at once than a step over one of them."""
    values = [torch.zeros(8, 8, dtype=dtype) for _ in range(2)]
    try:
        one, both = (_measure_steps(config, values[:count], is_foreach=is_foreach).peak for count in (1, 2))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return False  # the steps that are measured say what is wrong
    return 2 * both > 3 * one


def _measure_shape(
    config: OptimConfig, shape: tuple[int, ...], dtype: torch.dtype, *, is_foreach: bool, is_fused: bool
) -> _MeasuredSteps:
    """Measure the state of one weight, and its second step."""
    try:
        on_meta = [torch.ones(shape, dtype=dtype, device="meta")]
        return _measure_steps(config, on_meta, is_foreach=is_foreach, is_fused=is_fused)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError):
        pass  # it reads values, which the meta device has not
    try:
        return _measure_steps(config, [torch.ones(shape, dtype=dtype)], is_foreach=is_foreach)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            Problem(
                "optimizer_type",
                f"cannot take a step on this machine, so the size of its state is unknown ({reason})",
                value=config.optimizer_type,
            )
        ) from error


def _measure_steps(
    config: OptimConfig, values: Sequence[Tensor], *, is_foreach: bool, is_fused: bool = False
) -> _MeasuredSteps:
    """Measure the state of some weights, and their second step.

    The state of fused optimizers is measured by a step that is not fused, as the meta device has no fused kernels.
    """
    optimizer = _build_optimizer(config, values)
    if is_fused:
        optimizer.param_groups[0] |= {"fused": False, "foreach": False}
    weights: list[Any] = optimizer.param_groups[0]["params"]
    if is_foreach and "foreach" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["foreach"] = True
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    state = [each for each in tree_leaves([*optimizer.state.values()]) if isinstance(each, Tensor)]
    with MemoryMeter(values[0].device, [*weights, *(each.grad for each in weights), *state]) as meter:
        optimizer.step()
    return _MeasuredSteps(
        state=sum(each.nbytes for each in state),
        large_state=sum(each.nbytes for weight in weights for each in _list_large_state(optimizer, weight)),
        peak=meter.peak,
    )


def _list_large_state(optimizer: Any, weight: Tensor) -> list[Tensor]:
    state = [each for each in optimizer.state.get(weight, {}).values() if isinstance(each, Tensor)]
    return [each for each in state if is_large_state(each, weight)]


def _count_bitsandbytes_state(name: str, weight: WeightKind) -> int:
    """Count the moments of a weight: a byte and scales for each element of large weights, else float32."""
    kind, size = name.removeprefix("Paged"), torch.Size(weight[0]).numel()
    moments = BITSANDBYTES_STATES.get(kind.removesuffix("8bit").removesuffix("32bit"), 2)
    is_8bit = kind.endswith("8bit") and size >= MIN_8BIT_SIZE
    return moments * (size + 4 * -(-size // QUANTIZATION_BLOCK) if is_8bit else 4 * size)
