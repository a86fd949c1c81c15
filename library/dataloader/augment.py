"""Augmentation: random crop, flip and caption of each view of a sample, ``color_aug``, and condition images.

SDXL's size conditioning (``time_ids``) depends on crop and flip, so it is computed here as well.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..dataset.clip_windows import TextImages
from ..dataset.controls import MASK_FROM_IMAGE
from ..dataset.image_decoding import Pixels
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..randomness import Purpose, derive_rng
from .batch_plan import MicroBatch
from .buckets import BucketAssignment, assign_controls, list_control_facts
from .caption_processing import process_caption
from .face_crop import crops_faces, draw_face_crop, parse_face
from .manifest import Manifest

COLOR_AUG_PROBABILITY = 0.33
MAX_HUE_SHIFT = 8 / 180
"""The largest change of hue as a fraction of the circle; sd-scripts shifts by 8 of OpenCV's 180 hues."""

MAX_GAMMA_CHANGE = 0.05


def augment_color(pixels: Pixels, rng: random.Random) -> Pixels:
    """Change the hue or the gamma of one image in three, as sd-scripts does."""
    if rng.random() >= COLOR_AUG_PROBABILITY:
        return pixels
    if rng.random() < 0.5:
        return adjust_hue(pixels, rng.uniform(-MAX_HUE_SHIFT, MAX_HUE_SHIFT))
    return adjust_gamma(pixels, rng.uniform(1 - MAX_GAMMA_CHANGE, 1 + MAX_GAMMA_CHANGE))


