"""Files that are read as a whole: when they were changed, what stands for their bytes, why they cannot be read."""

import errno
import hashlib
import os
import stat
from dataclasses import dataclass

MOST_BYTES = 2**30
"""Of a file, or of the part of one, that is read."""
LARGE_BYTES = 2**26
"""Above this, files are read one at a time, so that a pool of threads does not fill the memory."""

Stamp = tuple[int, int, int]
"""Size, time of the last change of the bytes, time of the last change of anything; in bytes and nanoseconds."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a picture cannot be used."""

    kind: str  # one of a few words, for counting
    text: str  # completes the name of the picture to a sentence that says the way out


def stamp_of(path: str) -> Stamp | Flaw:
    """Taken before the file is read: if it changes in between, the stamp is too old, and not too new."""
    try:
        status = os.stat(path)
    except OSError as error:
        if os.path.islink(path) and isinstance(error, FileNotFoundError):
            return Flaw("unreadable", f"is a link to {os.readlink(path)}, which is not there; remove it, or bring that"
                        " file back")  # fmt: skip
        return unreadable(error)
    if not stat.S_ISREG(status.st_mode):
        what = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        return Flaw("unreadable", f"is {what.get(stat.S_IFMT(status.st_mode), 'a device')} and no file; remove it")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def content_of(data: bytes) -> str:
    """What stands for the bytes of a file."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def unreadable(error: OSError | MemoryError) -> Flaw:
    """For files that cannot be opened, or not be held."""
    if isinstance(error, MemoryError):
        return Flaw("unreadable", "does not fit into memory; make it smaller")
    way_out = {errno.EACCES: "change its permissions, or run as its owner", errno.EIO: "the disk may be failing",
               errno.ENOENT: "it may have been removed just now", errno.ELOOP: "it is a link that leads to itself:"
               " remove it"}.get(error.errno or 0)  # fmt: skip
    return Flaw("unreadable", f"cannot be read: {error.strerror or error}{f'; {way_out}' if way_out else ''}")


def too_large(size: int) -> Flaw:
    """Instead of reading it."""
    return Flaw("too large", f"is too large: {size / 2**30:.1f} GiB, and at most {MOST_BYTES // 2**30} GiB are read;"
                " make it smaller")  # fmt: skip
