"""Masks for masked loss: match mask files to images by name, check that they fit, and load the mask of an image."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..problems import Problem, report_file
from ..storage.filesystems import RemoteOutage
from ..storage.remote_path import is_remote, resolve_links
from .image_decoding import (
    ImageSource,
    InMemoryImage,
    has_transparency,
    load_oriented_image,
    load_rgb_image,
    split_alpha,
)
from .image_inspection import InspectedImage, build_inspection_version, inspect_image, is_large_image
from .image_ref import ImageRef
from .listing import ListedImage, format_count, format_first_names, is_image_file
from .scan import ImageDefect, Inspector, hash_bytes, scan_images
from .scan_cache import ScanRoots
from .schema import DatasetConfig, SubsetConfig

if TYPE_CHECKING:
    from PIL.Image import Image

MaskSource = Literal["folder", "alpha"]
"""A folder of mask images with the names of the training images, or the alpha channel of these themselves."""

MaskPixels = NDArray[np.uint8]
"""The pixels of a mask: (height, width)."""

MaskKey = tuple[int, int, ImageRef]
"""Dataset, subset and image: in two subsets, an image may have two masks."""

MASK_INSPECTION_VERSION = 1
"""The version of the inspection of masks, incremented when it may give another result for the same mask."""

_MAX_GRAY_CHANNEL_SPREAD = 48
"""Largest difference between the channels of a gray pixel after JPEG compression."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one image, as inspected at the start of the run."""

    image: ImageRef  # the mask file, or the training image itself
    is_alpha: bool  # the mask is the alpha channel of ``image``, not its brightness
    size: tuple[int, int]  # (width, height) in EXIF orientation
    content_hash: str  # of the file
    coverage: float  # mean of the mask, from 0 to 1


def get_mask_source(subset: SubsetConfig) -> MaskSource | None:
    """Return where the masks of a subset come from; a folder has priority over ``alpha_mask``, as in sd-scripts."""
    if subset.conditioning_data_dir is not None and not subset.conditioning_is_control:
        return "folder"
    return "alpha" if subset.alpha_mask else None


def load_image_and_mask(image: ImageSource, mask: Mask | None) -> "tuple[Image, MaskPixels | None]":
    """Load an image in RGB and its mask; with an alpha mask, the colors stored under transparent parts."""
    if mask is None:
        return load_rgb_image(image), None
    if mask.is_alpha:
        rgb, alpha = split_alpha(load_oriented_image(image))
        return rgb, np.asarray(alpha)
    rgb = load_rgb_image(image)
    try:
        return rgb, load_red_channel(verify_remote_image(mask.image, mask.content_hash))
    except RemoteOutage:
        raise
    except Exception as error:  # decoders raise all kinds of exceptions, without the name of the file
        raise ValueError(f"its mask {mask.image}: {error}") from error


def verify_remote_image(image: ImageRef, content_hash: str) -> ImageSource:
    """Read a remote image and compare it with its hash, as files on servers are replaced; leave a local one alone."""
    return InMemoryImage(image.read_verified(content_hash)) if is_remote(image.folder) else image


def load_red_channel(image: ImageSource) -> MaskPixels:
    """Load the red channel, as sd-scripts does; in a gray image all three are equal."""
    return np.asarray(load_oriented_image(image).convert("RGB"))[..., 0]


def load_alpha_channel(image: ImageSource) -> MaskPixels:
    return np.asarray(split_alpha(load_oriented_image(image))[1])


@dataclass
class MaskMatches:
    """The mask file of each image, and what could not be matched."""

    masks: dict[ImageRef, ImageRef] = field(default_factory=dict)
    missing: dict[ImageRef, str] = field(default_factory=dict)  # why an image has no mask
    unmatched: list[Path] = field(default_factory=list)  # masks without an image


def match_masks(images: Sequence[ImageRef], image_dir: Path, mask_dir: Path) -> MaskMatches:
    """Match each image to the file of the same path in ``mask_dir``, whatever its extension; opens no file."""
    by_parent: defaultdict[PurePath, list[ImageRef]] = defaultdict(list)
    for image in images:
        by_parent[get_relative_path(image, image_dir).parent].append(image)
    matches = MaskMatches()
    for parent, members in by_parent.items():
        _match_masks_in_dir(matches, members, image_dir / parent, mask_dir / parent)
    return matches


