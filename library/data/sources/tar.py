"""The members of a tar file and where their bytes are; nothing is unpacked, and what is wrong is told."""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PACKED = {b"\x1f\x8b": ("gzip", "gunzip"), b"BZh": ("bzip2", "bunzip2"), b"\xfd7zXZ": ("xz", "unxz"),
           b"(\xb5/\xfd": ("zstd", "unzstd")}  # fmt: skip
_BLOCK = 512
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar file."""

    name: str
    offset: int
    size: int


@dataclass
class Archive:
    """What a tar file holds, and a line for everything in it that cannot be used."""

    members: list[Member] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_archive(path: Path) -> Archive:
    """Read the headers alone."""
    archive = Archive()
    try:
        with path.open("rb") as file:
            start = file.read(6)
        packed = next((names for magic, names in _PACKED.items() if start.startswith(magic)), None)
        if packed is not None:
            archive.problems.append(f"{path}: is compressed ({packed[0]}); pictures are read in place, which needs"
                                    f" a plain tar file: {packed[1]} {path.name}")  # fmt: skip
            return archive
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for info in _infos(tar, path, size, archive):
                _take(info, path, archive)
    except tarfile.ReadError as error:
        archive.problems.append(f"{path}: is no tar file: {error}" if size else f"{path}: is empty")
    except OSError as error:
        archive.problems.append(f"{path}: cannot be read: {error.strerror}")
    return archive


def _infos(tar: tarfile.TarFile, path: Path, size: int, archive: Archive) -> Iterator[tarfile.TarInfo]:
    """Each header; then whether the archive ends where it says so, since tarfile takes any bad header for the end."""
    last = "its start"
    while True:
        try:
            info = tar.next()
        except tarfile.ReadError as error:
            archive.problems.append(f"{path}: cannot be read behind {last} ({error}); what follows is lost")
            return
        if info is None:
            break
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
        last = info.name
        missing = info.offset_data + info.size - size
        if info.isreg() and missing > 0:
            archive.problems.append(f"{path}: is cut off in {last}, {missing} bytes of it are missing; what follows is"
                                    " lost")  # fmt: skip
            return
        yield info
    with path.open("rb") as file:
        file.seek(tar.offset)
        block = file.read(_BLOCK)
    if not block:
        archive.problems.append(f"{path}: has no end mark behind {last}; it may be cut off there")
    elif len(block) < _BLOCK:
        archive.problems.append(f"{path}: is cut off behind {last}; what follows is lost")
    elif block.strip(b"\0"):
        archive.problems.append(f"{path}: is damaged behind {last}, at byte {tar.offset}; what follows is lost")


def _take(info: tarfile.TarInfo, path: Path, archive: Archive) -> None:
    name = info.name.removeprefix("./")
    if info.isdir():
        return
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or _DRIVE.match(name):
        archive.problems.append(f"{path}: member {info.name!r} points outside of it; pack it again with plain names")
    elif name.rpartition("/")[2].startswith("."):  # such as the "._a.png" that macOS packs, too
        return
    elif info.issym() or info.islnk():
        archive.problems.append(f"{path}: member {name!r} is a link to {info.linkname!r}; pack it again with"
                                " --dereference --hard-dereference")  # fmt: skip
    elif not info.isreg() or info.issparse():
        archive.problems.append(f"{path}: member {name!r} is no plain file; take it out")
    else:
        archive.members.append(Member(name, info.offset_data, info.size))
