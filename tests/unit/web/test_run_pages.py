"""Pages of runs show what the files of runs hold, as text, and nothing outside of the opened folders."""

import json
import os
import time

import pytest
from web_pages import open_page, write_preview_clip, write_run

from library.web.folders import FileFinder, OpenedFolders
from library.web.runs import RunReader, compare_settings


def test_runs_are_listed_with_their_state(tmp_path):
    write_run(tmp_path / "a", "done")
    with write_run(tmp_path / "b" / "deep", "halted", steps=7).open("a") as file:
        file.write('{"step": 8, "validation/loss": 1.0}\n{"step": 9, "loss/av')  # validated, and is writing
    failed = write_run(tmp_path / "b", "broken", steps=3)
    (tmp_path / "b" / "broken.error-rank0.txt").write_text("x")
    os.utime(failed, (time.time() - 50,) * 2)
    write_run(tmp_path / "c", "alive", steps=5)
    (tmp_path / "c" / ".alive.lock").touch()
    write_run(tmp_path / ".hidden", "cached")
    runs = {run.name: run for run in RunReader(OpenedFolders.open([str(tmp_path)])).list_overviews()}

    assert {name: run.status for name, run in runs.items()} == {
        "alive": "running",
        "done": "finished",
        "halted": "stopped",
        "broken": "failed",
    }
    assert next(iter(runs)) == "alive" and runs["alive"].seconds_left == 7.5
    assert (runs["halted"].step, runs["halted"].steps, runs["halted"].loss) == (8, 20, 2 / 7)
    page = open_page(tmp_path).get("/runs").text
    assert "b/deep" in page and "halted" in page and "cached" not in page


def test_folders_that_did_not_change_are_not_read_again_and_those_that_did_are(tmp_path):
    write_run(tmp_path / "a", "first")
    (tmp_path / "pictures").mkdir()
    finder = FileFinder(OpenedFolders.open([str(tmp_path)]), (".metrics.jsonl",), ".error")

    def find() -> dict[str, list[str]]:
        return {folder.name: names for folder, names in finder.iter_folders() if folder != tmp_path}

    assert find() == {"a": ["first.metrics.jsonl"], "pictures": []}
    (tmp_path / "pictures" / "new.metrics.jsonl").touch()  # at once, when the time of the folder may be the same
    assert find()["pictures"] == ["new.metrics.jsonl"]
    for folder in (tmp_path, tmp_path / "a", tmp_path / "pictures"):
        os.utime(folder, (time.time() - 100,) * 2)
    find()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("library.web.folders.os.scandir", lambda folder: pytest.fail(f"{folder} was read"))
        assert find() == {"a": ["first.metrics.jsonl"], "pictures": ["new.metrics.jsonl"]}
    (tmp_path / "a" / "first.metrics.jsonl").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.metrics.jsonl").touch()
    assert find() == {"a": [], "b": ["second.metrics.jsonl"], "pictures": ["new.metrics.jsonl"]}


def test_a_run_of_an_older_version_is_shown_without_its_settings(tmp_path):
    write_run(tmp_path, "old", previews=1)
    (tmp_path / "old.run.json").unlink()
    page = open_page(tmp_path)

    assert "older version" in page.get("/runs/0/old").text
    assert page.get("/api/charts/0/old").json()["status"] == "stopped"
    assert page.get("/api/previews/0/old").json()["rows"][0]["prompt"] == "prompt 1"
    assert "prompt 1" not in page.get("/report/0/old").text  # the report has no prompts to name the rows by


def test_clips_are_shown_as_animated_images_beside_their_videos(tmp_path):
    write_run(tmp_path, "walk", previews=1)
    for step in (0, 10):
        clip = write_preview_clip(tmp_path, "walk", 1, step)
    page = open_page(tmp_path)
    first, second = page.get("/api/previews/0/walk").json()["rows"]
    assert first["clips"] == {} and len(first["images"]) == 3
    assert second["images"].keys() == second["clips"].keys() == {"000000", "000010"}
    assert page.get(second["images"]["000010"]).headers["content-type"] == "image/webp"
    answer = page.get(second["clips"]["000010"], headers={"Range": "bytes=0-99"})
    assert (answer.status_code, answer.headers["content-type"]) == (206, "video/mp4"), "browsers seek in videos"
    assert answer.content == clip.read_bytes()[:100]
    assert "media-src 'self'" in answer.headers["content-security-policy"]


