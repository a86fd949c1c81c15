"""A family with a small pipeline, a batch for it, and recorders of the calls of its denoiser."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ...dataloader.batch import Batch, Cond
from ...models.base import ControlTextFamily, Family
from ...models.detect import DetectedModel, detect_model

HEIGHT, WIDTH = 64, 96  # not square, and FRAME not symmetric, so that a swap is detected
FRAME = (80.0, 120.0, 8.0, 4.0, HEIGHT, WIDTH)
ABSOLUTE, RELATIVE = 1e-5, 1.3e-6
"""The tolerances of ``torch.testing.assert_close`` for float32."""
EXACT = 1e-7
"""The tolerance for the same computation; it is that of ``torch.testing.assert_close`` for float64."""


class CheckFailedError(AssertionError):
    """A check that failed; the text is the reason."""


class CheckSkippedError(Exception):
    """A check that could not be made; the text is the reason."""


def ensure(is_fulfilled: bool, reason: str) -> None:
    """Fail the check for this reason unless the condition is fulfilled."""
    if not is_fulfilled:
        raise CheckFailedError(reason)


def return_unchanged(latents: Tensor) -> Tensor:
    return latents


@dataclass(frozen=True)
class TinyCase:
    """A tiny pipeline, a batch, and the arguments that make the diffusers pipeline compute the same."""

    family: str
    pipe: Any
    batch: Batch
    call: dict[str, Any]
    """The diffusers pipeline's arguments for the batch's conditioning and sizes."""
    sizes: dict[str, Any]
    """The arguments in ``call`` that are not embeddings, for a call with prompts."""
    encode: Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]
    """Encode pixels to latents with a diffusers pipeline: (pipe, pixels, generators)."""
    source: str
    """The model path from which ``Family.load`` builds the same kind of model."""
    pack_latents: Callable[[Tensor], Tensor] = return_unchanged
    """Pack latents of the family as the diffusers pipeline and its scheduler have them."""
    unpack_latents: Callable[[Tensor], Tensor] = return_unchanged
    """The inverse of ``pack_latents``."""
    pack_prediction: Callable[[Tensor], Tensor] | None = None
    """Pack latents of the family as the diffusers scheduler gets them, if it is not as the pipeline takes them."""
    select_prediction: Callable[[Tensor], Tensor] = return_unchanged
    """Select from what the diffusers scheduler gets the part of the picture itself."""
    convert_timesteps: Callable[[Tensor], Tensor] = return_unchanged
    """Convert timesteps of the diffusers scheduler to those of the family, where they count the other way."""
    scale: str = "guidance_scale"
    """The diffusers pipeline's argument for classifier-free guidance."""
    guidance_off: float = 1.0
    """The value that disables guidance."""
    texts: dict[str, Any] = field(default_factory=dict)
    """Arguments that make the diffusers pipeline encode prompts as the family does."""
    encode_clips: Callable[[Any, Tensor], Tensor] | None = None
    """Encode clips to the mean of their latents, for a family of videos: (pipe, clips)."""
    build_negative: Callable[[Any, str], dict[str, Any]] = lambda pipe, text: {"negative_prompt": text}
    """Arguments for a negative prompt: (pipe, text)."""
    build_prompt: Callable[[Any, str, str], dict[str, Any]] | None = None
    """Arguments for a prompt and a negative one, if these are not texts: (pipe, text, negative text)."""

    encodes_prompts_alone: bool = False
    """Whether the diffusers pipeline lets texts of different length in a batch affect each other."""
    simplify_call: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments
    """The arguments of a denoiser call without padding, which the family leaves out."""
    compares_arguments: bool = True
    """Whether the arguments of a denoiser call are compared; else only its result, which padding does not change."""
    tolerances: dict[str, float] = field(default_factory=dict)
    """Tolerances of the prediction, where the family gives the denoiser the same numbers in another shape."""
    decoding_tolerance: float = 5e-5
    """The tolerance of decoded pixels in 0..1, which is larger where the pipeline rounds them to whole numbers."""
    controls: tuple[Image, ...] = ()
    """The control images that the text encoder reads with each prompt."""
    has_control_clips: bool = False
    """Whether previews get these as control clips, of one frame each."""
    frame_images: tuple[Image, ...] = ()
    """The images that the clip begins and ends with, in the order of ``sampling.frame_images``."""
    captions: tuple[str, str] = ("a red circle on white ground", "Blau, 7")
    """Texts that are encoded in another way than each other."""
    num_frames: int = 1
    """Frames of the clip."""
    dropped_frames: int = 0
    """How many of the first frames of a clip the diffusers pipeline samples and does not return."""
    added_frames: int = 0
    """How many latent frames the family puts before those of the clip."""
    add_channels: Callable[[Tensor], Tensor] = return_unchanged
    """Add the channels to pixels that the VAE reads beside them."""
    restore_pixels: Callable[[Tensor], Tensor] = return_unchanged
    """Bring what the VAE decodes to pixels in -1..1, where it has other ones."""
    max_rows: int = 2
    """How many rows of the batch the diffusers pipeline takes at once."""

    blocks: tuple[str, ...] = ()
    """Classes of diffusers in which the reference trainer trains the linear layers."""
    untrained: str = "$^"
    """Pattern of the names of linear layers in these blocks that it does not train."""
    model: DetectedModel | None = None
    """The detected model, where ``source`` alone does not tell its family."""
    size: tuple[int, int] = (HEIGHT, WIDTH)
    """Height and width in pixels."""

    def encode_prompts(self, family: Family, pipe: Any, texts: Sequence[str]) -> Cond:
        """Encode texts, each with the control images or the first frame."""
        if isinstance(family, ControlTextFamily):
            images = self.frame_images[:1] if family.facts.text_images == "first frame" else self.controls
            return family.encode_prompts_with_controls(pipe, list(texts), [images] * len(texts))
        return family.encode_prompts(pipe, list(texts))

    def encode_negative_prompts(self, family: Family, pipe: Any, texts: Sequence[str]) -> Cond:
        """Encode negative prompts, as previews do."""
        if family.facts.text.has_negative_encoding:
            return family.encode_negative_prompts(pipe, list(texts))
        return self.encode_prompts(family, pipe, texts)

    def detect(self) -> DetectedModel:
        """Detect the model that ``Family.load`` builds."""
        return self.model or detect_model(self.source)

    def make_pixels(self, count: int = 2) -> Tensor:
        """Draw pixels in -1..1."""
        frames = (self.num_frames,) if self.num_frames > 1 else ()
        return torch.rand(count, 3, *frames, *self.size, generator=torch.Generator().manual_seed(5)) * 2 - 1

    @property
    def size_arguments(self) -> dict[str, int]:
        """The arguments of the diffusers pipeline for the size."""
        return dict(zip(("height", "width"), self.size, strict=True))

    @property
    def no_guidance(self) -> dict[str, float]:
        """The argument that disables classifier-free guidance."""
        return {self.scale: self.guidance_off}

    @property
    def latent_factor(self) -> int:
        """Pixels per latent of the family."""
        return self.size[0] // int(self.batch.latents.shape[-2])


