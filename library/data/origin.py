"""Where the bytes of a picture are: a file of its own, a stretch of a larger one, or a row of a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file that holds many pictures."""

    name: str
    offset: int
    length: int

    @property
    def mark(self) -> str:
        """What tells it apart within its file, as long as the file stays as it is."""
        return f"{self.offset}+{self.length}"


class Rows(Protocol):
    """Reads rows of files; one object for all pictures of a subset."""

    column: str

    def read(self, path: Path, number: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file that holds pictures in a column."""

    rows: Rows
    number: int  # in the file, from 0

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def length(self) -> int:
        """Not known before it is read."""
        return 0

    @property
    def mark(self) -> str:
        """What tells it apart within its file, as long as the file stays as it is."""
        return f"{self.rows.column}:{self.number}"


@dataclass(frozen=True, slots=True)
class Origin:
    """One picture; small, because there may be a million of them: the folder is one object for all of its pictures."""

    folder: Path
    file: str  # as seen from the folder
    part: Part | Row | None = None

    @property
    def path(self) -> Path:
        """The file that holds the bytes."""
        return self.folder / self.file

    @property
    def name(self) -> str:
        """The last part of what a person would call it."""
        return (self.file if self.part is None else self.part.name).rpartition("/")[2]

    @property
    def key(self) -> str:
        """Folder and name, free of the rest of the path."""
        if self.part is not None:
            return f"{self.path.name}/{self.part.name}"
        below, _, name = self.file.rpartition("/")
        return f"{below.rpartition('/')[2] or self.folder.name}/{name}"

    def read_bytes(self) -> bytes:
        """All bytes of the picture."""
        if self.part is None:
            return self.path.read_bytes()
        if isinstance(self.part, Row):
            return self.part.rows.read(self.path, self.part.number)
        with self.path.open("rb") as file:
            file.seek(self.part.offset)
            return file.read(self.part.length)

    def __str__(self) -> str:
        return str(self.path) if self.part is None else f"{self.path}:{self.part.name}"
