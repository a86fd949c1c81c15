"""Fonts for text in any script: Pillow's own, and where it lacks a character, one of those that the system has."""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

FOLDERS = ("~/.fonts", "~/.local/share/fonts", "/usr/local/share/fonts", "/usr/share/fonts", "~/Library/Fonts",
           "/Library/Fonts", "/System/Library/Fonts", "C:/Windows/Fonts")  # fmt: skip
WANTED = (
    "dejavusans.", "notosans-regular", "arial unicode", "notosanscjk", "notosanssc", "notosansjp", "notosanskr",
    "sourcehansans", "wqy", "droidsansfallback", "pingfang", "hiragino", "msyh", "yugoth", "malgun", "arialuni",
    "notoemoji", "symbola", "seguisym", "seguiemj",
)  # fmt: skip
"""How the file names of fonts with many characters begin, in the order in which they are tried."""
_NO_CHARACTER = "\U0010fffe"  # never assigned: what a font draws for it stands for all that it lacks


class Fonts:
    """One size of text; the first font that has a character draws it."""

    def __init__(self, size: int, files: Sequence[Path] | None = None):
        from PIL import ImageFont

        self.size = size
        self.main: FreeTypeFont = cast("FreeTypeFont", ImageFont.load_default(size))
        self._files = None if files is None else iter(files)  # looked for when there is need
        self._faces = [_Face(self.main)]
        self._known: dict[str, FreeTypeFont | None] = {}

    def of(self, character: str) -> "FreeTypeFont | None":
        """A font that has the character, if there is one."""
        if character not in self._known:
            having = (face.font for face in self._all() if face.has(character))
            self._known[character] = self.main if character.isspace() else next(having, None)
        return self._known[character]

    def _all(self) -> "Iterator[_Face]":
        """Loads no more of the system's fonts than are asked for."""
        yield from self._faces
        from PIL import ImageFont

        if self._files is None:
            self._files = iter(font_files())
        for file in self._files:
            try:
                self._faces.append(_Face(ImageFont.truetype(file, self.size)))
            except OSError:  # such as fonts of coloured pictures, which have sizes of their own
                continue
            yield self._faces[-1]


class _Face:
    """A font, and what it draws for characters that it lacks."""

    def __init__(self, font: "FreeTypeFont"):
        from PIL import ImageFont

        self.font = font
        # each character for itself: with shaping, a mark without its letter is drawn on a dotted circle
        self.plain = font.font_variant(layout_engine=ImageFont.Layout.BASIC)
        self.lacking = self._drawn(_NO_CHARACTER)

    def has(self, character: str) -> bool:
        return self._drawn(character) != self.lacking

    def _drawn(self, character: str) -> tuple[object, bytes]:
        mask = self.plain.getmask(character)
        return mask.size, bytes(mask)


def font_files(folders: Sequence[str] = FOLDERS) -> list[Path]:
    """Those of the system's fonts that are known to have many characters."""
    found = []
    for folder in folders:
        for parent, _, names in os.walk(Path(folder).expanduser()):
            found += [Path(parent, name) for name in names if name.lower().endswith((".ttf", ".ttc", ".otf"))]
    ranked = [
        (rank, path) for path in found for rank, start in enumerate(WANTED) if path.name.lower().startswith(start)
    ]
    return [path for _, path in sorted(ranked)]


def without_marks(text: str) -> str:
    """Without characters that only say how others are to be drawn, such as the joiners in emoji."""
    return "".join(one for one in text if unicodedata.category(one) != "Cf" and not "\ufe00" <= one <= "\ufe0f")


def code_of(character: str) -> str:
    r"""The character as ASCII, such as ``\\u732b``, for where no font has it."""
    return character.encode("ascii", "backslashreplace").decode()
