"""Text of the contact sheet fits its width in any script, and no character is drawn as an empty box."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from library.dataloader.contact_sheet_text import FontSet, TextRenderer, find_font_files

NO_SYSTEM_FONTS: list[Path] = []
SYSTEM_FONTS = find_font_files()


def build_renderer(files: list[Path] | None = NO_SYSTEM_FONTS) -> TextRenderer:
    return TextRenderer(ImageDraw.Draw(Image.new("RGB", (400, 40), "white")), files)


@given(st.text(max_size=80), st.integers(60, 300))
def test_text_is_truncated_to_fit(text, width):
    writer = build_renderer()
    fitted, full = writer.truncate_text(text, width), "".join(writer.split_glyphs(text))
    assert writer.measure_text(fitted) <= width and "\n" not in fitted
    assert len(writer.wrap_text(text, width, 2)) <= 2
    assert (fitted == full) == (writer.measure_text(full) <= width)
    assert fitted == full or (fitted.endswith("...") and full.startswith(fitted[:-3].rstrip()))


@given(st.text(alphabet="ab é猫🐈\n\t", max_size=60), st.integers(70, 200), st.integers(1, 3))
def test_wrapped_lines_have_all_the_text_and_all_but_the_last_fit(text, width, lines):
    writer = build_renderer()
    actual = writer.wrap_text(text, width, lines)
    assert "".join("".join(actual).split()) == "".join("".join(writer.split_glyphs(text)).split())
    assert all(writer.measure_text(line) <= width for line in actual[:-1])


def test_a_long_caption_is_wrapped_at_spaces_and_ends_in_an_ellipsis():
    writer = build_renderer()
    lines = writer.wrap_text("one two three four five six seven eight nine ten eleven twelve", 120, 2)
    assert " ".join(lines) == "one two three four five six seven eight nine ten eleven twelve"
    assert len(lines) == 2 and ImageFont.load_default(13).getlength(lines[0]) <= 120
    assert writer.truncate_text(lines[1], 120).endswith("...") and not writer.truncate_text(lines[0], 120).endswith(
        "..."
    )


def test_a_text_without_spaces_uses_all_its_lines():
    assert [len(line) > 5 for line in build_renderer().wrap_text("x" * 60, 100, 3)] == [True, True, True]


def test_characters_that_no_font_has_are_written_as_codes_and_the_renderer_reports_it():
    writer = build_renderer()
    assert writer.truncate_text("plain", 400) == "plain" and not writer.has_escaped_characters
    assert writer.truncate_text("a 猫 🐈 é", 400) == r"a \u732b \U0001f408 \xe9" and writer.has_escaped_characters
    assert writer.truncate_text("猫" * 9, 150) == r"\u732b\u732b\u732b..."  # no character code is split


def test_joiners_and_variation_selectors_are_removed():
    assert build_renderer().truncate_text("a\u200d\ufe0fb\u200e", 400) == "ab"


def render(text: str, files: list[Path] | None) -> np.ndarray:
    sheet = Image.new("L", (400, 40), 255)
    TextRenderer(ImageDraw.Draw(sheet), files).draw_text((5, 5), text, 390, color=0)
    return np.asarray(sheet)


def test_plain_text_is_drawn_as_pillow_draws_it():
    sheet = Image.new("L", (400, 40), 255)
    ImageDraw.Draw(sheet).text((5, 5), "a plain caption, 1.5 %", fill=0, font=ImageFont.load_default(13))
    assert (render("a plain caption, 1.5 %", []) == np.asarray(sheet)).all()


@pytest.mark.skipif(not SYSTEM_FONTS, reason="none of the preferred fonts is installed")
def test_a_system_font_draws_characters_that_pillows_default_font_does_not_have():
    fonts = FontSet(13)
    character = next(one for one in "éЖ猫" if fonts.find_font(one) is not None)
    assert fonts.find_font(character) is not fonts.default_font and fonts.find_font("a") is fonts.default_font
    writer = build_renderer(None)
    assert writer.truncate_text(f"a {character} b", 400) == f"a {character} b" and not writer.has_escaped_characters
    assert (render(f"a {character} b", None) != render("a   b", None)).any()
    assert (render(f"a {character} b", None) != render(f"a {character} b", [])).any()


@pytest.mark.skipif(not SYSTEM_FONTS, reason="none of the preferred fonts is installed")
def test_a_combining_mark_drawn_on_a_dotted_circle_does_not_count_as_a_glyph():
    fonts = FontSet(13, SYSTEM_FONTS[:1])
    virama = "\u094d"
    assert unicodedata.category(virama) == "Mn"
    has_letters = fonts.find_font("\u0915") is not None
    assert (fonts.find_font(virama) is not None) == has_letters


def test_fonts_are_searched_in_order_of_preference_and_broken_files_are_skipped(tmp_path):
    for name in ("wqy-zenhei.ttc", "deep/DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "other.ttf", "NotoSansCJK-Bold.ttc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no font")
    found = find_font_files([str(tmp_path), str(tmp_path / "nowhere")])
    assert [path.name for path in found] == ["DejaVuSans.ttf", "NotoSansCJK-Bold.ttc", "wqy-zenhei.ttc"]
    assert FontSet(13, found).find_font("猫") is None
