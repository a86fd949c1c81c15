"""Draw the contact sheet: images as they are trained, by bucket, so that bad crops are noticed before training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..atomic_files import open_atomic_path
from ..dataset.image_decoding import Pixels
from ..dataset.mask_files import MaskPixels
from ..errors import UserError
from ..problems import Problem, report_file
from .buckets import BucketAssignment
from .contact_sheet_text import TEXT_COLOR, TextRenderer
from .images import (
    BadSample,
    CropParams,
    load_control_pixels,
    load_first_frame,
    resize_and_crop,
    resize_and_crop_mask,
)
from .manifest import Manifest
from .summary import BucketSummary

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 480
"""The number of images on one sheet; with many buckets, fewer of each are drawn."""

SHEET_WIDTH = 1600
THUMBNAIL_AREA, MAX_THUMBNAIL_SIDE = 200 * 200, 420
TITLE_WIDTH = 480
MIN_CELL_WIDTH = 160  # leaves room for the text
CELL_GAP, MARGIN, ROW_GAP, CONTROL_GAP = 14, 24, 30, 4
LINE_HEIGHT, HEADING_HEIGHT, TITLE_HEIGHT = 17, 56, 56
CAPTION_LINES = 2
BACKGROUND_COLOR, MUTED_COLOR, WARNING_COLOR = (250, 250, 248), (105, 105, 105), (190, 40, 20)
CROP_HIGHLIGHT_FRACTION = 0.2
"""Crops that remove more than this are labeled in red."""

MASK_COLOR, MASK_OPACITY = (205, 40, 160), 0.6


@dataclass(frozen=True)
class Cell:
    """An image on the sheet; above the first one of a bucket is the bucket's heading."""

    summary: BucketSummary
    sample_index: int
    thumbnail_size: tuple[int, int]
    num_shown: int  # the number of images of the bucket that are shown
    is_first: bool
    control_sizes: tuple[
        tuple[int, int], ...
    ] = ()  # the sizes of thumbnails to the right of the image and as high as it

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.thumbnail_size
        width += sum(CONTROL_GAP + control_width for control_width, _ in self.control_sizes)
        return max(width, MIN_CELL_WIDTH), HEADING_HEIGHT + height + 6 + LINE_HEIGHT * (2 + CAPTION_LINES)


