"""Text on the sheet fits its place, in whatever script, and nothing is drawn as an empty box."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from library.data.contact_sheet_text import FontSet, TextRenderer, find_font_files

WITHOUT_SYSTEM_FONTS: list[Path] = []
OF_THE_SYSTEM = find_font_files()


def pen(files: list[Path] | None = WITHOUT_SYSTEM_FONTS) -> TextRenderer:
    return TextRenderer(ImageDraw.Draw(Image.new("RGB", (400, 40), "white")), files)


@given(st.text(max_size=80), st.integers(60, 300))
def test_text_is_cut_to_fit(text, width):
    writer = pen()
    fitted, whole = writer.truncate_text(text, width), "".join(writer.split_glyphs(text))
    assert writer.measure_text(fitted) <= width and "\n" not in fitted
    assert len(writer.wrap_text(text, width, 2)) <= 2
    assert (fitted == whole) == (writer.measure_text(whole) <= width)
    assert fitted == whole or (fitted.endswith("...") and whole.startswith(fitted[:-3].rstrip()))


@given(st.text(alphabet="ab é猫🐈\n\t", max_size=60), st.integers(70, 200), st.integers(1, 3))
def test_wrapped_lines_hold_the_whole_text_and_all_but_the_last_fit(text, width, lines):
    writer = pen()
    found = writer.wrap_text(text, width, lines)
    assert "".join("".join(found).split()) == "".join("".join(writer.split_glyphs(text)).split())
    assert all(writer.measure_text(line) <= width for line in found[:-1])


def test_a_long_caption_is_broken_between_words_and_ends_in_dots():
    writer = pen()
    lines = writer.wrap_text("one two three four five six seven eight nine ten eleven twelve", 120, 2)
    assert " ".join(lines) == "one two three four five six seven eight nine ten eleven twelve"
    assert len(lines) == 2 and ImageFont.load_default(13).getlength(lines[0]) <= 120
    assert writer.truncate_text(lines[1], 120).endswith("...") and not writer.truncate_text(lines[0], 120).endswith(
        "..."
    )


def test_a_text_without_spaces_uses_all_its_lines():
    assert [len(line) > 5 for line in pen().wrap_text("x" * 60, 100, 3)] == [True, True, True]


def test_characters_that_no_font_has_are_written_as_codes_and_this_is_known():
    writer = pen()
    assert writer.truncate_text("plain", 400) == "plain" and not writer.has_escaped_characters
    assert writer.truncate_text("a 猫 🐈 é", 400) == r"a \u732b \U0001f408 \xe9" and writer.has_escaped_characters
    assert writer.truncate_text("猫" * 9, 150) == r"\u732b\u732b\u732b..."  # no code is cut in two


def test_marks_that_only_join_others_are_left_out():
    assert pen().truncate_text("a\u200d\ufe0fb\u200e", 400) == "ab"


def ink(text: str, files: list[Path] | None) -> np.ndarray:
    sheet = Image.new("L", (400, 40), 255)
    TextRenderer(ImageDraw.Draw(sheet), files).draw_text((5, 5), text, 390, color=0)
    return np.asarray(sheet)


def test_plain_text_is_drawn_as_pillow_draws_it():
    sheet = Image.new("L", (400, 40), 255)
    ImageDraw.Draw(sheet).text((5, 5), "a plain caption, 1.5 %", fill=0, font=ImageFont.load_default(13))
    assert (ink("a plain caption, 1.5 %", []) == np.asarray(sheet)).all()


@pytest.mark.skipif(not OF_THE_SYSTEM, reason="this machine has none of the fonts that are looked for")
def test_a_font_of_the_system_draws_what_pillows_own_lacks():
    fonts = FontSet(13)
    character = next(one for one in "éЖ猫" if fonts.find_font(one) is not None)
    assert fonts.find_font(character) is not fonts.default_font and fonts.find_font("a") is fonts.default_font
    writer = pen(None)
    assert writer.truncate_text(f"a {character} b", 400) == f"a {character} b" and not writer.has_escaped_characters
    assert (ink(f"a {character} b", None) != ink("a   b", None)).any()
    assert (ink(f"a {character} b", None) != ink(f"a {character} b", [])).any()


@pytest.mark.skipif(not OF_THE_SYSTEM, reason="this machine has none of the fonts that are looked for")
def test_a_mark_without_its_letter_is_not_taken_for_one_that_a_font_has():
    fonts = FontSet(13, OF_THE_SYSTEM[:1])
    virama = "\u094d"
    assert unicodedata.category(virama) == "Mn"
    has_letters = fonts.find_font("\u0915") is not None
    assert (fonts.find_font(virama) is not None) == has_letters


def test_fonts_are_looked_for_in_their_order_and_broken_files_are_passed_over(tmp_path):
    for name in ("wqy-zenhei.ttc", "deep/DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "other.ttf", "NotoSansCJK-Bold.ttc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no font")
    found = find_font_files([str(tmp_path), str(tmp_path / "nowhere")])
    assert [path.name for path in found] == ["DejaVuSans.ttf", "NotoSansCJK-Bold.ttc", "wqy-zenhei.ttc"]
    assert FontSet(13, found).find_font("猫") is None
