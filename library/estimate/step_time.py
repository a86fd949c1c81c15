"""Estimate the time of a step, for comparing layouts and memory options: a model with assumed speeds, no measurement.

A step takes as long as the slower of two: the device, which computes the FLOPs and unpacks quantized weights, and the
host, which launches the kernels.  Fetching swapped weights and what is sent to other devices come on top.

The constants are those of an H100.  Stable Diffusion XL at 1024 with batch size 1, where the host is the slower one,
takes 0.498 s without options, with gradient checkpointing 1.87 x as long (1.87 x here), with half of the blocks swapped
1.50 x (1.49 x), with fp8 1.20 x (1.20 x), with nf4 1.15 x (1.20 x).  FLUX.1 at 1024 with gradient checkpointing, where
the device is the slower one, takes 1.03 s with 16 blocks swapped, 1.20 s with 40, 1.36 s with 50 and 1.26 s with fp8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .memory_estimate import DevicePart
from .meta_run import MetaRun, count_all_reduce_bytes
from .parallel_layouts import ParallelLayout

SECONDS_PER_KERNEL = 28e-6
"""The time that Python, autograd and CUDA take to start one kernel."""
RECOMPUTATION_FACTOR = 1.34
"""How much slower kernels start with activation checkpointing, whose hooks run for every tensor that is saved."""
BYTES_PER_FLOP = 1e-2
"""Bandwidth of a device's memory for its speed: 1 TB/s for 100 TFLOP/s."""
SECONDS_PER_SWAP = 350e-6
"""The time that the host takes to start the copy of a swapped block; assumed, since no GPU has measured it."""


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
    layout: ParallelLayout, run: MetaRun, parts: Sequence[DevicePart], images: int, devices: Devices
) -> float:
    """Estimate the throughput of all devices together, from FLOPs, kernels, pipeline bubbles and bytes sent."""
    config, stages = layout.config, layout.dims.pp
    micro_batches = config.train.gradient_accumulation_steps
    passes = 3 if config.train.gradient_checkpointing else 2
    seconds = [_estimate_computation(part, run, passes, devices) for part in parts]
    sent_bytes = run.sent_bytes / stages + 2 * max(part.sent_bytes for part in parts)
    computation = max(seconds)
    if config.parallel.device_map is not None:  # one device after the other
        computation, sent_bytes = sum(seconds), 2 * sum(part.sent_bytes for part in parts)
    computation *= micro_batches + (stages - 1) / len(parts[0].chunks)
    # Gathering weights overlaps with computation; activations and gradients do not.
    computation += micro_batches * 2 * run.stored.swapped_blocks * SECONDS_PER_SWAP
    gathered_bytes = _count_gathered_bytes(layout, run, passes) + 2 * run.stored.offloaded.total
    total = max(computation, micro_batches * gathered_bytes / devices.link_speed)
    total += (micro_batches * sent_bytes + _count_synchronized_bytes(layout, run)) / devices.link_speed
    return micro_batches * images * layout.dims.dp / total


def _estimate_computation(part: DevicePart, run: MetaRun, passes: int, devices: Devices) -> float:
    """Estimate the seconds of one micro-batch on one device: of the device or of its host, whichever takes longer."""
    traffic = passes * run.stored.unpacking_traffic * part.frozen_bytes / max(1, run.frozen_bytes)
    on_device = part.flops / devices.flops + traffic / (BYTES_PER_FLOP * devices.flops)
    on_host = part.kernels * SECONDS_PER_KERNEL
    return max(on_device, on_host * RECOMPUTATION_FACTOR if passes == 3 else on_host)


def _count_gathered_bytes(layout: ParallelLayout, run: MetaRun, passes: int) -> float:
    """Count the bytes of frozen weights that a device receives in a micro-batch, from others and from host memory."""
    frozen_bytes, ranks = sum(parameter.nbytes for parameter in run.frozen), layout.world_size
    if (sharding := layout.sharding) is not None:
        passes = passes if sharding.reshard_after_forward else 1
        return passes * frozen_bytes * (sharding.dp_shard - 1 + sharding.offload_params) / sharding.dp_shard
    if layout.zero is not None and layout.zero.stage == 3:
        return passes * frozen_bytes * (ranks - 1 + bool(layout.zero.offload_param_device)) / ranks
    return 0.0


def _count_synchronized_bytes(layout: ParallelLayout, run: MetaRun) -> float:
    """Count the bytes of gradients and adapter weights that a device sends in an optimizer step."""
    trainable_bytes = sum(parameter.nbytes for parameter in run.trainable)
    sent = count_all_reduce_bytes(trainable_bytes, layout.world_size)
    if layout.zero is not None and layout.zero.offload_optimizer_device:
        sent += 2 * trainable_bytes / layout.world_size
    return sent
