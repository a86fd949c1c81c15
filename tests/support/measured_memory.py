"""Memory of real training steps, by torch's allocator, for comparison with the estimate.

``PYTHONPATH=.:tests python tests/support/measured_memory.py random:sd1 512 1 --option ...`` prints both;
with ``--processes 2``, for two processes, gathered weights and communication buffers included.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_on_ranks
from torch.nn import functional

from benchmarks.synthetic_run import CAPTION, load_training_options, write_dataset
from benchmarks.synthetic_run import build_run as build_synthetic_run
from library.config import RunConfig
from library.estimate import meta_memory_meter
from library.estimate.layout_search import LayoutEstimate, estimate_layouts
from library.estimate.memory_estimate import MemoryEstimate
from library.estimate.meta_run import LargestBatch
from library.estimate.meta_run_cache import MetaRuns
from library.estimate.parallel_layouts import LayoutFinder
from library.estimate.step_time import Devices
from library.models.detect import DetectedModel, detect_model
from library.training.loop import train

PARTS = ("weights", "adapters", "gradients", "optimizer")


def load_config(*flags: str) -> tuple[RunConfig, frozenset[str], DetectedModel]:
    """Settings of a run on synthetic images, the options that are set, and the model."""
    config, explicit = load_training_options(flags)
    return config, explicit, detect_model(config.model)


def build_run(folder: Path, steps: int, *flags: str) -> AbstractContextManager[Any]:
    """A real run on synthetic images, ready for its first step."""
    return build_synthetic_run(write_dataset(flags, folder, steps), folder)


def estimate(
    world_size: int, *flags: str, batch: LargestBatch, names: tuple[str, ...] = (), link_speed: float = 25e9
) -> list[LayoutEstimate]:
    """Estimate all layouts that the flags allow, or those with these names."""
    config, explicit, model = load_config(*flags)
    layouts, _ = LayoutFinder(config, explicit, model, world_size).find_layouts()
    layouts = [layout for layout in layouts if not names or layout.name in names]
    return estimate_layouts(layouts, model, batch, Devices(world_size, 2**40, link_speed=link_speed))


def estimate_step(world_size: int, *flags: str) -> int:
    """Estimate activations, gathered weights and buffers of the first layout that the flags allow."""
    config, explicit, model = load_config(*flags)
    assert config.data.resolution is not None
    captions = (CAPTION.format(1),) * config.data.train_batch_size
    batch = LargestBatch((config.data.resolution.width, config.data.resolution.height), captions)
    first = LayoutFinder(config, explicit, model, world_size).find_layouts()[0][0].name
    memory: MemoryEstimate = estimate(world_size, *flags, batch=batch, names=(first,))[0].memory
    return memory.activations + memory.gathered + memory.buffers


def measure_step(folder: Path, *flags: str) -> int:
    """Peak bytes of forward and backward, without weights and gradients that exist beforehand."""
    folder = folder / os.environ.get("RANK", "0")
    folder.mkdir()
    train_config = load_config(*flags)[0].train
    steps = 2 if train_config.blocks_to_swap or train_config.activation_memory_budget else 1  # the first differs
    with build_run(folder, steps, *flags) as run, use_fused_rms_norm():
        compute_gradients, peaks = run.strategy.compute_gradients, []

        def measure(*arguments):
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
                loss = compute_gradients(*arguments)
            peaks.append(find_peak(profile))
            return loss

        run.strategy.compute_gradients = measure
        train(run)
    return peaks[-1]


class FusedRMSNorm(torch.autograd.Function):
    """Saves what the kernel of GPUs saves; a processor computes it in several operations, each with its own tensor."""

    @staticmethod
    def forward(ctx, states, weight, dims, eps):
        scale = states.float().square().mean(dims, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(states, weight, scale)
        ctx.dims = dims
        return (states.float() * scale).to(states.dtype) * (1 if weight is None else weight)

    @staticmethod
    def backward(ctx, gradient):
        states, weight, scale = ctx.saved_tensors
        gradient = gradient.float() * (1 if weight is None else weight)
        normalized = states * scale
        gradient = scale * (gradient - normalized * (gradient * normalized).mean(ctx.dims, keepdim=True))
        return gradient.to(states.dtype), None, None, None


@contextmanager
def use_fused_rms_norm() -> Iterator[None]:
    """Inside, torch's RMS norms allocate what they do on a GPU."""
    rms_norm = functional.rms_norm

    def normalize(states, normalized_shape, weight=None, eps=None):
        if weight is not None and (weight.dtype != states.dtype or weight.requires_grad):
            return rms_norm(states, normalized_shape, weight, eps)
        eps = torch.finfo(states.dtype).eps if eps is None else eps
        return FusedRMSNorm.apply(states, weight, tuple(range(-len(normalized_shape), 0)), eps)

    functional.rms_norm = normalize
    try:
        yield
    finally:
        functional.rms_norm = rms_norm


