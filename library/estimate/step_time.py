"""Estimate the time of a step, for comparing layouts and memory options: a model with assumed speeds, no measurement.

A step takes as long as the slower of two: the device, which computes the FLOPs and unpacks quantized weights, and the
host, which launches the kernels.  Fetching swapped weights and what is sent to other devices come on top.

The constants are those of an H100.  Stable Diffusion XL at 1024 with batch size 1 and peft's layers, where the host is
the slower one, takes 0.498 s without options, with gradient checkpointing 1.87 x as long, with half of the blocks
swapped 1.50 x, with fp8 1.20 x, with nf4 1.15 x; ``python -m benchmarks advice`` prints the same ratios of this model.
With fused layers it takes 0.42 s.  FLUX.1 at 1024 with gradient checkpointing, where the device is the slower one,
takes 1.03 s with 16 blocks swapped, 1.20 s with 40, 1.36 s with 50 and 1.26 s with fp8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .memory_estimate import DevicePart
from .meta_run import MetaRun, count_all_reduce_bytes
from .parallel_layouts import ParallelLayout

SECONDS_PER_KERNEL = 28e-6
"""The time that Python, autograd and CUDA take to start one kernel."""
SECONDS_PER_FUSED_KERNEL = 45e-6
"""The time for a kernel of a step with fused LoRA layers: there are fewer, each started by more Python."""
UNFUSED_FACTOR = 1.17
"""How much longer the device takes for a step with peft's LoRA layers, whose activations it reads and writes again."""
RECOMPUTATION_FACTOR = 1.34
"""How much slower kernels start with activation checkpointing, whose hooks run for every tensor that is saved."""
BYTES_PER_FLOP = 1e-2
"""Bandwidth of a device's memory for its speed: 1 TB/s for 100 TFLOP/s."""
SECONDS_PER_FETCH = 350e-6
"""The time that a step waits when a swapped block, the activations of a block or a weight of ZeRO 3 is fetched: what an
H100 took for single swapped weights.  No GPU has measured whole blocks."""


@dataclass(frozen=True)
class Devices:
    """GPUs to plan for; the speeds are assumed."""

    count: int
    memory: int
    flops: float = 1e14
    """The operations per second that diffusion models reach on such a device."""
    link_speed: float = 25e9
    """Bytes per second between devices, and to host memory."""


def estimate_images_per_second(
    layout: ParallelLayout,
    run: MetaRun,
    parts: Sequence[DevicePart],
    images: int,
    devices: Devices,
    swapped_state: int = 0,
) -> float:
    """Estimate the throughput of all devices together, from FLOPs, kernels, pipeline bubbles and bytes sent.

    ``swapped_state``: bytes of optimizer state that are fetched from host memory for a step, and copied back.
    """
    config, stages = layout.config, layout.dims.pp
    micro_batches = config.train.gradient_accumulation_steps
    passes = 3 if config.train.gradient_checkpointing else 2
    seconds = [_estimate_computation(part, run, passes, devices) for part in parts]
    sent_bytes = run.sent_bytes / stages + 2 * max(part.sent_bytes for part in parts)
    computation = max(seconds)
    if config.parallel.device_map is not None:  # one device after the other
        computation, sent_bytes = sum(seconds), 2 * sum(part.sent_bytes for part in parts)
    computation *= micro_batches + (stages - 1) / len(parts[0].chunks)
    # Gathering weights and offloading activations overlap with computation; sent activations and gradients do not.
    computation += micro_batches * _count_fetches(layout, run, passes) * SECONDS_PER_FETCH
    gathered_bytes = _count_gathered_bytes(layout, run, passes) + run.stored.copied_bytes
    if config.train.cpu_offload_checkpointing:
        gathered_bytes += 2 * sum(run.step.flows[:-1])
    total = max(computation, micro_batches * gathered_bytes / devices.link_speed)
    sent_bytes = micro_batches * sent_bytes + _count_synchronized_bytes(layout, run) + 2 * swapped_state
    total += sent_bytes / devices.link_speed
    return micro_batches * images * layout.dims.dp / total


def _estimate_computation(part: DevicePart, run: MetaRun, passes: int, devices: Devices) -> float:
    """Estimate the seconds of one micro-batch on one device: of the device or of its host, whichever takes longer."""
    traffic = passes * run.stored.unpacking_traffic * part.frozen_bytes / max(1, run.frozen_bytes)
    on_device = part.flops / devices.flops * (1 if run.has_fused_layers else UNFUSED_FACTOR)
    on_device += traffic / (BYTES_PER_FLOP * devices.flops)
    unpacking = run.num_unpacking_kernels * part.kernels / max(1, run.step.total.kernels)
    seconds_per_kernel = SECONDS_PER_FUSED_KERNEL if run.has_fused_layers else SECONDS_PER_KERNEL
    on_host = (part.kernels - unpacking) * seconds_per_kernel + unpacking * SECONDS_PER_KERNEL
    return max(on_device, on_host * RECOMPUTATION_FACTOR if passes == 3 else on_host)


def _count_fetches(layout: ParallelLayout, run: MetaRun, passes: int) -> float:
    """Count how often the host waits in a micro-batch: for swapped weights, blocks' activations, ZeRO 3's weights.

    DeepSpeed gathers each weight by hooks in Python, which take at least as long as those of swapped weights.
    """
    count = 2 * run.stored.visited_blocks
    if layout.config.train.cpu_offload_checkpointing:
        count += 2 * len(run.step.blocks)
    if layout.zero is not None and layout.zero.stage == 3:
        count += passes * run.num_frozen_matrices
    return count


def _count_gathered_bytes(layout: ParallelLayout, run: MetaRun, passes: int) -> float:
    """Count the bytes of sharded weights that a device receives in a micro-batch, from others and from host memory."""
    frozen_bytes, ranks = run.stored_share * run.sharded_bytes, layout.world_size
    if run.adapter is None:  # weights that are trained are sharded as well
        frozen_bytes += run.trainable_bytes
    if (sharding := layout.sharding) is not None:
        passes = passes if sharding.reshard_after_forward else 1
        return passes * frozen_bytes * (sharding.dp_shard - 1 + sharding.offload_params) / sharding.dp_shard
    if layout.zero is not None and layout.zero.stage == 3:
        return passes * frozen_bytes * (ranks - 1 + bool(layout.zero.offload_param_device)) / ranks
    return 0.0


def _count_synchronized_bytes(layout: ParallelLayout, run: MetaRun) -> float:
    """Count the bytes of gradients and adapter weights that a device sends in an optimizer step."""
    trainable_bytes = run.trainable_bytes
    sent = count_all_reduce_bytes(trainable_bytes, layout.world_size)
    if run.adapter is None and (layout.sharding is not None or (layout.zero is not None and layout.zero.stage == 3)):
        sent /= 2  # a reduce-scatter
    if run.adapter is None and layout.sharding is not None and layout.sharding.offload_params:
        sent += 2 * trainable_bytes / layout.sharding.dp_shard  # to host memory, where the optimizer steps, and back
    if layout.zero is not None and layout.zero.offload_optimizer_device:
        sent += 2 * trainable_bytes / layout.world_size
    return sent
