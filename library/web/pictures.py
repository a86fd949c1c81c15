"""The pictures of a dataset file as they will be trained: scanned and planned by the code that trains them."""

import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config.schema_data import DataConfig
from ..dataloader.buckets import BucketAssignment
from ..dataloader.invalid_images import CROP_WARNING_FRACTION, UPSCALE_WARNING_FACTOR
from ..dataloader.manifest import Sample
from ..dataloader.prepare import prepare_data
from ..dataset.clip_windows import DEFAULT_FRAME_RULE
from ..dataset.dataset_config import load_dataset_config
from ..dataset.image_ref import ImageRef
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..errors import UserError
from ..problems import report_file
from .background import BackgroundWork
from .folders import OpenedFolders

SIZE_MULTIPLE = 8
"""The least that any model needs; checks of a run use the multiple of its model."""

KEPT = "what was scanned is kept, and scanning again goes on from there"
CLIP_TOKENS = 75
MAX_DATASETS = 4
MAX_DATASET_FILE_BYTES = 2**18
_TOKEN = re.compile(r"[^\W\d_]+|\d|[^\s\w]+|_")
WARNINGS = {
    "cropped": f"a third or more is cropped ({CROP_WARNING_FRACTION:.0%})",
    "enlarged": f"enlarged {UPSCALE_WARNING_FACTOR:g} times or more",
    "duplicate": "the same file twice",
    "no caption": "no caption",
    "long": f"more than {CLIP_TOKENS} tokens, of which CLIP reads {CLIP_TOKENS}",
}


@dataclass(frozen=True)
class Picture:
    """One picture as it will be trained."""

    sample: Sample
    placement: BucketAssignment
    subset: SubsetConfig
    duplicate_of: str = ""

    @property
    def upscaling(self) -> float:
        return self.placement.resized_size[0] / self.sample.size[0]

    @property
    def is_editable(self) -> bool:
        """Whether the caption is in a file of its own; tables and shards are edited elsewhere."""
        is_own_file = self.subset.source_key == "image_dir" and self.sample.image.part is None
        return is_own_file and not self.subset.uses_musubi_captions

    def list_warnings(self, caption: str) -> Iterator[str]:
        """List the kinds of warnings."""
        if self.placement.cropped_fraction >= CROP_WARNING_FRACTION:
            yield "cropped"
        if self.upscaling >= UPSCALE_WARNING_FACTOR:
            yield "enlarged"
        if self.duplicate_of:
            yield "duplicate"
        if not caption:
            yield "no caption"
        elif count_least_tokens(caption) > CLIP_TOKENS:
            yield "long"

    def export_json(self, index: int, caption: str) -> dict[str, Any]:
        left, top = self.placement.crop_left_top
        width, height = self.placement.resized_size
        crop_width, crop_height = self.placement.bucket_resolution
        warnings = {kind: WARNINGS[kind] for kind in self.list_warnings(caption)}
        if "cropped" in warnings:
            warnings["cropped"] = f"{self.placement.cropped_fraction:.0%} is cropped"
        if "enlarged" in warnings:
            warnings["enlarged"] = f"enlarged {self.upscaling:.3g} times"
        if "duplicate" in warnings:
            warnings["duplicate"] = f"the same file as {self.duplicate_of}"
        return {
            "index": index,
            "name": self.sample.key,
            "size": list(self.sample.size),
            "bucket": list(self.placement.bucket_resolution),
            "crop": [left / width, top / height, crop_width / width, crop_height / height],
            "is_random_crop": self.subset.random_crop,
            "caption": caption,
            "repeats": self.sample.repeats,
            "is_reg": self.sample.is_reg,
            "is_editable": self.is_editable,
            "warnings": warnings,
            "hash": self.sample.content_hash[:16],
        }


def count_least_tokens(caption: str) -> int:
    """Count the parts into which CLIP splits a caption, each of which is at least one token."""
    return max((sum(1 for _ in _TOKEN.finditer(line)) for line in caption.split("\n")), default=0)


