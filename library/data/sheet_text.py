"""Text on a contact sheet, in any script, that never leaves the width it is given."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .fonts import FontSet, escape_character, strip_format_characters

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

TEXT_COLOR, LINE_COLOR = (25, 25, 25), (200, 200, 195)
MAX_CHARACTERS = 400
ELLIPSIS = "..."


class TextRenderer:
    """Writes and draws lines; knows whether it had to write codes for characters that no font has."""

    def __init__(self, draw: "ImageDraw", font_files: Sequence[Path] | None = None):
        self.draw, self.font_files = draw, font_files
        self.has_escaped_characters = False
        self._fonts: dict[int, FontSet] = {}

    def draw_text(self, corner: tuple[int, int], text: str, width: int, size: int = 13,
              color: tuple[int, int, int] = TEXT_COLOR) -> None:  # fmt: skip
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
