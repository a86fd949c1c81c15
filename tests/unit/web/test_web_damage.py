"""Damaged files, odd names and files that are gone break neither the page nor the list of what is sound."""

import json
import os
import re
import shutil
import time
from html import unescape
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient
from web_pages import open_page, write_run

KEY = "0/set.toml"
STEP = '{"step": 1, "loss/current": 1.0}\n'
METRICS = {
    "null": '{"step": null}\n',
    "text": '{"step": "x", "loss/average": "high"}\n',
    "nan": '{"step": 1, "loss/current": NaN, "loss/average": Infinity}\n{"step": 2, "gradient_norm": NaN}\n',
    "huge": '{"step": 1e999}\n{"step": 99999999999999999999, "loss/current": 1e308}\n' + STEP,
    "deep": "[" * 100_000,
    "binary": "\0\1\2" * 100,
}
SUMMARIES = {
    "steps": {"steps": "many"},
    "null": {"steps": None, "prompts": None, "all_settings": None, "started_at": None},
    "list": {"all_settings": ["a"], "prompts": "abc", "settings": 3},
    "time": {"started_at": 1e300},
}


def open_strict(root: Path) -> TestClient:
    """A client that gets faults of the page as answers with status 500, as a browser does."""
    page = open_page(root)
    return TestClient(
        page.app, page.base_url, raise_server_exceptions=False, headers=dict(page.headers), follow_redirects=False
    )


def list_addresses(key: str) -> list[str]:
    pages = [f"/runs/{key}", f"/report/{key}", f"/new?run={key}", f"/runs/compare?run={key}&run=0/fine"]
    return [*pages, f"/api/charts/{key}", f"/api/previews/{key}", f"/api/compare?run={key}&run=0/fine"]


def test_one_damaged_run_hides_no_other(tmp_path):
    write_run(tmp_path, "fine")
    facts = json.loads((tmp_path / "fine.run.json").read_text())
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "fine_000001_00_20260101000000_1.png").symlink_to("gone.png")
    for name, text in METRICS.items():
        (tmp_path / f"m-{name}.metrics.jsonl").write_text(text)
    for name, changes in SUMMARIES.items():
        (tmp_path / f"s-{name}.run.json").write_text(json.dumps(facts | changes))
        (tmp_path / f"s-{name}.metrics.jsonl").write_text(STEP)
    (tmp_path / "s-deep.run.json").write_text("[" * 100_000)
    page = open_strict(tmp_path)

    answer = page.get("/runs")
    assert answer.status_code == 200 and answer.text.count("<tr data-key") == len(METRICS) + len(SUMMARIES) + 2
    keys = [f"0/m-{name}" for name in METRICS] + [f"0/s-{name}" for name in (*SUMMARIES, "deep")]
    faults = [path for key in (*keys, "0/fine") for path in list_addresses(key) if page.get(path).status_code >= 500]
    assert faults == []
    charts = page.get("/api/charts/0/m-nan").json()
    assert "1 step skipped" in charts["facts"]


def test_runs_of_any_name_are_shown_with_their_previews(tmp_path):
    names = ("100%", "a#b?c", "quo'te\"d", "sp ace", "日本", "a&b=c+d")
    for name in (*names, "new\nline"):
        write_run(tmp_path / "odd", name, previews=1)
    not_unicode = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(not_unicode)
    for end in (b"x.run.json", b"\xe9.safetensors", b"\xe9.toml"):
        Path(os.fsdecode(not_unicode + b"/" + end)).write_bytes(b"        {[[datasets]]lora_x")
    page = open_strict(tmp_path)

    links = [unescape(link) for link in re.findall(r'<td><a href="([^"]+)"', page.get("/runs").text)]
    assert len(links) == len(names)  # those that cannot stand in an address are passed over
    for link in links:
        assert page.get(link).status_code == 200, link
        row = page.get(link.replace("/runs/", "/api/previews/")).json()["rows"][0]
        assert all(page.get(address).status_code == 200 for address in row["images"].values()), link
    assert [page.get(path).status_code for path in ("/lora", "/pictures", "/new")] == [200, 200, 200]


def test_links_of_metrics_that_lead_out_are_not_listed(tmp_path):
    write_run(tmp_path, "secret", steps=7)
    (tmp_path / "open").mkdir()
    for end in (".metrics.jsonl", ".run.json"):
        (tmp_path / "open" / f"link{end}").symlink_to(tmp_path / f"secret{end}")

    assert "link" not in re.findall(r"data-key=\"0/(\w+)", open_page(tmp_path / "open").get("/runs").text)


