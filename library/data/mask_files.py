"""Which mask belongs to which picture: by name, in the folder that ``conditioning_data_dir`` names; opens no file."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from ..dataset.image_ref import ImageRef
from ..dataset.listing import IMAGE_EXTENSIONS
from ..dataset.schema import SubsetConfig

MaskSource = Literal["folder", "alpha"]
"""A folder of pictures whose names are those of the pictures to train, or the opacity of these themselves."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one picture, as it was when it was looked at."""

    image: ImageRef  # a picture of its own, or the one that is trained
    is_alpha: bool  # the opacity of ``image`` is the mask, and not its brightness
    size: tuple[int, int]  # (width, height) after EXIF orientation
    content: str  # hash of the file
    share: float  # how much of the picture counts


@dataclass
class Matched:
    """Masks by picture, and what has no counterpart."""

    masks: dict[ImageRef, ImageRef] = field(default_factory=dict)
    missing: dict[ImageRef, str] = field(default_factory=dict)  # why a picture has none
    strays: list[Path] = field(default_factory=list)  # masks without a picture


def mask_source(subset: SubsetConfig) -> MaskSource | None:
    """Where a subset's masks come from; a folder goes before ``alpha_mask``, as in sd-scripts."""
    if subset.conditioning_data_dir is not None:
        return "folder"
    return "alpha" if subset.alpha_mask else None


def match(pictures: Sequence[ImageRef], folder: Path, masks: Path) -> Matched:
    """The mask of each picture of ``folder``: in ``masks`` under the same name, whatever the ending."""
    by_parent: defaultdict[PurePath, list[ImageRef]] = defaultdict(list)
    for picture in pictures:
        by_parent[_within(picture, folder).parent].append(picture)
    matched = Matched()
    for parent, members in by_parent.items():
        _match_in_one_folder(matched, members, folder / parent, masks / parent)
    return matched


def _match_in_one_folder(matched: Matched, pictures: Sequence[ImageRef], folder: Path, masks: Path) -> None:
    candidates: defaultdict[str, list[str]] = defaultdict(list)
    for name in _pictures_in(masks):
        candidates[_stem(name)].append(name)
    taken: set[str] = set()
    for picture in pictures:
        names = candidates.get(_stem(picture.name), [])
        chosen = [picture.name] if picture.name in names else names
        taken.update(chosen)
        if len(chosen) == 1:
            matched.masks[picture] = ImageRef(masks, chosen[0])
        elif chosen:
            matched.missing[picture] = f"has several masks in {masks}: {', '.join(chosen)}; keep one of them"
        else:
            stem = picture.name.rpartition(".")[0]
            matched.missing[picture] = f"has no mask; there is no {stem}.png, or with another ending, in {masks}"
    unclaimed = [name for names in candidates.values() for name in names if name not in taken]
    if unclaimed:  # a picture that is there and not used may keep its mask
        unused = {_stem(name) for name in _pictures_in(folder)} - {_stem(name) for name in taken}
        matched.strays += [masks / name for name in unclaimed if _stem(name) not in unused]


def _within(picture: ImageRef, folder: Path) -> PurePath:
    """The picture's name below the folder of its subset."""
    if picture.part is not None:
        return PurePath(picture.part.name)
    try:
        return picture.path.relative_to(folder)
    except ValueError:
        return PurePath(picture.name)


def _pictures_in(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    except OSError:
        return []
    return [name for name in names if not name.startswith(".") and name.lower().endswith(IMAGE_EXTENSIONS)]


def _stem(name: str) -> str:
    """Without ending; macOS writes accents apart from their letters, and the masks may come from elsewhere."""
    return unicodedata.normalize("NFC", name.rpartition(".")[0])
