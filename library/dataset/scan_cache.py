"""Scan results of unchanged image files, cached in one JSON file per folder; a damaged cache is discarded.

A result is used only for a file with the cached size and times, or for bytes with the cached hash.  The file is
replaced atomically, so that several processes may write it: the last one wins, and what the others had scanned is
scanned again.

A whole file needs no lock, no migration and no repair, which a database would.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic_files import write_atomic
from ..storage.remote_path import is_remote, resolve_links
from .image_ref import ImageRef
from .listing import ListedImage
from .schema import DatasetConfig

logger = logging.getLogger(__name__)
CACHE_FOLDER = ".cache-lorikeet"
"""The folder of caches in a folder of images; hidden, so that no search for images enters it."""

SCAN_FOLDER = "scan"
_LAYOUT = "lorikeet scan 1"
FileStamp = tuple[int, int, int]
"""Size in bytes, time of the last change of the content and of the last change of the inode, in nanoseconds."""

UNSETTLED: FileStamp = (-1, -1, -1)
"""The stamp of a file that changed so recently that its times might not show a further change."""

SETTLED_AFTER_NS = 2 * 10**9
"""The coarsest file systems have timestamps of two seconds."""


@dataclass(frozen=True, slots=True)
class CachedScan:
    """The scan result of one image."""

    stamp: FileStamp
    content: str  # hash of the bytes
    facts: list[Any]  # the result as JSON values


class ScanCache:
    """The scan results of one folder, loaded once, updated during a scan and written back."""

    def __init__(self, root: Path, cache_dir: Path | None, name: str, version: str):
        """Load the results named ``name`` of this ``version`` of the scan, from the newest of the possible files."""
        self._root, self._version = resolve_links(root), version
        self._candidates = _list_candidates(root, cache_dir, name)
        newest = max(self._candidates, key=_read_mtime)
        self._loaded = _read_entries(newest, version) if _read_mtime(newest) else {}
        self.entries = dict(self._loaded)
        self.path: Path | None = self._candidates[0]
        self._requested: set[str] = set()
        self._facts_by_content: dict[str, list[Any]] | None = None
        self._is_changed = False
        self._note: str | None = None
        self._last_folder: Path | None = None  # images come folder by folder
        self._is_last_in_root = False

    def make_key(self, image: ImageRef) -> str:
        """Return the key of an image and note that it is requested."""
        if image.folder is not self._last_folder:
            self._last_folder = image.folder
            self._is_last_in_root = resolve_links(image.folder) == self._root
        elsewhere = os.path.abspath if not is_remote(image.folder) else str
        key = image.file if self._is_last_in_root else elsewhere(image.path)
        if image.part is not None:
            key = f"{key}\0{image.part.position}"
        self._requested.add(key)
        return key

    def drop_deleted_files(self) -> None:
        """Drop the entries of deleted files; files that are not requested this time may be requested the next time."""
        if is_remote(self._root):  # would be a request for each
            return
        for key in self._loaded.keys() - self._requested:
            if not os.path.exists(self._root / key.partition("\0")[0]):
                self.update(key, None)

    def find_facts(self, content: str) -> list[Any] | None:
        """Find the result by content, for a file that was renamed, copied or touched."""
        if self._facts_by_content is None:
            self._facts_by_content = {entry.content: entry.facts for entry in self._loaded.values()}
        return self._facts_by_content.get(content)

    def update(self, key: str, entry: CachedScan | None) -> None:
        """Set or remove an entry."""
        if entry is None:
            self._is_changed |= self.entries.pop(key, None) is not None
        elif entry is not self.entries.get(key):
            self.entries[key] = entry
            self._is_changed = True

    def write(self) -> str | None:
        """Write the entries if any changed; return a note if the first location is not writable."""
        if self._is_changed:
            self.path, self._note = self._write_entries()
            self._is_changed = False
        return self._note

    def _write_entries(self) -> tuple[Path | None, str | None]:
        rows = [[key, *entry.stamp, entry.content, *entry.facts] for key, entry in self.entries.items()]
        body = json.dumps(rows, separators=(",", ":")).encode()
        head = {"layout": _LAYOUT, "reader": self._version, "digest": _compute_digest(self._version, body)}
        reasons = []
        for path in self._candidates:
            try:
                write_atomic(path, json.dumps(head).encode() + b"\n" + body)
            except OSError as error:
                reasons.append(f"{path.parent} is not writable: {error.strerror}")
                continue
            return path, f"{reasons[0]}; scan results are cached in {path}" if reasons else None
        return None, f"{'; '.join(reasons)}; all images will be scanned again at the next start" if reasons else None


def get_cache_folder(root: Path) -> Path:
    """Return the folder of the caches of a folder of images: in it, or a local one if it is remote."""
    return root.store.get_folder(root.url) if is_remote(root) else root / CACHE_FOLDER


def _list_candidates(root: Path, cache_dir: Path | None, name: str) -> tuple[Path, ...]:
    """List where the file may be: next to the images or in ``cache_dir``; else in the user's cache directory."""
    real_path = str(resolve_links(root))
    unique_name = f"{root.name}-{hashlib.blake2b(os.fsencode(real_path), digest_size=6).hexdigest()}.{name}.json"
    if cache_dir is None:
        first = get_cache_folder(root) / SCAN_FOLDER / f"{name}.json"
    else:
        first = cache_dir / SCAN_FOLDER / unique_name
    try:
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory
        return (first,)
    return first, user_cache / "lorikeet" / SCAN_FOLDER / unique_name


