"""The content of large files as a hash, computed once and remembered by path, size and times of change."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...dataset.scan_cache import SETTLED_AFTER_NS

_READ_CHUNK_BYTES = 2**24


class FileHashCache:
    """Hashes, and a file that remembers them; where it cannot be read or written, they are computed each time."""

    def __init__(self, cache_file: Path):
        self.cache_file = cache_file
        self._entries: dict[str, list[object]] = _load_entries(cache_file)

    def get_hash(self, file: Path, label: str = "", compute_hash: Callable[[Path], str] | None = None) -> str:
        """The hash of a file; or what ``compute`` makes of it, which ``what`` is the name of."""
        status, place = file.stat(), f"{file.resolve()} {label}".rstrip()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        known = self._entries.get(place)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        is_settled = max(stamp[1:]) < time.time_ns() - SETTLED_AFTER_NS
        found = (compute_hash or compute_sha256)(file)
        if is_settled:
            self._entries[place] = [*stamp, found]
            self._save()
        return found

    def _save(self) -> None:
        """All at once, so that nobody reads a half; of several processes the last one wins, and all are right."""
        draft = self.cache_file.with_name(f"{self.cache_file.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.cache_file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self._entries), encoding="utf-8")
            draft.replace(self.cache_file)
        except OSError:  # it only saves time
            with suppress(OSError):
                draft.unlink()


def _load_entries(cache_file: Path) -> dict[str, list[object]]:
    try:
        known = json.loads(cache_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    usable = isinstance(known, dict) and all(isinstance(item, list) and len(item) == 4 for item in known.values())
    return known if usable else {}


def compute_sha256(file: Path) -> str:
    """SHA-256 of what is in a file, however large it is."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
