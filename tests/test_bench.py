"""A bench measures what it says, on a folder of its own that it removes, and tells it as a table or as JSON."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from library.errors import ConfigError
from library.tools import bench, bench_cache, bench_data, bench_group, bench_scale
from library.tools.bench_figure import Figure, as_text, interleaved

GROUP = """
import signal
from library.tools.bench_group import together
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have told what runs behind it to ignore
together(2, ["-c", "import time; time.sleep(99)"])
"""


def test_no_process_outlives_a_bench_that_is_interrupted():
    bench_itself = psutil.Popen([sys.executable, "-c", GROUP], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(children := bench_itself.children()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    bench_itself.send_signal(signal.SIGINT)
    bench_itself.wait(60)
    assert len(children) == 2 and not [child for child in children if child.is_running()]


def test_a_process_that_is_just_being_started_is_ended_by_an_interrupt_too(monkeypatch):
    begun = []

    class StartsDuringAnInterrupt(subprocess.Popen):
        def __init__(self, *words, **settings):
            super().__init__(*words, **settings)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", StartsDuringAnInterrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which may be ignored here, see above
    try:
        with pytest.raises(KeyboardInterrupt):
            bench_group.together(2, ["-c", "import time; time.sleep(99)"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun and all(process.poll() is not None for process in begun)


def test_others_of_a_group_follow_one_that_fails(monkeypatch):
    monkeypatch.setattr(bench_group, "SECONDS_TO_FOLLOW", 0.2)
    wait = "import os, sys, time; rank = os.environ['RANK']; print(rank, flush=True)\nif rank == '0': sys.exit(3)\n"
    one, other = bench_group.together(2, ["-c", f"{wait}time.sleep(99)"])
    assert (one.code, one.said.strip(), other.said.strip()) == (3, "0", "1") and other.code < 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(bench_scale, "SECONDS_TO_SETTLE", 0.0)


def test_everything_is_measured_as_often_as_asked_and_nothing_is_left(tmp_path):
    words = ["--pictures", "100", "--entries", "1000", "--repetitions", "2", "--only", "audit", "plan", "--folder",
             str(tmp_path), "--json"]  # fmt: skip
    text, code = bench.run(["data", *words])
    said = json.loads(text)
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert said["command"] == "python -m library bench data " + " ".join(words)
    assert {"machine", "load", "versions"} < said.keys()
    found = {figure["name"]: figure for figure in said["figures"]}
    for name in (
        "first start, 100 pictures",
        "second start, 100 pictures",
        "second start with one change, 100 pictures",
    ):
        assert len(found[name]["values"]) == 2 and min(found[name]["values"]) > 0
    assert found["memory of placed pictures"]["unit"] == "bytes a picture"
    assert found["plan of 1,000 pictures for 64 processes: memory"]["median"] > 0
    assert not any(figure["target"] for name, figure in found.items() if "start" in name)  # it is for 100,000 pictures


@pytest.mark.long
def test_pools_are_measured_in_turn(tmp_path):
    text, _ = bench.run(["data", "--pictures", "100", "--only", "pool", "--folder", str(tmp_path)])
    assert sum("thread" in line or "processes:" in line for line in text.splitlines()) >= 4
    calls: list[str] = []
    seconds = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 3 and {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_latents_are_read_in_four_ways_that_all_read_every_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cache, "KINDS", (bench_cache.Kind(512, 64, 4, "fp16"),))
    read: list[int] = []
    honest = bench_cache._all_read
    monkeypatch.setattr(bench_cache, "_all_read", lambda way, count: (read.append(count), honest(way, count)))
    text, _ = bench.run(["data", "--pictures", "100", "--only", "cache", "--folder", str(tmp_path), "--json"])
    figures = {figure["name"]: figure for figure in json.loads(text)["figures"]}
    assert read == [100] * 4 * 6 and len(figures) == 8
    kind = "latents of 64 x 64 pixels, 4 channels, fp16"
    ours, other = (figures[f"{kind}: {name}"]["median"] for name in ("cache, whole loader", "npz files, compressed"))
    ratio = figures["  cache, whole loader beside npz files, compressed"]
    assert ratio["median"] == pytest.approx(other / ours) and ratio["at_least"] == 10


def test_a_table_tells_median_spread_and_whether_the_target_is_met():
    figures = [Figure("x", (3.0, 1.0, 2.0), "s", 2.5), Figure("y", (1234.0,), "MB", 1000.0),
               Figure("z", (9.0,), "times", at_least=10.0), Figure("a", (10.0,), "times", at_least=10.0)]  # fmt: skip
    lines = as_text("command", figures, {"machine": "this"}).splitlines()
    assert lines[:2] == ["command", "machine: this"]
    assert [line.split() for line in lines[4:]] == [
        ["x", "2", "s", "1", "to", "3", "under", "2.5:", "yes"],
        ["y", "1,234", "MB", "under", "1,000:", "NO"],
        ["z", "9", "times", "at", "least", "10:", "NO"],
        ["a", "10", "times", "at", "least", "10:", "yes"],
    ]


def test_the_pictures_are_real_and_differ(tmp_path):
    from library.data.prepare import prepare

    config = bench_scale.make_pictures(tmp_path / "p", 60, 80)
    samples = prepare(config, 8).manifest.samples
    assert len({sample.content for sample in samples}) == len({sample.caption for sample in samples}) == 60
    assert len({sample.size for sample in samples}) > 10


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["dat"], ["unknown bench 'dat'; did you mean data?"]),
        (["data", "--only", "loder", "--picture", "5", "--entries", "1"], [
            "--picture: unknown option; did you mean --pictures?", "--entries: 1 is too small; at least 1000",
            "--only: 'loder' is not one of audit, pool, cache, plan"]),
        (["data", "--folder", "nowhere"], ["--folder: nowhere is no folder; make it first"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_together(words, problems):
    with pytest.raises(ConfigError) as caught:
        bench.run(words)
    assert caught.value.problems == problems


def test_help_names_what_there_is():
    assert "data" in bench.run([])[0]
    text, _ = bench.run(["data", "--help"])
    assert all(name in text for name in (*bench_data.PARTS, "--pictures", "(100,000)"))
    for name in bench.WHAT:
        text, code = bench.run([name, "--help"])
        assert code == 0 and "  --json" in text and bench.WHAT[name] in text


@pytest.mark.long
def test_compiling_is_measured_with_an_empty_cache_and_with_a_full_one():
    words = ["--sizes", "1", "--ways", "dynamic", "--backend", "eager", "--steps", "11", "--json"]
    text, _ = bench.run(["compile", *words])
    figures = {figure["name"]: figure for figure in json.loads(text)["figures"]}
    for start in ("empty", "full"):
        assert figures[f"1 sizes, dynamic, {start} cache: compiling"]["remark"] == "2 graphs"
        whole = figures[f"1 sizes, dynamic, {start} cache: to the first step"]["median"]
        assert 0 < figures[f"1 sizes, dynamic, {start} cache: compiling"]["median"] < whole
    assert figures["1 sizes, dynamic, empty cache: a step"]["median"] > 0
    assert "  beside an empty cache" not in figures, "the cache is inductor's"


@pytest.mark.long
def test_how_long_stages_wait_is_measured_in_each_step_beside_the_formula():
    text, _ = bench.run(["pipeline", "--pp_size", "2", "--micro_batches", "2", "--pretend_ms", "20", "--repetitions",
                         "3", "--json"])  # fmt: skip
    waits, _ = json.loads(text)["figures"]
    assert waits["remark"] == "formula 33.3 %" and len(waits["values"]) == 3
    assert all(0 < value < 100 for value in waits["values"])


def test_a_pipeline_of_one_stage_has_nothing_to_measure():
    with pytest.raises(ConfigError, match="--pp_size: one stage has none to wait for"):
        bench.run(["pipeline"])
