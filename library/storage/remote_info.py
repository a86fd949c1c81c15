"""Facts that servers tell about files: size and state of each, the files of a folder, and the server of a URL."""

import hashlib
import time
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .filesystems import SCHEMES


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size, time and tag of a remote file, which identify its content: if one of them differs, the file has changed."""

    size: int
    changed_ns: int
    tag: int  # a hash of the server's ETag or hash

    @property
    def stamp(self) -> tuple[int, int, int]:
        return self.size, self.changed_ns, self.tag


@dataclass
class RemoteListing:
    """The files of a folder by their relative path, and the folders at its top."""

    files: dict[str, FileInfo] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


def split_server(url: str) -> tuple[str, str]:
    """Return the scheme, and what permissions and failures concern: the bucket, repository or host."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    return scheme, "/".join(parts[:3]) if scheme == "hf" else parts[0]


def format_address(url: str, query: str) -> str:
    """Return what fsspec is given: the URL for https, with its login and query, bucket and key otherwise."""
    scheme, _, path = url.partition("://")
    if SCHEMES[scheme].can_list:
        return path
    parts, (login, _, query) = urlsplit(url), query.partition("?")
    return urlunsplit((parts.scheme, login + parts.netloc, parts.path, query, ""))


def build_info(entry: dict[str, Any]) -> FileInfo:
    """Build the info of a file from what fsspec returns; servers that tell neither time nor tag are not trusted."""
    tags = [
        str(entry[key]) for key in ("ETag", "etag", "md5Hash", "crc32c", "blob_id", "Content-MD5") if entry.get(key)
    ]
    times = [entry.get(key) for key in ("LastModified", "mtime", "updated", "Last-Modified")]
    changed_ns = next((time_ns for value in times if (time_ns := _parse_time(value))), 0)
    if not tags and not changed_ns:
        changed_ns = time.time_ns()
    digest = hashlib.blake2b("\0".join(tags).encode(), digest_size=6).digest()
    return FileInfo(int(entry.get("size") or 0), changed_ns, int.from_bytes(digest, "big") if tags else 0)


def _parse_time(value: object) -> int | None:
    """Return nanoseconds of a time as one of the file systems gives it."""
    try:
        if isinstance(value, str):
            value = (
                parsedate_to_datetime(value) if "," in value else datetime.fromisoformat(value.replace("Z", "+00:00"))
            )
        return int(value.timestamp()) * 10**9 if isinstance(value, datetime) else None
    except ValueError:
        return None