def find_peak(profile: torch.profiler.profile) -> int:
    """The highest sum of allocations and frees."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure_state(folder: Path, *flags: str) -> dict[str, int]:
    """Bytes of weights, adapters, gradients and optimizer on this rank, after backward of the second step."""
    folder = folder / os.environ.get("RANK", "0")
    folder.mkdir()
    byte_counts: dict[str, int] = {}
    with build_run(folder, 2, *flags) as run:
        clip = run.strategy.clip_grad_norm

        def measure(parameters, max_norm):
            if run.state.step == 1:
                byte_counts.update(zip(PARTS, _measure_parts(run), strict=True))
            return clip(parameters, max_norm)

        run.strategy.clip_grad_norm = measure
        train(run)
    return byte_counts


def measure_full_step(folder: Path, *flags: str) -> int:
    """Peak bytes of a whole step of full training: weights and optimizer state, activations, gradients, the update."""
    folder = folder / os.environ.get("RANK", "0")
    folder.mkdir()
    with build_run(folder, 2, *flags) as run, use_fused_rms_norm():
        compute_gradients, zero_grad, byte_counts = run.strategy.compute_gradients, run.optimizer.zero_grad, []
        profile = torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU])

        def start(*arguments):
            if run.state.step == 1:
                byte_counts.append(sum(_measure_parts(run)))
                profile.start()
            return compute_gradients(*arguments)

        def stop(*arguments, **options):
            zero_grad(*arguments, **options)
            if run.state.step == 1 and byte_counts:
                profile.stop()

        run.strategy.compute_gradients, run.optimizer.zero_grad = start, stop
        train(run)
    return byte_counts[0] + find_peak(profile)


def estimate_full_step(world_size: int, *flags: str) -> MemoryEstimate:
    """Estimate the first layout that the flags allow, on CPUs, whose optimizers take one weight after the other."""
    config, explicit, model = load_config(*flags)
    assert config.data.resolution is not None
    captions = (CAPTION.format(1),) * config.data.train_batch_size
    batch = LargestBatch((config.data.resolution.width, config.data.resolution.height), captions)
    layouts, problems = LayoutFinder(config, explicit, model, world_size).find_layouts()
    assert layouts, problems
    runs = MetaRuns(model, batch, is_on_gpu=False)
    float32_on_gpus = meta_memory_meter.FLOAT32_OPS
    meta_memory_meter.FLOAT32_OPS = {functional.mse_loss, functional.l1_loss}  # autocast leaves norms alone on CPUs
    try:
        return estimate_layouts(layouts[:1], model, batch, Devices(world_size, 2**40), runs=runs)[0].memory
    finally:
        meta_memory_meter.FLOAT32_OPS = float32_on_gpus


def _measure_parts(run: Any) -> tuple[int, int, int, int]:
    model, trainable = run.strategy.unwrap_model(run.model), run.parameters
    frozen = [tensor for tensor in model.parameters() if not tensor.requires_grad]
    frozen += [tensor.ds_tensor for tensor in frozen if hasattr(tensor, "ds_tensor")]
    optimizer, gradients, masters = run.optimizer, count_bytes(tensor.grad for tensor in trainable), []
    if (zero := getattr(run.optimizer, "_zero", None)) is not None:
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
        optimizer, masters = zero.optimizer, next(getattr(zero, name) for name in names if hasattr(zero, name))
        # Storages of gradients can be larger than the shard of this rank.
        gradients = sum(tensor.nbytes for group in zero.averaged_gradients.values() for tensor in group)
    state = [
        tensor
        for parameter_state in optimizer.state.values()
        for tensor in parameter_state.values()
        if torch.is_tensor(tensor)
    ]
    return count_bytes([*frozen, *model.buffers()]), count_bytes(trainable), gradients, count_bytes([*state, *masters])


def count_bytes(tensors: Any) -> int:
    """Sum the bytes of the storages behind the tensors, each storage once."""
    local = [getattr(each, "_local_tensor", each) for each in tensors if each is not None]
    storages = [each.untyped_storage() for each in local if not each.is_meta]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    model, size, batch, *more = sys.argv[1:]
    processes = int(more.pop(more.index("--processes") + 1)) if "--processes" in more else 1
    more = [word for word in more if word != "--processes"]
    flags = ["--pretrained_model_name_or_path", model, "--resolution", size, "--train_batch_size", batch, *more]
    is_full = "full" in more
    with tempfile.TemporaryDirectory() as folder:
        if is_full:
            memory = estimate_full_step(processes, *flags)
            estimated = memory.total - memory.reserved
            sys.stdout.write(f"{memory}\n")
        else:
            estimated = estimate_step(processes, *flags)
        measure = measure_full_step if is_full else measure_step
        if processes > 1:
            measured = max(run_on_ranks(processes, measure, Path(folder), *flags))
        else:  # ranks are killed after some minutes, and a step of a published size takes longer
            measured = measure(Path(folder), *flags)
    sys.stdout.write(
        f"{' '.join(sys.argv[1:])}: estimated {estimated / 1e6:.1f} MB, allocated {measured / 1e6:.1f} MB,"
        f" {100 * (estimated / measured - 1):+.1f} %\n"
    )
