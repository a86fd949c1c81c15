"""A sheet of the pictures as the model will see them, bucket by bucket, so that bad crops are seen before training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from .bucket_facts import BucketFacts
from .buckets import Placement
from .images import Pixels, cut_out
from .manifest import Manifest
from .masks import MaskPixels, picture_and_mask, placed_mask
from .sheet_text import Pen

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 480
"""On one sheet; with many buckets, each shows fewer."""
SHEET_WIDTH = 1600
THUMB_AREA = 200 * 200
LONGEST = 420  # side of a thumbnail
TITLE_WIDTH = 480
NARROWEST = 160  # of a cell, for the text
GAP, MARGIN, BLOCK_GAP = 14, 24, 36
LINE, HEADING = 17, 56
CAPTION_LINES = 2
PAPER, QUIET, ALARM = (250, 250, 248), (105, 105, 105), (190, 40, 20)
ALARMING_LOSS = 0.2
COVER, COVER_SHARE = (205, 40, 160), 0.6
"""What a mask leaves out is covered with this colour, to this degree."""


@dataclass(frozen=True)
class Block:
    """Pictures of one bucket, side by side: the whole bucket, or as much of it as fits on a shelf."""

    facts: BucketFacts
    samples: tuple[int, ...]
    thumb: tuple[int, int]
    shown: int  # of the bucket, on the whole sheet
    is_first: bool = True

    @property
    def cell(self) -> tuple[int, int]:
        return max(self.thumb[0], NARROWEST), self.thumb[1] + 6 + LINE * (2 + CAPTION_LINES)

    @property
    def size(self) -> tuple[int, int]:
        return len(self.samples) * (self.cell[0] + GAP) - GAP, HEADING + self.cell[1]

    def split(self, count: int) -> "tuple[Block, Block]":
        """The first ``count`` pictures, and the others."""
        return replace(self, samples=self.samples[:count]), replace(self, samples=self.samples[count:], is_first=False)


@dataclass
class Shelf:
    """Blocks that stand side by side."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(block.size[0] + BLOCK_GAP for block in self.blocks) - BLOCK_GAP

    @property
    def height(self) -> int:
        return max(block.size[1] for block in self.blocks)

    def room_for(self, block: Block) -> int:
        """How many more pictures of this bucket have room."""
        used = self.width + BLOCK_GAP if self.blocks else 0
        return max(0, (SHEET_WIDTH - 2 * MARGIN - used + GAP) // (block.cell[0] + GAP))


def blocks_of(buckets: Sequence[BucketFacts], placements: Sequence[Placement], limit: int) -> list[Block]:
    """The buckets with the pictures that are shown, those that lose most first; upright buckets come first."""
    shown = buckets[:MOST_PICTURES]
    limit = max(1, min(limit, MOST_PICTURES // max(len(shown), 1)))
    blocks = []
    for facts in sorted(shown, key=lambda item: (item.from_step, item.dataset, item.size[0] / item.size[1], item.size)):
        samples = sorted(facts.samples, key=lambda index: (-placements[index].crop_loss, index))[:limit]
        blocks.append(Block(facts, tuple(samples), thumb_size(facts.size), len(samples)))
    return blocks


def shelves_of(blocks: Sequence[Block]) -> list[Shelf]:
    """The blocks in their order; one that does not fit goes on on the next shelf, but not for a single picture."""
    shelves = [Shelf()]
    waiting = list(reversed(blocks))
    while waiting:
        block = waiting.pop()
        room = shelves[-1].room_for(block)
        if room >= len(block.samples):
            shelves[-1].blocks.append(block)
        elif room >= 2 or not shelves[-1].blocks:
            here, rest = block.split(max(room, 1))
            shelves[-1].blocks.append(here)
            waiting.append(rest)
        else:
            shelves.append(Shelf())
            waiting.append(block)
    return shelves


def thumb_size(bucket: tuple[int, int]) -> tuple[int, int]:
    """About the same area for every bucket; small ones are enlarged by whole numbers, which keeps pixels visible."""
    width, height = bucket
    scale = min(math.sqrt(THUMB_AREA / (width * height)), LONGEST / max(bucket))
    scale = math.floor(scale) if scale > 1 else scale
    return max(round(width * scale), 1), max(round(height * scale), 1)


def draw_sheet(manifest: Manifest, placements: Sequence[Placement], buckets: Sequence[BucketFacts],
               limit: int) -> "tuple[Image, int]":  # fmt: skip
    """The sheet, and how many pictures are on it."""
    from PIL import Image, ImageDraw

    blocks = blocks_of(buckets, placements, limit)
    shelves = shelves_of(blocks)
    count = sum(block.shown for block in blocks)
    width = 2 * MARGIN + max(TITLE_WIDTH, *(shelf.width for shelf in shelves))
    height = 2 * MARGIN + HEADING + sum(shelf.height + BLOCK_GAP for shelf in shelves) - BLOCK_GAP
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = Pen(ImageDraw.Draw(sheet))
    left_out = len(buckets) - len(blocks)
    title = f"{count} of {len(manifest.samples)} pictures, as they are trained"
    title += f"; {left_out} buckets more" if left_out else ""
    pen.write((MARGIN, MARGIN - 4), title, width - 2 * MARGIN, 20)
    top = MARGIN + HEADING
    for shelf in shelves:
        left = MARGIN
        for block in shelf.blocks:
            _draw_block(sheet, pen, (left, top), block, manifest, placements)
            left += block.size[0] + BLOCK_GAP
        top += shelf.height + BLOCK_GAP
    said = "in each bucket those that lose most come first"
    said += "; characters that no font here has are written as codes" if pen.wrote_codes else ""
    pen.write((MARGIN, MARGIN + 24), said, width - 2 * MARGIN, colour=QUIET)
    return sheet, count


def write_sheet(sheet: "Image", path: Path) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        sheet.save(unfinished)
        unfinished.replace(path)
    except (OSError, ValueError) as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--preview: {path} cannot be written: {error}") from error


def _draw_block(sheet: "Image", pen: Pen, corner: tuple[int, int], block: Block, manifest: Manifest,
                placements: Sequence[Placement]) -> None:  # fmt: skip
    left, top = corner
    facts, width = block.facts, block.size[0]
    name = f"{facts.size[0]} x {facts.size[1]}"
    pen.line((left, top), width)
    pen.write((left, top + 4), name, width, 20)
    if said := _belongs_to(facts, manifest):
        start = left + pen.length(name, 20) + 8
        pen.write((start, top + 10), said, left + width - start, colour=QUIET)
    hidden = len(facts.samples) - block.shown
    count = f"{len(facts.samples)} picture" + ("" if len(facts.samples) == 1 else "s")
    said = f"{block.shown} shown, and {hidden} more" if hidden else count
    pen.write((left, top + 29), said if block.is_first else "continued", width, colour=QUIET)
    for number, index in enumerate(block.samples):
        x, y = left + number * (block.cell[0] + GAP), top + HEADING
        pixels, masked = _as_trained(manifest, placements[index], index)
        sheet.paste(_thumb(pixels, block.thumb), (x, y))
        _draw_text(pen, (x, y + block.thumb[1] + 4), block.cell[0], manifest, placements[index], index, masked)


def _belongs_to(facts: BucketFacts, manifest: Manifest) -> str:
    """The dataset and the stage, where there are several."""
    parts = [f"dataset {facts.dataset + 1}"] if len({dataset.number for dataset in manifest.datasets}) > 1 else []
    if len({dataset.from_step for dataset in manifest.datasets}) > 1:
        parts.append(f"step {facts.from_step + 1}")
    return ", ".join(parts)


def _draw_text(pen: Pen, corner: tuple[int, int], width: int, manifest: Manifest, placement: Placement, index: int,
               masked: float) -> None:  # fmt: skip
    sample = manifest.samples[index]
    subset = manifest.datasets[sample.dataset].subsets[sample.subset]
    x, y = corner
    loss = placement.crop_loss
    where = ", at random" if subset.random_crop and loss else ""
    pen.write((x, y), sample.image.name, width)
    said = f"{loss:.1%} cut away{where}" if loss else "nothing cut away"
    if sample.mask is not None:
        said = f"{loss:.1%} cut{where}, {masked:.0%} masked"
    said += ", regularisation" if sample.is_reg else ""
    pen.write((x, y + LINE), said, width, colour=ALARM if loss > ALARMING_LOSS else QUIET)
    caption = sample.caption.replace("\n", " | ") or "(no caption)"
    for number, line in enumerate(pen.wrapped(caption, width, CAPTION_LINES)):
        pen.write((x, y + (2 + number) * LINE), line, width, colour=QUIET)


def _as_trained(manifest: Manifest, placement: Placement, index: int) -> tuple[Pixels, float]:
    """The bucket's pixels, covered where a mask leaves them out, and how much that is."""
    sample = manifest.samples[index]
    subset = manifest.datasets[sample.dataset].subsets[sample.subset]
    image, values = picture_and_mask(sample.image, sample.mask)
    pixels = cut_out(image, placement, placement.crop, subset.resize_interpolation)
    if sample.mask is None or values is None:
        return pixels, 0.0
    mask = placed_mask(sample.mask, values, placement, placement.crop, is_mirrored=False)
    return covered_where_masked(pixels, mask), 1 - float(mask.mean(dtype=np.float64)) / 255


def covered_where_masked(pixels: Pixels, mask: MaskPixels) -> Pixels:
    """What is trained in full stays as it is."""
    cover = COVER_SHARE * (1 - mask[..., None].astype(np.float64) / 255)
    covered: Pixels = np.rint(pixels * (1 - cover) + np.asarray(COVER) * cover).astype(np.uint8)
    return covered


def _thumb(pixels: Pixels, size: tuple[int, int]) -> "Image":
    from PIL import Image

    image = Image.fromarray(pixels)
    grows = size[0] > image.width
    return image.resize(size, Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)
