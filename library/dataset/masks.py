"""Which mask belongs to which picture: by name, in the folder that ``conditioning_data_dir`` names; opens no file."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from .image_inspection import ImageSource, load_oriented_image, load_rgb_image, split_alpha
from .image_ref import ImageRef
from .listing import IMAGE_EXTENSIONS
from .schema import SubsetConfig

if TYPE_CHECKING:
    from PIL.Image import Image


MaskSource = Literal["folder", "alpha"]
"""A folder of pictures whose names are those of the pictures to train, or the opacity of these themselves."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one picture, as it was when it was looked at."""

    image: ImageRef  # a picture of its own, or the one that is trained
    is_alpha: bool  # the opacity of ``image`` is the mask, and not its brightness
    size: tuple[int, int]  # (width, height) after EXIF orientation
    content_hash: str  # hash of the file
    coverage: float  # how much of the picture counts


@dataclass
class MaskMatches:
    """Masks by picture, and what has no counterpart."""

    masks: dict[ImageRef, ImageRef] = field(default_factory=dict)
    missing: dict[ImageRef, str] = field(default_factory=dict)  # why a picture has none
    unmatched: list[Path] = field(default_factory=list)  # masks without a picture


def get_mask_source(subset: SubsetConfig) -> MaskSource | None:
    """Where a subset's masks come from; a folder goes before ``alpha_mask``, as in sd-scripts."""
    if subset.conditioning_data_dir is not None:
        return "folder"
    return "alpha" if subset.alpha_mask else None


def match_masks(images: Sequence[ImageRef], image_dir: Path, mask_dir: Path) -> MaskMatches:
    """The mask of each picture of ``folder``: in ``masks`` under the same name, whatever the ending."""
    by_parent: defaultdict[PurePath, list[ImageRef]] = defaultdict(list)
    for picture in images:
        by_parent[_get_relative_path(picture, image_dir).parent].append(picture)
    matched = MaskMatches()
    for parent, members in by_parent.items():
        _match_masks_in_dir(matched, members, image_dir / parent, mask_dir / parent)
    return matched


def _match_masks_in_dir(matches: MaskMatches, images: Sequence[ImageRef], image_dir: Path, mask_dir: Path) -> None:
    candidates: defaultdict[str, list[str]] = defaultdict(list)
    for name in _list_image_names(mask_dir):
        candidates[_normalize_stem(name)].append(name)
    taken: set[str] = set()
    for picture in images:
        names = candidates.get(_normalize_stem(picture.name), [])
        chosen = [picture.name] if picture.name in names else names
        taken.update(chosen)
        if len(chosen) == 1:
            matches.masks[picture] = ImageRef(mask_dir, chosen[0])
        elif chosen:
            matches.missing[picture] = f"has several masks in {mask_dir}: {', '.join(chosen)}; keep one of them"
        else:
            stem = picture.name.rpartition(".")[0]
            matches.missing[picture] = f"has no mask; there is no {stem}.png, or with another ending, in {mask_dir}"
    unclaimed = [name for names in candidates.values() for name in names if name not in taken]
    if unclaimed:  # a picture that is there and not used may keep its mask
        unused = {_normalize_stem(name) for name in _list_image_names(image_dir)} - {
            _normalize_stem(name) for name in taken
        }
        matches.unmatched += [mask_dir / name for name in unclaimed if _normalize_stem(name) not in unused]


def _get_relative_path(image: ImageRef, image_dir: Path) -> PurePath:
    """The picture's name below the folder of its subset."""
    if image.part is not None:
        return PurePath(image.part.name)
    try:
        return image.path.relative_to(image_dir)
    except ValueError:
        return PurePath(image.name)


def _list_image_names(directory: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if not entry.is_dir())
    except OSError:
        return []
    return [name for name in names if not name.startswith(".") and name.lower().endswith(IMAGE_EXTENSIONS)]


def _normalize_stem(name: str) -> str:
    """Without ending; macOS writes accents apart from their letters, and the masks may come from elsewhere."""
    return unicodedata.normalize("NFC", name.rpartition(".")[0])


MaskPixels = NDArray[np.uint8]
"""(height, width)."""


def load_image_and_mask(image: ImageRef, mask: Mask | None) -> "tuple[Image, MaskPixels | None]":
    """The picture to train, in RGB, and its whole mask; under an alpha mask the colours that are stored there."""
    if mask is None:
        return load_rgb_image(image), None
    if mask.is_alpha:
        colours, values = split_alpha(load_oriented_image(image))
        return colours, np.asarray(values)
    picture = load_rgb_image(image)
    try:
        return picture, load_red_channel(mask.image)
    except Exception as error:  # decoders raise whatever they like, and do not say of which file
        raise ValueError(f"its mask {mask.image}: {error}") from error


def load_red_channel(image: ImageSource) -> MaskPixels:
    """The red channel, as in sd-scripts; in a grey picture all three are alike."""
    return np.asarray(load_oriented_image(image).convert("RGB"))[..., 0]


def load_alpha_channel(image: ImageSource) -> MaskPixels:
    """The alpha channel."""
    return np.asarray(split_alpha(load_oriented_image(image))[1])
