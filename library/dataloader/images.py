"""Load, resize, crop and flip an image, or the frames of a clip, together with its mask, as sd-scripts resizes.

Files are decoded, in their EXIF orientation and transparent ones on white, by ``dataset.image_decoding``, and clips by
``dataset.clip_decoding``, frame by frame, so that only frames of the size of the bucket are in memory.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..dataset.clip_decoding import ClipError, read_clip_frames
from ..dataset.clip_inspection import inspect_clip
from ..dataset.clip_sound import Waveform, read_window_sound
from ..dataset.clip_windows import FrameRule, FrameWindow, RateConversion, TextImages
from ..dataset.controls import GREY, ControlImage
from ..dataset.image_decoding import Pixels, load_inpainting_mask, load_rgb_image, load_rgba_image
from ..dataset.image_ref import ImageRef
from ..dataset.mask_files import (
    Mask,
    MaskPixels,
    load_alpha_channel,
    load_image_and_mask,
    load_red_channel,
    verify_remote_image,
)
from ..dataset.schema import DatasetConfig
from ..errors import UserError
from ..problems import report_file
from ..storage.filesystems import RemoteOutage
from .augment import augment_color, make_condition
from .buckets import BucketAssignment, assign_controls, assign_reference
from .manifest import Sample

if TYPE_CHECKING:
    from PIL.Image import Image

    from .sample_prompts import Prompt


GREY_VALUE = 128
"""The pixels of a control clip that says nothing."""


@dataclass(frozen=True)
class BadSample:
    """An image that was valid when the dataset was scanned, and cannot be used now."""

    name: str
    problem: str


@dataclass(frozen=True)
class CropParams:
    """Crop position, flip and resampling filter of one view."""

    left_top: tuple[int, int]  # left, top in the resized image
    is_flipped: bool
    interpolation: str | None


def load_sample_pixels(
    sample: Sample, assignment: BucketAssignment, crop_params: CropParams, color_rng: random.Random | None = None
) -> tuple[Pixels, MaskPixels | None] | BadSample:
    """Load the pixels of the bucket and of the mask; ``color_rng`` enables ``color_aug``.

    Those of a clip with several frames are (frames, height, width, 3), and its mask is that of all of them.
    """
    if sample.window is not None:
        return _load_clip(sample, sample.window, assignment, crop_params)
    try:
        image, values = load_image_and_mask(verify_remote_image(sample.image, sample.content_hash), sample.mask)
        mask = None
        if sample.mask is not None and values is not None:
            left_top, is_flipped = crop_params.left_top, crop_params.is_flipped
            mask = resize_and_crop_mask(sample.mask, values, assignment, left_top, is_flipped=is_flipped)
    except RemoteOutage as error:  # no fault of the image
        raise UserError(report_file(sample.image, str(error))) from error
    except Exception as error:  # Pillow's decoders raise almost anything on damaged data
        return BadSample(str(sample.image), f"was readable at the start of the run, cannot be read now: {error}")
    if image.size != sample.size:
        return BadSample(str(sample.image), f"was {sample.size} at the start of the run, is {image.size} now")
    pixels = resize_and_crop(image, assignment, crop_params.left_top, crop_params.interpolation)
    if color_rng is not None:
        pixels = augment_color(pixels, color_rng)
    return np.ascontiguousarray(pixels[:, ::-1] if crop_params.is_flipped else pixels), mask


def _load_clip(
    sample: Sample, window: FrameWindow, assignment: BucketAssignment, crop_params: CropParams
) -> tuple[Pixels, MaskPixels | None] | BadSample:
    try:
        frames = read_clip_frames(sample.image, window.clip, window.start, window.length)
        pixels = _resize_frames(frames, window.length, sample.size, assignment, crop_params)
        mask = None
        if sample.mask is not None:
            left_top, is_flipped = crop_params.left_top, crop_params.is_flipped
            mask = load_resized_mask(sample.mask, assignment, left_top, is_flipped=is_flipped)
    except Exception as error:  # decoders raise almost anything on damaged data
        return BadSample(str(sample.image), f"was readable at the start of the run, cannot be read now: {error}")
    return pixels, mask


def _resize_frames(
    frames: "Iterator[Image]",
    length: int,
    size: tuple[int, int],
    assignment: BucketAssignment,
    crop_params: CropParams,
) -> Pixels:
    """Resize, crop and flip all frames alike; one frame alone is an image."""
    width, height = assignment.bucket_resolution
    pixels = np.empty((length, height, width, 3), np.uint8)
    previous, number = None, 0
    for number, frame in enumerate(frames):
        if frame.size != size:
            raise ClipError(f"frame {number} is {frame.size}, the first frame of the file is {size}")
        if frame is previous:  # a clip of a lower rate shows it again
            pixels[number] = pixels[number - 1]
            continue
        resized = resize_and_crop(frame, assignment, crop_params.left_top, crop_params.interpolation)
        pixels[number], previous = (resized[:, ::-1] if crop_params.is_flipped else resized), frame
    if number + 1 < length:
        raise ClipError(f"ends after {number + 1} of {length} frames")
    return pixels[0] if length == 1 else pixels


def load_sample_sound(sample: Sample) -> Waveform | BadSample | None:
    """Load the sound of a window, if it is trained."""
    if sample.window is None or not sample.has_sound:
        return None
    try:
        return read_window_sound(sample.image, sample.window)
    except Exception as error:  # decoders raise almost anything on damaged data
        return BadSample(str(sample.image), f"was readable at the start of the run, cannot be read now: {error}")


def load_first_frame(sample: Sample) -> "tuple[Image, MaskPixels | None]":
    """Load an image, or the first frame of a window, and its mask, in the size of the file."""
    if sample.window is None:
        return load_image_and_mask(sample.image, sample.mask)
    frame = next(read_clip_frames(sample.image, sample.window.clip, sample.window.start, 1))
    return frame, None if sample.mask is None else load_red_channel(sample.mask.image)


def load_first_pixels(
    sample: Sample, assignment: BucketAssignment, crop_params: CropParams
) -> tuple[Pixels] | BadSample:
    """Load the first frame of a window, or an image, resized, cropped and flipped as it is trained."""
    first = sample if sample.window is None else replace(sample, window=replace(sample.window, length=1))
    # An alpha channel that is a mask leaves the colors of transparent parts.
    mask = sample.mask if sample.mask is not None and sample.mask.is_alpha else None
    loaded = load_sample_pixels(replace(first, mask=mask), assignment, crop_params)
    return loaded if isinstance(loaded, BadSample) else loaded[:1]


def load_control_pixels(
    sample: Sample,
    assignment: BucketAssignment,
    dataset: DatasetConfig,
    crop_params: CropParams,
    rng: random.Random | None = None,
) -> tuple[Pixels, ...] | BadSample:
    """Load the control images of a sample, resized, cropped and flipped like it, or to sizes of their own.

    ``rng`` draws what varies where they are made from the image itself; without it, they are the same each time.
    """
    rng = rng or random.Random(sample.content_hash)
    found = []
    for control, own in zip(sample.controls, assign_controls(sample, assignment, dataset), strict=True):
        if control.made == GREY:
            frames = (sample.num_frames,) if sample.num_frames > 1 else ()
            found.append(np.full((*frames, *own.bucket_resolution[::-1], 3), GREY_VALUE, np.uint8))
            continue
        name = f"its control image {control.image}"
        if control.clip is not None and sample.window is not None:
            crop = crop_params if own == assignment else replace(crop_params, left_top=own.crop_left_top)
            loaded = _load_control_clip(sample, sample.window, control, own, crop)
            if isinstance(loaded, BadSample):
                return loaded
            found.append(loaded)
            continue
        try:
            load = load_inpainting_mask if control.is_mask else load_rgba_image if control.has_alpha else load_rgb_image
            image = load(verify_remote_image(control.image, control.content_hash))
        except RemoteOutage as error:  # no fault of the image
            raise UserError(report_file(control.image, str(error))) from error
        except Exception as error:  # Pillow's decoders raise almost anything on damaged data
            reason = f"{name} was readable at the start of the run, cannot be read now: {error}"
            return BadSample(str(sample.image), reason)
        if image.size != control.size:
            return BadSample(str(sample.image), f"{name} was {control.size} at the start, is {image.size} now")
        if control.is_reference:
            pixels = fit_on_white(image, own, crop_params.interpolation)
            found.append(np.ascontiguousarray(pixels[:, ::-1] if crop_params.is_flipped else pixels)[None])
            continue
        left_top = crop_params.left_top if own == assignment else own.crop_left_top
        pixels = resize_and_crop(image, own, left_top, crop_params.interpolation)
        if control.made:
            pixels = make_condition(control.made, pixels, rng)
        found.append(np.ascontiguousarray(pixels[:, ::-1] if crop_params.is_flipped else pixels))
    return tuple(found)


def _load_control_clip(
    sample: Sample, window: FrameWindow, control: ControlImage, own: BucketAssignment, crop_params: CropParams
) -> Pixels | BadSample:
    """Load the frames of a control clip that belong to a window; past its end, its last frame."""
    if control.clip is None:
        raise AssertionError("the control is a clip")
    try:
        frames = read_clip_frames(control.image, control.clip, window.start, window.length)
        return _resize_frames(frames, window.length, control.size, own, crop_params)
    except Exception as error:  # decoders raise almost anything on damaged data
        return BadSample(str(sample.image), f"its control clip {control.image} cannot be read now: {error}")


def fit_on_white(image: "Image", assignment: BucketAssignment, interpolation: str | None) -> Pixels:
    """Resize a reference image, and place it in the middle of a white one of the size of the bucket."""
    resized, (width, height) = resize_image(image, assignment.resized_size, interpolation), assignment.bucket_resolution
    pixels = np.full((height, width, 3), 255, np.uint8)
    top, left = (height - resized.shape[0]) // 2, (width - resized.shape[1]) // 2
    pixels[top : top + resized.shape[0], left : left + resized.shape[1]] = resized
    return pixels


def load_preview_controls(prompt: "Prompt", *, are_masks: bool = False, have_alpha: bool = False) -> "list[Image]":
    """Load the control images of a preview, or what is made of them, drawn by the seed of the prompt."""
    from PIL import Image

    load = load_inpainting_mask if are_masks and prompt.control_from_image is None else load_rgb_image
    load = load_rgba_image if have_alpha else load
    images = [load(path) for path in prompt.control_images]
    if prompt.control_from_image is None:
        return images
    rng = random.Random(prompt.seed or 0)
    return [Image.fromarray(make_condition(prompt.control_from_image, np.asarray(image), rng)) for image in images]


def load_text_images(prompt: "Prompt", kind: TextImages) -> "list[Image]":
    """Load the images that a text encoder reads with the texts of a preview."""
    if kind == "first frame":
        return [image for image in load_frame_images(prompt)[:1] if image is not None]
    return load_preview_controls(prompt) if kind == "controls" else []


def load_reference_images(prompt: "Prompt", size: tuple[int, int]) -> "list[Image]":
    """Load the control images of a preview of a clip as its reference images, in its size as in training."""
    from PIL import Image

    images = map(load_rgb_image, prompt.control_images)
    return [Image.fromarray(fit_on_white(image, assign_reference(image.size, size), None)) for image in images]


def build_grey_clip(prompt: "Prompt", size: tuple[int, int]) -> "list[Image]":
    """Build the control clip of a preview that has reference images alone, as in training."""
    from PIL import Image

    return [Image.new("RGB", size, (GREY_VALUE,) * 3)] * (prompt.num_frames or 1)


def load_control_clips(
    prompt: "Prompt", rule: FrameRule, get_size: Callable[[int], tuple[int, int]], *, has_references: bool = False
) -> "list[list[Image]]":
    """Load the control clips of a preview at the rate of the model, in its number of frames, each in its size.

    Of a shorter one the last frame is repeated; a control image is a clip of one frame, unless it is a reference image.
    """
    length = prompt.num_frames or 1
    images = [] if has_references else [[load_rgb_image(path)] * length for path in prompt.control_images]
    clips = [_read_preview_clip(path, rule, length) for path in prompt.control_clips]
    return [[fit_frame(frame, get_size(number)) for frame in clip] for number, clip in enumerate((*images, *clips))]


def _read_preview_clip(path: Path, rule: FrameRule, length: int) -> "list[Image]":
    image = ImageRef(path.parent, path.name)
    clip = replace(inspect_clip(image, "").frames, conversion=RateConversion(rule.fps))
    return list(read_clip_frames(image, clip, 0, length))


def fit_frame(image: "Image", size: tuple[int, int]) -> "Image":
    """Resize a frame to cover the size, as in training, and crop its center."""
    from PIL import Image

    if image.size == size:
        return image
    scale = max(size[0] / image.size[0], size[1] / image.size[1])
    resized = (max(size[0], round(image.size[0] * scale)), max(size[1], round(image.size[1] * scale)))
    left, top = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
    pixels = resize_image(image, resized, None)
    return Image.fromarray(np.ascontiguousarray(pixels[top : top + size[1], left : left + size[0]]))


def load_frame_images(prompt: "Prompt") -> "tuple[Image | None, Image | None]":
    """Load the images with which the clip of a preview begins and ends, if there are any."""
    first, last = (None if path is None else load_rgb_image(path) for path in (prompt.first_image, prompt.last_image))
    return first, last


_PILLOW_FILTERS = {
    "nearest": "NEAREST",
    "bilinear": "BILINEAR",
    "linear": "BILINEAR",
    "bicubic": "BICUBIC",
    "cubic": "BICUBIC",
    "lanczos": "LANCZOS",
    "box": "BOX",
}


def resize_and_crop(
    image: "Image", assignment: BucketAssignment, crop_left_top: tuple[int, int], interpolation: str | None
) -> Pixels:
    """Resize, then crop the bucket at ``crop_left_top``."""
    resized = resize_image(image, assignment.resized_size, interpolation)
    left, top = crop_left_top
    width, height = assignment.bucket_resolution
    return resized[top : top + height, left : left + width]


def resize_image(image: "Image", size: tuple[int, int], interpolation: str | None) -> Pixels:
    """Resize as sd-scripts does; by default with area averaging, with Lanczos if a side grows."""
    from PIL import Image

    if image.size == size:
        return np.asarray(image)
    shrinks = image.size[0] >= size[0] and image.size[1] >= size[1]
    interpolation = interpolation or ("area" if shrinks else "lanczos")
    if interpolation == "area" and shrinks:
        return resize_area(np.asarray(image), size)
    # OpenCV, which sd-scripts uses here, treats area as bilinear when a side grows
    name = _PILLOW_FILTERS["bilinear" if interpolation == "area" else interpolation]
    return np.asarray(image.resize(size, Image.Resampling[name]))


def resize_area(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Average the area of each target pixel, with fractional weights at its borders: to the bit as OpenCV does.

    Pillow's box filter uses whole pixels only, which aliases unless the sizes divide evenly.
    """
    height, width, _ = image.shape
    if not (width % size[0] or height % size[1]):
        return _average_blocks(image, (width // size[0], height // size[1]))
    rows = _average_along(_average_along(image, 1, size[0]), 0, size[1])  # in OpenCV's order, for equal sums
    return np.clip(np.rint(rows), 0, 255).astype(np.uint8)


def _average_blocks(image: Pixels, block: tuple[int, int]) -> Pixels:
    """Average blocks of whole pixels as OpenCV does: it rounds halves up in blocks of 2 x 2, to even in others."""
    parts = [image[row :: block[1], column :: block[0]] for row in range(block[1]) for column in range(block[0])]
    sums = np.zeros(parts[0].shape, np.int32)
    for part in parts:
        sums += part
    averaged: Pixels
    if block == (2, 2):
        averaged = ((sums + 2) >> 2).astype(np.uint8)
    else:
        averaged = np.rint(sums.astype(np.float32) * np.float32(1 / (block[0] * block[1]))).astype(np.uint8)
    return averaged


def _average_along(
    image: NDArray[np.uint8] | NDArray[np.float32], axis: Literal[0, 1], count: int
) -> NDArray[np.float32]:
    """Average rows (axis 0) or columns (1) to ``count``, which are fewer."""
    length = image.shape[axis]
    edges = np.linspace(0, length, count + 1)
    starts, ends = edges[:-1, None], edges[1:, None]
    first = np.floor(starts).astype(np.int64)
    lines = first + np.arange(int((np.ceil(ends) - first).max()))
    weights = np.clip(np.minimum(lines + 1, ends) - np.maximum(lines, starts), 0, None)
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    lines = np.minimum(lines, length - 1)
    shape = (count, *image.shape[1:]) if axis == 0 else (image.shape[0], count, *image.shape[2:])
    averaged = np.zeros(shape, np.float32)
    for index in range(lines.shape[1]):
        part = np.take(image, lines[:, index], axis).astype(np.float32)
        part *= weights[:, index].reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        averaged += part
    return averaged


def load_resized_mask(
    mask: Mask, assignment: BucketAssignment, crop_left_top: tuple[int, int], *, is_flipped: bool
) -> MaskPixels:
    """Load a mask, resized, cropped and flipped like its image; ``ValueError`` if its size has changed."""
    image = verify_remote_image(mask.image, mask.content_hash)
    values = load_alpha_channel(image) if mask.is_alpha else load_red_channel(image)
    return resize_and_crop_mask(mask, values, assignment, crop_left_top, is_flipped=is_flipped)


def resize_and_crop_mask(
    mask: Mask, values: MaskPixels, assignment: BucketAssignment, crop_left_top: tuple[int, int], *, is_flipped: bool
) -> MaskPixels:
    """Resize, crop and flip a mask like its image; ``ValueError`` if its size has changed."""
    size = (values.shape[1], values.shape[0])
    if size != mask.size:
        raise ValueError(f"the mask {mask.image} was {mask.size} at the start of the run, is {size} now")
    left, top = crop_left_top
    width, height = assignment.bucket_resolution
    cropped = resize_mask(values, assignment.resized_size)[top : top + height, left : left + width]
    return np.ascontiguousarray(cropped[:, ::-1] if is_flipped else cropped)


def resize_mask(values: MaskPixels, size: tuple[int, int]) -> MaskPixels:
    """Resize with area averaging, bilinear if a side grows; filters of images would ring at the edges of a mask."""
    from PIL import Image

    height, width = values.shape
    if (width, height) == size:
        return values
    if width >= size[0] and height >= size[1]:
        return resize_area(values[..., None], size)[..., 0]
    return np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BILINEAR))
