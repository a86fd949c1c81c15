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

ROOT = Path(__file__).resolve().parents[3]
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


def test_all_five_steps_can_be_taken_by_keys_alone(window, tmp_path):
    window, address, root = window
    write_faulty_pictures(root / "photos", count=12)
    window.goto(f"{address}/train")
    window.walk_to("#choose-machine")
    window.press("Enter")
    window.wait_for("document.querySelector('#machine-folders button')")
    window.walk_to("#machine-folders button")
    window.press("Enter")
    window.wait_for_text("12 pictures, something to look at in")

    window.walk_to("[aria-label='Turn it upright: 00_turned.jpg']")
    window.press("Enter")
    window.wait_for("!document.querySelector(\"[aria-label='Turn it upright: 00_turned.jpg']\")")
    window.wait_for("document.activeElement !== document.body")  # the focus goes to what comes next
    window.walk_to("[aria-label^='Crop']")
    window.press("Enter")
    window.wait_for("document.activeElement.id === 'crop-position'")
    window.press("End")
    window.walk_to("#crop-apply")
    window.press("Enter")
    window.wait_for("document.querySelector('#undo').innerText === 'Undo (2)'")
    window.walk_to("#next-step")
    window.press("Enter")

    window.wait_for("document.querySelector('.caption-row textarea')")
    window.walk_to(".caption-row textarea")
    window.type("by keys ")
    window.press("Enter", 2)
    window.wait_for_text("saved")
    assert any("by keys" in path.read_text() for path in (root / "photos").glob("*.txt"))
    for step, selector in (("model", "[value=demo]"), ("card", "#memory"), ("start", "#o-output_name")):
        window.walk_to("#next-step")
        window.press("Enter")
        window.wait_for(f"location.pathname.startsWith('/train/{step}/')")
        window.wait_for(f"document.querySelector('{selector}')")
        window.walk_to(selector)
    window.wait_for("document.querySelector('#state').innerText !== 'checking…'")
    window.walk_to("#all > summary")
    window.press("Enter")
    window.walk_to("#all #find")
    window.type("ema_decay")
    window.walk_to("#o-ema_decay")
    window.press("Tab", 8)
    assert window.evaluate("document.activeElement.closest('#all') !== null"), "Shift and Tab go back"
    assert window.errors == []
