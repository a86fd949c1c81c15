"""One run at a time writes files of one name into one folder; known by a file that stays young while the run lives.

Locks of the system do not reach over every network file system; a file that only one can create, and whose time is
renewed, does.
"""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UserError
from .processes import Process

SECONDS_BETWEEN_SIGNS = 20.0
SECONDS_OF_SILENCE = 120.0
"""Without a sign of life for so long, a run on another machine is thought dead."""


class FolderLock:
    """Held from ``take`` until the ``with`` block ends."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / f".{name}.lock"
        self._token = os.urandom(8).hex()
        self._is_over = threading.Event()
        self._renewer: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock; a run that lives and holds it is a ``UserError``."""
        if self.path.exists():
            self._put_aside()
        mine = {**Process.own().as_json(), "token": self._token}
        try:
            with self.path.open("x", encoding="utf-8") as file:
                json.dump(mine, file)
        except FileExistsError:
            raise self._refusal(_read(self.path)) from None
        self._renewer = threading.Thread(target=self._renew, daemon=True)
        self._renewer.start()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        if self._renewer is None:
            return
        self._is_over.set()
        self._renewer.join()
        if _read(self.path).get("token") == self._token:
            self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            with suppress(OSError):
                os.utime(self.path)

    def _put_aside(self) -> None:
        """Remove what a dead run left; of several that find it, one does."""
        found = _read(self.path)
        if self._lives(found):
            raise self._refusal(found)
        aside = self.path.with_name(f"{self.path.name}-{self._token}")
        with suppress(FileNotFoundError):
            self.path.rename(aside)
            if _read(aside).get("token") != found.get("token"):  # another one was faster, and this is its own
                aside.rename(self.path)
                raise self._refusal(_read(self.path))
            aside.unlink()

    def _lives(self, found: dict[str, Any]) -> bool:
        process = Process.from_json(found)
        if process is not None and process.is_here:
            return process.lives()
        try:
            return self._time_now() - self.path.stat().st_mtime < SECONDS_OF_SILENCE
        except FileNotFoundError:
            return False

    def _time_now(self) -> float:
        """As the file system sees it, whose clock may be another machine's."""
        probe = self.path.with_name(f"{self.path.name}-{self._token}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now

    def _refusal(self, found: dict[str, Any]) -> UserError:
        return UserError(
            f"--output_dir: another run writes files of this name into {self.path.parent}: process {found.get('pid')}"
            f" on {found.get('host')}.\nGive this one another --output_name or --output_dir. If that run is dead for"
            f" sure, wait {SECONDS_OF_SILENCE:g} s or delete {self.path}"
        )


def _read(path: Path) -> dict[str, Any]:
    """What stands in a lock; one that is just being written is empty, and young."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