@dataclass
class OutsideLinks:
    """Pictures that are links out of the opened folders, or whose captions are: training reads them, the page not."""

    folders: OpenedFolders
    count: int = 0
    _stems: dict[tuple[Path, str], set[str] | None] = field(default_factory=dict)

    def hide(self, sample: Sample) -> bool:
        """Whether a picture must not be shown; a folder is listed once."""
        below, _, name = sample.image.file.rpartition("/")
        key = sample.image.folder, below
        if key not in self._stems:
            self._stems[key] = self._find_stems(key[0] / below)
        stems, stem = self._stems[key], name.rpartition(".")[0]
        is_hidden = stems is None or stem in stems or "_".join(stem.split("_")[:-4]) in stems
        self.count += is_hidden
        return is_hidden

    def describe(self) -> Iterator[str]:
        if self.count:
            yield f"{self.count} pictures are not shown: they or their captions are links out of the opened folders"

    def _find_stems(self, folder: Path) -> set[str] | None:
        """Return the names without extension of such links; None if the whole folder is elsewhere."""
        if not self.folders.contains(folder):
            return None
        with os.scandir(folder) as entries:
            links = [entry.name for entry in entries if entry.is_symlink()]
        return {name.rpartition(".")[0] for name in links if not self.folders.contains(folder / name)}


@dataclass
class PictureSet:
    """The pictures of one dataset file; scanned in a thread of its own."""

    path: Path
    folders: OpenedFolders
    pictures: Sequence[Picture] = ()
    captions: list[str] = field(default_factory=list)
    """The captions as they are now; the manifest has them as they were scanned."""

    warnings: list[tuple[str, ...]] = field(default_factory=list)
    notes: Sequence[str] = ()
    work: BackgroundWork = field(default_factory=lambda: BackgroundWork("listing the pictures", KEPT))
    """The scan of the pictures, which runs in the background."""

    version: int = 0
    """A number that changes with every edit."""

    _selections: "OrderedDict[tuple[int, str, str, str], list[int]]" = field(default_factory=OrderedDict)

    @property
    def is_ready(self) -> bool:
        return not self.work.is_running

    def start(self) -> None:
        """Scan in the background."""
        self.work.start(self._scan)

    def _scan(self, work: BackgroundWork) -> Mapping[str, Any]:
        config = DataConfig(dataset_config=str(self.path), on_invalid_images="skip")
        for dataset in load_dataset_config(config).datasets:
            check_folders(self.folders, dataset)
        prepared = prepare_data(config, SIZE_MULTIPLE, frame_rule=DEFAULT_FRAME_RULE).merge_validation()
        first: dict[tuple[int, str], str] = {}
        pictures, links = [], OutsideLinks(self.folders)
        for sample, placement in zip(prepared.manifest.samples, prepared.assignments, strict=True):
            subset = prepared.manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
            if links.hide(sample):
                continue
            key = sample.dataset_index, sample.identity
            pictures.append(Picture(sample, placement, subset, first.get(key, "")))
            first.setdefault(key, sample.key)
        self.pictures, self.notes = pictures, (*links.describe(), *prepared.manifest.notes)
        self.captions = [picture.sample.caption for picture in pictures]
        self.warnings = [(*picture.list_warnings(picture.sample.caption),) for picture in pictures]
        return {}

    def set_caption(self, image: ImageRef, old: str, new: str) -> None:
        """Take over the caption of a file that was written, in all datasets and subsets that have the picture."""
        for index in self._positions.get(image, ()):
            if self.captions[index] == old:
                self.captions[index] = new
                self.warnings[index] = (*self.pictures[index].list_warnings(new),)

    @cached_property
    def _positions(self) -> dict[ImageRef, list[int]]:
        positions: dict[ImageRef, list[int]] = {}
        for index, picture in enumerate(self.pictures):
            positions.setdefault(picture.sample.image, []).append(index)
        return positions

    def select(self, text: str, warning: str, bucket: str) -> list[int]:
        """Return the positions of the pictures whose name or caption has all words of ``text``."""
        key = (self.version, text, warning, bucket)
        if key not in self._selections:
            words = text.lower().split()
            self._selections[key] = [
                index
                for index, (picture, caption) in enumerate(zip(self.pictures, self.captions, strict=True))
                if all(word in f"{picture.sample.key}\n{caption}".lower() for word in words)
                and (not warning or warning in self.warnings[index])
                and (not bucket or bucket == format_bucket(picture))
            ]
            while len(self._selections) > 16:
                self._selections.popitem(last=False)
        return self._selections[key]

    def summarize(self) -> dict[str, Any]:
        """Count pictures by warning and bucket, and tags."""
        counts = Counter(kind for kinds in self.warnings for kind in kinds)
        buckets = Counter(map(format_bucket, self.pictures))
        tags = Counter(tag.strip() for caption in self.captions for tag in caption.split(",") if tag.strip())
        return {
            "total": len(self.pictures),
            "warnings": [
                {"id": kind, "text": WARNINGS[kind], "count": counts[kind]} for kind in WARNINGS if counts[kind]
            ],
            "buckets": [{"id": name, "count": count} for name, count in buckets.most_common()],
            "tags": [{"tag": tag, "count": count} for tag, count in tags.most_common(60)],
            "notes": list(self.notes),
            "seconds": self.work.seconds,
        }


