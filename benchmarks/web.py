"""Benchmark the web page in Chromium: scrolling a large folder, the list of many runs, the curves of a long run."""

import json
import random
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from time import perf_counter
from typing import Any

from PIL import Image

from library.errors import ConfigError, UserError
from library.problems import report_argument

from .processes import ROOT
from .report import Measurement, add_count_option

TAGS = "lorikeet,green,bird,red head,tree,sky,sitting,flying,close-up,portrait".split(",")
SIZES = ((96, 64), (64, 96), (64, 64), (128, 64), (80, 64))
DATASET = """[[datasets]]
resolution = 64
enable_bucket = true
min_bucket_reso = 32
max_bucket_reso = 128
bucket_reso_steps = 16
[[datasets.subsets]]
image_dir = "pictures"
caption_extension = ".txt"
recursive = true
"""
PICTURES_PER_FOLDER = 5000
PLACES = (0.25, 0.5, 0.9, 0.1)
"""Where the folder is scrolled to, as shares of its length."""

SCROLL = """(frames) => new Promise((done) => {
  const gaps = [];
  let last = performance.now();
  const step = (now) => {
    gaps.push(now - last);
    last = now;
    scrollBy(0, 300);
    if (gaps.length < frames) requestAnimationFrame(step); else done(gaps.slice(1));
  };
  requestAnimationFrame(step);
})"""
WATCH = """() => {
  let last = performance.now();
  window.longestFrame = 0;
  const step = (now) => {
    window.longestFrame = Math.max(window.longestFrame, now - last);
    last = now;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}"""


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--pictures", 100_000, "pictures in a folder")
    add_count_option(parser, "--runs", 200, "runs in the list")
    add_count_option(parser, "--lines", 1_000_000, "lines of metrics of a long run")
    parser.set_defaults(repetitions=1)


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Write the files, start the page, and use it as a person would."""
    if training_options:
        raise ConfigError([report_argument(training_options[0], "unknown option")])
    write_pictures(directory, options.pictures)
    write_runs(directory / "runs", options.runs)
    write_long_run(directory / "long", options.lines)
    with start_page(directory) as address, open_tab() as tab:
        yield from measure_pictures(tab, address, options.pictures)
        yield from measure_runs(tab, address, options.runs + 1)
        yield from measure_long_run(tab, address)


def write_pictures(directory: Path, count: int) -> None:
    draw = random.Random(0)
    for number in range(count):
        folder = directory / "pictures" / f"{number // PICTURES_PER_FOLDER:03}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", SIZES[number % len(SIZES)], (number % 256, number // 256 % 256, number // 65536))
        image.save(folder / f"{number:06}.png", compress_level=1)
        (folder / f"{number:06}.txt").write_text(", ".join(draw.sample(TAGS, 4)), "utf-8")
    (directory / "set.toml").write_text(DATASET, "utf-8")


def write_runs(directory: Path, count: int) -> None:
    for number in range(count):
        write_metrics(directory / f"{number:04}" / f"run{number:04}.metrics.jsonl", 50)


def write_long_run(directory: Path, lines: int) -> None:
    write_metrics(directory / "long.metrics.jsonl", lines)


def write_metrics(path: Path, lines: int) -> None:
    draw = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, lines + 1):
            loss = 0.1 + draw.random() / step**0.5
            values = {"step": step, "loss/current": loss, "loss/average": loss / 2, "lr/unet": 1e-4}
            file.write(json.dumps(values | {"speed/steps_per_second": 2.0}) + "\n")


@contextmanager
def start_page(directory: Path) -> Iterator[str]:
    """Start the page on a folder; yield its address."""
    command = [sys.executable, "-m", "library", "web", "--root", str(directory), "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
    try:
        assert server.stdout is not None
        match = re.search(r"http://\S+", server.stdout.readline())
        if match is None:
            raise UserError("the page does not start; try python -m library web")
        yield match[0].rstrip("/")
    finally:
        server.terminate()
        server.wait()


@contextmanager
def open_tab() -> Iterator[Any]:
    """Open a tab of a browser that nobody sees."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UserError("playwright: missing; pip install -e '.[browser]'") from None
    program = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            tab = browser.new_page(viewport={"width": 1280, "height": 860})
            tab.set_default_timeout(900_000)
            yield tab
        finally:
            browser.close()