def build_batch(latents: Tensor, cond: Cond, frame: Sequence[float] = FRAME) -> Batch:
    """Build a batch whose samples all have this original size, crop and target size."""
    count = len(latents)
    names = tuple(f"sample {number}" for number in range(count))
    return Batch(
        latents,
        cond,
        size_conditioning=torch.tensor([list(frame)] * count),
        loss_weights=torch.ones(count),
        global_positions=tuple(range(count)),
        sample_keys=names,
    )


def take_rows(batch: Batch, count: int) -> Batch:
    """Take the first samples of a batch."""
    return slice_rows(batch, slice(count))


def slice_rows(batch: Batch, rows: slice) -> Batch:
    """Take some samples of a batch."""
    cond = {name: value[rows] for name, value in batch.cond.items()}
    controls = tuple(latents[rows] for latents in batch.control_latents)
    frame_cond = {name: value[rows] for name, value in batch.frame_cond.items()}
    names = ("latents", "size_conditioning", "loss_weights", "global_positions", "sample_keys")
    parts: dict[str, Any] = {name: getattr(batch, name)[rows] for name in names}
    return replace(batch, cond=cond, control_latents=controls, frame_cond=frame_cond, **parts)


def resize_frame_cond(batch: Batch, latents: Tensor) -> Batch:
    """Replace the latents among what the model gets of frames by zeros of the size and device of these.

    So it is with control images of the size of the picture, which are channels of some models.
    """
    controls = tuple(
        torch.zeros(*each.shape[:-2], *latents.shape[-2:], device=latents.device)
        if each.shape[-2:] == batch.latents.shape[-2:]
        else each
        for each in batch.control_latents
    )
    cond = {
        name: torch.zeros(*value.shape[:3], *latents.shape[-2:], device=latents.device)
        if value.ndim == 5
        else value.to(latents.device)
        for name, value in batch.frame_cond.items()
    }
    return replace(batch, frame_cond=cond, control_latents=controls)


