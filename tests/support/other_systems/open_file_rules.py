"""Refuse what Windows refuses: files that this process has open or mapped are neither removed nor replaced nor renamed.

Python's audit events come before every removal and renaming, whichever function asks for it; raising in one ends it.
Renaming or removing a folder with an open file in it is refused, too, as is removing the current directory, and
opening a mapped file in a way that truncates it.  Linux alone tells which files are open (``/proc/self``).

Not imitated: files that another process has open; names that Windows does not allow; a file that is opened by
``O_TEMPORARY``.
"""

import errno
import os
import sys
import threading
from collections.abc import Iterator

ALLOWED_CALLERS = (f"{os.sep}filelock{os.sep}_unix.py",)
"""Modules that other systems do not use: filelock has another lock for Windows."""

STATE = threading.local()


def install() -> None:
    """Refuse from now on, for as long as the process lives; a second call changes nothing."""
    if not getattr(sys, "_refuses_open_files", False):
        sys._refuses_open_files = True
        sys.addaudithook(_check_event)


def list_open_files() -> list[str]:
    """The paths of files that this process has open or mapped."""
    return [*_list_descriptors(), *list_mapped_files()]


def _list_descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if path.startswith("/") and not path.startswith(("/proc/", "/dev/", "/sys/")):
            yield path


def list_mapped_files() -> list[str]:
    """The paths of files that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in file if "/" in line}
    return [path for path in paths if not path.startswith(("/dev/", "/proc/"))]


def _check_event(event: str, arguments: tuple) -> None:
    if event not in ("os.remove", "os.rename", "os.rmdir", "open") or getattr(STATE, "is_checking", False):
        return
    STATE.is_checking = True
    try:
        if event == "open":
            _check_truncation(*arguments)
        elif not _is_called_by_allowed():
            _check_removal(event, arguments)
    finally:
        STATE.is_checking = False


def _check_removal(event: str, arguments: tuple) -> None:
    if event == "os.rename":
        source, target, source_folder, target_folder = arguments
        _refuse_if_open(_locate(source, source_folder))
        _refuse_if_open(_locate(target, target_folder))
    else:
        _refuse_if_open(_locate(*arguments))


def _check_truncation(path: object, mode: str | None, flags: int) -> None:
    if isinstance(path, (str, bytes, os.PathLike)) and flags & os.O_TRUNC:
        located = _locate(path, -1)
        if os.path.exists(located) and any(_is_same(located, other) for other in list_mapped_files()):
            raise OSError(errno.EINVAL, "the file is mapped and cannot be truncated", located)


def _locate(path: object, folder: int) -> str:
    """The real path; that of a link is the link's own."""
    name = os.fsdecode(path)  # type: ignore[arg-type]
    if folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    name = os.path.abspath(name)
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))


def _refuse_if_open(path: str) -> None:
    if not os.path.lexists(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        inside = path + os.sep
        # Removing a tree holds its folders open here, by descriptors that do not exist on Windows.
        used = [other for other in list_open_files() if other.startswith(inside) and not os.path.isdir(other)]
        current = os.path.realpath(os.getcwd()) + os.sep
        used += [current] if current.startswith(inside) else []
    else:
        used = [other for other in list_open_files() if _is_same(path, other)]
    if used:
        raise PermissionError(errno.EACCES, f"in use by this process ({used[0]})", path)


def _is_same(path: str, other: str) -> bool:
    if path == other:
        return True
    try:
        return os.path.samestat(os.lstat(path), os.stat(other))
    except OSError:
        return False


def _is_called_by_allowed() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(ALLOWED_CALLERS):
            return True
        frame = frame.f_back
    return False