def format_bucket(picture: Picture) -> str:
    return "{}x{}".format(*picture.placement.bucket_resolution)


def check_folders(folders: OpenedFolders, dataset: DatasetConfig) -> None:
    """Raise ``OutsideFolders`` if a dataset has pictures, masks or caches elsewhere."""
    for subset in dataset.subsets:
        named = [subset.resolve_image_dir(), subset.resolve_metadata_file(), subset.resolve_mask_dir()]
        shards = [Path(re.split(r"[*?\[{]", name)[0]) for name in (*(subset.parquet or ()), *(subset.webdataset or ()))]
        for path in (*named, subset.resolve_cache_directory(), *shards):
            if path is not None:
                folders.resolve(path)


@dataclass
class PictureShelf:
    """The dataset files that were opened last."""

    folders: OpenedFolders
    _sets: "OrderedDict[Path, PictureSet]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, path: Path, *, is_again: bool = False) -> PictureSet:
        """Return the pictures of a dataset file; the first call starts the scan."""
        if path.suffix not in (".toml", ".json") or not path.is_file():
            raise UserError(report_file(self.folders.format_path(path), "no dataset file (.toml or .json)"))
        with self._lock:
            opened = self._sets.get(path)
            if opened is None or (is_again and opened.is_ready):
                opened = self._sets[path] = PictureSet(path, self.folders)
                opened.start()
            self._sets.move_to_end(path)
            while len(self._sets) > MAX_DATASETS:
                self._sets.popitem(last=False)
            return opened

    def holds(self, pictures: PictureSet) -> bool:
        with self._lock:
            return any(each is pictures for each in self._sets.values())

    def find_dataset_files(self) -> list[Path]:
        """Find dataset files below the opened folders."""
        found = []
        for folder, entries in self.folders.walk():
            names = [entry.name for entry in entries if entry.name.endswith(".toml") and entry.is_file()]
            found += [folder / name for name in sorted(names) if _is_dataset_file(folder / name)]
        return found


def _is_dataset_file(path: Path) -> bool:
    try:
        if path.is_symlink() or path.stat().st_size > MAX_DATASET_FILE_BYTES:
            return False
        return re.search(r"^\s*\[\[?datasets", path.read_text("utf-8", "replace"), re.MULTILINE) is not None
    except OSError:
        return False