def make_generators(count: int = 2) -> list[torch.Generator]:
    """Seed a generator for each sample."""
    return [torch.Generator().manual_seed(100 + number) for number in range(count)]


class ForwardOnlyWrapper(nn.Module):
    """A wrapper like DDP or FSDP: only ``forward`` works; the attributes of the inner module are hidden."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def copy_tensor(value: Any) -> Any:
    """Copy a tensor; return anything else as it is."""
    return value.clone() if isinstance(value, Tensor) else value


class Recorder:
    """Record each call of a module, bound to the parameter names, and its output."""

    def __init__(self, module: nn.Module):
        self.calls: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.signature = inspect.signature(module.forward)
        module.register_forward_hook(self.record, with_kwargs=True)

    def record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        arguments = self.signature.bind(*args, **kwargs).arguments
        # Copies: the pipeline of Kandinsky 5 writes each step into the latents that it has given.
        self.calls.append({name: copy_tensor(value) for name, value in arguments.items()})
        self.outputs.append(output if isinstance(output, Tensor) else output[0])


def flatten_tensors(value: Any) -> list[Tensor]:
    """The tensors and integers inside ``value``, in order, as float64."""
    if isinstance(value, Tensor):
        return [value.double()]
    if type(value) is int:
        return [torch.tensor(value).double()]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in flatten_tensors(value[key])]
    return [tensor for item in value for tensor in flatten_tensors(item)] if isinstance(value, list | tuple) else []


def find_call_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Find the tensor arguments in which two calls of a denoiser differ."""
    names = [{name for name in call if flatten_tensors(call[name])} for call in (theirs, ours)]
    for name in sorted(names[0] - names[1]):
        yield f"the argument {name!r} is not given"
    for name in sorted(names[1] - names[0]):
        yield f"the argument {name!r} is given, and not by the pipeline"
    for name in sorted(names[0] & names[1]):
        tensors = flatten_tensors(ours[name]), flatten_tensors(theirs[name])
        if len(tensors[0]) != len(tensors[1]):
            yield f"argument {name!r}: {len(tensors[0])} tensors instead of {len(tensors[1])}"
            continue
        for a, b in zip(*tensors, strict=True):
            b = b.expand_as(a) if is_expandable(b, a) else b
            if text := describe_difference(a, b, rtol=EXACT, atol=EXACT):
                yield f"argument {name!r}: {text}"


def is_expandable(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor can be broadcast to the shape of another one."""
    sides = zip(reversed(tensor.shape), reversed(like.shape), strict=False)
    return tensor.ndim <= like.ndim and all(own in (1, other) for own, other in sides)


def describe_difference(actual: Tensor, expected: Tensor, *, rtol: float = RELATIVE, atol: float = ABSOLUTE) -> str:
    """Describe how two tensors differ; empty if they are close."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if torch.allclose(actual, expected, rtol=rtol, atol=atol):
        return ""
    difference = float((actual - expected).abs().max())
    return f"it differs by up to {difference:.3g}, where values are up to {float(expected.abs().max()):.3g}"


def ensure_close(
    actual: Tensor, expected: Tensor, reason: str, *, rtol: float = RELATIVE, atol: float = ABSOLUTE
) -> None:
    """Fail the check for this reason if two tensors differ."""
    actual, expected = actual.double(), expected.double()
    if text := describe_difference(actual, expected, rtol=rtol, atol=atol):
        raise CheckFailedError(f"{reason}: {text}")