def build_cells(
    buckets: Sequence[BucketSummary], assignments: Sequence[BucketAssignment], max_per_bucket: int
) -> list[Cell]:
    """Select the most cropped images of each bucket; buckets are sorted by stage, dataset and aspect ratio."""
    shown = buckets[:MAX_IMAGES]
    max_per_bucket = max(1, min(max_per_bucket, MAX_IMAGES // max(len(shown), 1)))

    def get_sort_key(bucket: BucketSummary) -> tuple[object, ...]:
        width, height = bucket.resolution
        return bucket.from_step, bucket.dataset_index_in_file, width / height, bucket.resolution

    cells = []
    for bucket in sorted(shown, key=get_sort_key):
        indices = sorted(bucket.sample_indices, key=lambda index: (-assignments[index].cropped_fraction, index))
        indices, size = indices[:max_per_bucket], compute_thumbnail_size(bucket.resolution)
        controls = tuple((max(size[1] * wide // high, 1), size[1]) for wide, high in bucket.control_resolutions)
        cells += [
            Cell(
                summary=bucket,
                sample_index=index,
                thumbnail_size=size,
                num_shown=len(indices),
                is_first=index == indices[0],
                control_sizes=controls,
            )
            for index in indices
        ]
    return cells


def place_cells(cells: Sequence[Cell]) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Place cells in rows, from left to right; return the corner of each, and the size of the sheet."""
    corners, x, y, right, bottom = list[tuple[int, int]](), MARGIN, MARGIN + TITLE_HEIGHT, MARGIN + TITLE_WIDTH, 0
    for cell in cells:
        width, height = cell.size
        if x > MARGIN and x + width > SHEET_WIDTH - MARGIN:
            x, y = MARGIN, bottom + ROW_GAP
        corners.append((x, y))
        right, bottom, x = max(right, x + width), max(bottom, y + height), x + width + CELL_GAP
    return corners, (right + MARGIN, bottom + MARGIN)


def compute_thumbnail_size(resolution: tuple[int, int]) -> tuple[int, int]:
    """Give all buckets about the same area; small ones are enlarged by integers, which keeps pixels visible."""
    width, height = resolution
    scale = min(math.sqrt(THUMBNAIL_AREA / (width * height)), MAX_THUMBNAIL_SIDE / max(resolution))
    scale = math.floor(scale) if scale > 1 else scale
    return max(round(width * scale), 1), max(round(height * scale), 1)


def draw_contact_sheet(
    manifest: Manifest, assignments: Sequence[BucketAssignment], buckets: Sequence[BucketSummary], max_per_bucket: int
) -> "tuple[Image, int]":
    """Draw the sheet; also return the number of images on it."""
    from PIL import Image, ImageDraw

    cells = build_cells(buckets, assignments, max_per_bucket)
    corners, size = place_cells(cells)
    sheet = Image.new("RGB", size, BACKGROUND_COLOR)
    renderer, width = TextRenderer(ImageDraw.Draw(sheet)), size[0] - 2 * MARGIN
    num_hidden = len(buckets) - sum(cell.is_first for cell in cells)
    title = f"{len(cells)} of {len(manifest.samples)} images, as they are trained"
    title += f"; {num_hidden} more buckets are not shown" if num_hidden else ""
    renderer.draw_text((MARGIN, MARGIN - 4), title, width, 20)
    for cell, corner in zip(cells, corners, strict=True):
        _draw_cell(sheet, renderer, corner, cell=cell, manifest=manifest, assignment=assignments[cell.sample_index])
    subtitle = "the most cropped images of each bucket first"
    subtitle += "; characters without a font are shown as codes" if renderer.has_escaped_characters else ""
    renderer.draw_text((MARGIN, MARGIN + 24), subtitle, width, color=MUTED_COLOR)
    return sheet, len(cells)


def save_contact_sheet(sheet: "Image", path: Path) -> None:
    try:
        with open_atomic_path(path) as temporary:
            sheet.save(temporary)
    except (OSError, ValueError) as error:
        raise UserError(Problem("preview", f"{path} cannot be written: {error}")) from error


def _draw_cell(
    sheet: "Image",
    renderer: TextRenderer,
    corner: tuple[int, int],
    cell: Cell,
    manifest: Manifest,
    assignment: BucketAssignment,
) -> None:
    (x, y), (width, _), summary = corner, cell.size, cell.summary
    if cell.is_first:
        renderer.draw_line((x, y), width)
        name = f"{summary.resolution[0]} x {summary.resolution[1]}"
        name += f", {summary.num_frames} frames" if summary.num_frames > 1 else ""
        renderer.draw_text((x, y + 4), name, width, 20)
        start = renderer.measure_text(name, 20) + 8
        if start < width and (text := _format_dataset_and_stage(summary, manifest)):
            renderer.draw_text((x + start, y + 10), text, width - start, color=MUTED_COLOR)
        total = len(summary.sample_indices)
        num_hidden = total - cell.num_shown
        text = f"{cell.num_shown} shown, {num_hidden} more" if num_hidden else f"{total} image{'s' * (total != 1)}"
        renderer.draw_text((x, y + 29), text, width, color=MUTED_COLOR)
    pixels, masked = _load_as_trained(manifest, assignment, cell.sample_index)
    sheet.paste(_make_thumbnail(pixels, cell.thumbnail_size), (x, y + HEADING_HEIGHT))
    left = x + cell.thumbnail_size[0] + CONTROL_GAP
    controls = _load_controls_as_trained(manifest, assignment, cell.sample_index)
    for pixels, size in zip(controls, cell.control_sizes, strict=True):
        pixels = pixels if pixels.ndim == 3 else pixels[0]
        sheet.paste(_make_thumbnail(pixels, size), (left, y + HEADING_HEIGHT))
        left += size[0] + CONTROL_GAP
    lines = _format_labels(manifest, assignment, cell.sample_index, masked)
    lines += renderer.wrap_text(lines.pop(), width, CAPTION_LINES)
    crop_color = WARNING_COLOR if assignment.cropped_fraction > CROP_HIGHLIGHT_FRACTION else MUTED_COLOR
    top = y + HEADING_HEIGHT + cell.thumbnail_size[1] + 4
    for row, (line, color) in enumerate(
        zip(lines, (TEXT_COLOR, crop_color, *[MUTED_COLOR] * CAPTION_LINES), strict=False)
    ):
        renderer.draw_text((x, top + row * LINE_HEIGHT), line, width, color=color)


def _format_dataset_and_stage(summary: BucketSummary, manifest: Manifest) -> str:
    """Format the dataset and the first step of the stage, if there are several."""
    parts = []
    if len({dataset.dataset_index_in_file for dataset in manifest.datasets}) > 1:
        parts.append(f"dataset {summary.dataset_index_in_file + 1}")
    if len({dataset.from_step for dataset in manifest.datasets}) > 1:
        parts.append(f"step {summary.from_step + 1}")
    return ", ".join(parts)


def _format_labels(
    manifest: Manifest, assignment: BucketAssignment, sample_index: int, masked_fraction: float
) -> list[str]:
    """Format the file name, crop and mask, and caption of an image."""
    sample = manifest.samples[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    cropped = assignment.cropped_fraction
    label = f"{cropped:.1%} cropped" if cropped else "not cropped"
    label += " at random" if subset.random_crop and cropped else ""
    label += f", {masked_fraction:.0%} masked" if sample.mask is not None else ""
    if sample.controls:
        label += f", right: {len(sample.controls)} control image{'s' * (len(sample.controls) > 1)}"
    label += ", regularization" if sample.is_reg else ""
    if sample.window is not None:
        label = f"frames {sample.window.start} to {sample.window.last}, {label}"
    return [sample.image.name, label, sample.caption.replace("\n", " | ") or "(no caption)"]


def _load_as_trained(manifest: Manifest, assignment: BucketAssignment, sample_index: int) -> tuple[Pixels, float]:
    """Load the image resized, cropped and with its mask drawn over it; also return the masked fraction."""
    sample = manifest.samples[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    image, values = load_first_frame(sample)
    pixels = resize_and_crop(image, assignment, assignment.crop_left_top, subset.resize_interpolation)
    if sample.mask is None or values is None:
        return pixels, 0.0
    mask = resize_and_crop_mask(sample.mask, values, assignment, assignment.crop_left_top, is_flipped=False)
    return overlay_mask(pixels, mask), 1 - float(mask.mean(dtype=np.float64)) / 255


def _load_controls_as_trained(
    manifest: Manifest, assignment: BucketAssignment, sample_index: int
) -> tuple[Pixels, ...]:
    sample = manifest.samples[sample_index]
    dataset = manifest.datasets[sample.dataset_index]
    interpolation = dataset.subsets[sample.subset_index].resize_interpolation
    crop = CropParams(assignment.crop_left_top, is_flipped=False, interpolation=interpolation)
    controls = load_control_pixels(sample, assignment, dataset, crop)
    if isinstance(controls, BadSample):
        raise UserError(report_file(controls.name, controls.problem))
    return controls


def overlay_mask(pixels: Pixels, mask: MaskPixels) -> Pixels:
    """Cover what is masked out with ``MASK_COLOR``; pixels of full weight do not change."""
    cover = MASK_OPACITY * (1 - mask[..., None].astype(np.float64) / 255)
    covered: Pixels = np.rint(pixels * (1 - cover) + np.asarray(MASK_COLOR) * cover).astype(np.uint8)
    return covered


def _make_thumbnail(pixels: Pixels, size: tuple[int, int]) -> "Image":
    from PIL import Image

    image = Image.fromarray(pixels)
    return image.resize(size, Image.Resampling.NEAREST if size[0] > image.width else Image.Resampling.LANCZOS)
