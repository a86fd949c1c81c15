"""Text on a contact sheet, in any script, that never leaves the width it is given."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .fonts import Fonts, code_of, without_marks

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

INK, RULE = (25, 25, 25), (200, 200, 195)
MOST_CHARACTERS = 400
DOTS = "..."


class Pen:
    """Writes and draws lines; knows whether it had to write codes for characters that no font has."""

    def __init__(self, draw: "ImageDraw", font_files: Sequence[Path] | None = None):
        self.draw, self.font_files = draw, font_files
        self.wrote_codes = False
        self._fonts: dict[int, Fonts] = {}

    def write(self, corner: tuple[int, int], text: str, width: int, size: int = 13,
              colour: tuple[int, int, int] = INK) -> None:  # fmt: skip
        """One line, cut to fit."""
        fonts = self._of_size(size)
        x, baseline = float(corner[0]), corner[1] + fonts.main.getmetrics()[0]
        for font, part in self._runs(self.fitted(text, width, size), size):
            self.draw.text((x, baseline), part, fill=colour, font=font, anchor="ls")
            x += font.getlength(part)

    def line(self, corner: tuple[int, int], width: int) -> None:
        self.draw.line([corner, (corner[0] + width, corner[1])], fill=RULE)

    def length(self, text: str, size: int = 13) -> int:
        return math.ceil(sum(font.getlength(part) for font, part in self._runs(text, size)))

    def fitted(self, text: str, width: int, size: int = 13) -> str:
        """The text as it can be drawn, or its start and three dots."""
        pieces = self.pieces(text, size)
        if self.length("".join(pieces), size) <= width:
            return "".join(pieces)
        while pieces and self.length("".join(pieces) + DOTS, size) > width:
            pieces.pop()
        return "".join(pieces).rstrip() + DOTS

    def wrapped(self, text: str, width: int, lines: int, size: int = 13) -> list[str]:
        """Broken between words, or in a word that fills a line; the last line takes the rest, to be cut when drawn."""
        found = [""]
        for word in "".join(self.pieces(text, size)).split():
            longer = f"{found[-1]} {word}".strip()
            if len(found) == lines or self.length(longer, size) <= width:
                found[-1] = longer
                continue
            if found[-1]:
                found.append("")
            for piece in self.pieces(word, size):
                if len(found) < lines and found[-1] and self.length(found[-1] + piece, size) > width:
                    found.append("")
                found[-1] += piece
        return found

    def pieces(self, text: str, size: int = 13) -> list[str]:
        """The text on one line in what is drawn as one: characters, or codes of those that no font has."""
        text = " ".join(text[:MOST_CHARACTERS].encode("utf-8", "replace").decode("utf-8").split())
        fonts, found = self._of_size(size), []
        for character in without_marks(text):
            has_font = fonts.of(character) is not None
            self.wrote_codes |= not has_font
            found.append(character if has_font else code_of(character))
        return found

    def _runs(self, text: str, size: int) -> "list[tuple[FreeTypeFont, str]]":
        """Stretches of one font, in which it may join letters as a script wants it."""
        fonts = self._of_size(size)
        runs: list[tuple[FreeTypeFont, str]] = []
        for character in text:
            font = fonts.of(character) or fonts.main
            if runs and runs[-1][0] is font:
                runs[-1] = (font, runs[-1][1] + character)
            else:
                runs.append((font, character))
        return runs

    def _of_size(self, size: int) -> Fonts:
        if size not in self._fonts:
            self._fonts[size] = Fonts(size, self.font_files)
        return self._fonts[size]
