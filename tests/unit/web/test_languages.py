"""Every text of the page is in the catalogue of every language, with the same parts to fill in, and none bypasses it."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from web_pages import open_page, write_run

from library.report import charts
from library.report.metric_series import MetricTable
from library.web import languages, workbench
from library.web.guided import family_pictures, model_choices, plain_words, step_pages
from library.web.guided.caption_model import KNOWN_MODELS
from library.web.languages import chart_texts
from library.web.languages.catalogue import (
    LANGUAGES,
    choose_language,
    iter_script_texts,
    list_script_texts,
    list_template_texts,
    read_catalogue,
    translate_template,
)

WEB = Path(workbench.__file__).parent
TEMPLATES = sorted((WEB / "templates").glob("*.html"))
SCRIPTS = sorted((WEB / "static").glob("*.js"))
OTHERS = [language for language in LANGUAGES if language != "en"]
FILLED_IN = re.compile(r"\{\d\}")
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|`(?:[^`\\]|\\.)*`')
SHOWN = re.compile(r"(textContent|title|alt|placeholder|label)(: | = )[^,;{}]*$")
"""What stands before a literal that is shown."""


def list_constants() -> set[str]:
    """The texts that the server passes to the filter ``tr``."""
    literals = {
        text
        for path in TEMPLATES
        for part in re.findall(r"\{\{[^}]*\| tr[^}]*\}\}", path.read_text("utf-8"))
        for text in re.findall(r'"([^"]*)"', part)
    }
    sections = {title for _, title in (*workbench.SECTIONS, *step_pages.STEPS)}
    fields = {text for words in plain_words.FIRST_FIELDS.values() for text in words}
    sentences = {*plain_words.FAMILY_SENTENCES.values(), *plain_words._KINDS.values()}
    states = set("waiting running stopping stopped finished failed".split())
    groups = {"To try it", "On this computer", "From the hub, downloaded when the run starts, or now"}
    demo = model_choices.build_demo_choice()
    titles = {"Compare", "Log in", "Not possible", demo.sentence, demo.facts}
    drawn = {*family_pictures.TEXTS.values(), family_pictures.BILLION, family_pictures.MILLION}
    titles |= drawn | {*chart_texts.CHART_TITLES, *chart_texts.CURVE_NAMES, *chart_texts.AGES}
    return literals - {"model"} | sections | fields | sentences | states | groups | titles | {*KNOWN_MODELS.values()}


@pytest.mark.parametrize("language", OTHERS)
def test_a_catalogue_has_exactly_the_texts_of_the_page(language):
    texts = {text for path in TEMPLATES for text in list_template_texts(path.read_text("utf-8"))}
    texts |= {*list_script_texts(), *list_constants()}
    catalogue = read_catalogue(language)
    assert catalogue.keys() == texts, (sorted(texts - catalogue.keys()), sorted(catalogue.keys() - texts))
    for text, translated in catalogue.items():
        assert sorted(FILLED_IN.findall(text)) == sorted(FILLED_IN.findall(translated)), text
        assert translated.strip() and "<" not in translated and '"' not in translated, text
    assert [*catalogue] == [*read_catalogue(OTHERS[0])], "translators find a text at the same line"


def find_untranslated(script: str) -> list[str]:
    """The literals of a script that are sentences, or are shown, and do not go through ``tr``."""
    found = []
    for line in script.splitlines():
        code = re.sub(r'\btr\("(?:[^"\\]|\\.)*"', "tr(", line.partition("  // ")[0])
        if code.lstrip().startswith("//") or '"use strict"' in code:
            continue
        for literal in LITERAL.finditer(code):
            before, words = code[: literal.start()], re.sub(r"\$\{[^}]*\}", " ", literal[0][1:-1])
            is_sentence = re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", words) or re.match(r"[A-Z][a-z]+ [a-z]", words)
            is_shown = SHOWN.search(before) and re.search(r"[A-Za-z]{3,}", words)
            if (is_sentence or is_shown) and not before.endswith(("byId(", "className: ")):
                found.append(literal[0])
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_text_of_a_script_bypasses_the_catalogue(path):
    assert find_untranslated(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "code",
    [
        'line.textContent = "saved";',
        'make("p", { title: `${count} files` })',
        'confirm("Really do it?")',
        'x(["no files in it"])',
    ],
)
def test_a_planted_text_of_a_script_is_found(code):
    assert len(find_untranslated(code)) == 1 and find_untranslated(f"// {code}") == []


def test_a_planted_text_is_found(tmp_path):
    catalogue = {"Put {0} back, {1}": "{1}: {0}!", "Hint": "Wink", "Text": "Wort"}
    source = (
        '<p title="Hint" id="Text">Put  {{ a | b }} back,\n {{ c }} </p>{% if x > 1 %}<code>Text</code>{% endif %} Text'
    )
    expected = '<p title="Wink" id="Text">{{ c }}: {{ a | b }}! </p>{% if x > 1 %}<code>Text</code>{% endif %} Wort'
    assert translate_template(source, catalogue) == expected
    assert list_template_texts(source) == ["Hint", "Put {0} back, {1}", "Text"]
    assert [*iter_script_texts('x = tr("a \\"b\\" {0}", 1) + attr("no")')] == ['a "b" {0}']


@pytest.mark.parametrize(
    ("cookies", "accepted", "language"),
    [
        ({}, "", "en"),
        ({}, "ko-KR,ko;q=0.9,en-US;q=0.8", "ko"),
        ({}, "fr, en;q=0.5, ja;q=0.7", "ja"),
        ({}, "zh-TW;q=x,*;q=0.1", "en"),
        ({"language": "zh"}, "ko", "zh"),
        ({"language": "../ko"}, "ko", "ko"),
    ],
)
def test_the_language_is_that_of_the_choice_or_of_the_browser(cookies, accepted, language):
    assert choose_language(cookies, accepted) == language


def test_all_pages_come_in_each_language_and_english_is_as_before(tmp_path):
    write_run(tmp_path, "one", previews=1)
    page = open_page(tmp_path)
    for path in (
        "/runs",
        "/runs/0/one",
        "/train",
        "/new",
        "/lora",
        "/pictures",
        "/runs/compare?run=0/one",
        "/runs/0/x",
    ):
        for language in LANGUAGES:
            text = page.get(path, headers={"Accept-Language": language}).text
            assert f'<html lang="{language}">' in text and "&lt;/" not in text, (path, language)
            texts = json.loads(re.search(r'id="texts">(.*?)</script>', text)[1])
            assert len(texts) == (0 if language == "en" else len({*list_script_texts()}))
        assert ">学習一覧</a>" in page.get(path, headers={"Accept-Language": "ja"}).text
    assert languages.__doc__ and "<h1>Runs</h1>" in page.get("/runs", headers={"Accept-Language": "fr"}).text


def test_charts_and_ages_are_in_the_language_of_the_reader(tmp_path):
    """Every chart that can be drawn has a title and curves in all catalogues; names of runs are left as they are."""
    metrics = write_run(tmp_path, "gain", steps=1)
    write_run(tmp_path, "two", steps=1)
    names = ["loss/timestep/0-1", "loss/timestep/1-2", "loss/bucket/64x64", "loss/bucket/96x96", "loss/dataset/a"]
    names += ["loss/dataset/b", "speed/samples_per_second", "memory/peak_gb", "gradient_norm", "update/norm"]
    names += ["data_wait_seconds", "validation/loss", "validation/base", "validation/gain", "validation/dataset/a"]
    names += ["validation/timestep/1", "validation/base/timestep/1"]
    names += [f"evaluation/{name}" for _, name in charts.EVALUATION_METRICS]
    with metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 2, **dict.fromkeys(names, 0.5)}) + "\n")
    table = MetricTable(metrics)
    table.read_new_lines()
    built = [*charts.build_curves(table), *charts.build_validation_charts(table), *charts.build_group_charts(table)]
    titles = {each.title for each in (*built, *charts.build_comparison_charts({"gain": table}))}
    assert titles == {*chart_texts.CHART_TITLES}
    curves = {curve.name for chart in built for curve in chart.curves}
    others = {name.rpartition("/")[2] for name in names} | {"unet", "GB", "dataset/a"}
    assert curves - {*chart_texts.CURVE_NAMES} <= others

    page = open_page(tmp_path)
    korean, catalogue = {"Accept-Language": "ko"}, read_catalogue("ko")
    answer = page.get("/api/charts/0/gain", headers=korean).json()
    shown = {each["title"]: [curve["name"] for curve in each["curves"]] for each in answer["curves"]}
    assert shown[catalogue["Loss"]] == [catalogue["each step"], catalogue["mean of 100 steps"]]
    compared = page.get("/api/compare?run=0/gain&run=0/two", headers=korean).json()["curves"][0]
    assert [curve["name"] for curve in compared["curves"]] == ["gain", "two"] and "손실" in compared["title"]
    for path in (metrics, tmp_path / "gain.run.json"):
        os.utime(path, (time.time() - 2 * 86_400 - 60,) * 2)
    assert "2일 전" in page.get("/runs", headers=korean).text and "2 days ago" in page.get("/runs").text