def test_wrong_requests_are_answered_with_what_is_wrong(tmp_path):
    page = open_strict(tmp_path)

    for path in ("/runs/0/" + "a" * 5000, "/api/charts/0/" + "a/" * 3000, "/image/0/" + "b" * 300 + ".png"):
        assert page.get(path).status_code == 404, path[:30]
    for body in (b"[" * 500_000, b'{"a":' * 100_000, json.dumps({"values": {"output_name": "\ud800"}}).encode()):
        assert page.post("/api/new/check", content=body).status_code in (200, 400), body[:30]


def test_a_form_is_accepted_wherever_the_page_was_started(tmp_path, monkeypatch):
    for name in ("open/images", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    write_dataset(tmp_path / "open")
    monkeypatch.chdir(tmp_path / "elsewhere")
    values = {"dataset_config": str(tmp_path / "open" / "set.toml"), "output_dir": str(tmp_path / "open" / "out")}
    answer = open_page(tmp_path / "open").post("/api/new/check", json={"values": values})

    assert answer.json()["problems"] == []


def write_dataset(root: Path) -> Path:
    folder = root / "images"
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(("a", "b", "c#d?e%f", "g\nh", "<i>", "caf\udce9")):
        Image.new("RGB", (64, 64), (30 * number, 200, 10)).save(folder / "new.png")
        (folder / "new.png").rename(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"picture {number}")
    (root / "set.toml").write_text(
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\n"
    )
    return folder


@pytest.fixture
def pictures(tmp_path) -> tuple[TestClient, Path]:
    folder = write_dataset(tmp_path)
    page = open_strict(tmp_path)
    wait_until_idle(page)
    return page, folder


def wait_until_idle(page) -> dict:
    """Wait for the scan or the edit; return its end."""
    page.get(f"/api/pictures/state/{KEY}")
    while (work := page.get(f"/api/pictures/work/{KEY}").json())["is_running"]:
        time.sleep(0.02)
    return work


def read_rows(page) -> list[dict]:
    return page.get(f"/api/pictures/rows/{KEY}").json()["rows"]


def test_pictures_of_any_name_are_shown_and_edited(pictures):
    page, folder = pictures
    rows = read_rows(page)
    assert [page.get(f"/thumbnail/{row['index']}/{KEY}").status_code for row in rows] == [200] * 6

    body = json.dumps({"captions": {"0": "half a \ud800 letter"}})
    assert page.post(f"/api/pictures/captions/{KEY}", content=body.encode()).json()["count"] == 1
    assert read_rows(page)[0]["caption"] == "half a ? letter"
    page.post(f"/api/pictures/tags/{KEY}", json={"action": "add", "tag": "mika"})
    assert wait_until_idle(page)["count"] == 6 and (folder / "caf\udce9.txt").read_text() == "picture 5, mika\n"


def test_pictures_and_folders_that_are_gone_are_told(pictures):
    page, folder = pictures
    for name in ("a.png", "a.txt"):
        (folder / name).unlink()
    (folder / "b.png").write_bytes(b"broken")
    positions = {row["name"]: row["index"] for row in read_rows(page)}
    for name in ("images/a.png", "images/b.png"):
        assert page.get(f"/thumbnail/{positions[name]}/{KEY}").status_code == 404

    page.post(f"/api/pictures/tags/{KEY}", json={"action": "add", "tag": "mika"})
    assert "the image is gone" in wait_until_idle(page)["problems"][0] and not (folder / "a.txt").exists()
    shutil.rmtree(folder)
    answer = page.post(f"/api/pictures/captions/{KEY}", json={"captions": {"1": "new"}})
    assert answer.status_code == 400 and "gone" in answer.json()["error"]
    page.post(f"/api/pictures/scan/{KEY}", json={})
    wait_until_idle(page)
    assert "not found" in page.get(f"/api/pictures/state/{KEY}").json()["problems"][0]


def test_two_windows_do_not_overwrite_each_other(pictures):
    page, _ = pictures
    row = read_rows(page)[0]

    def save(text: str, known: str):
        body = {"captions": {row["index"]: text}, "known": {row["index"]: known}}
        return page.post(f"/api/pictures/captions/{KEY}", json=body)

    assert save("first", row["caption"]).status_code == 200
    answer = save("second", row["caption"])
    assert answer.status_code == 400 and "edited in another window" in answer.json()["error"]
    assert save("second", read_rows(page)[0]["caption"]).status_code == 200
