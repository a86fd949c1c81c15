"""Count the kernels that a training step launches, and the bytes that it keeps for backward, without a GPU.

The model is on the meta device, with the emulation of CUDA's autocast and fused kernels that estimates use.  Each ATen
operator that is no view counts as one launch, a foreach or fused operator as often as it splits its tensors.  A step is
the forward of the denoiser, loss, backward, clipping and AdamW.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.config import RunConfig

from .accuracy import FUSED, LORA, NORMS, REPLACED, SHARED_CASTS, SharedCasts
from .peer_layers import PEERS, use_peer_layers
from .report import Measurement
from .synthetic_run import CAPTION, load_training_options

META = torch.device("meta")
MODELS = ("sdxl:4", "sdxl:1", "flux:1", "qwen_image:1", "z_image:1", "sd1:1", "sd1:8")
"""Family and batch size."""
MAX_LAUNCHES = {"sdxl:4": 8500, "flux:1": 9000, "qwen_image:1": 12000}
MAX_SAVED_GB = {"sdxl:4": 27.5, "flux:1": 33.0, "qwen_image:1": 31.0}
DIFFUSERS = "as diffusers' scripts"
LAYERS = (*REPLACED, DIFFUSERS, *PEERS)
"""What ``--no-fused_layers`` leaves, with shared casts, each half of ``--fused_layers``, both, and other trainers."""
WITHOUT_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
}
"""Operators that launch nothing, though their schema does not say that they return a view."""
CHUNK_SIZE, CHUNKS_PER_LAUNCH = 65536, 320
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Of ``multi_tensor_apply``, by the number of lists."""


@dataclass(frozen=True)
class StepCounts:
    launches: int
    saved_bytes: int


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="families and batch sizes (all)"
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="which LoRA layers (all)")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same families, at 64 x 64")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Count a step of each model with each kind of layers."""
    for name in options.models:
        family, _, batch_size = name.partition(":")
        model, resolution = f"random:{family}", "512" if family == "sd1" else "1024"
        if options.tiny:
            model, resolution = f"{model}:tiny", "64"
        title = f"{family}, {resolution} x {resolution}, batch size {batch_size}"
        argv = ["--pretrained_model_name_or_path", model, "--resolution", resolution, "--train_batch_size", batch_size]
        config, _ = load_training_options([*argv, "--mixed_precision", "bf16", *training_options])
        before: StepCounts | None = None
        for layers in options.layers:
            counts = count_step(config, layers)
            before = before or counts
            is_target = layers == FUSED and not options.tiny
            note = f"{counts.launches / before.launches:.2f} x {options.layers[0]}" if counts is not before else ""
            most, most_gb = (MAX_LAUNCHES.get(name), MAX_SAVED_GB.get(name)) if is_target else (None, None)
            yield Measurement(f"{title}, {layers}: launches", [counts.launches], at_most=most, note=note)
            saved = counts.saved_bytes / 1e9
            yield Measurement(f"{title}, {layers}: saved for backward", [saved], "GB", at_most=most_gb)


