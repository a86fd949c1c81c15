"""What is wrong with each picture of a project, and which of it the page can mend."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...captioning.near_duplicates import HASH_BITS, compute_perceptual_hash
from ...config.schema_data import DataConfig
from ...dataloader.buckets import BucketAssigner, BucketAssignment, build_bucket_assigner
from ...dataloader.invalid_images import CROP_WARNING_FRACTION, UPSCALE_WARNING_FACTOR
from ...dataset.caption_files import decode_utf8
from ...dataset.dataset_config import load_dataset_config
from ...dataset.image_inspection import InspectedImage, inspect_image
from ...errors import UserError
from ..background import BackgroundWork
from ..folders import OpenedFolders
from .project import PictureFolder, Project

ALIKE_BITS = 4
"""Perceptual hashes that differ in at most this many bits are of pictures that are alike."""

MANY_PICTURES = 3000
"""The number of pictures above which those that are alike are not looked for: every one is compared with every one."""

TRAIT_TEXTS = {
    "transparent": "has transparent parts, which are trained as white",
    "CMYK": "has the colors of print (CMYK)",
    "16-bit": "has 16 bits for each color, of which 8 are used",
    "palette": "has a color palette",
    "animated": "moves; only its first frame is used",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a picture, and the mend that the page offers for it."""

    kind: str
    text: str
    mend: str = ""
    """``rotate``, ``convert``, ``remove`` or ``crop``; empty if the page cannot mend it."""


@dataclass(frozen=True)
class CheckedPicture:
    """One picture with what was found in it."""

    path: Path
    folder: PictureFolder
    inspected: InspectedImage
    caption: str
    perceptual_hash: int | None = None
    faults: Sequence[Fault] = ()

    @property
    def mask(self) -> Path | None:
        return self.folder.masks.get(self.path.name)


MEND_LABELS = {"rotate": "Turn it upright", "convert": "Convert to PNG", "remove": "Remove", "crop": "Crop…"}
"""The buttons of the mends."""


@dataclass
class PictureCheck:
    """Checks the pictures of one project in the background; what did not change is not opened again."""

    project: Project
    work: BackgroundWork = field(default_factory=lambda: BackgroundWork("looking at the pictures", "check again"))
    pictures: Sequence[CheckedPicture] = ()
    _known: dict[tuple[Path, int, int], tuple[InspectedImage, int | None]] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _is_outdated: bool = True

    def __post_init__(self) -> None:
        self.work.is_running = False

    def update(self, project: Project) -> None:
        """Go by the project as it is now."""
        if project != self.project:
            self.project, self._is_outdated = project, True

    def invalidate(self) -> None:
        """Check again when it is asked for the next time."""
        self._is_outdated = True

    def start(self) -> None:
        """Check in the background, unless that runs already or nothing has changed."""
        with self._turn:
            if not self.work.is_running and self._is_outdated:
                self._is_outdated = False
                self.work = BackgroundWork("looking at the pictures", "check again")
                self.work.start(self._run)

    def _run(self, work: BackgroundWork) -> Mapping[str, Any]:
        self.pictures = self.check(work)
        return {}

    def check(self, work: BackgroundWork | None = None) -> list[CheckedPicture]:
        """Open every picture, and list what is wrong with it."""
        folders = self.project.list_folders()
        total = sum(len(each.names) for each in folders)
        extension = self.project.find_caption_extension()
        found = list[CheckedPicture]()
        for folder in folders:
            captions = _find_captions(folder.path, extension)
            for name in folder.names:
                if work is not None:
                    work.report(work.title, len(found), total)
                path = folder.path / name
                inspected, looks = self._look(path)
                file = captions.get(path.stem)
                caption = folder.class_tokens if file is None else _read_caption(file)
                found.append(CheckedPicture(path, folder, inspected, caption, looks))
        return list_faults(found, build_assigner(self.project))

    def require_readable(self, path: Path) -> None:
        """Raise unless the file is a picture of a format that is decoded, whatever its name says."""
        if defect := self._look(path)[0].defect:
            raise UserError(f"{path.name} {defect.text}")

    def _look(self, path: Path) -> tuple[InspectedImage, int | None]:
        try:
            status = path.stat()
            key = path, status.st_size, status.st_mtime_ns
        except OSError:
            key = path, 0, 0
        if key not in self._known:
            inspected = inspect_image(path)
            looks = None if inspected.defect else compute_perceptual_hash(path)[0]
            self._known[key] = inspected, looks
        return self._known[key]


def _find_captions(folder: Path, extension: str) -> dict[str, Path]:
    names = [name for name in os.listdir(folder) if name.lower().endswith(extension)]
    return {Path(name).stem: folder / name for name in names}


def _read_caption(file: Path) -> str:
    try:
        return decode_utf8(file.read_bytes()).strip()
    except (OSError, ValueError):
        return ""


def build_assigner(project: Project) -> BucketAssigner | None:
    """Build what says how a picture is cropped, from the dataset file; None while there are no pictures."""
    if not project.count_pictures():
        return None
    project.write_dataset()
    datasets = load_dataset_config(DataConfig(dataset_config=str(project.dataset_path))).datasets
    return build_bucket_assigner(datasets[0])


