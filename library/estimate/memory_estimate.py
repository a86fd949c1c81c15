"""Estimate peak memory per GPU of a parallel layout: weights, gradients, optimizer state, activations, buffers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from ..config.types import DeviceMap
from ..distributed.fsdp_settings import FSDPSettings
from ..parallel.device_map import build_device_map, iter_weight_devices
from ..parallel.fsdp import find_fsdp_blocks
from ..parallel.pipeline_stages import partition_blocks
from .full_training import FullBytes, count_flat_bytes, count_zero_buckets, estimate_full_training, shard_by_zero3
from .meta_run import MetaRun, count_frozen_bytes, disable_logging
from .optimizer_memory import OptimizerMemory
from .parallel_layouts import ParallelLayout
from .step_memory import StepMemory

CONTEXT_BYTES = 768 * 2**20
"""An assumption for the CUDA context, the workspaces of cuBLAS and cuDNN, and fragmentation."""
COMMUNICATION_BYTES = 256 * 2**20
"""An assumption for NCCL's buffers."""
UNLIMITED = 2**60


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes on the GPU that needs most."""

    weights: int
    """Frozen weights, as far as they stay on the device."""
    adapters: int
    """Trained weights: adapters, or with ``--train full`` those of the model."""
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
    step, num_blocks, count = run.step, len(run.chain.blocks), stages * (2 if schedule == "interleaved" else 1)
    ends = partition_blocks(run.chain.count_block_parameters(), count)
    parts = []
    for stage in range(stages):
        ranges = [(ends[chunk], ends[chunk + 1]) for chunk in range(stage, count, stages)]
        local = {index for first, end in ranges for index in range(first, end)}
        absent = [block for index, block in run.chain.iter_places() if index not in local]
        received = sum(step.flows[first] for first, _ in ranges if first)
        sent = sum(step.flows[end] for _, end in ranges if end < num_blocks)
        chunks = tuple(step.run_stage(first, end) for first, end in ranges)
        in_flight = count_in_flight(schedule, stages, stage, micro_batches)
        frozen_bytes = run.frozen_bytes - count_frozen_bytes(*absent)
        elsewhere = 0
        if run.adapter is None:  # adapters are whole on every rank
            elsewhere = sum(each.nbytes for block in absent for each in block.parameters() if each.requires_grad)
        share = 1 - elsewhere / run.trainable_bytes
        parts.append(DevicePart(frozen_bytes, chunks, received, sent, in_flight, trainable_share=share))
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
    layout: ParallelLayout,
    run: MetaRun,
    parts: Sequence[DevicePart],
    optimizer: OptimizerMemory,
    buffered_shapes: float,
) -> MemoryEstimate:
    """Estimate the part that needs most; ``optimizer`` is that of all trainable parameters."""
    if run.adapter is None:
        if layout.dims.pp > 1:
            stages = [_estimate_stage(layout, run, part, optimizer, buffered_shapes) for part in parts]
            return max(stages, key=lambda estimate: estimate.total)
        return _add_frozen_weights(layout, run, parts[0], estimate_full_training(layout, run, optimizer))
    estimates = [_estimate_part(layout, run, part, optimizer.state, buffered_shapes) for part in parts]
    return max(estimates, key=lambda estimate: estimate.total)


def _add_frozen_weights(layout: ParallelLayout, run: MetaRun, part: DevicePart, full: FullBytes) -> MemoryEstimate:
    """Add frozen weights, which encoders and what ``train_modules`` leaves out have, to those of full training."""
    weights, gathered, ranks = part.frozen_bytes, 0, layout.world_size
    if layout.zero is not None and layout.zero.stage == 3:
        weights, gathered = shard_by_zero3(run.frozen, part.frozen_bytes, layout.zero, ranks)
    elif layout.sharding is not None:
        weights, gathered = _shard_by_fsdp(run, part.frozen_bytes, layout.sharding)
    elements = run.trainable_elements * full.weights / run.trainable_bytes
    return MemoryEstimate(
        weights=weights,
        adapters=full.weights,
        gradients=full.gradients,
        optimizer=full.optimizer,
        ema=0 if layout.config.optim.ema_decay is None else round(4 * elements),
        activations=full.activations,
        gathered=gathered + full.gathered,
        buffers=full.buffers,
        reserved=CONTEXT_BYTES + (COMMUNICATION_BYTES if ranks > 1 else 0),
    )


def _estimate_stage(
    layout: ParallelLayout, run: MetaRun, part: DevicePart, optimizer: OptimizerMemory, buffered_shapes: float
) -> MemoryEstimate:
    """Estimate a stage of a pipeline that trains the model: weights of its blocks, and of what is outside of blocks."""
    weights = round(part.trainable_share * run.trainable_bytes)
    in_transit = part.received_bytes + part.sent_bytes
    after_backward = max(optimizer.count_temporaries(part.trainable_share), count_flat_bytes(run, weights))
    full = FullBytes(
        weights=weights,
        gradients=weights,
        optimizer=round(part.trainable_share * optimizer.state),
        activations=max(part.count_activation_bytes(run.encoding_peak), after_backward),
        buffers=int(layout.config.train.gradient_accumulation_steps * in_transit * buffered_shapes),
    )
    return _add_frozen_weights(layout, run, part, full)


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
        buffers = count_zero_buckets(layout.zero, elements)
        if layout.zero.stage == 3:
            weights, gathered = shard_by_zero3(run.frozen, part.frozen_bytes, layout.zero, ranks)
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
