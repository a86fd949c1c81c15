"""Draw the contact sheet: images as they are trained, by bucket, so that bad crops are noticed before training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..atomic_files import open_atomic_path
from ..dataset.image_inspection import Pixels
from ..dataset.masks import MaskPixels, load_image_and_mask
from ..errors import UserError
from .buckets import BucketAssignment
from .contact_sheet_text import TEXT_COLOR, TextRenderer
from .images import resize_and_crop, resize_and_crop_mask
from .manifest import Manifest
from .summary import BucketSummary

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 480
"""On one sheet; with many buckets, fewer of each bucket are drawn."""

SHEET_WIDTH = 1600
THUMBNAIL_AREA, MAX_THUMBNAIL_SIDE = 200 * 200, 420
TITLE_WIDTH = 480
MIN_CELL_WIDTH = 160  # for the text
CELL_GAP, MARGIN, BLOCK_GAP = 14, 24, 36
LINE_HEIGHT, HEADING_HEIGHT = 17, 56
CAPTION_LINES = 2
BACKGROUND_COLOR, MUTED_COLOR, WARNING_COLOR = (250, 250, 248), (105, 105, 105), (190, 40, 20)
CROP_HIGHLIGHT_FRACTION = 0.2
"""Crops that remove more than this are labelled in red."""

MASK_COLOR, MASK_OPACITY = (205, 40, 160), 0.6


@dataclass(frozen=True)
class BucketBlock:
    """Images of one bucket, side by side; a bucket that does not fit into a row has several blocks."""

    summary: BucketSummary
    sample_indices: tuple[int, ...]
    thumbnail_size: tuple[int, int]
    num_shown: int  # in all blocks of the bucket
    is_first: bool = True

    @property
    def cell_size(self) -> tuple[int, int]:
        width, height = self.thumbnail_size
        return max(width, MIN_CELL_WIDTH), height + 6 + LINE_HEIGHT * (2 + CAPTION_LINES)

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.cell_size
        return len(self.sample_indices) * (width + CELL_GAP) - CELL_GAP, HEADING_HEIGHT + height

    def split(self, count: int) -> "tuple[BucketBlock, BucketBlock]":
        """Split after the first ``count`` images."""
        first, rest = self.sample_indices[:count], self.sample_indices[count:]
        return replace(self, sample_indices=first), replace(self, sample_indices=rest, is_first=False)


@dataclass
class SheetRow:
    """Blocks side by side."""

    blocks: list[BucketBlock] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(block.size[0] + BLOCK_GAP for block in self.blocks) - BLOCK_GAP

    @property
    def height(self) -> int:
        return max(block.size[1] for block in self.blocks)

    def count_free_cells(self, block: BucketBlock) -> int:
        """Count how many images of the block fit into the rest of the row."""
        used = self.width + BLOCK_GAP if self.blocks else 0
        return max(0, (SHEET_WIDTH - 2 * MARGIN - used + CELL_GAP) // (block.cell_size[0] + CELL_GAP))


def build_blocks(
    buckets: Sequence[BucketSummary], assignments: Sequence[BucketAssignment], max_per_bucket: int
) -> list[BucketBlock]:
    """Select the most cropped images of each bucket; buckets are sorted by stage, dataset and aspect ratio."""
    shown = buckets[:MAX_IMAGES]
    max_per_bucket = max(1, min(max_per_bucket, MAX_IMAGES // max(len(shown), 1)))

    def get_sort_key(bucket: BucketSummary) -> tuple[object, ...]:
        width, height = bucket.resolution
        return bucket.from_step, bucket.dataset_index_in_file, width / height, bucket.resolution

    blocks = []
    for bucket in sorted(shown, key=get_sort_key):
        indices = sorted(bucket.sample_indices, key=lambda index: (-assignments[index].cropped_fraction, index))
        indices = indices[:max_per_bucket]
        blocks.append(BucketBlock(bucket, tuple(indices), compute_thumbnail_size(bucket.resolution), len(indices)))
    return blocks


def arrange_rows(blocks: Sequence[BucketBlock]) -> list[SheetRow]:
    """Fill rows with blocks in order; a block continues in the next row, unless only one image fits into this one."""
    rows = [SheetRow()]
    remaining = list(reversed(blocks))
    while remaining:
        block = remaining.pop()
        num_free = rows[-1].count_free_cells(block)
        if num_free >= len(block.sample_indices):
            rows[-1].blocks.append(block)
        elif num_free >= 2 or not rows[-1].blocks:
            first, rest = block.split(max(num_free, 1))
            rows[-1].blocks.append(first)
            remaining.append(rest)
        else:
            rows.append(SheetRow())
            remaining.append(block)
    return rows


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

    blocks = build_blocks(buckets, assignments, max_per_bucket)
    rows = arrange_rows(blocks)
    count = sum(block.num_shown for block in blocks)
    width = 2 * MARGIN + max(TITLE_WIDTH, *(row.width for row in rows))
    height = 2 * MARGIN + HEADING_HEIGHT + sum(row.height + BLOCK_GAP for row in rows) - BLOCK_GAP
    sheet = Image.new("RGB", (width, height), BACKGROUND_COLOR)
    renderer = TextRenderer(ImageDraw.Draw(sheet))
    num_hidden = len(buckets) - len(blocks)
    title = f"{count} of {len(manifest.samples)} images, as they are trained"
    title += f"; {num_hidden} more buckets are not shown" if num_hidden else ""
    renderer.draw_text((MARGIN, MARGIN - 4), title, width - 2 * MARGIN, 20)
    top = MARGIN + HEADING_HEIGHT
    for row in rows:
        left = MARGIN
        for block in row.blocks:
            _draw_block(sheet, renderer, (left, top), block, manifest, assignments)
            left += block.size[0] + BLOCK_GAP
        top += row.height + BLOCK_GAP
    subtitle = "the most cropped images of each bucket first"
    subtitle += "; characters without a font are shown as codes" if renderer.has_escaped_characters else ""
    renderer.draw_text((MARGIN, MARGIN + 24), subtitle, width - 2 * MARGIN, color=MUTED_COLOR)
    return sheet, count


def save_contact_sheet(sheet: "Image", path: Path) -> None:
    try:
        with open_atomic_path(path) as temporary:
            sheet.save(temporary)
    except (OSError, ValueError) as error:
        raise UserError(f"--preview: {path} cannot be written: {error}") from error


def _draw_block(
    sheet: "Image",
    renderer: TextRenderer,
    corner: tuple[int, int],
    block: BucketBlock,
    manifest: Manifest,
    assignments: Sequence[BucketAssignment],
) -> None:
    left, top = corner
    summary, width = block.summary, block.size[0]
    name = f"{summary.resolution[0]} x {summary.resolution[1]}"
    renderer.draw_line((left, top), width)
    renderer.draw_text((left, top + 4), name, width, 20)
    if text := _format_dataset_and_stage(summary, manifest):
        start = left + renderer.measure_text(name, 20) + 8
        renderer.draw_text((start, top + 10), text, left + width - start, color=MUTED_COLOR)
    total = len(summary.sample_indices)
    num_hidden = total - block.num_shown
    text = f"{block.num_shown} shown, {num_hidden} more" if num_hidden else f"{total} image{'s' * (total != 1)}"
    renderer.draw_text((left, top + 29), text if block.is_first else "continued", width, color=MUTED_COLOR)
    y = top + HEADING_HEIGHT
    for number, index in enumerate(block.sample_indices):
        x = left + number * (block.cell_size[0] + CELL_GAP)
        pixels, masked = _load_as_trained(manifest, assignments[index], index)
        sheet.paste(_make_thumbnail(pixels, block.thumbnail_size), (x, y))
        lines = _format_labels(manifest, assignments[index], index, masked)
        lines += renderer.wrap_text(lines.pop(), block.cell_size[0], CAPTION_LINES)
        is_red = assignments[index].cropped_fraction > CROP_HIGHLIGHT_FRACTION
        colors = [TEXT_COLOR, WARNING_COLOR if is_red else MUTED_COLOR]
        for row, line in enumerate(lines):
            position = x, y + block.thumbnail_size[1] + 4 + row * LINE_HEIGHT
            renderer.draw_text(position, line, block.cell_size[0], color=colors[row] if row < 2 else MUTED_COLOR)


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
    label += ", regularization" if sample.is_reg else ""
    return [sample.image.name, label, sample.caption.replace("\n", " | ") or "(no caption)"]


def _load_as_trained(manifest: Manifest, assignment: BucketAssignment, sample_index: int) -> tuple[Pixels, float]:
    """Load the image resized, cropped and with its mask drawn over it; also return the masked fraction."""
    sample = manifest.samples[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    image, values = load_image_and_mask(sample.image, sample.mask)
    pixels = resize_and_crop(image, assignment, assignment.crop_left_top, subset.resize_interpolation)
    if sample.mask is None or values is None:
        return pixels, 0.0
    mask = resize_and_crop_mask(sample.mask, values, assignment, assignment.crop_left_top, is_flipped=False)
    return overlay_mask(pixels, mask), 1 - float(mask.mean(dtype=np.float64)) / 255


def overlay_mask(pixels: Pixels, mask: MaskPixels) -> Pixels:
    """Cover what is masked out with ``MASK_COLOR``; pixels of full weight do not change."""
    cover = MASK_OPACITY * (1 - mask[..., None].astype(np.float64) / 255)
    covered: Pixels = np.rint(pixels * (1 - cover) + np.asarray(MASK_COLOR) * cover).astype(np.uint8)
    return covered


def _make_thumbnail(pixels: Pixels, size: tuple[int, int]) -> "Image":
    from PIL import Image

    image = Image.fromarray(pixels)
    return image.resize(size, Image.Resampling.NEAREST if size[0] > image.width else Image.Resampling.LANCZOS)