def count_step(config: RunConfig, layers: str) -> StepCounts:
    """Count a step after one that wrote what later steps only read."""
    from library.estimate.meta_memory_meter import AutocastEmulation, MemoryMeter, run_backward

    task, batch, noised = build_step(config)
    trained: Any = task.denoiser
    prepare_layers(trained, layers)
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = count_fused_launches([parameters] * 4)
    for _ in range(2):
        allocated = [*trained.parameters(), *trained.buffers(), *tree_leaves((vars(batch), vars(noised)))]
        tensors = [each for each in allocated if isinstance(each, Tensor)]
        with MemoryMeter(META, tensors) as meter, LaunchCounter() as counter:
            with (SharedCasts if layers == SHARED_CASTS else AutocastEmulation)(torch.bfloat16):
                predicted = task.family.predict(task.pipe, trained, noised.latents, noised.timesteps, batch)
                loss = task.objective.compute_elementwise_loss(predicted, noised).mean()
                saved = meter.live
                run_backward(loss)
            clip_gradients([parameter.grad for parameter in parameters if parameter.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        del predicted, loss
    return StepCounts(counter.launches + optimizer, saved)


@torch.no_grad()
def clip_gradients(gradients: list[Tensor]) -> None:
    """Do what ``torch.nn.utils.clip_grad_norm_`` does, which has no foreach operators for the meta device."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (1 / (norm + 1e-6)).clamp(max=1.0))


def build_step(config: RunConfig) -> tuple[Any, Any, Any]:
    """Build the training task, a batch and its noised latents on the meta device, as an estimate does."""
    from library.dataloader.batch import Moments, PixelBatch
    from library.distributed.devices import MIXED_PRECISION_DTYPES
    from library.models.detect import detect_model
    from library.models.families import FAMILIES
    from library.models.loading import load_pipeline_on_meta
    from library.models.text_encoding import encode_text_on_meta
    from library.parallel.async_copy import CopyStream
    from library.training.setup import build_objective
    from library.training.task import DiffusionTask
    from library.training.trainable_modules import build_trainable_modules

    detected = detect_model(config.model)
    family = FAMILIES.get(detected.family)(config.model)
    pipe = load_pipeline_on_meta(family, detected, MIXED_PRECISION_DTYPES[config.distributed.mixed_precision or "no"])
    trained, _ = build_trainable_modules(config, family, pipe)
    objective = build_objective(config.noise, config.loss, family, pipe)
    task = DiffusionTask(family, pipe, trained, objective, config.train.seed, CopyStream(META))
    count, size = config.data.train_batch_size, config.data.resolution
    assert size is not None
    captions, positions = tuple(CAPTION.format(number) for number in range(count)), tuple(range(count))
    cond = encode_text_on_meta(family, pipe, captions, ())
    with torch.no_grad():
        pixels = torch.empty(1, 3, size.height, size.width, device=META)
        moments = Moments(family.encode_moments(pipe, pixels).mean_and_std.expand(count, -1, -1, -1, -1))
        conditioning, weights = (torch.ones(shape, device=META) for shape in ((count, 6), (count,)))
        loaded = PixelBatch(None, captions, conditioning, weights, positions, captions, moments=moments, cond=cond)
        batch = task.encode(loaded, 0)
        noised = objective.add_noise(batch.latents, partial(task.build_generators, step=0, global_positions=positions))
    return task, batch, noised


def prepare_layers(trained: Any, layers: str) -> None:
    """Replace what ``layers`` replaces of the model as peft and diffusers have built it."""
    from library.adapters.precision import leave_input_casts_to_autocast
    from library.models.half_precision_norms import write_norms_in_half_precision
    from library.models.recomputed_activations import recompute_activations
    from library.parallel.fuse_lora import fuse_lora_layers

    if layers in PEERS:
        use_peer_layers(trained, PEERS[layers])
    elif layers != DIFFUSERS:
        leave_input_casts_to_autocast(trained)
    if layers in (NORMS, FUSED):
        write_norms_in_half_precision(trained.denoiser, torch.bfloat16)
        recompute_activations(trained.denoiser)
    if layers in (LORA, FUSED):
        fuse_lora_layers(trained.denoiser, torch.bfloat16)


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators on the device that do more than look at a tensor differently."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.launches += count_launches(function, args, result)
        return result


def count_launches(function: Any, args: Any, result: Any) -> int:
    """Count the launches of one operator."""
    if not any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves((args, result))):
        return 0
    name = function.overloadpacket.__name__
    if name in WITHOUT_KERNEL or _is_view(function):
        return 0
    lists = [each for each in (*args, result) if isinstance(each, (list, tuple)) and len(each) == len(args[0])]
    return count_fused_launches(lists) if name.startswith("_foreach_") else 1


def count_fused_launches(lists: Sequence[Sequence[Tensor]]) -> int:
    """Count the launches of a foreach or fused operator, which splits tensors into chunks."""
    per_launch = TENSORS_PER_LAUNCH[min(len(lists), max(TENSORS_PER_LAUNCH))]
    chunks = sum(math.ceil(tensor.numel() / CHUNK_SIZE) for tensor in lists[0])
    return max(math.ceil(len(lists[0]) / per_launch), math.ceil(chunks / CHUNKS_PER_LAUNCH))


def _is_view(function: Any) -> bool:
    aliases = [each.alias_info for each in function._schema.returns]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)
