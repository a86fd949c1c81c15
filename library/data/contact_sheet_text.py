"""Fonts for text in any script: Pillow's own, and where it lacks a character, one of those that the system has."""

import math
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont


FONT_DIRS = (
    "~/.fonts",
    "~/.local/share/fonts",
    "/usr/local/share/fonts",
    "/usr/share/fonts",
    "~/Library/Fonts",
    "/Library/Fonts",
    "/System/Library/Fonts",
    "C:/Windows/Fonts",
)


PREFERRED_FONTS = (
    "dejavusans.",
    "notosans-regular",
    "arial unicode",
    "notosanscjk",
    "notosanssc",
    "notosansjp",
    "notosanskr",
    "sourcehansans",
    "wqy",
    "droidsansfallback",
    "pingfang",
    "hiragino",
    "msyh",
    "yugoth",
    "malgun",
    "arialuni",
    "notoemoji",
    "symbola",
    "seguisym",
    "seguiemj",
)
"""How the file names of fonts with many characters begin, in the order in which they are tried."""

_UNASSIGNED_CHARACTER = "\U0010fffe"  # never assigned: what a font draws for it stands for all that it lacks


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


def find_font_files(directories: Sequence[str] = FONT_DIRS) -> list[Path]:
    """Those of the system's fonts that are known to have many characters."""
    found = []
    for folder in directories:
        for parent, _, names in os.walk(Path(folder).expanduser()):
            found += [Path(parent, name) for name in names if name.lower().endswith((".ttf", ".ttc", ".otf"))]
    ranked = [
        (rank, path)
        for path in found
        for rank, start in enumerate(PREFERRED_FONTS)
        if path.name.lower().startswith(start)
    ]
    return [path for _, path in sorted(ranked)]


def strip_format_characters(text: str) -> str:
    """Without characters that only say how others are to be drawn, such as the joiners in emoji."""
    return "".join(one for one in text if unicodedata.category(one) != "Cf" and not "\ufe00" <= one <= "\ufe0f")


def escape_character(character: str) -> str:
    r"""The character as ASCII, such as ``\\u732b``, for where no font has it."""
    return character.encode("ascii", "backslashreplace").decode()


TEXT_COLOR, LINE_COLOR = (25, 25, 25), (200, 200, 195)


MAX_CHARACTERS = 400

ELLIPSIS = "..."


class TextRenderer:
    """Writes and draws lines; knows whether it had to write codes for characters that no font has."""

    def __init__(self, draw: "ImageDraw", font_files: Sequence[Path] | None = None):
        self.draw, self.font_files = draw, font_files
        self.has_escaped_characters = False
        self._fonts: dict[int, FontSet] = {}

    def draw_text(
        self, corner: tuple[int, int], text: str, width: int, size: int = 13, color: tuple[int, int, int] = TEXT_COLOR
    ) -> None:
        """One line, cut to fit."""
        fonts = self._get_fonts(size)
        x, baseline = float(corner[0]), corner[1] + fonts.default_font.getmetrics()[0]
        for font, part in self._split_font_runs(self.truncate_text(text, width, size), size):
            self.draw.text((x, baseline), part, fill=color, font=font, anchor="ls")
            x += font.getlength(part)

    def draw_line(self, corner: tuple[int, int], width: int) -> None:
        self.draw.line([corner, (corner[0] + width, corner[1])], fill=LINE_COLOR)

    def measure_text(self, text: str, size: int = 13) -> int:
        return math.ceil(sum(font.getlength(part) for font, part in self._split_font_runs(text, size)))

    def truncate_text(self, text: str, width: int, size: int = 13) -> str:
        """The text as it can be drawn, or its start and three dots."""
        pieces = self.split_glyphs(text, size)
        if self.measure_text("".join(pieces), size) <= width:
            return "".join(pieces)
        while pieces and self.measure_text("".join(pieces) + ELLIPSIS, size) > width:
            pieces.pop()
        return "".join(pieces).rstrip() + ELLIPSIS

    def wrap_text(self, text: str, width: int, max_lines: int, size: int = 13) -> list[str]:
        """Broken between words, or in a word that fills a line; the last line takes the rest, to be cut when drawn."""
        found = [""]
        for word in "".join(self.split_glyphs(text, size)).split():
            longer = f"{found[-1]} {word}".strip()
            if len(found) == max_lines or self.measure_text(longer, size) <= width:
                found[-1] = longer
                continue
            if found[-1]:
                found.append("")
            for piece in self.split_glyphs(word, size):
                if len(found) < max_lines and found[-1] and self.measure_text(found[-1] + piece, size) > width:
                    found.append("")
                found[-1] += piece
        return found

    def split_glyphs(self, text: str, size: int = 13) -> list[str]:
        """The text on one line in what is drawn as one: characters, or codes of those that no font has."""
        text = " ".join(text[:MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8").split())
        fonts, found = self._get_fonts(size), []
        for character in strip_format_characters(text):
            has_font = fonts.find_font(character) is not None
            self.has_escaped_characters |= not has_font
            found.append(character if has_font else escape_character(character))
        return found

    def _split_font_runs(self, text: str, size: int) -> "list[tuple[FreeTypeFont, str]]":
        """Stretches of one font, in which it may join letters as a script wants it."""
        fonts = self._get_fonts(size)
        runs: list[tuple[FreeTypeFont, str]] = []
        for character in text:
            font = fonts.find_font(character) or fonts.default_font
            if runs and runs[-1][0] is font:
                runs[-1] = (font, runs[-1][1] + character)
            else:
                runs.append((font, character))
        return runs

    def _get_fonts(self, size: int) -> FontSet:
        if size not in self._fonts:
            self._fonts[size] = FontSet(size, self.font_files)
        return self._fonts[size]