def list_faults(pictures: Sequence[CheckedPicture], assign: BucketAssigner | None) -> list[CheckedPicture]:
    """List the faults of every picture; of equal and alike ones the largest is the original."""
    first_of_hash, originals = dict[str, CheckedPicture](), find_originals(pictures)
    checked = []
    for picture in pictures:
        faults, inspected = list(_list_own_faults(picture, assign)), picture.inspected
        if inspected.content_hash and not inspected.defect:
            first = first_of_hash.setdefault(inspected.content_hash, picture)
            if first is not picture:
                faults.append(Fault("duplicate", f"is the same file as {first.path.name}", "remove"))
            elif original := originals.get(picture.path):
                faults.append(Fault("alike", f"looks like {original.name}", "remove"))
        checked.append(replace(picture, faults=faults))
    return checked


def _list_own_faults(picture: CheckedPicture, assign: BucketAssigner | None) -> Iterator[Fault]:
    inspected = picture.inspected
    if inspected.defect:
        yield Fault("broken", inspected.defect.text, "remove")
        return
    if inspected.exif_orientation != 1:
        yield Fault("sideways", "is stored turned: only its EXIF data says which way is up", "rotate")
    for trait in inspected.traits:
        yield Fault(trait, TRAIT_TEXTS[trait], "convert")
    placement = place_picture(picture, assign)
    if placement is not None:
        factor = placement.resized_size[0] / inspected.size[0]
        if factor >= UPSCALE_WARNING_FACTOR:
            text = "is small, {} × {} pixels: it is enlarged {:.2g} times, and blurred by that"
            yield Fault("small", text.format(*inspected.size, factor), "remove")
        if placement.cropped_fraction >= CROP_WARNING_FRACTION:
            text = f"is so narrow that {placement.cropped_fraction:.0%} of it is cropped; choose what is left"
            yield Fault("narrow", text, "crop")
    if not picture.caption:
        yield Fault("no caption", "has no caption")


def place_picture(picture: CheckedPicture, assign: BucketAssigner | None) -> BucketAssignment | None:
    """Return how a picture is resized and cropped; None if it is broken or fits no bucket."""
    try:
        return None if assign is None or picture.inspected.defect else assign(*picture.inspected.size)
    except ValueError:
        return None


def find_originals(pictures: Sequence[CheckedPicture]) -> dict[Path, Path]:
    """Find pictures that look like another one, which has at least as many pixels, of the same folder kind."""
    usable = [each for each in pictures if each.perceptual_hash is not None]
    if len(usable) > MANY_PICTURES:
        return {}
    usable.sort(key=lambda each: -each.inspected.size[0] * each.inspected.size[1])
    originals = dict[Path, Path]()
    for number, picture in enumerate(usable):
        for other in usable[:number]:
            if (
                other.path not in originals
                and other.folder.is_reg == picture.folder.is_reg
                and _are_alike(picture, other)
            ):
                originals[picture.path] = other.path
                break
    return originals


def _are_alike(one: CheckedPicture, other: CheckedPicture) -> bool:
    assert one.perceptual_hash is not None and other.perceptual_hash is not None
    bits = one.perceptual_hash.bit_count()
    is_flat = bits in (0, HASH_BITS) or bits < HASH_BITS // 8  # a picture of one color is like every other
    return not is_flat and (one.perceptual_hash ^ other.perceptual_hash).bit_count() <= ALIKE_BITS


def export_picture(picture: CheckedPicture, source: Path, assign: BucketAssigner | None) -> dict[str, Any]:
    """Export a picture for the page."""
    placement = place_picture(picture, assign)
    width, height = picture.inspected.size
    left, top = (0, 0) if placement is None else placement.crop_left_top
    resized = (1, 1) if placement is None else placement.resized_size
    bucket = resized if placement is None else placement.bucket_resolution
    stamp = picture.path.stat().st_mtime_ns if picture.path.exists() else 0
    return {
        "path": picture.path.relative_to(source).as_posix(),
        "name": picture.path.name,
        "size": [width, height],
        "is_readable": picture.inspected.defect is None,
        "crop": [left / resized[0], top / resized[1], bucket[0] / resized[0], bucket[1] / resized[1]],
        "caption": picture.caption,
        "has_mask": picture.mask is not None,
        "version": str(stamp),
        "faults": [
            {"kind": each.kind, "text": each.text, "mend": each.mend, "label": MEND_LABELS.get(each.mend, "")}
            for each in picture.faults
        ],
    }


def export_folder(folder: PictureFolder, source: Path, *, is_used: bool) -> dict[str, Any]:
    """Export what was recognized of a folder."""
    return {
        "name": folder.path.relative_to(source).as_posix() if folder.path != source else "",
        "count": len(folder.names),
        "repeats": folder.repeats,
        "class_tokens": folder.class_tokens,
        "is_reg": folder.is_reg,
        "is_used": is_used,
        "masks": len(folder.masks),
    }


def find_picture(project: Project, folders: OpenedFolders, path: str) -> Path:
    """Return the file of a picture by the path that the page has; only files that are listed."""
    found = folders.resolve(project.source / path)
    for folder in project.list_folders():
        if found.parent == folder.path.resolve() and found.name in folder.names:
            return folder.path / found.name
    raise FileNotFoundError(2, "no such picture; reload the page", path)
