"""The whole way of a newcomer in a real browser: a caption, a wrong setting, a run, stop and go on, comparison, LoRA."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCREENSHOTS = os.environ.get("LORIKEET_SCREENSHOTS", "")
"""A folder; if set, pictures for docs/ are written there."""

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


@pytest.fixture
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
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))
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
    page.click("#rescan")
    page.wait_for_selector("#undo:text-is('Undo (1)'):not([disabled])")
    page.click("#undo")
    page.wait_for_selector("#undo:text-is('Undo')")
    assert all(path.read_text() == text for path, text in captions.items())

    # A new run: a wrong value is refused at its field.
    page.click("a:has-text('New run') >> nth=-1")
    page.wait_for_selector("text=No problems")
    page.select_option("#preset", label="Demo model (CPU)")
    page.fill("#o-network_dim", "sixteen")
    page.wait_for_selector(".field.bad[data-name=network_dim] >> text=expected an integer")
    assert page.is_disabled("#start")
    take_picture(page, "web_new_run", height=900)
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
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto(address.rstrip("/") + "/runs/0/output/first/first")
    take_picture(page, "web_phone", width=390, height=800, scheme="dark")
    assert errors == []