def adjust_hue(pixels: Pixels, shift: float) -> Pixels:
    """Shift all hues by a fraction of the circle; saturation and value (the maximum of red, green and blue) stay."""
    values = pixels.astype(np.float32)
    red, green, blue = values[..., 0], values[..., 1], values[..., 2]
    value = values.max(axis=2)
    chroma = value - values.min(axis=2)
    safe = np.where(chroma == 0, 1, chroma)
    sector = np.where(
        value == red,
        (green - blue) / safe % 6,
        np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    sector = sector + np.float32(shift * 6)
    channels = [value - chroma * _compute_missing_chroma((sector + start) % 6) for start in (5, 3, 1)]
    shifted: Pixels = np.rint(np.stack(channels, axis=2)).astype(np.uint8)
    return shifted


def _compute_missing_chroma(sector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the fraction of the chroma that a channel lacks, at a position on the circle of six sectors."""
    missing: NDArray[np.float32] = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return missing


def adjust_gamma(pixels: Pixels, gamma: float) -> Pixels:
    """Apply a gamma curve; above 1 it darkens, black and white stay."""
    table = np.rint(255 * (np.arange(256) / 255) ** gamma).astype(np.uint8)
    return np.take(table, pixels)


CANNY_THRESHOLDS = 100, 200
"""Gradients above the first are edges where they are connected to one above the second, as OminiControl has them."""

MAX_BLUR_RADIUS = 10


def make_condition(kind: str, pixels: Pixels, rng: random.Random) -> Pixels:
    """Make the condition image of a picture; holes and blur are drawn from ``rng``."""
    if kind == "canny":
        return np.repeat(detect_edges(pixels)[..., None], 3, axis=2)
    if kind == "colorization":
        return _remove_color(pixels)
    if kind == "deblurring":
        return _blur(pixels, rng.randint(1, MAX_BLUR_RADIUS))
    if kind == "inpainting":
        return _cut_hole(pixels, rng)
    if kind == MASK_FROM_IMAGE:
        return draw_mask(pixels.shape[0], pixels.shape[1], rng)
    raise AssertionError(f"unknown condition {kind}")


def _remove_color(pixels: Pixels) -> Pixels:
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L").convert("RGB"))


def _blur(pixels: Pixels, radius: int) -> Pixels:
    from PIL import Image, ImageFilter

    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def _cut_hole(pixels: Pixels, rng: random.Random) -> Pixels:
    """Blacken a random rectangle, or all but it; half of the pictures each."""
    height, width = pixels.shape[:2]
    left, right = sorted(rng.randint(0, width) for _ in range(2))
    top, bottom = sorted(rng.randint(0, height) for _ in range(2))
    is_kept = np.full((height, width, 1), rng.random() < 0.5)
    is_kept[top:bottom, left:right] ^= True
    return np.where(is_kept, pixels, np.uint8(0))


FULL_MASK_RATE, MAX_MASK_SHAPES = 0.25, 4
"""How many of the masks cover everything, as the authors of the inpainting models trained; shapes of the others."""


def draw_mask(height: int, width: int, rng: random.Random) -> Pixels:
    """Draw a mask: white rectangles and ellipses on black, or white everywhere."""
    from PIL import Image, ImageDraw

    if rng.random() < FULL_MASK_RATE:
        return np.full((height, width, 3), 255, np.uint8)
    image = Image.new("L", (width, height))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, MAX_MASK_SHAPES)):
        sides = [max(1, round(side * rng.uniform(0.1, 0.6))) for side in (width, height)]
        # Half of a shape may be outside, so that corners are covered, too.
        left, top = (rng.randint(0, whole - 1) - side // 2 for whole, side in zip((width, height), sides, strict=True))
        shape = draw.rectangle if rng.random() < 0.5 else draw.ellipse
        shape((left, top, left + sides[0] - 1, top + sides[1] - 1), fill=255)
    return np.repeat(np.asarray(image)[..., None], 3, axis=2)


def detect_edges(pixels: Pixels) -> NDArray[np.uint8]:
    """Detect edges (0 or 255) with Canny's method: Sobel gradients of the strongest channel, thinned and connected."""
    values = np.pad(pixels.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    columns, rows = values[:, 2:] - values[:, :-2], values[2:] - values[:-2]
    horizontal = columns[:-2] + 2 * columns[1:-1] + columns[2:]
    vertical = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    strongest = (np.abs(horizontal) + np.abs(vertical)).argmax(axis=2)[..., None]
    horizontal, vertical = (np.take_along_axis(part, strongest, 2)[..., 0] for part in (horizontal, vertical))
    magnitude = np.abs(horizontal) + np.abs(vertical)
    low, high = CANNY_THRESHOLDS
    candidates = _thin_edges(horizontal, vertical, magnitude) & (magnitude > low)
    return (_connect_edges(candidates, magnitude > high) * 255).astype(np.uint8)


def _thin_edges(
    horizontal: NDArray[np.int32], vertical: NDArray[np.int32], magnitude: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Keep the pixels whose gradient is the largest along its direction, of four directions."""
    height, width = magnitude.shape
    padded = np.pad(magnitude, 1)

    def shift(down: int, right: int) -> NDArray[np.int32]:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    slope = np.abs(vertical) / np.maximum(np.abs(horizontal), 1e-9)
    flat, steep = slope < np.tan(np.pi / 8), slope > np.tan(3 * np.pi / 8)
    falling = (horizontal ^ vertical) >= 0  # both gradients have one sign
    one_side = np.select([flat, steep, falling], [shift(0, -1), shift(-1, 0), shift(-1, -1)], shift(-1, 1))
    other_side = np.select([flat, steep, falling], [shift(0, 1), shift(1, 0), shift(1, 1)], shift(1, -1))
    return (magnitude > one_side) & (magnitude >= other_side)


def _connect_edges(candidates: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Keep the connected groups of candidates that contain a strong one."""
    numbers = np.full(np.add(candidates.shape, 2), -1)
    inner = numbers[1:-1, 1:-1]
    inner[candidates] = np.arange(candidates.sum())
    height, width = candidates.shape
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        neighbors = numbers[1 + down : 1 + down + height, 1 + right : 1 + right + width]
        linked = (inner >= 0) & (neighbors >= 0)
        pairs.append((inner[linked], neighbors[linked]))
    first, second = (np.concatenate(each) for each in zip(*pairs, strict=True))
    groups = np.arange(candidates.sum())
    while True:  # each round joins neighboring groups and follows the links to their smallest member
        lower = np.minimum(groups[first], groups[second])
        joined = groups.copy()
        for members in (groups[first], groups[second], first, second):
            np.minimum.at(joined, members, lower)
        joined = joined[joined]
        if np.array_equal(joined, groups):
            break
        groups = joined
    has_strong = np.zeros(len(groups), bool)
    has_strong[groups[strong[candidates]]] = True
    kept = np.zeros_like(candidates)
    kept[candidates] = has_strong[groups]
    return kept


@dataclass(frozen=True)
class SampleView:
    """One occurrence of a sample in the run: the ``repeat_index``-th of its epoch; epoch and step count from 0."""

    epoch: int
    step: int
    sample_index: int
    repeat_index: int


@dataclass(frozen=True)
class Augmenter:
    """Draws crop, flip and caption of each view, statelessly from the seed and the view."""

    manifest: Manifest
    assignments: Sequence[BucketAssignment]
    seed: int
    total_steps: int

    def list_views(self, micro_batch: MicroBatch, step: int) -> list[SampleView]:
        """List the views of a micro-batch."""
        return [
            SampleView(micro_batch.epoch, step, *entry)
            for entry in zip(micro_batch.sample_indices, micro_batch.repeat_indices, strict=True)
        ]

    def get_subset(self, sample_index: int) -> SubsetConfig:
        """Return the subset of a sample."""
        entry = self.manifest.samples[sample_index]
        return self.manifest.datasets[entry.dataset_index].subsets[entry.subset_index]

    def get_dataset(self, sample_index: int) -> DatasetConfig:
        """Return the dataset of a sample."""
        return self.manifest.datasets[self.manifest.samples[sample_index].dataset_index]

    def assign_controls(self, sample_index: int) -> tuple[BucketAssignment, ...]:
        """Assign the control images of a sample to their sizes."""
        sample = self.manifest.samples[sample_index]
        return assign_controls(sample, self.assignments[sample_index], self.get_dataset(sample_index))

    def get_control_key(self, sample_index: int, *, is_flipped: bool) -> str:
        """Identify the pixels of the control images of a sample without random crop; empty if it has none."""
        sample = self.manifest.samples[sample_index]
        if not sample.controls:
            return ""
        facts = list_control_facts(sample, self.assign_controls(sample_index))
        interpolation = self.get_subset(sample_index).resize_interpolation or ""
        return " ".join(map(str, [*facts, interpolation, "mirrored" if is_flipped else ""]))

    def identify_controls(self, view: SampleView) -> str:
        """``get_control_key`` of a view."""
        if not self.manifest.samples[view.sample_index].controls:
            return ""
        return self.get_control_key(view.sample_index, is_flipped=self.is_flipped(view))

    def get_text_image_key(self, sample_index: int, kind: TextImages, *, is_flipped: bool) -> str:
        """Identify the images that a text encoder reads with the caption of a sample; empty if there are none."""
        if kind == "first frame":
            return self._get_first_frame_key(sample_index, is_flipped=is_flipped)
        return self.get_control_key(sample_index, is_flipped=is_flipped) if kind == "controls" else ""

    def identify_first_frame(self, view: SampleView) -> str:
        """Identify the first frame of a view, or its image; see ``get_text_image_key``."""
        return self._get_first_frame_key(view.sample_index, is_flipped=self.is_flipped(view))

    def _get_first_frame_key(self, sample_index: int, *, is_flipped: bool) -> str:
        """Identify the pixels of the first frame of a window, or of an image, without random crop."""
        sample, assignment = self.manifest.samples[sample_index], self.assignments[sample_index]
        window = () if sample.window is None else replace(sample.window, length=1).list_facts()
        facts = [sample.content_hash, *assignment.resized_size, *assignment.crop_left_top]
        facts += [*assignment.bucket_resolution, self.get_subset(sample_index).resize_interpolation or ""]
        shown = ["alpha"] if sample.mask is not None and sample.mask.is_alpha else []  # transparent parts keep colors
        return " ".join(map(str, [*facts, "mirrored" if is_flipped else "", *window, *shown]))

    def draw_assignment(self, view: SampleView) -> BucketAssignment:
        """Draw the size to which an image is resized, and the position of its crop."""
        assignment, sample = self.assignments[view.sample_index], self.manifest.samples[view.sample_index]
        subset, rng = self.get_subset(view.sample_index), self._derive_crop_rng(view)
        face_range, face = subset.face_crop_aug_range, None
        if face_range is not None and crops_faces(self.get_dataset(view.sample_index), sample):
            face = parse_face(sample.image.name)
        if face_range is None or face is None:
            return replace(assignment, crop_left_top=self.draw_crop(view))
        is_random = subset.random_crop
        return draw_face_crop(face, sample.size, assignment, face_range, is_random=is_random, rng=rng)

    def _derive_crop_rng(self, view: SampleView) -> random.Random:
        return derive_rng(self.seed, Purpose.CROP, view.epoch, view.sample_index, view.repeat_index)

    def draw_crop(self, view: SampleView) -> tuple[int, int]:
        """Draw (left, top) of the crop in the resized image, where it is not around a face."""
        assignment = self.assignments[view.sample_index]
        if not self.get_subset(view.sample_index).random_crop:
            return assignment.crop_left_top
        rng = self._derive_crop_rng(view)
        margins = [assignment.resized_size[side] - assignment.bucket_resolution[side] for side in (0, 1)]
        return rng.randint(0, margins[0]), rng.randint(0, margins[1])

    def is_flipped(self, view: SampleView) -> bool:
        """Whether the view is flipped horizontally."""
        if not self.get_subset(view.sample_index).flip_aug:
            return False
        return derive_rng(self.seed, Purpose.FLIP, view.epoch, view.sample_index, view.repeat_index).random() < 0.5

    def compute_size_conditioning(
        self, sample_index: int, assignment: BucketAssignment, *, is_flipped: bool
    ) -> tuple[int, ...]:
        """Compute (original height, width, crop top, left, target height, width); ``left`` is that of the flip.

        An image that is cropped around its face counts as one of the size of the crop, as in sd-scripts.
        """
        sample, crop_left_top = self.manifest.samples[sample_index], assignment.crop_left_top
        size, (width, height) = sample.size, assignment.bucket_resolution
        if crops_faces(self.get_dataset(sample_index), sample) and parse_face(sample.image.name) is not None:
            return height, width, 0, 0, height, width
        left = assignment.resized_size[0] - width - crop_left_top[0] if is_flipped else crop_left_top[0]
        return size[1], size[0], crop_left_top[1], left, height, width

    def draw_caption(self, view: SampleView) -> str:
        """Draw the caption of a view, as the text encoders get it."""
        sample, subset = self.manifest.samples[view.sample_index], self.get_subset(view.sample_index)
        rng = derive_rng(self.seed, Purpose.CAPTION, view.epoch, view.sample_index, view.repeat_index)
        return process_caption(
            sample.caption, subset, rng, epoch=view.epoch, step=view.step, total_steps=self.total_steps
        )
