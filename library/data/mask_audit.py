"""Look at every mask once: masks that do not fit their pictures, are missing, or leave nothing to train are named."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dataset.image_ref import ImageRef
from ..dataset.listing import ListedImage
from ..dataset.scan import ImageDefect, Inspector, hash_bytes, scan_images
from ..dataset.scan_cache import ScanRoots
from ..dataset.schema import DatasetConfig, SubsetConfig
from .images import Readable, is_transparent, turned, without_transparency
from .inspection import Bytes, Seen, is_large, look_at, reader
from .mask_files import Mask, mask_source, match
from .masks import MaskPixels, brightness

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN_NAMES = 5
VERSION = 1
"""Of what is found out about masks here; what an earlier one found out is not believed."""
_COLOURFUL = 48
"""Red, green and blue of a grey pixel lie closer together than this, even after JPEG."""
Place = tuple[int, int, ImageRef]
"""Dataset, subset and picture: in two subsets, one picture may have two masks."""


@dataclass(frozen=True, slots=True)
class SeenMask:
    """What a mask turned out to be."""

    size: tuple[int, int]  # (width, height) after EXIF orientation
    content: str  # hash of the file
    share: float = 0.0  # of the picture that counts
    problem: str | None = None
    is_coloured: bool = False
    orientation: int = 1  # of EXIF


@dataclass
class MaskAudit:
    """The masks of a run and what has to be said about them."""

    masks: dict[Place, Mask] = field(default_factory=dict)
    problems: dict[Place, str] = field(default_factory=dict)  # without the name of the picture
    strays: list[str] = field(default_factory=list)  # a line for each subset with masks that have no picture
    notes: list[str] = field(default_factory=list)


def audit_masks(datasets: Sequence[DatasetConfig], found: Sequence[ListedImage], seen: Mapping[ImageRef, Seen],
                roots: ScanRoots) -> MaskAudit:  # fmt: skip
    """The masks of the pictures that were ``found``; the fitness of a picture itself is not judged here."""
    audit = MaskAudit()
    pictures: defaultdict[tuple[int, int], list[ListedImage]] = defaultdict(list)
    for item in found:
        pictures[item.dataset, item.subset].append(item)
    for (dataset, index), members in pictures.items():
        subset = datasets[dataset].subsets[index]
        source = mask_source(subset)
        if source == "alpha":
            readable = [item for item in members if seen[item.image].problem is None]
            looks = _looked_at(audit, "opacity", look_at_opacity, roots.group_by_root(readable), roots.get_cache_dir)
            _from_alpha(audit, subset, (dataset, index), looks)
        elif source == "folder":
            _from_folder(audit, subset, (dataset, index), [item.image for item in members], seen, roots)
    return audit


def without_masks(datasets: Sequence[DatasetConfig], masks: Sequence[Mask | None]) -> list[str]:
    """A line for each subset that asks for masks if no picture of the run has one."""
    if any(mask is not None for mask in masks):
        return []
    lines = []
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        if mask_source(subset) == "alpha":
            place = subset.place("alpha_mask")
            lines.append(f"{place}: alpha_mask: no picture has transparent parts, so that there is no mask;"
                         " take alpha_mask out, or use pictures with transparency")  # fmt: skip
        elif mask_source(subset) == "folder":
            place = subset.place("conditioning_data_dir")
            lines.append(f"{place}: conditioning_data_dir: no picture that has a mask can be used")
    return lines


def look_at_mask(image: Readable) -> SeenMask:
    """A mask in a file of its own."""
    seen = look_at(image)
    if seen.problem:
        return SeenMask(seen.size, seen.content, problem=seen.problem)
    stored, values = turned(image), brightness(image)
    problem = None
    if is_transparent(stored) and (np.asarray(without_transparency(stored)[1]) < 255).any():
        problem = "has transparent parts; the brightness of a mask counts: save it without transparency"
    elif not values.any():
        problem = "is black everywhere, so that nothing of the picture would be trained"
    return SeenMask(seen.size, seen.content, _share(values), problem, _is_coloured(stored), seen.orientation)


def look_at_opacity(image: Readable) -> SeenMask:
    """The mask that a picture brings along; a share of 1 is none."""
    stored, content = turned(image), hash_bytes(image.read_bytes())
    if not is_transparent(stored):
        return SeenMask(stored.size, content, 1.0)
    values = np.asarray(without_transparency(stored)[1])
    problem = None if values.any() else "is transparent everywhere, so that nothing of it would be trained"
    return SeenMask(stored.size, content, _share(values), problem)


def _share(values: MaskPixels) -> float:
    return float(values.mean(dtype=np.float64)) / 255


def _is_coloured(image: "Image") -> bool:
    pixels = np.asarray(image.convert("RGB")).astype(np.int16)
    return bool((pixels.max(axis=2) - pixels.min(axis=2) > _COLOURFUL).any())


def _from_alpha(audit: MaskAudit, subset: SubsetConfig, where: tuple[int, int],
                looks: Mapping[ImageRef, SeenMask]) -> None:  # fmt: skip
    opaque = []
    for picture, look in looks.items():
        if look.problem:
            audit.problems[(*where, picture)] = look.problem
        elif look.share == 1:
            opaque.append(picture)
        else:
            audit.masks[(*where, picture)] = Mask(picture, True, look.size, look.content, look.share)
    if opaque:
        names = _first([picture.name for picture in opaque])
        audit.notes.append(f"{subset.source}: alpha_mask: {len(opaque)} of {len(looks)} pictures have no"
                           f" transparent parts and are trained whole: {names}")  # fmt: skip


def _from_folder(audit: MaskAudit, subset: SubsetConfig, where: tuple[int, int], pictures: Sequence[ImageRef],
                 seen: Mapping[ImageRef, Seen], roots: ScanRoots) -> None:  # fmt: skip
    folder, masks = subset.folder(), subset.mask_folder()
    if folder is None or masks is None:
        raise AssertionError("a subset with masks in a folder has both folders")
    matched = match(pictures, folder, masks)
    home = {Path(os.path.realpath(masks)): dict.fromkeys(matched.masks.values())}
    looks = _looked_at(
        audit, "masks", look_at_mask, home, lambda home: subset.cache_folder() or roots.get_cache_dir(home)
    )
    for picture, reason in matched.missing.items():
        audit.problems[(*where, picture)] = reason
    for picture, mask in matched.masks.items():
        look = looks[mask]
        if misfit := look.problem or _misfit(look.size, seen[picture]):
            audit.problems[(*where, picture)] = f"its mask {mask} {misfit}"
        else:
            audit.masks[(*where, picture)] = Mask(mask, False, look.size, look.content, look.share)
    if matched.strays:
        audit.strays.append(f"{masks}: {len(matched.strays)} masks have no picture of their name in {folder}:"
                            f" {_first([path.name for path in matched.strays])}; remove them, or leave them be with"
                            " --on_bad_data skip")  # fmt: skip
    _note_doubts(audit, masks, matched.masks, looks, seen)


def _note_doubts(audit: MaskAudit, masks: Path, found: Mapping[ImageRef, ImageRef], looks: Mapping[ImageRef, SeenMask],
                 seen: Mapping[ImageRef, Seen]) -> None:  # fmt: skip
    """What may be meant otherwise than it is taken."""
    coloured = [mask.name for mask, look in looks.items() if look.is_coloured]
    if coloured:
        audit.notes.append(f"{masks}: {len(coloured)} masks are in colour, of which the red channel is used, as in"
                           f" sd-scripts: {_first(coloured)}")  # fmt: skip
    upright = [mask.name for picture, mask in found.items() if not seen[picture].problem and not looks[mask].problem
               and _may_be_turned(seen[picture], looks[mask])]  # fmt: skip
    if upright:
        audit.notes.append(f"{masks}: {len(upright)} masks belong to pictures that EXIF turns, and say nothing of it"
                           f" themselves; they are taken as upright: {_first(upright)}")  # fmt: skip


def _may_be_turned(picture: Seen, mask: SeenMask) -> bool:
    """Whether the mask may have been made of the picture as it is stored, and its shape does not tell."""
    if mask.orientation != 1:
        return False
    return picture.orientation in (2, 3, 4) or (picture.orientation != 1 and picture.size[0] == picture.size[1])


def _misfit(mask: tuple[int, int], picture: Seen) -> str | None:
    """A mask may be smaller or larger than its picture, rounded to whole pixels, but of no other shape."""
    if picture.problem or _is_same_shape(mask, picture.size):
        return None
    hint = ""
    if _is_same_shape(mask[::-1], picture.size):
        hint = "; it is turned, as when it was made without regard to the picture's EXIF orientation"
    return f"is {mask[0]}x{mask[1]} pixels, and the picture {picture.size[0]}x{picture.size[1]}{hint}"


def _is_same_shape(mask: tuple[int, int], picture: tuple[int, int]) -> bool:
    """Whether there is a scale at which each side is met to less than a pixel of the mask."""
    smallest = max((side - 1) / whole for side, whole in zip(mask, picture, strict=True))
    largest = min((side + 1) / whole for side, whole in zip(mask, picture, strict=True))
    return smallest < largest


def _looked_at(audit: MaskAudit, name: str, look: Callable[[Readable], SeenMask],
               images: Mapping[Path, Iterable[ImageRef]],
               cache_dir: Callable[[Path], Path | None]) -> dict[ImageRef, SeenMask]:  # fmt: skip
    """By the pool of threads, and not again next time; ``images`` are given as to ``scan_images``."""

    def examined(data: bytes, content: str, alone: AbstractContextManager[object]) -> SeenMask:
        try:
            with alone if is_large(data) else nullcontext():
                return look(Bytes(data))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise whatever they like on broken data
            return SeenMask((0, 0), content, problem=f"cannot be read: {error}")

    inspection = Inspector(name, f"{VERSION} {reader()}", examined, _failed, _packed, _unpacked)
    result = scan_images(inspection, images, cache_dir)
    audit.notes += result.notes
    return result.images


def _failed(flaw: ImageDefect) -> SeenMask:
    return SeenMask((0, 0), "", problem=flaw.text)


def _packed(seen: SeenMask) -> list[Any]:
    return [*seen.size, seen.share, seen.problem, seen.is_coloured, seen.orientation]


def _unpacked(facts: list[Any], content: str) -> SeenMask:
    width, height, *others = facts
    return SeenMask((width, height), content, *others)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
