"""What was found out about files, kept in one file for each folder of pictures; a broken one is thrown away.

Nothing in it has to be believed: a row counts only for a file whose size and times are those in the row, or whose bytes
have the row's hash.  The file is written as a whole under another name and renamed, so that several processes may do so
at once: the last one wins, and what the others found out is found out again.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .whole_files import Stamp

logger = logging.getLogger(__name__)

FOLDER = ".cache-lorikeet"
"""In a folder of pictures; hidden, so that no search for pictures enters it."""
ROOM = "scan"
_LAYOUT = "lorikeet scan 1"

UNSETTLED: Stamp = (-1, -1, -1)
"""Of a file that was changed so shortly before that a further change might not show in its times."""
SETTLED_AFTER = 2 * 10**9
"""Nanoseconds; the coarsest file systems count in steps of two seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One file, or a part of one."""

    stamp: Stamp
    content: str  # hash of its bytes
    facts: list[Any]  # what was found out, as plain data


@dataclass(frozen=True)
class Kept:
    """What is known of a folder, and where it can be written."""

    rows: dict[str, Row]
    places: tuple[Path, ...]  # the first that can be written to is taken

    def write(self, rows: dict[str, Row], reader: str) -> tuple[Path | None, str | None]:
        """Where the rows were written, if anywhere, and what is to be said about it."""
        body = json.dumps([[key, *row.stamp, row.content, *row.facts] for key, row in rows.items()],
                          separators=(",", ":")).encode()  # fmt: skip
        head = {"layout": _LAYOUT, "reader": reader, "digest": _digest(reader, body)}
        reasons = []
        for path in self.places:
            try:
                write_whole(path, json.dumps(head).encode() + b"\n" + body)
            except OSError as error:
                reasons.append(f"{path.parent} cannot be written to: {error.strerror}")
                continue
            return path, f"{reasons[0]}; what was found out about its files is kept in {path}" if reasons else None
        return None, f"{'; '.join(reasons)}; at the next start, all files have to be read again" if reasons else None


def kept_in(home: Path, cache_dir: Path | None, name: str, reader: str) -> Kept:
    """What is known of ``home``, found out by ``reader`` and none before it; the newest of several stores counts."""
    places = _places(home, cache_dir, name)
    newest = max(places, key=_time_of)
    return Kept(_read(newest, reader) if _time_of(newest) else {}, places)


def write_whole(path: Path, data: bytes) -> None:
    """So that whoever reads the file sees either what was in it or what shall be in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with other.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(other, path)
    except BaseException:
        other.unlink(missing_ok=True)
        raise


def _time_of(path: Path) -> int:
    """Of its last change; 0 when it is not there, or cannot be reached."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _read(path: Path, reader: str) -> dict[str, Row]:
    try:
        head_line, _, body = path.read_bytes().partition(b"\n")
        head = json.loads(head_line)
        if head["digest"] != _digest(head["reader"], body) or head["layout"] != _LAYOUT:
            raise ValueError("it was changed or cut off")
        if head["reader"] != reader:
            logger.info("%s was made by another version; all files are looked at again", path)
            return {}
        return {key: Row((size, changed, touched), content, facts)
                for key, size, changed, touched, content, *facts in json.loads(body)}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be used (%s) and will be replaced; all files are looked at again", path, error)
        return {}


def _digest(reader: str, body: bytes) -> str:
    return hashlib.blake2b(body, key=hashlib.sha256(reader.encode()).digest(), digest_size=16).hexdigest()


def _places(home: Path, cache_dir: Path | None, name: str) -> tuple[Path, ...]:
    """Beside the pictures, or in the folder that was named; if neither can be written to, in the user's own cache."""
    whole = os.path.realpath(home)
    own = f"{home.name}-{hashlib.blake2b(os.fsencode(whole), digest_size=6).hexdigest()}.{name}.json"
    first = home / FOLDER / ROOM / f"{name}.json" if cache_dir is None else cache_dir / ROOM / own
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a process without a home
        return (first,)
    return first, user / "lorikeet" / ROOM / own
