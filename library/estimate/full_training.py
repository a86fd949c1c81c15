"""Peak memory of full training (``--train full``): weights, gradients and optimizer state are as large as the model.

So it matters when gradients exist: in a step without accumulation they grow during backward, while activations are
freed, and are whole when the optimizer steps.  A fused backward pass never holds more than some of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..distributed.deepspeed_settings import DeepSpeedSettings
from ..distributed.fsdp_settings import FSDPSettings
from ..parallel.deepspeed.engine import FULL_BUCKET_SIZE
from ..parallel.fsdp import find_fsdp_blocks
from ..parallel.gradient_sync import MAX_FLAT_ELEMENTS
from .meta_run import MetaRun
from .optimizer_memory import OptimizerMemory
from .parallel_layouts import ParallelLayout
from .step_memory import StepMemory

ZERO_DEFAULTS = {"stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 1_000_000_000}
"""DeepSpeed's defaults, in elements."""
ZERO_BUCKET_SIZE = 500_000_000
"""DeepSpeed's default of ``reduce_bucket_size`` at stages 1 and 2."""


@dataclass(frozen=True)
class FullBytes:
    """What full training needs on one device besides frozen weights."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int = 0
    buffers: int = 0


def estimate_full_training(layout: ParallelLayout, run: MetaRun, optimizer: OptimizerMemory) -> FullBytes:
    """Estimate the device that needs most; all devices of a layout of full training hold as much."""
    step, weights = run.step.total, run.trainable_bytes
    if layout.sharding is not None:
        return _estimate_fsdp(layout, run, optimizer, layout.sharding)
    if layout.zero is not None:
        return _estimate_zero(layout, run, optimizer, layout.zero)
    accumulates = layout.config.train.gradient_accumulation_steps > 1
    if layout.config.full.fused_backward_pass and (not accumulates or run.stored.swapped_bytes):
        return _estimate_fused(run, optimizer, accumulates=accumulates)
    is_ddp = layout.dims.dp > 1 and layout.dims.model_parallel_size == 1
    has_bucket_view = is_ddp and layout.config.distributed.ddp_gradient_as_bucket_view
    after_backward = optimizer.count_temporaries()
    if layout.dims.model_parallel_size > 1:  # gradients are copied into flat tensors for their all-reduce
        after_backward = max(after_backward, count_flat_bytes(run, weights))
    has_gradients = accumulates or has_bucket_view
    peak = _find_peak(step, weights, after_backward, run.encoding_peak, has_gradients=has_gradients)
    buffers = weights if is_ddp and not has_bucket_view else 0
    return FullBytes(weights, weights, optimizer.state, peak - weights, buffers=buffers)


def _estimate_fused(run: MetaRun, optimizer: OptimizerMemory, *, accumulates: bool) -> FullBytes:
    """Estimate a fused backward pass, which collects some gradients; weights of swapped blocks are in host memory.

    So are their large state, which is on the device while its weight is updated, and the gradients that accumulate.
    """
    stored, collected = run.stored, run.collected_bytes
    share, temporaries = collected / run.trainable_bytes, 0
    if stored.swapped_bytes:
        temporaries = round(share * optimizer.count_large_state(run.trainable_kinds))
    temporaries += optimizer.count_temporaries(share)
    weights = run.trainable_bytes - stored.swapped_bytes
    return FullBytes(
        weights=weights,
        gradients=collected + (weights if accumulates else 0),
        optimizer=optimizer.state - optimizer.count_large_state(stored.swapped_kinds),
        activations=max(run.step.total.peak + temporaries, run.encoding_peak),
        gathered=stored.offloaded.device_bytes,
    )


def count_flat_bytes(run: MetaRun, gradients: int) -> int:
    """Count the bytes of the tensor into which gradients are copied for an all-reduce."""
    return min(gradients, MAX_FLAT_ELEMENTS * run.trainable_bytes // run.trainable_elements)


def _find_peak(
    step: StepMemory, gradients: int, after_backward: int, encoding_peak: int, *, has_gradients: bool
) -> int:
    """Find the peak of gradients and of what is allocated for a while: in encoding, the step, or after backward."""
    if has_gradients:
        return gradients + max(step.peak, encoding_peak, after_backward)
    return max(step.peak_with_gradients, encoding_peak, gradients + after_backward)


def _estimate_fsdp(
    layout: ParallelLayout, run: MetaRun, optimizer: OptimizerMemory, sharding: FSDPSettings
) -> FullBytes:
    """Shards of everything; of a block, whole weights and gradients while it computes, and those outside of blocks."""
    step, ranks = run.step.total, sharding.dp_shard
    weights = _count_shards(run.trainable, ranks)
    share = weights / run.trainable_bytes
    blocks, outside = list[int](), 0
    for part in run.trained.children():
        sizes, rest = _count_unit_bytes(part, sharding.block_classes)
        blocks, outside = blocks + sizes, outside + rest
    largest = max(blocks, default=0)
    gathered = outside + (2 * largest if sharding.reshard_after_forward else sum(blocks))
    reduced = 2 * max(largest, outside)  # the gradients of a unit, and the buffer in which they are reduced
    growth = round(share * max(0, step.peak_with_gradients - step.peak))
    accumulates = layout.config.train.gradient_accumulation_steps > 1
    body = max(step.forward_peak, step.saved + step.backward_peak + reduced) + (weights if accumulates else growth)
    peak = max(body, run.encoding_peak, weights + optimizer.count_temporaries(share))
    if sharding.offload_params:
        return FullBytes(0, 0, 0, max(step.peak + reduced, run.encoding_peak), gathered)
    state = round(share * optimizer.state)
    return FullBytes(weights, weights, state, max(0, peak - weights), gathered)


def _count_shards(tensors: Iterable[Tensor], ranks: int) -> int:
    """Count the bytes of rows, which are sharded with padding."""
    return sum(-(-each.shape[0] // ranks) * (each.nbytes // each.shape[0]) for each in tensors)


def _count_unit_bytes(part: nn.Module, block_classes: Sequence[str]) -> tuple[list[int], int]:
    """Count the trained bytes of each unit that FSDP gathers at once, and of what is outside of blocks."""
    counted, sizes = set[Tensor](), list[int]()
    for block in find_fsdp_blocks(part, block_classes):  # inner blocks first
        own = {each for each in block.parameters() if each.requires_grad} - counted
        counted |= own
        sizes.append(sum(each.nbytes for each in own))
    outside = sum(each.nbytes for each in part.parameters() if each.requires_grad) - sum(sizes)
    return sizes, outside


def _estimate_zero(
    layout: ParallelLayout, run: MetaRun, optimizer: OptimizerMemory, zero: DeepSpeedSettings
) -> FullBytes:
    """Shards of optimizer state and gradients, at stage 3 of weights as well; DeepSpeed allocates its buckets whole."""
    ranks, weights, elements = layout.world_size, run.trainable_bytes, run.trainable_elements
    shard = -(-weights // ranks)
    is_offloaded = zero.offload_optimizer_device is not None
    state = 0 if is_offloaded else -(-optimizer.state // ranks) + (shard if zero.stage < 3 else 0)  # master weights
    temporaries = 0 if is_offloaded else -(-optimizer.temporaries // ranks)
    gradients = 0 if is_offloaded else shard
    activations = max(run.step.total.peak, run.encoding_peak, temporaries)
    if zero.stage < 3:
        return FullBytes(weights, gradients, state, activations, buffers=count_zero_buckets(zero, ZERO_BUCKET_SIZE))
    whole, gathered = shard_by_zero3(run.trainable, weights, zero, ranks)
    buckets = count_zero_buckets(zero, min(elements, FULL_BUCKET_SIZE))
    return FullBytes(whole, gradients, state, activations, gathered=gathered, buffers=buckets)


def shard_by_zero3(tensors: Sequence[Tensor], num_bytes: int, zero: DeepSpeedSettings, ranks: int) -> tuple[int, int]:
    """Count sharded and gathered bytes: small tensors stay replicated, gathered ones stay live up to a limit.

    ``num_bytes`` are those of the tensors and of whatever else each rank holds.
    """
    limits: dict[str, Any] = {**ZERO_DEFAULTS, **zero.passthrough_config.get("zero_optimization", {})}
    threshold, max_live = (int(limits[name]) for name in ZERO_DEFAULTS)
    large = [each for each in tensors if each.numel() > threshold]
    shards = sum(-(-each.numel() // ranks) * each.element_size() for each in tensors)
    replicated = num_bytes - sum(each.nbytes for each in large)
    live = min(sum(each.nbytes for each in large), max_live * max((each.element_size() for each in large), default=0))
    return replicated + (0 if zero.offload_param_device else shards), live


def count_zero_buckets(zero: DeepSpeedSettings, elements: int) -> int:
    """Count DeepSpeed's gradient buckets, which it allocates in full however few gradients there are."""
    settings: dict[str, Any] = dict(zero.passthrough_config.get("zero_optimization", {}))
    count = 2 if settings.get("overlap_comm") and zero.stage < 3 else 1
    return 4 * count * int(settings.get("reduce_bucket_size", elements))
