"""Estimate peak memory per GPU of a parallel layout: weights, gradients, optimizer state, activations, buffers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..config.schema_optim import OptimConfig
from ..config.types import DeviceMap
from ..distributed.deepspeed_settings import DeepSpeedSettings
from ..distributed.fsdp_settings import FSDPSettings
from ..errors import UserError
from ..optim.optimizers import ParamGroup, build_optimizer
from ..parallel.device_map import build_device_map, iter_weight_devices
from ..parallel.fsdp import find_fsdp_blocks
from ..parallel.pipeline_stages import partition_blocks
from ..problems import Problem
from .meta_run import MetaRun, StepMemory, count_frozen_bytes, disable_logging
from .parallel_layouts import ParallelLayout

CONTEXT_BYTES = 768 * 2**20
"""An assumption for the CUDA context, the workspaces of cuBLAS and cuDNN, and fragmentation."""
COMMUNICATION_BYTES = 256 * 2**20
"""An assumption for NCCL's buffers."""
UNLIMITED = 2**60
ZERO_DEFAULTS = {"stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 1_000_000_000}
"""DeepSpeed's defaults, in elements."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes on the GPU that needs most."""

    weights: int
    """Frozen weights, as far as they stay on the device."""
    adapters: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    """Peak of forward and backward, temporary buffers included."""
    gathered: int
    """Frozen weights all-gathered from other ranks or copied from host memory, while they are used."""
    buffers: int
    """The buffers of DDP, ZeRO or pipeline communication."""
    reserved: int
    """The CUDA context and NCCL's buffers."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class DevicePart:
    """The part of the model that one device holds: all of it, a pipeline stage, or its part of a device map."""

    frozen_bytes: int
    """Bytes of frozen weights, before FSDP or ZeRO shard them."""
    chunks: tuple[StepMemory, ...]
    """The memory of each part of the model on this device; an interleaved pipeline has several."""
    received_bytes: int = 0
    """Bytes of activations from other pipeline stages, in a micro-batch."""
    sent_bytes: int = 0
    in_flight: int = 1
    """Chunks that have run forward and not yet backward, at most."""
    trainable_share: float = 1.0
    encodes: bool = True
    """Whether images and captions are encoded here."""

    def count_activation_bytes(self, encoding_peak: int) -> int:
        """Peak bytes of activations, which may be reached while the next micro-batch is encoded."""
        saved = sum(chunk.saved for chunk in self.chunks) // len(self.chunks)
        computing = self.in_flight * saved + max(chunk.peak - chunk.saved for chunk in self.chunks)
        encoding = (self.in_flight - 1) * saved + encoding_peak if self.encodes else 0
        return max(computing, encoding)

    @property
    def flops(self) -> int:
        return sum(chunk.flops for chunk in self.chunks)

    @property
    def kernels(self) -> int:
        return sum(chunk.kernels for chunk in self.chunks)


def split_model(run: MetaRun, layout: ParallelLayout, devices: int, device_memory: int) -> list[DevicePart]:
    """Split a run into one part per pipeline stage or device of a device map; otherwise all devices hold the same."""
    parallel = layout.config.parallel
    if layout.dims.pp > 1:
        micro_batches = layout.config.train.gradient_accumulation_steps
        return _split_pipeline(run, layout.dims.pp, parallel.pp_schedule, micro_batches)
    if parallel.device_map is not None:
        with disable_logging():
            return _split_device_map(run, parallel.device_map, devices, device_memory)
    return [DevicePart(run.frozen_bytes, (run.step.total,))]


def _split_pipeline(run: MetaRun, stages: int, schedule: str, micro_batches: int) -> list[DevicePart]:
    step, blocks, count = run.step, run.chain.blocks, stages * (2 if schedule == "interleaved" else 1)
    ends = partition_blocks(run.chain.count_block_parameters(), count)
    parts = []
    for stage in range(stages):
        ranges = [(ends[chunk], ends[chunk + 1]) for chunk in range(stage, count, stages)]
        local = {index for first, end in ranges for index in range(first, end)}
        absent = [block for index, block in enumerate(blocks) if index not in local]
        received = sum(step.flows[first] for first, _ in ranges if first)
        sent = sum(step.flows[end] for _, end in ranges if end < len(blocks))
        chunks = tuple(step.run_stage(first, end) for first, end in ranges)
        in_flight = count_in_flight(schedule, stages, stage, micro_batches)
        frozen_bytes = run.frozen_bytes - count_frozen_bytes(*absent)
        parts.append(DevicePart(frozen_bytes, chunks, received, sent, in_flight))
    return parts


def count_in_flight(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """Count the chunks that have run forward and not yet backward, at most, in torch's pipeline schedules."""
    if schedule == "interleaved":
        rounds = max(1, micro_batches // stages)
        if micro_batches % rounds:
            return 2 * micro_batches  # ScheduleLoopedBFS, with all forwards first
        return min(2 * micro_batches, micro_batches // rounds + 2 * (stages - 1 - stage) + 1)
    return min(micro_batches, stages - stage) if schedule == "1f1b" and micro_batches >= stages else micro_batches


def _split_device_map(run: MetaRun, device_map: DeviceMap, devices: int, device_memory: int) -> list[DevicePart]:
    limit = device_memory if device_map.preset == "sequential" else UNLIMITED
    device_of_module = build_device_map(run.denoiser, device_map, [limit] * devices)
    tensors = {tensor: device for _, tensor, device in iter_weight_devices(run.denoiser, device_of_module)}
    device_of_block = [tensors[next(block.parameters())] for block in run.chain.blocks]
    total, parts = run.trainable_bytes, list[DevicePart]()
    for device in reversed(range(devices)):
        own = [tensor for tensor, owner in tensors.items() if owner == device]
        frozen = sum(tensor.nbytes for tensor in own if not tensor.requires_grad)
        share = sum(tensor.nbytes for tensor in own if tensor.requires_grad) / total
        indices = [index for index, owner in enumerate(device_of_block) if owner == device]
        received = sum(run.step.flows[index] for index in indices if index and index - 1 not in indices)
        chunk = sum((run.step.blocks[index] for index in indices), StepMemory(received, received))
        if device == 0:  # also everything outside of the blocks
            frozen = run.frozen_bytes - sum(part.frozen_bytes for part in parts)
            share = 1 - sum(part.trainable_share for part in parts)
            chunk = run.step.head + chunk + run.step.tail
        parts.append(
            DevicePart(
                frozen_bytes=frozen,
                chunks=(chunk,),
                received_bytes=received,
                sent_bytes=received,
                in_flight=1,
                trainable_share=share,
                encodes=device == 0,
            )
        )
    return parts[::-1]


def estimate_memory(
    layout: ParallelLayout, run: MetaRun, parts: Sequence[DevicePart], optimizer_state: int, buffered_shapes: float
) -> MemoryEstimate:
    """Estimate the part that needs most; ``optimizer_state`` is that of all trainable parameters."""
    estimates = [_estimate_part(layout, run, part, optimizer_state, buffered_shapes) for part in parts]
    return max(estimates, key=lambda estimate: estimate.total)


def _estimate_part(
    layout: ParallelLayout, run: MetaRun, part: DevicePart, optimizer_state: int, buffered_shapes: float
) -> MemoryEstimate:
    train, ranks = layout.config.train, layout.world_size
    adapters = round(part.trainable_share * run.trainable_bytes)
    elements = round(part.trainable_share * run.trainable_elements)
    gradients, optimizer = adapters, round(part.trainable_share * optimizer_state)
    activations = part.count_activation_bytes(run.encoding_peak)
    weights, gathered = part.frozen_bytes, run.stored.offloaded.device_bytes
    buffers = 0
    if layout.dims.pp > 1:
        buffers = int(train.gradient_accumulation_steps * (part.received_bytes + part.sent_bytes) * buffered_shapes)
    if layout.zero is not None:
        shard = -(-adapters // ranks)
        is_offloaded = layout.zero.offload_optimizer_device is not None
        gradients = 0 if is_offloaded else shard
        optimizer = 0 if is_offloaded else shard + -(-optimizer_state // ranks)  # with master weights
        buffers = _count_zero_buckets(layout.zero, elements)
        if layout.zero.stage == 3:
            weights, gathered = _shard_by_zero3(run, part.frozen_bytes, layout.zero, ranks)
    elif layout.sharding is not None:
        weights, gathered = _shard_by_fsdp(run, part.frozen_bytes, layout.sharding)
    if layout.zero is None and ranks > 1:
        if layout.sharding is None and layout.dims.model_parallel_size == 1:
            buffers = 0 if layout.config.distributed.ddp_gradient_as_bucket_view else adapters
        else:
            buffers += max(0, adapters - activations)  # flattened after activations are freed
    ema = 0 if layout.config.optim.ema_decay is None else 4 * elements
    reserved = CONTEXT_BYTES + (COMMUNICATION_BYTES if ranks > 1 else 0)
    return MemoryEstimate(
        weights=weights,
        adapters=adapters,
        gradients=gradients,
        optimizer=optimizer,
        ema=ema,
        activations=activations,
        gathered=gathered,
        buffers=buffers,
        reserved=reserved,
    )


def _shard_by_fsdp(run: MetaRun, frozen: int, sharding: FSDPSettings) -> tuple[int, int]:
    """Count sharded and gathered bytes: rows are sharded with padding; the next block is gathered ahead of time."""
    shards = sum(-(-each.shape[0] // sharding.dp_shard) * (each.nbytes // each.shape[0]) for each in run.frozen)
    gathered = 0
    for part in run.trained.children():
        counted, sizes = set[Tensor](), list[int]()
        for block in find_fsdp_blocks(part, sharding.block_classes):  # inner blocks first
            own = {each for each in block.parameters() if not each.requires_grad} - counted
            counted |= own
            sizes.append(sum(each.nbytes for each in own))
        outside = sum(each.nbytes for each in part.parameters() if not each.requires_grad) - sum(sizes)
        gathered += outside + (2 * max(sizes, default=0) if sharding.reshard_after_forward else sum(sizes))
    share = run.stored_share
    unsharded = frozen - share * run.sharded_bytes
    return round(unsharded + (0 if sharding.offload_params else share * shards)), round(share * gathered)


def _shard_by_zero3(run: MetaRun, frozen: int, zero: DeepSpeedSettings, ranks: int) -> tuple[int, int]:
    """Count sharded and gathered bytes: small tensors stay replicated, gathered ones stay live up to a limit."""
    limits: dict[str, Any] = {**ZERO_DEFAULTS, **zero.passthrough_config.get("zero_optimization", {})}
    threshold, max_live = (int(limits[name]) for name in ZERO_DEFAULTS)
    large = [each for each in run.frozen if each.numel() > threshold]
    shards = sum(-(-each.numel() // ranks) * each.element_size() for each in run.frozen)
    replicated = frozen - sum(each.nbytes for each in large)
    live = min(sum(each.nbytes for each in large), max_live * max((each.element_size() for each in large), default=0))
    return replicated + (0 if zero.offload_param_device else shards), live


def _count_zero_buckets(zero: DeepSpeedSettings, elements: int) -> int:
    """Count DeepSpeed's gradient buckets, which it allocates in full however few gradients there are."""
    settings: dict[str, Any] = dict(zero.passthrough_config.get("zero_optimization", {}))
    count = 2 if settings.get("overlap_comm") and zero.stage < 3 else 1
    return 4 * count * int(settings.get("reduce_bucket_size", elements))


def estimate_optimizer_state(config: OptimConfig, groups: Sequence[ParamGroup]) -> int:
    """Measure the bytes of optimizer state by a real step on one tensor of each shape."""
    counts = Counter((tuple(each.shape), each.dtype) for group in groups for each in group.parameters)
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in counts]
    optimizer: Any = build_optimizer(config, [ParamGroup("shapes", parameters, config.learning_rate)])
    try:
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            Problem(
                "optimizer_type",
                f"cannot take a step on this machine, so the size of its state is unknown ({reason})",
                value=config.optimizer_type,
            )
        ) from error
    total = 0
    for parameter, count in zip(parameters, counts.values(), strict=True):
        state = tree_leaves(optimizer.state.get(parameter, {}))
        total += count * sum(leaf.nbytes for leaf in state if isinstance(leaf, Tensor))
    return total
