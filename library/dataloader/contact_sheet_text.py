"""Draw text in any script, with Pillow's default font and the system's fonts for characters it does not have."""

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
    *("~/.fonts", "~/.local/share/fonts", "/usr/local/share/fonts", "/usr/share/fonts"),
    *("~/Library/Fonts", "/Library/Fonts", "/System/Library/Fonts", "C:/Windows/Fonts"),
)

PREFERRED_FONTS = (
    *("dejavusans.", "notosans-regular", "arial unicode", "notosanscjk", "notosanssc", "notosansjp", "notosanskr"),
    *("sourcehansans", "wqy", "droidsansfallback", "pingfang", "hiragino", "msyh", "yugoth", "malgun", "arialuni"),
    *("notoemoji", "symbola", "seguisym", "seguiemj"),
)
"""Prefixes of the file names of fonts with many characters, in the order in which they are tried."""

TEXT_COLOR, LINE_COLOR = (25, 25, 25), (200, 200, 195)
MAX_CHARACTERS = 400
ELLIPSIS = "..."
_UNASSIGNED_CHARACTER = "\U0010fffe"  # never assigned, so that every font draws its missing-glyph box


class _FontFace:
    """A font, and the glyph it draws for characters it does not have."""

    def __init__(self, font: "FreeTypeFont"):
        from PIL import ImageFont

        self.font = font
        # without shaping, which draws a combining mark alone on a dotted circle
        self.basic_font = font.font_variant(layout_engine=ImageFont.Layout.BASIC)
        self.missing_glyph = self._rasterize(_UNASSIGNED_CHARACTER)

    def has_glyph(self, character: str) -> bool:
        return self._rasterize(character) != self.missing_glyph

    def _rasterize(self, character: str) -> tuple[object, bytes]:
        mask = self.basic_font.getmask(character)
        return mask.size, bytes(mask)


class FontSet:
    """The fonts for one text size; each character is drawn with the first font that has it."""

    def __init__(self, size: int, files: Sequence[Path] | None = None):
        from PIL import ImageFont

        self.size = size
        self.default_font: FreeTypeFont = cast("FreeTypeFont", ImageFont.load_default(size))
        self._font_files = None if files is None else iter(files)  # searched when first needed
        self._faces = [_FontFace(self.default_font)]
        self._font_by_character: dict[str, FreeTypeFont | None] = {}

    def find_font(self, character: str) -> "FreeTypeFont | None":
        """Return the first font that has the character, or None."""
        if character not in self._font_by_character:
            fonts = (face.font for face in self._iter_faces() if face.has_glyph(character))
            self._font_by_character[character] = self.default_font if character.isspace() else next(fonts, None)
        return self._font_by_character[character]

    def _iter_faces(self) -> "Iterator[_FontFace]":
        """Iterate over all fonts; those of the system are loaded only when reached."""
        yield from self._faces
        from PIL import ImageFont

        if self._font_files is None:
            self._font_files = iter(find_font_files())
        for file in self._font_files:
            try:
                self._faces.append(_FontFace(ImageFont.truetype(file, self.size)))
            except OSError:  # such as color bitmap fonts, which have fixed sizes only
                continue
            yield self._faces[-1]


def find_font_files(directories: Sequence[str] = FONT_DIRS) -> list[Path]:
    """List the system's fonts that are known to have many characters, the preferred ones first."""
    files = []
    for folder in directories:
        for parent, _, names in os.walk(Path(folder).expanduser()):
            files += [Path(parent, name) for name in names if name.lower().endswith((".ttf", ".ttc", ".otf"))]
    ranked = [
        (rank, path)
        for path in files
        for rank, prefix in enumerate(PREFERRED_FONTS)
        if path.name.lower().startswith(prefix)
    ]
    return [path for _, path in sorted(ranked)]


def _strip_format_characters(text: str) -> str:
    """Remove characters that only control how others are drawn, such as joiners and variation selectors of emoji."""
    return "".join(char for char in text if unicodedata.category(char) != "Cf" and not "\ufe00" <= char <= "\ufe0f")


class TextRenderer:
    """Draw lines of text; characters that no font has are drawn as codes such as ``\\u732b``."""

    def __init__(self, draw: "ImageDraw", font_files: Sequence[Path] | None = None):
        self.draw, self.font_files = draw, font_files
        self.has_escaped_characters = False
        self._fonts: dict[int, FontSet] = {}

    def draw_text(
        self, corner: tuple[int, int], text: str, width: int, size: int = 13, color: tuple[int, int, int] = TEXT_COLOR
    ) -> None:
        """Draw one line, truncated to ``width``."""
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
        """Return the text as it is drawn, truncated with an ellipsis if it is too wide."""
        pieces = self.split_glyphs(text, size)
        if self.measure_text("".join(pieces), size) <= width:
            return "".join(pieces)
        while pieces and self.measure_text("".join(pieces) + ELLIPSIS, size) > width:
            pieces.pop()
        return "".join(pieces).rstrip() + ELLIPSIS

    def wrap_text(self, text: str, width: int, max_lines: int, size: int = 13) -> list[str]:
        """Wrap at spaces, or within a word wider than a line; the last line has all the rest, truncated when drawn."""
        lines = [""]
        for word in "".join(self.split_glyphs(text, size)).split():
            longer = f"{lines[-1]} {word}".strip()
            if len(lines) == max_lines or self.measure_text(longer, size) <= width:
                lines[-1] = longer
                continue
            if lines[-1]:
                lines.append("")
            for piece in self.split_glyphs(word, size):
                if len(lines) < max_lines and lines[-1] and self.measure_text(lines[-1] + piece, size) > width:
                    lines.append("")
                lines[-1] += piece
        return lines

    def split_glyphs(self, text: str, size: int = 13) -> list[str]:
        """Split the text, joined to one line, into characters; those that no font has become escape codes."""
        text = " ".join(text[:MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8").split())
        fonts, glyphs = self._get_fonts(size), []
        for character in _strip_format_characters(text):
            has_font = fonts.find_font(character) is not None
            self.has_escaped_characters |= not has_font
            glyphs.append(character if has_font else character.encode("ascii", "backslashreplace").decode())
        return glyphs

    def _split_font_runs(self, text: str, size: int) -> "list[tuple[FreeTypeFont, str]]":
        """Split into runs of one font, within which letters are shaped together."""
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
