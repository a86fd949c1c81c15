"""The five steps in a real Chromium: 25 pictures with faults become a finished LoRA, and once more by keys alone."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, find_chromium
from faulty_pictures import write_faulty_pictures
from PIL import Image
from web_pages import write_preview_clip, write_run

ROOT = Path(__file__).resolve().parents[3]
IMPORTED = ROOT / "tests" / "data" / "import"
SCREENSHOTS = os.environ.get("LORIKEET_SCREENSHOTS", "")
"""A folder; if set, such as ``docs``, the pictures of docs/web.md are written there."""

pytestmark = pytest.mark.slow


@pytest.fixture
def window(tmp_path) -> Iterator[tuple[Chromium, str, Path]]:
    """A window, the address of the page, and the folder that it has opened."""
    pytest.importorskip("aiohttp", reason="no aiohttp, which speaks to Chromium: pip install -e '.[test]'")
    program = find_chromium()
    if program is None:
        pytest.skip("no browser: apt install chromium")
    root = tmp_path / "open"
    root.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "library", "web", "--root", str(root), "--port", "0"]
    server = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    address = re.search(r"http://\S+", server.stdout.readline())[0].rstrip("/")
    opened = Chromium(program, tmp_path / "profile")
    try:
        yield opened, address, root
    finally:
        opened.close()
        server.terminate()
        server.wait(30)


def check_looks(window: Chromium, name: str, height: int = 860) -> None:
    """Check that nothing is wider than a phone; write the picture of the docs where that is asked for."""
    window.resize(390, 844, "dark")
    assert window.evaluate("document.documentElement.scrollWidth") <= 390, name
    window.resize(1280, height)
    if SCREENSHOTS:
        window.evaluate("scrollTo(0, 0)")
        time.sleep(0.6)
        with Image.open(io.BytesIO(window.take_picture())) as image:
            image.save(Path(SCREENSHOTS) / f"{name}.webp", quality=70, method=6)


def test_pictures_with_faults_become_a_lora_in_five_pages(window, tmp_path):
    window, address, root = window
    shutil.copytree(ROOT / "tests" / "data" / "tagger", root / "models" / "tagger")
    window.goto(f"{address}/train")
    window.drop("#drop", [write_faulty_pictures(tmp_path / "mika")])
    window.wait_for_text("25 pictures, something to look at in 9")
    assert "Not taken: notes.pdf" in window.read_text("#refused") and ".DS_Store" not in window.read_text()
    check_looks(window, "web_step_pictures", 1000)

    # Everything that can be mended is mended; the crop is chosen in a dialog.
    while window.evaluate("!!document.querySelector('#faults .fault button')"):
        left = window.evaluate("document.querySelectorAll('#faults .fault').length")
        is_crop = window.read_text("#faults .fault button").startswith("Crop")
        window.click("#faults .fault button")
        if is_crop:
            window.wait_for("document.querySelector('#crop-dialog').open")
            window.click("#crop-apply")
        window.wait_for(f"document.querySelectorAll('#faults .fault').length < {left}")
    assert window.read_text("#summary") == "21 pictures, something to look at in 1"

    # Captions: a model writes what is missing, and a word comes before all.
    window.click("#next-step")
    window.wait_for_text("1 of 21 have no caption")
    window.click("#model-part summary")
    window.click("#write-captions")
    window.wait_for_text("written", 120)
    window.click("#tags-part summary")
    window.fill("#tag", "mika_person")
    window.click("#apply-tags")
    window.wait_for_text("21 captions changed")
    check_looks(window, "web_step_captions")
    texts = [path.read_text() for path in (root / "loras/mika/pictures").rglob("*.txt")]
    assert len(texts) == 21 and all(text.startswith("mika_person") for text in texts)

    # The demo model is chosen already, and the page says that there is no card, or which.
    window.click("#next-step")
    window.wait_for("document.querySelector('[value=demo]:checked')")
    check_looks(window, "web_step_model")
    window.click("#next-step")
    window.wait_for("document.querySelector('#card-text')?.innerText.startsWith('looking') === false", 120)
    window.fill("#memory", "8GB")
    window.click("#ask")
    window.wait_for_text("It fits on a card with 8GB", 180)
    check_looks(window, "web_step_card", 640)

    # A few steps are trained, with the files that the page has shown.
    window.click("#next-step")
    window.wait_for_text("Nothing is wrong")
    assert window.evaluate("document.querySelectorAll('#form > .card .field:not(.prompts)').length") == 12
    window.fill("#o-max_train_steps", "few")
    window.wait_for("document.querySelector('#start').disabled && document.querySelector('.field.bad')")
    for name, text in {"max_train_steps": "8", "sample_every_n_steps": "8"}.items():
        window.fill(f"#o-{name}", text)
    window.fill("#prompts", "mika_person, picture 07 --s 4")
    window.wait_for_text("Nothing is wrong")
    window.wait_for("!document.querySelector('#start').disabled")
    check_looks(window, "web_step_start", 960)
    window.click("#files summary")
    shown = window.read_text("#dataset"), window.read_text("#toml")
    window.click("#start")
    window.wait_for("location.pathname.startsWith('/runs/')")
    window.wait_for("document.querySelector('#status')?.innerText === 'finished'", 300)
    assert (root / "loras/mika/output/mika.safetensors").is_file()
    assert list((root / "loras/mika/output/sample").glob("mika_*.png"))
    assert (root / "loras/mika/dataset.toml").read_text().strip() == shown[0].strip()
    assert (root / "loras/mika/output/mika.toml").read_text().endswith(shown[1].strip() + "\n")
    assert window.errors == []


def check_names(window: Chromium) -> None:
    """Check that the focus was seen on the way here, and that a screen reader has a name for all that can have it."""
    assert window.faults == set() and window.list_unnamed_controls() == [], window.evaluate("location.pathname")


def go_on(window: Chromium, step: str, selector: str) -> None:
    check_names(window)
    window.use("#next-step")
    window.wait_for(f"location.pathname.startsWith('/train/{step}/') && document.readyState === 'complete'")
    window.wait_for(f"document.querySelector('{selector}')")


def mend_all_pictures(window: Chromium) -> None:
    """Mend one fault after the other without Tab: the focus is at the next one each time."""
    fault = "#faults .fault button"
    window.walk_to(fault)
    while window.evaluate(f"document.activeElement.matches('{fault}')"):
        left = window.evaluate("document.querySelectorAll('#faults .fault').length")
        is_crop = window.evaluate("document.activeElement.innerText").startswith("Crop")
        window.press("Enter")
        if is_crop:
            window.wait_for_focus("#crop-position")
            window.press("Escape")
            window.wait_for_focus(fault)  # that of the same picture
            assert window.evaluate("document.activeElement.innerText").startswith("Crop")
            window.press("Enter")
            window.wait_for_focus("#crop-position")
            window.press("End")
            window.use("#crop-apply")
        window.wait_for(f"document.querySelectorAll('#faults .fault').length < {left}")
        window.wait_for("document.activeElement !== document.body")
    assert window.read_text("#summary") == "21 pictures, something to look at in 1"
    window.use("#undo", modifiers=8)
    window.wait_for_text("22 pictures")
    window.wait_for_focus("#undo")


def write_captions_by_keys(window: Chromium) -> None:
    window.use("#tags-part summary")
    window.walk_to("#tag")
    window.type("mika_person")
    window.press("Enter")
    window.wait_for_text("captions changed")
    window.wait_for("document.activeElement !== document.body")
    window.walk_to(".caption-row textarea")
    window.type("by keys ")
    window.press("Enter", 2)
    window.wait_for_text("saved")


def choose_settings_by_keys(window: Chromium) -> None:
    window.wait_for_text("Nothing is wrong")
    for name, text in {"max_train_steps": "4", "sample_every_n_steps": "2"}.items():
        window.walk_to(f"#o-{name}")
        window.type(text)  # what is there was selected by Tab
    window.walk_to("#prompts")
    window.type("mika_person, picture 07 --s 2")
    window.use("#all > summary")
    window.walk_to("#all #find")
    window.type("ema_decay")
    window.walk_to("#o-ema_decay")
    window.press("Tab", 8)
    assert window.evaluate("document.activeElement.closest('#all') !== null"), "Shift and Tab go back"
    window.use("#all > summary", modifiers=8)
    window.wait_for_text("Nothing is wrong")
    window.wait_for("!document.querySelector('#start').disabled")


def look_at_pictures_by_keys(window: Chromium, picture: str) -> None:
    """Open a picture, go to another one, fill the screen and leave: the focus is where it was."""
    window.use(picture)
    window.wait_for_focus("#viewer-close")
    check_names(window)
    shown = window.evaluate("document.querySelector('#viewer-over').src")
    window.press("ArrowLeft")
    assert window.evaluate("document.querySelector('#viewer-over').src") != shown
    window.press("f")
    window.wait_for("document.fullscreenElement?.id === 'viewer-body'")
    window.press("f")
    window.wait_for("!document.fullscreenElement")
    window.press("Escape")
    window.wait_for("!document.querySelector('#viewer').open")
    window.wait_for_focus("#previews button")


def look_at_the_run_by_keys(window: Chromium, folder: Path) -> None:
    window.use("#star")
    window.wait_for("document.querySelector('#star').getAttribute('aria-pressed') === 'true'")
    window.use("#note-part summary")
    window.walk_to("#note")
    window.type("by keys")
    window.press("Enter", 2)
    window.wait_for("document.querySelector('#note-state').innerText === 'saved'")
    window.walk_to("[role=tab]")
    window.press("ArrowRight")
    window.wait_for("document.querySelector('#previews img')")
    assert window.evaluate("document.activeElement.id") == "tab-previews"
    look_at_pictures_by_keys(window, "#previews tr:last-child td:last-child button")
    window.walk_to("[role=tab]", modifiers=8)
    for _ in range(3):
        window.press("ArrowRight")
    window.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    window.use("[data-panel=files] a[download][href*='mika.safetensors']")
    deadline = time.monotonic() + 30
    while not list(folder.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(folder.glob("*.safetensors"))


def compare_delete_and_put_back_by_keys(window: Chromium) -> None:
    window.use(".bar [href='/runs']")
    window.wait_for("document.readyState === 'complete' && document.querySelectorAll('#rows tr').length === 3")
    for name in ("other", "third"):
        window.use(f"[aria-label='Compare {name}']", " ")
    check_names(window)
    window.use("#compare", modifiers=8)
    window.wait_for("document.readyState === 'complete' && document.querySelector('#previews img')")
    window.walk_to("#preview-step")
    window.press("Home")
    assert window.evaluate("document.activeElement.getAttribute('aria-valuetext')") == window.read_text(
        "#preview-label"
    )
    window.press("End")
    look_at_pictures_by_keys(window, "#previews tr:nth-child(2) td:last-child button")
    window.use(".bar [href='/runs']", modifiers=8)
    window.wait_for("document.readyState === 'complete' && document.querySelectorAll('#rows tr').length === 3")
    window.use("[aria-label='Compare other']", " ")
    window.use("#delete", modifiers=8)
    window.wait_for_focus("[data-restore]")
    assert "other" in window.read_text("#deleted-line[role=status]")
    check_names(window)
    window.press("Enter")
    window.wait_for("document.querySelectorAll('#rows tr').length === 3")
    window.wait_for_focus("#filter")


def test_all_is_done_by_keys_alone_from_25_photographs_to_a_lora(window, tmp_path):
    window, address, root = window
    write_faulty_pictures(root / "mika")
    for name in ("other", "third"):
        write_run(root / "others", name, previews=1)
    window.goto(f"{address}/train")
    window.use("#choose-machine")
    window.wait_for("document.querySelector('#machine-folders button')")
    window.use("#machine-folders button")
    window.wait_for_text("25 pictures, something to look at in 9")
    mend_all_pictures(window)
    go_on(window, "captions", ".caption-row textarea")
    write_captions_by_keys(window)
    go_on(window, "model", "[value=demo]")
    window.walk_to("[value=demo]")
    window.press("ArrowDown")  # a model of the hub, with its button
    window.walk_to("#download")
    window.walk_to("#models input", modifiers=8)
    window.press("ArrowUp")
    assert window.evaluate("document.activeElement.value") == "demo"
    go_on(window, "card", "#memory")
    window.walk_to("#memory")
    go_on(window, "start", "#o-output_name")
    choose_settings_by_keys(window)
    check_names(window)
    window.use("#start")
    window.wait_for("location.pathname.startsWith('/runs/') && document.readyState === 'complete'")
    window.wait_for("document.querySelector('#status')?.innerText === 'finished'", 300)
    window.wait_for("document.querySelector('#state-change[role=status]').innerText === 'finished'")
    check_names(window)
    look_at_the_run_by_keys(window, tmp_path)
    check_names(window)
    compare_delete_and_put_back_by_keys(window)

    window.use(".bar [href='/new']")
    window.wait_for("document.readyState === 'complete' && document.querySelector('#state').innerText !== 'checking…'")
    window.walk_to("#import")
    window.answer_file_chooser([IMPORTED / "kohya_sdxl.json"])
    window.wait_for_focus("#import-use")
    check_names(window)
    window.walk_to("#language", modifiers=8)
    for key, language in (("ArrowDown", "ko"), ("ArrowUp", "en")):
        window.press(key)
        window.wait_for(f"document.documentElement.lang === '{language}' && document.readyState === 'complete'")
        window.wait_for_focus("#language")
    for path in ("pictures", "lora", "pictures/0/loras/mika/dataset.toml"):
        window.goto(f"{address}/{path}")
        window.wait_for("!document.querySelector('#grid') || document.querySelector('.cell')")
        check_names(window)
    assert window.errors == []


def test_clips_are_played_at_one_moment_and_heard_where_they_are_seen(window):
    window, address, root = window
    write_run(root, "walk", previews=1)
    for step in (0, 10):
        write_preview_clip(root, "walk", 1, step, has_sound=True)
    window.goto(f"{address}/runs/0/walk")
    window.use("#tab-charts", "ArrowRight")
    window.use("[data-picture='1 000010']")
    window.wait_for("document.querySelectorAll('#viewer video:not([hidden])').length === 2")
    clips = "[...document.querySelectorAll('#viewer video')]"
    window.wait_for(f"{clips}.every((each) => each.readyState >= 2 && !each.paused && each.currentTime > 0)")
    assert window.evaluate(f"{clips}.every((each) => each.muted) && document.querySelector('#viewer-over').hidden")
    window.press("m")
    assert window.evaluate(f"{clips}.map((each) => each.muted)") == [False, True]
    window.use("#viewer-split", "Home")
    assert window.evaluate(f"{clips}.map((each) => each.muted)") == [True, False]
    window.wait_for(f"{clips}[1].webkitAudioDecodedByteCount > 0")
    window.evaluate(f"{clips}[1].currentTime = {clips}[0].duration / 2; {clips}[0].currentTime = 0")
    window.wait_for(f"Math.abs({clips}[0].currentTime - {clips}[1].currentTime) < 0.1")
    window.walk_to("#viewer-close")
    window.press("ArrowUp")  # a prompt with pictures alone
    window.wait_for("document.querySelectorAll('#viewer video:not([hidden])').length === 0")
    assert window.evaluate(
        "document.querySelector('#viewer-sound').hidden && !document.querySelector('#viewer-over').hidden"
    )
    window.press("ArrowDown")
    window.wait_for("!document.querySelector('#viewer-sound').hidden")
    window.evaluate(f"{clips}.forEach((each) => each.src = 'data:video/mp4,broken')")
    window.wait_for("document.querySelector('#viewer-sound').hidden && !document.querySelector('#viewer-over').hidden")
    window.press("Escape")
    window.wait_for_focus("[data-picture]")
    assert window.evaluate(f"{clips}.every((each) => each.paused && !each.hasAttribute('src'))")