def _read_mtime(path: Path) -> int:
    """Return the time of the last change, 0 if the file cannot be reached."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _read_entries(path: Path, version: str) -> dict[str, CachedScan]:
    try:
        head_line, _, body = path.read_bytes().partition(b"\n")
        head = json.loads(head_line)
        if head["digest"] != _compute_digest(head["reader"], body) or head["layout"] != _LAYOUT:
            raise ValueError("checksum mismatch")
        if head["reader"] != version:
            logger.info("%s was written by another version; scanning all images again", path)
            return {}
        return {
            key: CachedScan((size, mtime, ctime), content, facts)
            for key, size, mtime, ctime, content, *facts in json.loads(body)
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s) and will be replaced; scanning all images again", path, error)
        return {}


def _compute_digest(version: str, body: bytes) -> str:
    return hashlib.blake2b(body, key=hashlib.sha256(version.encode()).digest(), digest_size=16).hexdigest()


class ScanRoots:
    """The folder whose scan cache holds an image: ``image_dir``, or the folder of the metadata file or shard."""

    def __init__(self, datasets: Sequence[DatasetConfig], cache_dir: Path | None):
        """``cache_dir`` is for subsets without a ``cache_directory``."""
        self._datasets, self._cache_dir = datasets, cache_dir
        self._roots: dict[tuple[int, int], Path] = {}
        self._cache_dirs: dict[Path, Path] = {}

    def find_root(self, item: ListedImage) -> Path:
        """Return the real path: two links to one folder would otherwise overwrite each other's cache."""
        key = (item.dataset, item.subset)
        if key not in self._roots:
            subset = self._datasets[item.dataset].subsets[item.subset]
            metadata = subset.resolve_metadata_file()
            root = subset.resolve_image_dir() or (metadata.parent if metadata is not None else item.image.folder)
            self._roots[key] = resolve_links(root if is_remote(root) or root.is_dir() else root.parent)
            if (cache_dir := subset.resolve_cache_directory()) is not None:
                self._cache_dirs.setdefault(self._roots[key], cache_dir)
        return self._roots[key]

    def get_cache_dir(self, root: Path) -> Path | None:
        """Return the folder that holds the cache instead of the root itself."""
        return self._cache_dirs.get(root, self._cache_dir)

    def group_by_root(self, items: Iterable[ListedImage]) -> dict[Path, dict[ImageRef, None]]:
        """Group images by root, each once and in order."""
        groups: dict[Path, dict[ImageRef, None]] = {}
        for item in items:
            groups.setdefault(self.find_root(item), {})[item.image] = None
        return groups
