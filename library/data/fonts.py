"""Fonts for text in any script: Pillow's own, and where it lacks a character, one of those that the system has."""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

FONT_DIRS = ("~/.fonts", "~/.local/share/fonts", "/usr/local/share/fonts", "/usr/share/fonts", "~/Library/Fonts",
           "/Library/Fonts", "/System/Library/Fonts", "C:/Windows/Fonts")  # fmt: skip
PREFERRED_FONTS = (
    "dejavusans.", "notosans-regular", "arial unicode", "notosanscjk", "notosanssc", "notosansjp", "notosanskr",
    "sourcehansans", "wqy", "droidsansfallback", "pingfang", "hiragino", "msyh", "yugoth", "malgun", "arialuni",
    "notoemoji", "symbola", "seguisym", "seguiemj",
)  # fmt: skip
"""How the file names of fonts with many characters begin, in the order in which they are tried."""
_UNASSIGNED_CHARACTER = "\U0010fffe"  # never assigned: what a font draws for it stands for all that it lacks


class FontSet:
    """One size of text; the first font that has a character draws it."""

    def __init__(self, size: int, files: Sequence[Path] | None = None):
        from PIL import ImageFont

        self.size = size
        self.default_font: FreeTypeFont = cast("FreeTypeFont", ImageFont.load_default(size))
        self._font_files = None if files is None else iter(files)  # looked for when there is need
        self._faces = [_FontFace(self.default_font)]
        self._font_by_character: dict[str, FreeTypeFont | None] = {}

    def find_font(self, character: str) -> "FreeTypeFont | None":
        """A font that has the character, if there is one."""
        if character not in self._font_by_character:
            having = (face.font for face in self._iter_faces() if face.has_glyph(character))
            self._font_by_character[character] = self.default_font if character.isspace() else next(having, None)
        return self._font_by_character[character]

    def _iter_faces(self) -> "Iterator[_FontFace]":
        """Loads no more of the system's fonts than are asked for."""
        yield from self._faces
        from PIL import ImageFont

        if self._font_files is None:
            self._font_files = iter(find_font_files())
        for file in self._font_files:
            try:
                self._faces.append(_FontFace(ImageFont.truetype(file, self.size)))
            except OSError:  # such as fonts of coloured pictures, which have sizes of their own
                continue
            yield self._faces[-1]


class _FontFace:
    """A font, and what it draws for characters that it lacks."""

    def __init__(self, font: "FreeTypeFont"):
        from PIL import ImageFont

        self.font = font
        # each character for itself: with shaping, a mark without its letter is drawn on a dotted circle
        self.basic_font = font.font_variant(layout_engine=ImageFont.Layout.BASIC)
        self.missing_glyph = self._rasterize(_UNASSIGNED_CHARACTER)

    def has_glyph(self, character: str) -> bool:
        return self._rasterize(character) != self.missing_glyph

    def _rasterize(self, character: str) -> tuple[object, bytes]:
        mask = self.basic_font.getmask(character)
        return mask.size, bytes(mask)


def find_font_files(directories: Sequence[str] = FONT_DIRS) -> list[Path]:
    """Those of the system's fonts that are known to have many characters."""
    found = []
    for folder in directories:
        for parent, _, names in os.walk(Path(folder).expanduser()):
            found += [Path(parent, name) for name in names if name.lower().endswith((".ttf", ".ttc", ".otf"))]
    ranked = [
        (rank, path) for path in found for rank, start in enumerate(PREFERRED_FONTS) if path.name.lower().startswith(start)
    ]
    return [path for _, path in sorted(ranked)]


def strip_format_characters(text: str) -> str:
    """Without characters that only say how others are to be drawn, such as the joiners in emoji."""
    return "".join(one for one in text if unicodedata.category(one) != "Cf" and not "\ufe00" <= one <= "\ufe0f")


def escape_character(character: str) -> str:
    r"""The character as ASCII, such as ``\\u732b``, for where no font has it."""
    return character.encode("ascii", "backslashreplace").decode()