def test_a_run_is_shown_with_charts_previews_settings_log_and_files(tmp_path):
    write_run(tmp_path / "out", "demo", previews=2, network_dim=16, optimizer_args=["a=1", "b=2"])
    (tmp_path / "out" / "demo.log").write_text("\x1b[32mstart\x1b[0m\n 1%|x|\r 2%|xx|\nend\n")
    (tmp_path / "out" / "demo.safetensors").write_bytes(b"12345")
    (tmp_path / "out" / "demo2.safetensors").write_bytes(b"other")
    page = open_page(tmp_path)

    text = page.get("/runs/0/out/demo").text
    assert "network_dim" in text and "one epoch: 3 images" in text and "demo.safetensors" in text
    assert "demo2.safetensors" not in text
    charts = page.get("/api/charts/0/out/demo").json()
    assert charts["is_complete"] and [chart["title"] for chart in charts["curves"]][:2] == ["Loss", "Learning rate"]
    previews = page.get("/api/previews/0/out/demo").json()
    assert [column["label"] for column in previews["columns"]] == ["before", "step 10", "step 20"]
    assert page.get(previews["rows"][1]["images"]["000010"]).headers["content-type"] == "image/png"
    assert page.get("/api/log/0/out/demo").text == "start\n 2%|xx|\nend"
    answer = page.get("/file/0/out/demo.safetensors?run=0/out/demo")
    assert answer.content == b"12345" and answer.headers["content-disposition"].startswith("attachment")
    report = page.get("/report/0/out/demo")
    assert report.headers["content-disposition"].startswith("attachment") and "step 20 of 20" in report.text


def test_a_live_run_is_read_on(tmp_path):
    metrics, page = write_run(tmp_path, "live", steps=2), open_page(tmp_path)
    before = page.get("/api/charts/0/live").json()["curves"][0]["curves"][0]["x"]
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "loss/current": 9.0}) + "\n")

    assert before == [1, 2]
    assert page.get("/api/charts/0/live").json()["curves"][0]["curves"][0]["x"] == [1, 2, 3]


def test_runs_are_compared_by_curves_and_settings(tmp_path):
    write_run(tmp_path / "a", "one", network_dim=16, seed=1)
    write_run(tmp_path / "b", "one", network_dim=32, seed=1)
    page = open_page(tmp_path)
    query = "?run=0/a/one&run=0/b/one"

    text = page.get(f"/runs/compare{query}").text
    assert "<td>network_dim</td><td>16</td><td>32</td>" in text and "seed" not in text
    curves = page.get(f"/api/compare{query}").json()["curves"]
    assert [curve["name"] for curve in curves[0]["curves"]] == ["one", "one (b)"]
    assert compare_settings([{"a": 1}, {}]) == [("a", ["1", ""])]


def test_pictures_of_runs_are_compared_by_prompt_whatever_their_order(tmp_path):
    for name, prompts in {"one": ["a cat", "a dog", "a cat"], "two": ["a dog", "a fox", "a cat"]}.items():
        write_run(tmp_path / name, name, previews=3)
        facts = json.loads((tmp_path / name / f"{name}.run.json").read_text())
        (tmp_path / name / f"{name}.run.json").write_text(json.dumps(facts | {"prompts": prompts}))
    for path in (tmp_path / "two" / "sample").glob("two_000010_*"):
        path.unlink()
    answer = open_page(tmp_path).get("/api/compare/previews?run=0/one/one&run=0/two/two").json()

    def number_files(run: str) -> list[tuple[str, list[str]]]:
        rows = ((row["prompt"], row["runs"].get(f"0/{run}/{run}", {"images": {}})["images"]) for row in answer["rows"])
        return [(prompt, [url.split("_")[-3] for url in images.values()]) for prompt, images in rows]

    assert [column["id"] for column in answer["columns"]] == ["000000", "000010", "000020"]
    # A prompt that is there twice, with two seeds, is two rows.
    ones, nothing = (["00"] * 3, ["01"] * 3, ["02"] * 3), list[str]()
    assert number_files("one") == list(zip(["a cat", "a dog", "a cat", "a fox"], [*ones, nothing], strict=True))
    twos = [["02"] * 2, ["00"] * 2, nothing, ["01"] * 2]
    assert number_files("two") == list(zip(["a cat", "a dog", "a cat", "a fox"], twos, strict=True))


