"""A sheet of the pictures as the model will see them, bucket by bucket, so that bad crops are seen before training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..dataset.image_inspection import Pixels
from ..dataset.masks import MaskPixels, load_image_and_mask
from ..errors import UserError
from .buckets import BucketAssignment
from .contact_sheet_text import TextRenderer
from .images import resize_and_crop, resize_and_crop_mask
from .manifest import Manifest
from .summary import BucketSummary

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_IMAGES = 480
"""On one sheet; with many buckets, each shows fewer."""

SHEET_WIDTH = 1600

THUMBNAIL_AREA = 200 * 200

MAX_THUMBNAIL_SIDE = 420  # side of a thumbnail

TITLE_WIDTH = 480

MIN_CELL_WIDTH = 160  # of a cell, for the text

CELL_GAP, MARGIN, BLOCK_GAP = 14, 24, 36

LINE_HEIGHT, HEADING_HEIGHT = 17, 56

CAPTION_LINES = 2

BACKGROUND_COLOR, MUTED_COLOR, WARNING_COLOR = (250, 250, 248), (105, 105, 105), (190, 40, 20)


CROPPED_FRACTION_IN_RED = 0.2

MASK_COLOR, MASK_OPACITY = (205, 40, 160), 0.6
"""What a mask leaves out is covered with this colour, to this degree."""


@dataclass(frozen=True)
class BucketBlock:
    """Pictures of one bucket, side by side: the whole bucket, or as much of it as fits on a shelf."""

    summary: BucketSummary
    sample_indices: tuple[int, ...]
    thumbnail_size: tuple[int, int]
    num_shown: int  # of the bucket, on the whole sheet
    is_first: bool = True

    @property
    def cell_size(self) -> tuple[int, int]:
        return max(self.thumbnail_size[0], MIN_CELL_WIDTH), self.thumbnail_size[1] + 6 + LINE_HEIGHT * (
            2 + CAPTION_LINES
        )

    @property
    def size(self) -> tuple[int, int]:
        return len(self.sample_indices) * (self.cell_size[0] + CELL_GAP) - CELL_GAP, HEADING_HEIGHT + self.cell_size[1]

    def split(self, count: int) -> "tuple[BucketBlock, BucketBlock]":
        """The first ``count`` pictures, and the others."""
        return replace(self, sample_indices=self.sample_indices[:count]), replace(
            self, sample_indices=self.sample_indices[count:], is_first=False
        )


@dataclass
class SheetRow:
    """Blocks that stand side by side."""

    blocks: list[BucketBlock] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(block.size[0] + BLOCK_GAP for block in self.blocks) - BLOCK_GAP

    @property
    def height(self) -> int:
        return max(block.size[1] for block in self.blocks)

    def count_free_cells(self, block: BucketBlock) -> int:
        """How many more pictures of this bucket have room."""
        used = self.width + BLOCK_GAP if self.blocks else 0
        return max(0, (SHEET_WIDTH - 2 * MARGIN - used + CELL_GAP) // (block.cell_size[0] + CELL_GAP))


def build_blocks(
    buckets: Sequence[BucketSummary], assignments: Sequence[BucketAssignment], max_per_bucket: int
) -> list[BucketBlock]:
    """The buckets with the pictures that are shown, those that lose most first; upright buckets come first."""
    shown = buckets[:MAX_IMAGES]
    max_per_bucket = max(1, min(max_per_bucket, MAX_IMAGES // max(len(shown), 1)))
    blocks = []
    for facts in sorted(
        shown,
        key=lambda item: (
            item.from_step,
            item.dataset_number,
            item.resolution[0] / item.resolution[1],
            item.resolution,
        ),
    ):
        samples = sorted(facts.sample_indices, key=lambda index: (-assignments[index].cropped_fraction, index))[
            :max_per_bucket
        ]
        blocks.append(BucketBlock(facts, tuple(samples), compute_thumbnail_size(facts.resolution), len(samples)))
    return blocks


def arrange_rows(blocks: Sequence[BucketBlock]) -> list[SheetRow]:
    """The blocks in their order; one that does not fit goes on on the next shelf, but not for a single picture."""
    shelves = [SheetRow()]
    waiting = list(reversed(blocks))
    while waiting:
        block = waiting.pop()
        room = shelves[-1].count_free_cells(block)
        if room >= len(block.sample_indices):
            shelves[-1].blocks.append(block)
        elif room >= 2 or not shelves[-1].blocks:
            here, rest = block.split(max(room, 1))
            shelves[-1].blocks.append(here)
            waiting.append(rest)
        else:
            shelves.append(SheetRow())
            waiting.append(block)
    return shelves


def compute_thumbnail_size(resolution: tuple[int, int]) -> tuple[int, int]:
    """About the same area for every bucket; small ones are enlarged by whole numbers, which keeps pixels visible."""
    width, height = resolution
    scale = min(math.sqrt(THUMBNAIL_AREA / (width * height)), MAX_THUMBNAIL_SIDE / max(resolution))
    scale = math.floor(scale) if scale > 1 else scale
    return max(round(width * scale), 1), max(round(height * scale), 1)


def draw_contact_sheet(
    manifest: Manifest, assignments: Sequence[BucketAssignment], buckets: Sequence[BucketSummary], max_per_bucket: int
) -> "tuple[Image, int]":
    """The sheet, and how many pictures are on it."""
    from PIL import Image, ImageDraw

    blocks = build_blocks(buckets, assignments, max_per_bucket)
    shelves = arrange_rows(blocks)
    count = sum(block.num_shown for block in blocks)
    width = 2 * MARGIN + max(TITLE_WIDTH, *(shelf.width for shelf in shelves))
    height = 2 * MARGIN + HEADING_HEIGHT + sum(shelf.height + BLOCK_GAP for shelf in shelves) - BLOCK_GAP
    sheet = Image.new("RGB", (width, height), BACKGROUND_COLOR)
    pen = TextRenderer(ImageDraw.Draw(sheet))
    left_out = len(buckets) - len(blocks)
    title = f"{count} of {len(manifest.samples)} pictures, as they are trained"
    title += f"; {left_out} buckets more" if left_out else ""
    pen.draw_text((MARGIN, MARGIN - 4), title, width - 2 * MARGIN, 20)
    top = MARGIN + HEADING_HEIGHT
    for shelf in shelves:
        left = MARGIN
        for block in shelf.blocks:
            _draw_block(sheet, pen, (left, top), block, manifest, assignments)
            left += block.size[0] + BLOCK_GAP
        top += shelf.height + BLOCK_GAP
    said = "in each bucket those that lose most come first"
    said += "; characters that no font here has are written as codes" if pen.has_escaped_characters else ""
    pen.draw_text((MARGIN, MARGIN + 24), said, width - 2 * MARGIN, color=MUTED_COLOR)
    return sheet, count


def save_contact_sheet(sheet: "Image", path: Path) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        sheet.save(unfinished)
        unfinished.replace(path)
    except (OSError, ValueError) as error:
        unfinished.unlink(missing_ok=True)
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
    facts, width = block.summary, block.size[0]
    name = f"{facts.resolution[0]} x {facts.resolution[1]}"
    renderer.draw_line((left, top), width)
    renderer.draw_text((left, top + 4), name, width, 20)
    if said := _format_dataset_and_stage(facts, manifest):
        start = left + renderer.measure_text(name, 20) + 8
        renderer.draw_text((start, top + 10), said, left + width - start, color=MUTED_COLOR)
    hidden = len(facts.sample_indices) - block.num_shown
    count = f"{len(facts.sample_indices)} picture" + ("" if len(facts.sample_indices) == 1 else "s")
    said = f"{block.num_shown} shown, and {hidden} more" if hidden else count
    renderer.draw_text((left, top + 29), said if block.is_first else "continued", width, color=MUTED_COLOR)
    for number, index in enumerate(block.sample_indices):
        x, y = left + number * (block.cell_size[0] + CELL_GAP), top + HEADING_HEIGHT
        pixels, masked = _load_as_trained(manifest, assignments[index], index)
        sheet.paste(_make_thumbnail(pixels, block.thumbnail_size), (x, y))
        _draw_labels(
            renderer,
            (x, y + block.thumbnail_size[1] + 4),
            block.cell_size[0],
            manifest,
            assignments[index],
            index,
            masked,
        )


def _format_dataset_and_stage(summary: BucketSummary, manifest: Manifest) -> str:
    """The dataset and the stage, where there are several."""
    parts = (
        [f"dataset {summary.dataset_number + 1}"]
        if len({dataset.dataset_number for dataset in manifest.datasets}) > 1
        else []
    )
    if len({dataset.from_step for dataset in manifest.datasets}) > 1:
        parts.append(f"step {summary.from_step + 1}")
    return ", ".join(parts)


def _draw_labels(
    renderer: TextRenderer,
    corner: tuple[int, int],
    width: int,
    manifest: Manifest,
    assignment: BucketAssignment,
    sample_index: int,
    masked_fraction: float,
) -> None:
    sample = manifest.samples[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    x, y = corner
    loss = assignment.cropped_fraction
    where = ", at random" if subset.random_crop and loss else ""
    renderer.draw_text((x, y), sample.image.name, width)
    said = f"{loss:.1%} cut away{where}" if loss else "nothing cut away"
    if sample.mask is not None:
        said = f"{loss:.1%} cut{where}, {masked_fraction:.0%} masked"
    said += ", regularisation" if sample.is_reg else ""
    renderer.draw_text(
        (x, y + LINE_HEIGHT), said, width, color=WARNING_COLOR if loss > CROPPED_FRACTION_IN_RED else MUTED_COLOR
    )
    caption = sample.caption.replace("\n", " | ") or "(no caption)"
    for number, line in enumerate(renderer.wrap_text(caption, width, CAPTION_LINES)):
        renderer.draw_text((x, y + (2 + number) * LINE_HEIGHT), line, width, color=MUTED_COLOR)


def _load_as_trained(manifest: Manifest, assignment: BucketAssignment, sample_index: int) -> tuple[Pixels, float]:
    """The bucket's pixels, covered where a mask leaves them out, and how much that is."""
    sample = manifest.samples[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    image, values = load_image_and_mask(sample.image, sample.mask)
    pixels = resize_and_crop(image, assignment, assignment.crop_left_top, subset.resize_interpolation)
    if sample.mask is None or values is None:
        return pixels, 0.0
    mask = resize_and_crop_mask(sample.mask, values, assignment, assignment.crop_left_top, is_flipped=False)
    return overlay_mask(pixels, mask), 1 - float(mask.mean(dtype=np.float64)) / 255


def overlay_mask(pixels: Pixels, mask: MaskPixels) -> Pixels:
    """What is trained in full stays as it is."""
    cover = MASK_OPACITY * (1 - mask[..., None].astype(np.float64) / 255)
    covered: Pixels = np.rint(pixels * (1 - cover) + np.asarray(MASK_COLOR) * cover).astype(np.uint8)
    return covered


def _make_thumbnail(pixels: Pixels, size: tuple[int, int]) -> "Image":
    from PIL import Image

    image = Image.fromarray(pixels)
    grows = size[0] > image.width
    return image.resize(size, Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)