def _match_masks_in_dir(matches: MaskMatches, images: Sequence[ImageRef], image_dir: Path, mask_dir: Path) -> None:
    masks_by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for name in list_image_names(mask_dir):
        masks_by_stem[normalize_stem(name)].append(name)
    matched: set[str] = set()
    for image in images:
        names = masks_by_stem.get(normalize_stem(image.name), [])
        names = [image.name] if image.name in names else names
        matched.update(names)
        if len(names) == 1:
            matches.masks[image] = ImageRef(mask_dir, names[0])
        elif names:
            matches.missing[image] = f"has several masks in {mask_dir}: {', '.join(names)}; keep one of them"
        else:
            stem = image.name.rpartition(".")[0] or image.name
            matches.missing[image] = f"has no mask: no {stem}.png, or with another image extension, in {mask_dir}"
    unmatched = [name for names in masks_by_stem.values() for name in names if name not in matched]
    if unmatched:  # the mask of an image that exists but is not selected is no problem
        unselected = set(map(normalize_stem, list_image_names(image_dir))) - set(map(normalize_stem, matched))
        matches.unmatched += [mask_dir / name for name in unmatched if normalize_stem(name) not in unselected]


def get_relative_path(image: ImageRef, image_dir: Path) -> PurePath:
    if image.part is not None:
        return PurePath(image.part.name)
    try:
        return image.path.relative_to(image_dir)
    except ValueError:
        return PurePath(image.name)


def list_image_names(directory: Path) -> list[str]:
    try:
        if is_remote(directory):
            names = sorted(name for name in directory.list_folder(recursive=False).files)
        else:
            names = sorted(entry.name for entry in os.scandir(directory) if not entry.is_dir())
    except RemoteOutage:
        raise
    except OSError:
        return []
    return [name for name in names if not name.startswith(".") and is_image_file(name)]


def normalize_stem(name: str) -> str:
    """Remove the extension; macOS decomposes accented letters in file names, and masks may come from elsewhere."""
    return unicodedata.normalize("NFC", name.rpartition(".")[0] or name)  # a clip may be a folder


@dataclass
class MaskScanResult:
    """The masks of all images, with problems and notes."""

    masks: dict[MaskKey, Mask] = field(default_factory=dict)
    problems: dict[MaskKey, str] = field(default_factory=dict)  # messages without the name of the image
    unmatched: list[Problem] = field(default_factory=list)  # one for each subset with masks that have no image
    notes: list[str] = field(default_factory=list)


def scan_masks(
    datasets: Sequence[DatasetConfig],
    listed: Sequence[ListedImage],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
) -> MaskScanResult:
    """Match and inspect the masks of all listed images; defects of the images themselves are reported elsewhere."""
    result = MaskScanResult()
    by_subset: defaultdict[tuple[int, int], list[ListedImage]] = defaultdict(list)
    for item in listed:
        by_subset[item.dataset, item.subset].append(item)
    for (dataset, index), members in by_subset.items():
        subset = datasets[dataset].subsets[index]
        source = get_mask_source(subset)
        if source == "alpha":
            readable = [item for item in members if inspected[item.image].problem is None]
            _scan_alpha_masks(result, subset, (dataset, index), readable, roots)
        elif source == "folder":
            _scan_mask_dir(
                result,
                subset,
                subset_key=(dataset, index),
                images=[item.image for item in members],
                inspected=inspected,
                roots=roots,
            )
    return result


def find_subsets_without_masks(datasets: Sequence[DatasetConfig], masks: Sequence[Mask | None]) -> list[Problem]:
    """List the subsets with a folder of masks, if no image of the run has a mask."""
    if any(mask is not None for mask in masks):
        return []
    return [
        subset.report("conditioning_data_dir", "none of the usable images has a mask")
        for dataset in datasets
        for subset in dataset.subsets
        if get_mask_source(subset) == "folder"
    ]


