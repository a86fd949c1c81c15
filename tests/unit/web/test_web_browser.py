"""The whole way of a newcomer in a real browser: a caption, a wrong setting, a run, stop and go on, comparison, LoRA.

And deletion, notes, notifications, imports and languages.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chromium import LOOK
from PIL import Image
from safetensors.torch import save_file
from web_pages import write_run

ROOT = Path(__file__).resolve().parents[3]
IMPORTED = ROOT / "tests" / "data" / "import"
SCREENSHOTS = os.environ.get("LORIKEET_SCREENSHOTS", "")
"""A folder; if set, such as ``docs``, the pictures of docs/web.md are written there."""

pytestmark = pytest.mark.slow


@pytest.fixture
def address(tmp_path) -> Iterator[str]:
    """The address of a page on a copy of the demo's datasets."""
    shutil.copytree(ROOT / "dataset_configs", tmp_path / "dataset_configs")
    (tmp_path / "dataset_configs" / "demo" / "lorikeet_00.txt").write_text(
        "a lorikeet <script>document.title='x'</script>"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "library", "web", "--root", str(tmp_path), "--port", "0"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        yield re.search(r"http://\S+", line)[0]
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[browser]'")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no browser: apt install chromium, or python -m playwright install chromium")
        yield opened
        opened.close()


def take_picture(page, name: str, width: int = 1280, height: int = 860, scheme: str = "light") -> None:
    if SCREENSHOTS:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(1200)
        with Image.open(io.BytesIO(page.screenshot())) as image:
            image.save(Path(SCREENSHOTS) / f"{name}.webp", quality=80)
        page.set_viewport_size({"width": 1280, "height": 860})
        page.emulate_media(color_scheme="light")


def test_a_newcomer_finds_the_way(browser, address, tmp_path):
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None
    )

    page.goto(address)
    assert page.inner_text("h1") == "Runs" and page.is_visible("text=No runs yet")

    # The pictures of the demo, and a caption that holds a script: it is text, and is mended.
    page.click("text=Pictures")
    page.click("text=dataset_configs/demo.toml")
    page.wait_for_selector(".cell")
    assert page.title().startswith("demo.toml") and "<script>" in page.inner_text(".cell >> nth=0")
    take_picture(page, "web_pictures", height=700)
    page.focus("#grid")
    page.keyboard.press("Enter")
    page.wait_for_selector("#editor[open]")
    page.fill("#caption", "a lorikeet, green")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#editor-name:has-text('lorikeet_01')")
    page.keyboard.press("Escape")
    caption_file = tmp_path / "dataset_configs" / "demo" / "lorikeet_00.txt"
    assert caption_file.read_text() == "a lorikeet, green\n"
    page.wait_for_selector("text=a lorikeet, green")
    page.click("#undo")
    page.wait_for_selector("#undo:disabled")
    assert "<script>" in caption_file.read_text()
    caption_file.write_text("a lorikeet\n")

    # A tag is added to all captions, the folder is scanned again, and the edit undone.
    folders = ("demo", "demo_regularisation")
    files = [path for name in folders for path in (tmp_path / "dataset_configs" / name).glob("*.txt")]
    captions = {path: path.read_text() for path in files}
    page.click("#rescan")
    page.wait_for_selector(".cell >> text=a lorikeet")
    page.click("#tags-part summary")
    page.fill("#tag", "emoji")
    page.click("#try-tags")
    page.wait_for_selector("#examples ins >> text=emoji >> nth=0")
    page.click("#apply-tags")
    page.wait_for_selector(f"text={len(captions)} captions changed")
    assert all(path.read_text() == f"{text.strip()}, emoji\n" for path, text in captions.items())
    held_requests = []
    # playwright inspects the function, which a method of a list does not allow.
    page.route("**/api/pictures/work/**", lambda route: held_requests.append(route))  # noqa: PLW0108
    page.click("#rescan")
    while not held_requests:
        page.wait_for_timeout(10)
    assert page.is_disabled("#undo"), "an undo would be refused while the folder is scanned"
    held_requests[0].continue_()
    page.unroute("**/api/pictures/work/**")
    page.wait_for_selector("#undo:text-is('Undo (1)'):not([disabled])")
    page.click("#undo")
    page.wait_for_selector("#undo:text-is('Undo')")
    assert all(path.read_text() == text for path, text in captions.items())

    # A new run: a wrong value is refused at its field.
    page.click("a:has-text('New run') >> nth=-1")
    page.wait_for_selector("text=No problems")
    page.select_option("#preset", label="Demo model (CPU)")
    page.click("#begin")
    page.fill("#o-network_dim", "sixteen")
    page.wait_for_selector(".field.bad[data-name=network_dim] >> text=expected an integer")
    assert page.is_disabled("#start")
    take_picture(page, "web_new_run", height=840)
    settings = {"network_dim": "4", "max_train_steps": "60", "sample_every_n_steps": "15", "output_dir": "output/first"}
    settings |= {"output_name": "first", "sample_prompts": "prompts.txt"}
    for name, value in settings.items():
        page.fill(f"#o-{name}", value)
    (tmp_path / "prompts.txt").write_text("a lorikeet --w 96 --h 96 --s 12 --d 1\na fox --w 96 --h 96 --s 12 --d 6\n")
    page.check("#o-sample_at_first")
    page.wait_for_selector("text=No problems")
    page.click("#plan")
    page.wait_for_selector("#plan-output >> text=one epoch")
    page.wait_for_selector("#start:not([disabled])")

    # It starts; previews arrive; it is stopped with its state, and goes on.
    page.click("#start")
    page.wait_for_selector("#curves .chart", timeout=180_000)
    page.click("[data-tab=previews]")
    page.wait_for_selector("#previews img", timeout=180_000)
    page.click("[data-stop]")
    page.wait_for_selector("#status:text-is('stopped')", timeout=180_000)
    page.wait_for_selector("[data-resume]")
    assert list((tmp_path / "output" / "first").glob("first*-state"))
    page.click("[data-resume]")
    page.wait_for_selector("#status:text-is('finished')", timeout=300_000)
    page.reload()
    page.wait_for_selector("#previews th >> text=step 60")
    take_picture(page, "web_previews", height=760, scheme="dark")
    page.click("#previews tr:nth-child(2) td:last-child button")
    page.wait_for_selector("#viewer[open]")
    page.keyboard.press("ArrowLeft")
    assert page.eval_on_selector("#viewer-right", "select => select.value") == "000045"
    page.keyboard.press("Escape")
    page.click("[data-tab=charts]")
    assert "step 60 of 60" in page.inner_text("#facts")

    # Another run like it, and both compared.
    page.click("text=New run like this")
    page.wait_for_selector("#state >> text=1 problem")  # its files exist
    page.fill("#o-network_dim", "8")
    page.fill("#o-max_train_steps", "20")
    page.fill("#o-output_name", "second")
    page.fill("#o-sample_prompts", "")
    page.fill("#o-sample_every_n_steps", "")
    page.uncheck("#o-sample_at_first")
    page.wait_for_selector("text=No problems")
    page.click("#start")
    page.wait_for_selector("#status:text-is('finished')", timeout=300_000)
    page.click("text=Runs")
    for name in ("first", "second"):
        page.check(f"[aria-label='Compare {name}']")
    take_picture(page, "web_runs", height=480)
    page.click("#compare")
    page.wait_for_selector("#curves .chart")
    assert "network_dim" in page.inner_text("table:has(th:has-text('Setting'))")
    take_picture(page, "web_compare", height=760)

    # Its LoRA is inspected and converted.
    shutil.copytree(ROOT / "library" / "demo" / "model", tmp_path / "models" / "demo")
    page.click("text=LoRA files")
    page.check("tr:has(label:text-is('first.safetensors')) input")
    page.click("[data-form=inspect] button.main")
    page.wait_for_selector("#result-state >> text=done in", timeout=120_000)
    assert "rank" in page.inner_text("#output")
    take_picture(page, "web_lora", height=900)
    page.click("[data-command=convert]")
    page.fill("#convert-to", "diffusers")
    page.click("[data-form=convert] button.main")
    page.wait_for_selector("#result-title:has-text('convert')")
    page.wait_for_selector("#result-state >> text=done in", timeout=120_000)
    assert (tmp_path / "output" / "first" / "first-convert.safetensors").is_file()

    # It is merged into its model.
    page.click("[data-command='merge into a model']")
    page.select_option("[data-form='merge into a model'] [data-model]", label="models/demo")
    assert page.input_value("#output-merge-into-a-model") == "demo-merged"
    page.click("[data-form='merge into a model'] button.main")
    page.wait_for_selector("#result-title:has-text('merge into a model')")
    page.wait_for_selector("#result-state >> text=done in", timeout=120_000)
    assert (tmp_path / "models" / "demo-merged" / "model_index.json").is_file()

    # The same on a phone: nothing is wider than the screen.
    page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/runs", "/runs/0/output/first/first", "/pictures/0/dataset_configs/demo.toml", "/new", "/lora"):
        page.goto(address.rstrip("/") + path)
        page.wait_for_timeout(500)
        page.evaluate(
            "for (const line of document.querySelectorAll('.facts')) line.textContent = 'a_long_path'.repeat(9)"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto(address.rstrip("/") + "/runs/0/output/first/first")
    take_picture(page, "web_phone", width=390, height=800, scheme="dark")
    assert errors == []


class Keyboard:
    """Goes through pages by keys alone, and notes where the focus is not seen."""

    def __init__(self, page):
        self.page, self.press, self.type, self.faults = page, page.keyboard.press, page.keyboard.type, set[str]()

    def walk_to(self, selector: str, by: str = "Tab") -> None:
        for _ in range(120):
            self.press(by)
            fault, has_arrived = self.page.evaluate(LOOK, selector)
            self.faults |= {fault} - {""}
            if has_arrived:
                return
        raise AssertionError(f"{selector} is not reached from {self.page.evaluate('document.activeElement.outerHTML')}")

    def use(self, selector: str, key: str = "Enter", by: str = "Tab") -> None:
        self.walk_to(selector, by)
        self.press(key)

    def wait_for_focus(self, selector: str) -> None:
        self.page.wait_for_function("(selector) => document.activeElement.matches(selector)", arg=selector)


def test_all_can_be_done_by_keyboard(browser, address, tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / "output", name, previews=2, network_dim=len(name))
    lora = {"lora_unet_mid_block_attentions_0_proj_in.alpha": torch.tensor(4.0)}
    lora |= {f"lora_unet_mid_block_attentions_0_proj_in.lora_{end}.weight": torch.ones(4, 4) for end in ("down", "up")}
    for name in ("three", "four"):
        save_file(lora, tmp_path / "output" / f"{name}.safetensors")
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.set_default_timeout(60_000)
    keyboard, caption_file = Keyboard(page), tmp_path / "dataset_configs" / "demo" / "lorikeet_00.txt"

    # Pictures: a caption is edited, a tag is added to all, and both are undone.
    page.goto(address)
    keyboard.use(".bar [href='/pictures']")
    page.wait_for_url("**/pictures")
    keyboard.use("a[href$='/demo.toml']")
    page.wait_for_selector(".cell")
    keyboard.walk_to("#grid")
    for key in ("ArrowRight", "End", "Home", "Enter"):
        keyboard.press(key)
    keyboard.wait_for_focus("#caption")
    keyboard.press("Control+A")
    keyboard.type("by keyboard")
    page.once("dialog", lambda dialog: dialog.dismiss())
    keyboard.press("Escape")  # what is typed is not lost without a question
    assert page.input_value("#caption") == "by keyboard"
    keyboard.use("#save")
    keyboard.wait_for_focus("#grid")
    page.wait_for_selector(".cell >> text=by keyboard")
    keyboard.use("#tags-part summary", by="Shift+Tab")
    keyboard.walk_to("#tag")
    keyboard.type("emoji")
    keyboard.use("#try-tags", "Space")
    page.wait_for_selector("#examples ins >> nth=0")
    keyboard.use("#apply-tags")
    page.wait_for_selector("#tags-result:has-text('changed')")
    keyboard.wait_for_focus("#apply-tags")
    assert caption_file.read_text() == "by keyboard, emoji\n"
    keyboard.use("#undo", by="Shift+Tab")
    page.wait_for_selector("#undo:text-is('Undo (1)')")
    keyboard.wait_for_focus("#undo")
    keyboard.press("Enter")
    page.wait_for_selector("#undo:disabled:text-is('Undo')")
    keyboard.wait_for_focus("#grid")
    assert "<script>" in caption_file.read_text()

    # A new run: a preset, a wrong value to which its message leads, and a start that is stopped.
    keyboard.use("a.button[href^='/new']", by="Shift+Tab")
    page.wait_for_selector("text=No problems")
    keyboard.walk_to("#preset")
    keyboard.type("Demo")
    keyboard.use("#begin")
    page.wait_for_selector(".field.set[data-name=learning_rate]")
    keyboard.walk_to("#find")
    keyboard.type("scheduler_args")
    keyboard.walk_to("#o-lr_scheduler_args")
    keyboard.type("x")
    keyboard.press("Enter")
    page.wait_for_selector("#start:disabled")
    keyboard.walk_to("#find", by="Shift+Tab")
    keyboard.press("Control+A")
    keyboard.press("Delete")
    keyboard.use("#problems button")
    keyboard.wait_for_focus("#o-lr_scheduler_args")
    keyboard.press("Backspace")
    page.wait_for_selector("text=No problems")
    keyboard.use("#start")
    page.wait_for_url("**/runs/0/**")
    page.evaluate("globalThis.isSamePage = true")
    keyboard.use("#action")
    page.wait_for_selector("#status:text-is('stopped')")
    keyboard.wait_for_focus("#action, [role=tab]")
    assert page.evaluate("globalThis.isSamePage")  # a page that is loaded again would lose keys

    # Runs: one with charts and previews, and two over each other.
    keyboard.use(".bar [href='/runs']", by="Shift+Tab")
    page.wait_for_url("**/runs")
    page.wait_for_selector("[data-remove]")
    keyboard.use("[data-remove]")
    keyboard.wait_for_focus("#filter")
    keyboard.use("a[href$='output/one']")
    page.wait_for_selector("#curves .chart")
    keyboard.walk_to("#tab-charts")
    keyboard.walk_to("#curves .plot")
    keyboard.press("Home")
    assert page.inner_text("#curves .u-value >> nth=0") == "1"
    keyboard.press("+")
    keyboard.walk_to("#tab-charts", by="Shift+Tab")
    keyboard.press("ArrowRight")
    page.wait_for_selector("#previews img >> nth=0")
    keyboard.walk_to("#preview-step")
    keyboard.press("ArrowLeft")
    assert page.inner_text("#preview-label") == "step 10"
    keyboard.use("#previews tr:nth-child(2) td:last-child button")
    keyboard.wait_for_focus("#viewer-close")
    keyboard.press("ArrowLeft")
    assert page.input_value("#viewer-right") == "000000"
    keyboard.walk_to("#viewer-split")
    keyboard.press("Home")
    assert page.input_value("#viewer-split") == "0"
    keyboard.press("Escape")
    keyboard.wait_for_focus("#previews button")
    keyboard.use(".bar [href='/runs']", by="Shift+Tab")
    page.wait_for_url("**/runs")
    for name in ("one", "two"):
        keyboard.use(f"[aria-label='Compare {name}']", "Space")
    keyboard.use("#compare", by="Shift+Tab")
    page.wait_for_selector("#curves .chart")

    # LoRA files: inspect, convert, merge and resize.
    keyboard.use(".bar [href='/lora']")
    page.wait_for_url("**/lora")
    for name in ("three", "four"):
        keyboard.use(f"[data-name='{name}.safetensors']", "Space")
    for command in ("inspect", "convert", "merge", "resize"):
        keyboard.use(f"[data-command={command}]")
        if command == "convert":
            keyboard.use("[data-name='four.safetensors']", "Space", by="Shift+Tab")
    assert keyboard.faults == set()


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
    page.wait_for_selector("#rows tr >> nth=1")
    assert read_files(folder) == before
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
    page.evaluate(drop, [["kohya_sdxl.json", (IMPORTED / "kohya_sdxl.json").read_text()]])
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


def test_runs_are_changed_told_of_and_imported(browser, address, tmp_path):
    """One server, whose start takes longer than these actions."""
    check_that_runs_are_noted_deleted_and_put_back(browser, address, tmp_path)
    check_that_each_open_page_tells_that_a_run_has_ended(browser, address, tmp_path)
    check_that_a_dropped_file_becomes_the_form_and_refusals_are_shown(browser, address, tmp_path)
    check_that_every_page_is_in_the_language_that_is_chosen(browser, address, tmp_path)
