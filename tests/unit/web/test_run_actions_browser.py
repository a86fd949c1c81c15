"""Deletion, notes, notifications, imports and languages in a real browser, with the mouse and by keys alone."""

import json
from pathlib import Path

import pytest
from test_web_browser import ROOT, address, browser  # noqa: F401  (fixtures)
from web_pages import write_run

DATA = ROOT / "tests" / "data" / "import"
pytestmark = pytest.mark.slow


def open_window(context, errors: list[str]):
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Policy" in message.text else None)
    return page


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_that_runs_are_noted_deleted_and_put_back(chromium, page_address, tmp_path):
    folder, errors = tmp_path / "output", list[str]()
    for name in ("it's <i>one<&>", "two"):
        write_run(folder, name, previews=2)
    page = open_window(chromium.new_context(), errors)

    # A note that is HTML is text; leaving with an unsaved one is asked about, which a saved one is not.
    page.goto(f"{page_address}runs/0/output/two")
    page.click("#note-part summary")
    page.fill("#note", "<img src=x onerror=alert(1)>\n'\"&amp;")
    page.wait_for_selector("#note-state:has-text('not saved yet')")
    page.click("#save-note")
    page.wait_for_selector("#note-state:text-is('saved')")
    page.goto(f"{page_address}runs")
    assert page.inner_text(".note") == "<img src=x onerror=alert(1)>\n'\"&amp;"
    assert json.loads((folder / "two.notes.json").read_text())["note"] == "<img src=x onerror=alert(1)>\n'\"&amp;"

    # Both are deleted and put back with a double click; the second one by keys.
    before = read_files(folder)
    for box in page.query_selector_all("#rows input"):
        box.check()
    page.click("#delete")
    page.wait_for_selector("#deleted tr >> nth=1")
    assert page.query_selector("#rows tr") is None and "<i>one<&>" in page.inner_text("#deleted-line")
    page.reload()  # what was deleted is found again
    page.click("#deleted-part summary")
    page.dblclick("#deleted tr >> nth=0 >> [data-restore]")
    page.wait_for_selector("#deleted-line:has-text('The files are back')")
    assert not page.inner_text("#job-problems") and len(page.query_selector_all("#deleted tr")) == 1
    page.focus("#deleted [data-restore]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#deleted-part", state="hidden")
    assert read_files(folder) == before and len(page.query_selector_all("#rows tr")) == 2
    assert page.evaluate("document.activeElement.id") == "filter"

    # From the page of a run; for good only after a question.
    page.goto(f"{page_address}runs/0/output/two")
    page.click("#delete")
    page.wait_for_selector("#deleted tr")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("[data-erase]")
    assert page.query_selector("#deleted tr")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[data-erase]")
    page.wait_for_selector("#deleted-part", state="hidden")
    assert read_files(folder) == {name: data for name, data in before.items() if not name.startswith("two")}
    assert not errors


def check_that_each_open_page_tells_that_a_run_has_ended(chromium, page_address, tmp_path):
    write_run(tmp_path, "alive", steps=3)
    (tmp_path / ".alive.lock").touch()
    errors, context = list[str](), chromium.new_context()
    context.grant_permissions(["notifications"], origin=page_address.rstrip("/"))
    windows = [open_window(context, errors) for _ in range(2)]
    for window in windows:
        window.goto(f"{page_address}runs")
    windows[0].click("#notify")
    windows[1].reload()
    for window in windows:
        while '"running"' not in (window.evaluate("sessionStorage.getItem('run-states')") or ""):
            window.wait_for_timeout(50)
    (tmp_path / ".alive.lock").unlink()
    for window in windows:
        window.wait_for_selector("#told a:has-text('alive has stopped.')")
    windows[0].click("#told button")
    assert not windows[0].query_selector("#told p") and not errors


def check_that_a_dropped_file_becomes_the_form_and_refusals_are_shown(chromium, page_address, tmp_path):
    errors = list[str]()
    page = open_window(chromium.new_context(), errors)
    page.goto(f"{page_address}new")
    drop = """(files) => {
      const data = new DataTransfer();
      for (const [name, text] of files) data.items.add(new File([text], name));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, [["<b>x'.json", "{"]])
    page.wait_for_selector('#import-problems:has-text("<b>x\'.json")')
    page.evaluate(drop, [[f"{number}.json", "x" * 800_000] for number in range(2)])
    page.wait_for_selector("#import-problems:has-text('the request is larger than 1 MiB')")
    page.evaluate(drop, [["kohya_sdxl.json", (DATA / "kohya_sdxl.json").read_text()]])
    page.wait_for_selector("#import-use:not([hidden])")
    page.keyboard.press("Enter")
    page.wait_for_url("**/new?file=*")
    assert (tmp_path / "imports" / "kohya_sdxl" / "kohya_sdxl.toml").exists() and not errors


def check_that_every_page_is_in_the_language_that_is_chosen(chromium, page_address, tmp_path):
    write_run(tmp_path, "one", previews=1)
    write_run(tmp_path, "two", previews=1)
    errors = list[str]()
    page = open_window(chromium.new_context(), errors)
    paths = ("runs", "runs/0/one", "runs/compare?run=0/one&run=0/two", "pictures", "new", "lora", "train")
    for number, path in enumerate(paths):
        page.goto(f"{page_address}{path}")
        language = ("ko", "ja", "zh")[number % 3]
        page.select_option("#language", language)
        page.wait_for_selector(f"html[lang={language}]")
        assert page.input_value("#language") == language
        assert any(ord(letter) > 0x2E00 for letter in page.inner_text("h1") + page.inner_text("nav .entry")), path
        page.wait_for_timeout(300)
    assert not errors


def test_runs_are_changed_told_of_and_imported(browser, address, tmp_path):  # noqa: F811
    """One server, whose start takes longer than these actions."""
    check_that_runs_are_noted_deleted_and_put_back(browser, address, tmp_path)
    check_that_each_open_page_tells_that_a_run_has_ended(browser, address, tmp_path)
    check_that_a_dropped_file_becomes_the_form_and_refusals_are_shown(browser, address, tmp_path)
    check_that_every_page_is_in_the_language_that_is_chosen(browser, address, tmp_path)
