"""The table of what fits on a GPU has every model of videos, and cells that say what the search advises."""

import pytest

from library.models.families import FAMILY_FACTS
from scripts.video_memory_table import (
    END,
    GB,
    HEADER,
    PAGE,
    START,
    build_search,
    fit_clip,
    format_advice,
    format_options,
    insert_rows,
    list_video_models,
)


def list_titles() -> list[str]:
    parts = [name.partition(":") for name in list_video_models()]
    return [f"{FAMILY_FACTS[family].title} {variant}".strip() for family, _, variant in parts]


def test_every_family_of_videos_has_its_published_sizes():
    names = list_video_models()
    assert {name.partition(":")[0] for name in names} == {
        name for name, facts in FAMILY_FACTS.items() if facts.pipeline.kind == "video"
    }
    assert {"wan", "wan:14b", "cogvideox:2b"} <= {*names} and "hunyuan_video15:720p" not in names
    assert not any(name.endswith("tiny") for name in names)


def test_the_rows_of_the_page_are_models_in_their_order():
    """Searches take minutes for a large model; a new one gets its row by python -m scripts.video_memory_table FAMILY"""
    page = PAGE.read_text("utf-8")
    table = page.partition(START)[2].partition(END)[0]
    rows = [line[2:].split(" | ")[0] for line in table.splitlines()[2:]]
    assert rows == [title for title in list_titles() if title in rows] and insert_rows(page, {}) == page


def test_rows_are_replaced_by_their_model_and_others_stay():
    first, second = list_titles()[:2]
    page = f"before\n{START}{HEADER}\n| {first} | old |\n| {second} | old |\n{END}\nafter\n"
    changed = insert_rows(page, {"x": f"| {second} | new |"})
    assert changed == page.replace(f"| {second} | old |", f"| {second} | new |")


def test_a_cell_names_the_options_by_few_words():
    options = {"cache_latents": True, "mixed_precision": "bf16", "gradient_checkpointing": True, "blocks_to_swap": 7}
    assert format_options(options) == "checkpointing, swap 7" and format_options({}) == "nothing"
    assert format_options({"gradient_checkpointing_every": 4, "quantize_base": "nf4"}) == "every 4, nf4"
    assert format_advice([]) == "does not fit"
    assert fit_clip(32, FAMILY_FACTS["mochi"].pipeline.frames) == (832, 480, 49)
    assert fit_clip(64, FAMILY_FACTS["ltx_video"].pipeline.frames) == (832, 448, 49)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "kandinsky6_video"])  # whose blocks get a second stream only with sound
def test_a_cell_has_what_the_search_advises(name):
    search, clip = build_search(f"random:{name}:tiny")
    assert clip == (832, 480, 49)
    assert format_advice(search.advise(80 * GB)).startswith("nothing: ")
    assert format_advice(search.advise(1)) == "does not fit"
