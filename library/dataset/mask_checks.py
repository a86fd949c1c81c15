"""Look at every mask once: masks that do not fit their pictures, are missing, or leave nothing to train are named."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .image_inspection import (
    ImageSource,
    InMemoryImage,
    InspectedImage,
    build_inspection_version,
    has_transparency,
    inspect_image,
    is_large_image,
    load_oriented_image,
    split_alpha,
)
from .image_ref import ImageRef
from .listing import ListedImage
from .masks import Mask, MaskPixels, get_mask_source, load_red_channel, match_masks
from .scan import ImageDefect, Inspector, hash_bytes, scan_images
from .scan_cache import ScanRoots
from .schema import DatasetConfig, SubsetConfig

if TYPE_CHECKING:
    from PIL.Image import Image


MAX_NAMES_SHOWN = 5


MASK_INSPECTION_VERSION = 1
"""Of what is found out about masks here; what an earlier one found out is not believed."""


_MAX_GRAY_CHANNEL_SPREAD = 48
"""Red, green and blue of a grey pixel lie closer together than this, even after JPEG."""


MaskKey = tuple[int, int, ImageRef]
"""Dataset, subset and picture: in two subsets, one picture may have two masks."""


@dataclass(frozen=True, slots=True)
class InspectedMask:
    """What a mask turned out to be."""

    size: tuple[int, int]  # (width, height) after EXIF orientation
    content_hash: str  # hash of the file
    coverage: float = 0.0  # of the picture that counts
    problem: str | None = None
    is_color: bool = False
    exif_orientation: int = 1  # of EXIF


@dataclass
class MaskScanResult:
    """The masks of a run and what has to be said about them."""

    masks: dict[MaskKey, Mask] = field(default_factory=dict)
    problems: dict[MaskKey, str] = field(default_factory=dict)  # without the name of the picture
    unmatched: list[str] = field(default_factory=list)  # a line for each subset with masks that have no picture
    notes: list[str] = field(default_factory=list)


def scan_masks(
    datasets: Sequence[DatasetConfig],
    found_images: Sequence[ListedImage],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
) -> MaskScanResult:
    """The masks of the pictures that were ``found``; the fitness of a picture itself is not judged here."""
    audit = MaskScanResult()
    pictures: defaultdict[tuple[int, int], list[ListedImage]] = defaultdict(list)
    for item in found_images:
        pictures[item.dataset, item.subset].append(item)
    for (dataset, index), members in pictures.items():
        subset = datasets[dataset].subsets[index]
        source = get_mask_source(subset)
        if source == "alpha":
            readable = [item for item in members if inspected[item.image].problem is None]
            looks = _inspect_masks(
                audit, "opacity", inspect_alpha_mask, roots.group_by_root(readable), roots.get_cache_dir
            )
            _scan_alpha_masks(audit, subset, (dataset, index), looks)
        elif source == "folder":
            _scan_mask_dir(audit, subset, (dataset, index), [item.image for item in members], inspected, roots)
    return audit


def find_subsets_without_masks(datasets: Sequence[DatasetConfig], masks: Sequence[Mask | None]) -> list[str]:
    """A line for each subset that asks for masks if no picture of the run has one."""
    if any(mask is not None for mask in masks):
        return []
    lines = []
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        if get_mask_source(subset) == "alpha":
            place = subset.locate("alpha_mask")
            lines.append(
                f"{place}: alpha_mask: no picture has transparent parts, so that there is no mask;"
                " take alpha_mask out, or use pictures with transparency"
            )
        elif get_mask_source(subset) == "folder":
            place = subset.locate("conditioning_data_dir")
            lines.append(f"{place}: conditioning_data_dir: no picture that has a mask can be used")
    return lines


def inspect_mask(source: ImageSource) -> InspectedMask:
    """A mask in a file of its own."""
    seen = inspect_image(source)
    if seen.problem:
        return InspectedMask(seen.size, seen.content_hash, problem=seen.problem)
    stored, values = load_oriented_image(source), load_red_channel(source)
    problem = None
    if has_transparency(stored) and (np.asarray(split_alpha(stored)[1]) < 255).any():
        problem = "has transparent parts; the brightness of a mask counts: save it without transparency"
    elif not values.any():
        problem = "is black everywhere, so that nothing of the picture would be trained"
    return InspectedMask(
        seen.size, seen.content_hash, _compute_coverage(values), problem, _is_color(stored), seen.exif_orientation
    )


def inspect_alpha_mask(source: ImageSource) -> InspectedMask:
    """The mask that a picture brings along; a share of 1 is none."""
    stored, content = load_oriented_image(source), hash_bytes(source.read_bytes())
    if not has_transparency(stored):
        return InspectedMask(stored.size, content, 1.0)
    values = np.asarray(split_alpha(stored)[1])
    problem = None if values.any() else "is transparent everywhere, so that nothing of it would be trained"
    return InspectedMask(stored.size, content, _compute_coverage(values), problem)


def _compute_coverage(values: MaskPixels) -> float:
    return float(values.mean(dtype=np.float64)) / 255


def _is_color(image: "Image") -> bool:
    pixels = np.asarray(image.convert("RGB")).astype(np.int16)
    return bool((pixels.max(axis=2) - pixels.min(axis=2) > _MAX_GRAY_CHANNEL_SPREAD).any())


def _scan_alpha_masks(
    scan_result: MaskScanResult,
    subset: SubsetConfig,
    subset_key: tuple[int, int],
    inspected_masks: Mapping[ImageRef, InspectedMask],
) -> None:
    opaque = []
    for picture, look in inspected_masks.items():
        if look.problem:
            scan_result.problems[(*subset_key, picture)] = look.problem
        elif look.coverage == 1:
            opaque.append(picture)
        else:
            scan_result.masks[(*subset_key, picture)] = Mask(picture, True, look.size, look.content_hash, look.coverage)
    if opaque:
        names = _format_first_names([picture.name for picture in opaque])
        scan_result.notes.append(
            f"{subset.source}: alpha_mask: {len(opaque)} of {len(inspected_masks)} pictures have no"
            f" transparent parts and are trained whole: {names}"
        )


def _scan_mask_dir(
    scan_result: MaskScanResult,
    subset: SubsetConfig,
    subset_key: tuple[int, int],
    images: Sequence[ImageRef],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
) -> None:
    folder, masks = subset.resolve_image_dir(), subset.resolve_mask_dir()
    if folder is None or masks is None:
        raise AssertionError("a subset with masks in a folder has both folders")
    matched = match_masks(images, folder, masks)
    home = {Path(os.path.realpath(masks)): dict.fromkeys(matched.masks.values())}
    looks = _inspect_masks(
        scan_result,
        "masks",
        inspect_mask,
        home,
        lambda home: subset.resolve_cache_directory() or roots.get_cache_dir(home),
    )
    for picture, reason in matched.missing.items():
        scan_result.problems[(*subset_key, picture)] = reason
    for picture, mask in matched.masks.items():
        look = looks[mask]
        if misfit := look.problem or _explain_size_mismatch(look.size, inspected[picture]):
            scan_result.problems[(*subset_key, picture)] = f"its mask {mask} {misfit}"
        else:
            scan_result.masks[(*subset_key, picture)] = Mask(mask, False, look.size, look.content_hash, look.coverage)
    if matched.unmatched:
        scan_result.unmatched.append(
            f"{masks}: {len(matched.unmatched)} masks have no picture of their name in {folder}:"
            f" {_format_first_names([path.name for path in matched.unmatched])}; remove them, or leave them be with"
            " --on_invalid_images skip"
        )
    _note_suspicious_masks(scan_result, masks, matched.masks, looks, inspected)


def _note_suspicious_masks(
    scan_result: MaskScanResult,
    mask_dir: Path,
    matched_masks: Mapping[ImageRef, ImageRef],
    inspected_masks: Mapping[ImageRef, InspectedMask],
    inspected: Mapping[ImageRef, InspectedImage],
) -> None:
    """What may be meant otherwise than it is taken."""
    coloured = [mask.name for mask, look in inspected_masks.items() if look.is_color]
    if coloured:
        scan_result.notes.append(
            f"{mask_dir}: {len(coloured)} masks are in colour, of which the red channel is used, as in"
            f" sd-scripts: {_format_first_names(coloured)}"
        )
    upright = [
        mask.name
        for picture, mask in matched_masks.items()
        if not inspected[picture].problem
        and not inspected_masks[mask].problem
        and _may_need_rotation(inspected[picture], inspected_masks[mask])
    ]
    if upright:
        scan_result.notes.append(
            f"{mask_dir}: {len(upright)} masks belong to pictures that EXIF turns, and say nothing of it"
            f" themselves; they are taken as upright: {_format_first_names(upright)}"
        )


def _may_need_rotation(image: InspectedImage, mask: InspectedMask) -> bool:
    """Whether the mask may have been made of the picture as it is stored, and its shape does not tell."""
    if mask.exif_orientation != 1:
        return False
    return image.exif_orientation in (2, 3, 4) or (image.exif_orientation != 1 and image.size[0] == image.size[1])


def _explain_size_mismatch(mask_size: tuple[int, int], image: InspectedImage) -> str | None:
    """A mask may be smaller or larger than its picture, rounded to whole pixels, but of no other shape."""
    if image.problem or _has_same_aspect_ratio(mask_size, image.size):
        return None
    hint = ""
    if _has_same_aspect_ratio(mask_size[::-1], image.size):
        hint = "; it is turned, as when it was made without regard to the picture's EXIF orientation"
    return f"is {mask_size[0]}x{mask_size[1]} pixels, and the picture {image.size[0]}x{image.size[1]}{hint}"


def _has_same_aspect_ratio(mask_size: tuple[int, int], image_size: tuple[int, int]) -> bool:
    """Whether there is a scale at which each side is met to less than a pixel of the mask."""
    smallest = max((side - 1) / whole for side, whole in zip(mask_size, image_size, strict=True))
    largest = min((side + 1) / whole for side, whole in zip(mask_size, image_size, strict=True))
    return smallest < largest


def _inspect_masks(
    scan_result: MaskScanResult,
    name: str,
    inspect: Callable[[ImageSource], InspectedMask],
    images: Mapping[Path, Iterable[ImageRef]],
    cache_dir: Callable[[Path], Path | None],
) -> dict[ImageRef, InspectedMask]:
    """By the pool of threads, and not again next time; ``images`` are given as to ``scan_images``."""

    def inspect_one(data: bytes, content: str, alone: AbstractContextManager[object]) -> InspectedMask:
        try:
            with alone if is_large_image(data) else nullcontext():
                return inspect(InMemoryImage(data))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise whatever they like on broken data
            return InspectedMask((0, 0), content, problem=f"cannot be read: {error}")

    inspection = Inspector(
        name,
        f"{MASK_INSPECTION_VERSION} {build_inspection_version()}",
        inspect_one,
        _build_defective_mask,
        _pack_mask,
        _unpack_mask,
    )
    result = scan_images(inspection, images, cache_dir)
    scan_result.notes += result.notes
    return result.images


def _build_defective_mask(defect: ImageDefect) -> InspectedMask:
    return InspectedMask((0, 0), "", problem=defect.text)


def _pack_mask(mask: InspectedMask) -> list[Any]:
    return [*mask.size, mask.coverage, mask.problem, mask.is_color, mask.exif_orientation]


def _unpack_mask(row: list[Any], content_hash: str) -> InspectedMask:
    width, height, *others = row
    return InspectedMask((width, height), content_hash, *others)


def _format_first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
