"""Mends of pictures: turned upright, converted, cropped or removed; each can be undone, also after a restart.

Before a file is changed it is copied into the project's folder, with a note of what it has become.
"""

import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...atomic_files import compute_sha256, replace_path, write_atomic
from ...dataset.image_decoding import load_oriented_image, load_rgb_image
from ...errors import UserError
from ...problems import report_file
from ..jobs import FOLDER
from .picture_check import CheckedPicture, place_picture
from .uploads import CAPTION_EXTENSIONS

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...dataloader.buckets import BucketAssigner

LOG_FILE, MENDS_FOLDER = "mend.json", "mends"
JPEG_QUALITY = 95
_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".png": "PNG", ".bmp": "BMP"}


@dataclass
class MendLog:
    """The mends of a project, one after another."""

    folder: Path
    _changes: list[dict[str, Any]] = field(default_factory=list)
    _changes_by_file: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / FOLDER / MENDS_FOLDER

    def list_mends(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(each for each in self.path.iterdir() if (each / LOG_FILE).is_file())

    def run(self, mend: Callable[["MendLog"], object]) -> None:
        """Run a mend, whose changes are undone together; what was changed before an error is put back."""
        entry, self._changes, self._changes_by_file = self.path / f"{time.time_ns():020}", [], {}
        entry.mkdir(parents=True)
        self._entry = entry
        try:
            mend(self)
        except BaseException:
            self._put_back(entry, self._changes)
            shutil.rmtree(entry, ignore_errors=True)
            raise
        self._write_log()

    def _write_log(self) -> None:
        write_atomic(self._entry / LOG_FILE, json.dumps(self._changes, indent=1).encode())

    def replace_file(self, path: Path, data: bytes) -> None:
        """Write a file; what was there is kept."""
        change = self._keep(path)
        write_atomic(path, data)
        change["after"] = compute_sha256(path)

    def remove_file(self, path: Path) -> None:
        """Remove a file; it is kept."""
        change = self._keep(path)
        path.unlink()
        change["after"] = None

    def find_original(self, path: Path) -> Path | None:
        """Return the copy of a file as it was before this mend; None if this mend has not changed it."""
        change = self._find_change(path)
        return None if change is None or change["kept"] is None else self._entry / change["kept"]

    def _find_change(self, path: Path) -> dict[str, Any] | None:
        return self._changes_by_file.get(str(path))

    def _keep(self, path: Path) -> dict[str, Any]:
        """Keep a file as it was before the first change of this mend; return what is noted of it."""
        if (change := self._find_change(path)) is not None:
            return change
        name = f"{len(self._changes):03}-{path.name}"
        if path.exists():
            shutil.copy2(path, self._entry / name)
        change = {"file": str(path), "kept": name if path.exists() else None, "after": None}
        self._changes.append(change)
        self._changes_by_file[str(path)] = change
        return change

    def undo(self) -> int:
        """Undo the last mend, unless its files have changed since; return how many files were put back."""
        mends = self.list_mends()
        if not mends:
            return 0
        entry = mends[-1]
        changes = json.loads((entry / LOG_FILE).read_text("utf-8"))
        for change in {change["file"]: change for change in changes}.values():  # the last change of each file
            path = Path(change["file"])
            now = compute_sha256(path) if path.exists() else None
            if now != change["after"]:
                raise UserError(report_file(path, "changed since by another program", "the mend is not undone"))
        self._put_back(entry, changes)
        shutil.rmtree(entry)
        return len(changes)

    def _put_back(self, entry: Path, changes: Sequence[dict[str, Any]]) -> None:
        for change in reversed(changes):
            path = Path(change["file"])
            if change["kept"] is None:
                path.unlink(missing_ok=True)
            else:
                temporary = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
                shutil.copy2(entry / change["kept"], temporary)
                replace_path(temporary, path)


@dataclass(frozen=True)
class CropChoice:
    """What a crop leaves: the shape in which the picture is trained, at a position chosen by the user."""

    assign: "BucketAssigner | None" = None
    position: float = 0.5
    """0 for the left or upper end, 1 for the other."""
    shared_files: Set[Path] = frozenset()
    """Captions and masks of the pictures that are not mended, which may be those of mended ones too."""


def list_side_files(picture: CheckedPicture) -> list[Path]:
    """List the captions and the mask of a picture, whether they exist or not."""
    captions = [picture.path.with_suffix(extension) for extension in CAPTION_EXTENSIONS]
    return captions if picture.mask is None else [*captions, picture.mask]


def remove_picture(log: MendLog, picture: CheckedPicture, crop: CropChoice = CropChoice()) -> None:
    """Remove a picture with its caption and mask; what another picture uses stays."""
    for each in (picture.path, *list_side_files(picture)):
        if each not in crop.shared_files and each.is_file():
            log.remove_file(each)


def rotate_picture(log: MendLog, picture: CheckedPicture, crop: CropChoice = CropChoice()) -> None:
    """Store the pixels upright, so that every program shows them so."""
    image = load_oriented_image(picture.path)
    log.replace_file(picture.path, encode_picture(image, picture.path.suffix))


def convert_picture(log: MendLog, picture: CheckedPicture, crop: CropChoice = CropChoice()) -> None:
    """Store the pixels as they are trained: a PNG in RGB with 8 bits."""
    target = picture.path.with_suffix(".png")
    if target != picture.path and target.exists():
        raise UserError(report_file(target, "is there already", f"rename it, and convert {picture.path.name} again"))
    data = encode_picture(_convert_profile(picture.path), ".png")
    if target != picture.path:
        log.remove_file(picture.path)
    log.replace_file(target, data)


def _convert_profile(path: Path) -> "Image":
    """Load in RGB; colors of print by their profile, where the file has one."""
    from PIL import Image, ImageCms

    with Image.open(path) as opened:
        profile = opened.info.get("icc_profile") if opened.mode == "CMYK" else None
    if not profile:
        return load_rgb_image(path)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        image = load_oriented_image(path)
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except ImageCms.PyCMSError:
        return load_rgb_image(path)
    return load_rgb_image(path) if converted is None else converted


def crop_picture(log: MendLog, picture: CheckedPicture, crop: CropChoice) -> None:
    """Crop a picture to the shape in which it is trained, and its mask like it."""
    placement = place_picture(picture, crop.assign)
    if placement is None:
        raise UserError(f"{picture.path.name}: fits no bucket, so there is nothing to crop it to")
    shares = [part / whole for part, whole in zip(placement.bucket_resolution, placement.resized_size, strict=True)]
    if picture.mask in crop.shared_files:
        fix = "crop these pictures together, or give each its own mask in a folder masks beside it"
        raise UserError(report_file(picture.mask, f"is the mask of {picture.path.name} and of another picture", fix))
    for path in (picture.path, picture.mask):
        if path is None:
            continue
        original = log.find_original(path)
        data = _crop_file(original or path, shares, crop.position)
        if original is None:
            log.replace_file(path, data)
        elif data != path.read_bytes():  # the mask of a picture that was cropped before this one
            fix = "give each its own mask in a folder masks beside it"
            raise UserError(report_file(path, "is the mask of pictures that are cropped in different ways", fix))


def _crop_file(path: Path, shares: Sequence[float], position: float) -> bytes:
    """Crop to these shares of the width and the height."""
    image = load_oriented_image(path)
    sides = [max(1, round(side * share)) for side, share in zip(image.size, shares, strict=True)]
    left, top = (round((whole - part) * position) for whole, part in zip(image.size, sides, strict=True))
    return encode_picture(image.crop((left, top, left + sides[0], top + sides[1])), path.suffix)


def encode_picture(image: "Image", extension: str) -> bytes:
    """Encode without EXIF data and with the color profile; formats that Pillow does not write here become an error."""
    kind = _FORMATS.get(extension.lower())
    if kind is None:
        raise UserError(f"{extension}: this format is not written here; convert the picture to PNG first")
    data = io.BytesIO()
    options: dict[str, Any] = {"quality": JPEG_QUALITY, "subsampling": 0} if kind == "JPEG" else {}
    options |= {"lossless": True} if kind == "WEBP" else {}
    if (profile := image.info.get("icc_profile")) and kind != "BMP":
        options = options | {"icc_profile": profile}
    if kind == "JPEG" and image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB")
    image.info = {}
    image.save(data, kind, **options)
    return data.getvalue()