def _scan_alpha_masks(
    result: MaskScanResult,
    subset: SubsetConfig,
    subset_key: tuple[int, int],
    items: Sequence[ListedImage],
    roots: ScanRoots,
) -> None:
    images = roots.group_by_root(items)
    inspected_masks = _inspect_masks(result, "alpha_masks", inspect_alpha_mask, images, roots.get_cache_dir)
    opaque = []
    for image, mask in inspected_masks.items():
        if mask.problem:
            result.problems[(*subset_key, image)] = mask.problem
        elif mask.coverage == 1:
            opaque.append(image.name)
        else:
            result.masks[(*subset_key, image)] = Mask(image, True, mask.size, mask.content_hash, mask.coverage)
    if opaque:
        result.notes.append(
            f"{subset.source}: alpha_mask: {len(opaque)} of {format_count(len(inspected_masks), 'image')} without"
            f" transparent parts, so that the whole image is trained: {format_first_names(opaque)}"
        )


def _scan_mask_dir(
    result: MaskScanResult,
    subset: SubsetConfig,
    subset_key: tuple[int, int],
    images: Sequence[ImageRef],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
) -> None:
    image_dir, mask_dir = subset.resolve_image_dir(), subset.resolve_mask_dir()
    if image_dir is None or mask_dir is None:
        raise AssertionError("a subset with a folder of masks has an image_dir too")
    matches = match_masks(images, image_dir, mask_dir)
    mask_files = {resolve_links(mask_dir): dict.fromkeys(matches.masks.values())}
    cache_directory = subset.resolve_cache_directory()
    inspected_masks = _inspect_masks(
        result, "masks", inspect_mask, mask_files, lambda root: cache_directory or roots.get_cache_dir(root)
    )
    for image, reason in matches.missing.items():
        result.problems[(*subset_key, image)] = reason
    for image, file in matches.masks.items():
        mask = inspected_masks[file]
        if problem := mask.problem or _describe_size_mismatch(mask.size, inspected[image]):
            result.problems[(*subset_key, image)] = f"its mask {file} {problem}"
        else:
            result.masks[(*subset_key, image)] = Mask(file, False, mask.size, mask.content_hash, mask.coverage)
    if matches.unmatched:
        names = format_first_names([path.name for path in matches.unmatched])
        result.unmatched.append(
            report_file(
                mask_dir,
                f"{format_count(len(matches.unmatched), 'mask')} without an image of the same name in"
                f" {image_dir}: {names}",
                "remove them, or ignore them with --on_invalid_images skip",
            )
        )
    color = [file.name for file, mask in inspected_masks.items() if mask.is_color]
    if color:
        result.notes.append(
            f"{mask_dir}: {format_count(len(color), 'mask')} in color, of which only the red channel is used, as in"
            f" sd-scripts: {format_first_names(color)}"
        )
    ambiguous = [
        file.name
        for image, file in matches.masks.items()
        if _is_orientation_ambiguous(inspected[image], inspected_masks[file])
    ]
    if ambiguous:
        result.notes.append(
            f"{mask_dir}: {format_count(len(ambiguous), 'mask')} without an EXIF orientation for images that have one,"
            f" assumed to be upright already: {format_first_names(ambiguous)}"
        )


@dataclass(frozen=True, slots=True)
class InspectedMask:
    """The result of inspecting one mask."""

    size: tuple[int, int]  # (width, height) in EXIF orientation
    content_hash: str  # of the file
    coverage: float = 0.0
    problem: str | None = None
    is_color: bool = False
    exif_orientation: int = 1


def inspect_mask(source: ImageSource) -> InspectedMask:
    """Inspect a mask file; its brightness is the mask."""
    image = inspect_image(source)
    if image.problem:
        return InspectedMask(image.size, image.content_hash, problem=image.problem)
    stored, values = load_oriented_image(source), load_red_channel(source)
    problem = None
    if has_transparency(stored) and (np.asarray(split_alpha(stored)[1]) < 255).any():
        problem = "has transparent parts, but its brightness is the mask; save it without transparency"
    elif not values.any():
        problem = "is black everywhere, so that nothing of the image would be trained"
    coverage = _compute_coverage(values)
    return InspectedMask(
        size=image.size,
        content_hash=image.content_hash,
        coverage=coverage,
        problem=problem,
        is_color=_is_color(stored),
        exif_orientation=image.exif_orientation,
    )