def measure_pictures(tab: Any, address: str, count: int) -> Iterator[Measurement]:
    start = perf_counter()
    tab.goto(f"{address}/pictures/0/set.toml")
    tab.wait_for_selector("#work:not([hidden])")
    tab.wait_for_selector(".cell img", state="attached")
    yield Measurement("pictures: scan, and the first page", [perf_counter() - start], "s")
    start = perf_counter()
    tab.reload()
    tab.wait_for_selector(".cell img", state="attached")
    yield Measurement("pictures: first page after the scan", [perf_counter() - start], "s", 2.0)
    seconds = [jump(tab, share, count) for share in PLACES]
    yield Measurement("pictures: after a jump", seconds, "s")
    frames = tab.evaluate(SCROLL, 200)
    yield Measurement("pictures: frames while scrolling", [each / 1000 for each in frames], "s")
    tab.wait_for_selector(".cell")
    num_cells = tab.locator(".cell").count()
    yield Measurement("pictures: cells in the page", [num_cells], at_most=200)
    tab.focus("#grid")
    start = perf_counter()
    tab.keyboard.press("End")
    tab.wait_for_selector(f".cell[data-position='{count - 1}']")
    yield Measurement("pictures: End key", [perf_counter() - start], "s")
    start = perf_counter()
    tab.fill("#text", "lorikeet flying")
    tab.wait_for_function("(all) => !byId('count').textContent.startsWith(all)", arg=f"{count:,} ")
    yield Measurement("pictures: search", [perf_counter() - start], "s")
    yield from measure_edit(tab)


def jump(tab: Any, share: float, count: int) -> float:
    """Scroll to a place; return the seconds until all that is seen there is drawn."""
    start = perf_counter()
    tab.evaluate("(share) => scrollTo(0, share * byId('grid').clientHeight)", share)
    tab.wait_for_function(
        """([share, count]) => {
          const cells = [...document.querySelectorAll(".cell")], last = innerHeight - 20;
          const isNear = (cell) => Math.abs(cell.dataset.position - share * count) < count / 50 + 100;
          return cells.some((cell) => cell.getBoundingClientRect().bottom > last) && cells.every(isNear);
        }""",
        arg=[share, count],
    )
    return perf_counter() - start


def measure_edit(tab: Any) -> Iterator[Measurement]:
    """Add a tag to what the search found, and undo it."""
    tab.click("#tags-part summary")
    tab.fill("#tag", "outside")
    start = perf_counter()
    tab.click("#apply-tags")
    tab.wait_for_selector("#tags-result:has-text('changed')")
    changed = int(re.sub(r"\D", "", tab.inner_text("#tags-result")))
    yield Measurement("pictures: edit of tags", [perf_counter() - start], "s", note=f"{changed:,} captions")
    start = perf_counter()
    tab.click("#undo")
    tab.wait_for_function("() => byId('undo').textContent === 'Undo' && byId('work').hidden")
    yield Measurement("pictures: undo", [perf_counter() - start], "s", note=f"{changed:,} captions")


def measure_runs(tab: Any, address: str, count: int) -> Iterator[Measurement]:
    seconds = []
    for _ in range(3):
        start = perf_counter()
        tab.goto(f"{address}/runs")
        tab.wait_for_function("(count) => byId('rows').rows.length === count", arg=count)
        seconds.append(perf_counter() - start)
    yield Measurement(f"{count} runs: the list", seconds, "s", 1.0, note="the first time first")


def measure_long_run(tab: Any, address: str) -> Iterator[Measurement]:
    start = perf_counter()
    tab.goto(f"{address}/runs/0/long/long")
    tab.evaluate(WATCH)
    tab.wait_for_selector("#curves .chart")
    yield Measurement("long run: first curves", [perf_counter() - start], "s")
    tab.wait_for_selector("#reading[hidden]", state="attached")
    yield Measurement("long run: complete", [perf_counter() - start], "s")
    yield Measurement("long run: longest frame", [tab.evaluate("() => window.longestFrame") / 1000], "s")
    size = tab.evaluate("async () => (await (await fetch(`/api/charts/${byId('run').dataset.key}`)).text()).length")
    yield Measurement("long run: size of an answer", [size / 1e6], "MB")