@pytest.mark.parametrize(
    "path",
    (
        "/runs/0/../secret /runs/0/%2e%2e/secret /image/0/..%2Fsecret.png /image/0/link.png "
        "/image/0/demo.metrics.jsonl /file/0/demo.png?run=0/demo /file/0/demo-000001.safetensors?run=0/demo "
        "/file/0/..%2Fsecret.png?run=0/demo /file/0/demo.metrics.jsonl?run=../secret /api/log/0/..%2Fsecret "
        "/api/charts/1/secret /report/0/none /api/compare /api/compare/previews"
    ).split(),
)
def test_other_files_are_refused(tmp_path, path):
    write_run(tmp_path / "open", "demo")
    write_run(tmp_path, "secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "open" / "demo.png").write_bytes(b"secret")
    for name in ("link.png", "demo-000001.safetensors"):
        (tmp_path / "open" / name).symlink_to(tmp_path / "secret.png")
    answer = open_page(tmp_path / "open").get(path)

    assert answer.status_code in (400, 403, 404) and b"secret" != answer.content


def test_a_log_outside_of_the_folders_is_not_shown(tmp_path):
    (tmp_path / "private.txt").write_text("private")
    write_run(tmp_path / "open", "demo", console_log_file=str(tmp_path / "private.txt"))

    assert open_page(tmp_path / "open").get("/api/log/0/demo").text == ""


def test_names_prompts_and_settings_are_shown_as_text(tmp_path):
    name = "<img src=x onerror=alert(1)>"
    write_run(tmp_path, name, previews=1, training_comment="<script>alert(2)</script>")
    page = open_page(tmp_path)

    for path in ("/runs", f"/runs/0/{name}", f"/runs/compare?run=0/{name}", "/api/runs/rows", f"/report/0/{name}"):
        text = page.get(path).text
        assert "<img src=x" not in text and "<script>alert" not in text and "&lt;img" in text, path
    assert page.get(f"/api/previews/0/{name}").headers["content-type"] == "application/json"


def test_two_hundred_runs_are_listed_from_the_last_line_of_each(tmp_path, monkeypatch):
    for number in range(200):
        write_run(tmp_path / f"run{number:03d}", "lora", steps=50)
    page, parsed = open_page(tmp_path), []
    monkeypatch.setattr("library.web.runs.json.loads", lambda line, read=json.loads: parsed.append(line) or read(line))

    started = time.process_time()
    text = page.get("/runs").text
    seconds = time.process_time() - started
    assert text.count("<tr data-key") == 200 and seconds < 1
    assert sum(line.startswith(b'{"step"') for line in parsed if isinstance(line, bytes)) == 200
    print(f"200 runs: {seconds:.2f} s of CPU time")


@pytest.mark.slow
def test_a_million_lines_are_drawn_in_slices(tmp_path):
    line = '"loss/current": 0.123456789, "loss/average": 0.12345, "lr/unet": 0.0001, "gradient_norm": 0.5, "epoch": 1'
    with (tmp_path / "long.metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step}, {line}}}\n' for step in range(1, 1_000_001))
    page, slices, is_complete, started = open_page(tmp_path), [], False, time.perf_counter()
    while not is_complete:
        began = time.perf_counter()
        answer = page.get("/api/charts/0/long")
        slices.append(time.perf_counter() - began)
        is_complete = answer.json()["is_complete"]

    assert answer.json()["curves"][0]["curves"][0]["x"][-1] == 1_000_000
    assert len(answer.content) < 1_000_000 and len(slices) > 2
    print(
        f"a million lines: {time.perf_counter() - started:.1f} s in {len(slices)} slices of at most {max(slices):.1f} s"
    )