def inspect_alpha_mask(source: ImageSource) -> InspectedMask:
    """Inspect the alpha channel of a training image; a coverage of 1 means that there is no mask."""
    stored, content_hash = load_oriented_image(source), hash_bytes(source.read_bytes())
    if not has_transparency(stored):
        return InspectedMask(stored.size, content_hash, 1.0)
    values = np.asarray(split_alpha(stored)[1])
    problem = None if values.any() else "is transparent everywhere, so that nothing of it would be trained"
    return InspectedMask(stored.size, content_hash, _compute_coverage(values), problem)


def _compute_coverage(values: MaskPixels) -> float:
    return float(values.mean(dtype=np.float64)) / 255


def _is_color(image: "Image") -> bool:
    pixels = np.asarray(image.convert("RGB")).astype(np.int16)
    return bool((pixels.max(axis=2) - pixels.min(axis=2) > _MAX_GRAY_CHANNEL_SPREAD).any())


def _is_orientation_ambiguous(image: InspectedImage, mask: InspectedMask) -> bool:
    """Whether the mask may have been made from the image as stored, without this being visible in its shape."""
    if image.problem or mask.problem or mask.exif_orientation != 1:
        return False
    return image.exif_orientation in (2, 3, 4) or (image.exif_orientation != 1 and image.size[0] == image.size[1])


def _describe_size_mismatch(mask_size: tuple[int, int], image: InspectedImage) -> str | None:
    """Describe a mask of another shape; another size is fine, up to rounding to whole pixels."""
    if image.problem or has_same_aspect_ratio(mask_size, image.size):
        return None
    hint = ""
    if has_same_aspect_ratio(mask_size[::-1], image.size):
        hint = "; it is rotated, as if made without applying the EXIF orientation of the image"
    return f"is {mask_size[0]}x{mask_size[1]} pixels, the image {image.size[0]}x{image.size[1]}{hint}"


def has_same_aspect_ratio(mask_size: tuple[int, int], image_size: tuple[int, int]) -> bool:
    """Whether one scale maps both sides of the image to those of the mask with less than a pixel of error."""
    lower = max((mask - 1) / image for mask, image in zip(mask_size, image_size, strict=True))
    upper = min((mask + 1) / image for mask, image in zip(mask_size, image_size, strict=True))
    return lower < upper


def _inspect_masks(
    result: MaskScanResult,
    name: str,
    inspect: Callable[[ImageSource], InspectedMask],
    images: Mapping[Path, Iterable[ImageRef]],
    get_cache_dir: Callable[[Path], Path | None],
) -> dict[ImageRef, InspectedMask]:
    """Inspect masks in the thread pool of ``scan_images``, with its cache."""

    def inspect_bytes(data: bytes, content_hash: str, decode_lock: AbstractContextManager[object]) -> InspectedMask:
        try:
            with decode_lock if is_large_image(data) else nullcontext():
                return inspect(InMemoryImage(data))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise all kinds of exceptions for damaged files
            return InspectedMask((0, 0), content_hash, problem=f"cannot be read: {error}")

    version = f"{MASK_INSPECTION_VERSION} {build_inspection_version()}"
    scan = scan_images(
        Inspector(
            name=name,
            version=version,
            inspect=inspect_bytes,
            fail=_build_defective_mask,
            pack=_pack_mask,
            unpack=_unpack_mask,
        ),
        images,
        get_cache_dir,
    )
    result.notes += scan.notes
    return scan.images


def _build_defective_mask(defect: ImageDefect) -> InspectedMask:
    return InspectedMask((0, 0), "", problem=defect.text)


def _pack_mask(mask: InspectedMask) -> list[Any]:
    return [*mask.size, mask.coverage, mask.problem, mask.is_color, mask.exif_orientation]


def _unpack_mask(facts: list[Any], content_hash: str) -> InspectedMask:
    width, height, *others = facts
    return InspectedMask((width, height), content_hash, *others)
