"""Pages of pictures show what will be trained; captions are edited in their files, and every edit can be undone."""

import gzip
import json
import os
import time
from pathlib import Path

import pytest
from PIL import Image
from problem_lines import format_lines
from web_pages import open_page

from library.web.background import WorkStopped
from library.web.caption_edits import CaptionEditor, build_tag_edit, plan_tag_edit
from library.web.folders import OpenedFolders
from library.web.pictures import PictureSet
from library.web.undo_log import MAX_UNDO, UndoLog

KEY = "0/set.toml"
SIZES = {"wide": (400, 60), "plain": (64, 64), "small": (20, 20), "tall": (70, 100)}


@pytest.fixture
def dataset(tmp_path) -> Path:
    folder = tmp_path / "open" / "images"
    folder.mkdir(parents=True)
    for number, (name, size) in enumerate(SIZES.items()):
        Image.new("RGB", size, (60 * number, 200, 10)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"{name} picture, a tag, b")
    (folder / "twin.png").write_bytes((folder / "plain.png").read_bytes())
    (folder / "plain.txt").write_text(" ".join(["word"] * 80))
    write_dataset(tmp_path / "open" / "set.toml", folder)
    return folder


def write_dataset(path: Path, folder: Path, **keys: str) -> None:
    more = "".join(f"{name} = {value}\n" for name, value in keys.items())
    path.write_text(
        f"[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 32\nmax_bucket_reso = 128\n"
        f"bucket_reso_steps = 16\n[[datasets.subsets]]\nimage_dir = '{folder}'\ncaption_extension = '.txt'\n{more}"
    )


def wait_for_scan(page, key: str = KEY) -> dict:
    for _ in range(400):
        state = page.get(f"/api/pictures/state/{key}").json()
        if state.get("is_ready", True):
            return state
        time.sleep(0.05)
    raise AssertionError("the scan does not end")


def wait_for_work(page) -> dict:
    """The end of an edit of many captions, or of an undo."""
    for _ in range(400):
        work = page.get(f"/api/pictures/work/{KEY}").json()
        if not work["is_running"]:
            return work
        time.sleep(0.05)
    raise AssertionError("the work does not end")


def scan(pictures: PictureSet) -> None:
    pictures.start()
    while pictures.work.is_running:
        time.sleep(0.02)


def undo(page) -> dict:
    assert page.post(f"/api/pictures/undo/{KEY}", json={}).status_code == 200
    return wait_for_work(page)


def get_rows(page, **query: object) -> dict[str, dict]:
    answer = page.get(f"/api/pictures/rows/{KEY}", params=query).json()
    return {row["name"].split("/")[1].split(".")[0]: row for row in answer["rows"]}


def test_pictures_are_shown_with_buckets_crops_and_warnings(dataset):
    page = open_page(dataset.parent)
    assert "set.toml" in page.get("/pictures").text and "set.toml" in page.get(f"/pictures/{KEY}").text
    state = wait_for_scan(page)
    rows = get_rows(page)

    assert (state["total"], state["problems"]) == (5, [])
    assert {each["id"]: each["count"] for each in state["warnings"]} == {
        "cropped": 1,
        "enlarged": 1,
        "duplicate": 1,
        "no caption": 1,
        "long": 1,
    }
    assert rows["twin"]["warnings"] == {"duplicate": "the same file as images/plain.png", "no caption": "no caption"}
    assert rows["small"]["warnings"] == {"enlarged": "enlarged 3.2 times"}
    left, top, width, height = rows["wide"]["crop"]
    assert 0 < left < 0.5 and top == 0 and height == 1 and left + width / 2 == pytest.approx(0.5, abs=0.02)
    assert list(get_rows(page, warning="long")) == ["plain"] and list(get_rows(page, text="WIDE tag")) == ["wide"]
    assert list(get_rows(page, bucket="64x64", count=1)) == ["plain"]
    answer = page.get(f"/thumbnail/{rows['wide']['index']}/{KEY}")
    assert answer.headers["content-type"] == "image/webp" and answer.content[8:12] == b"WEBP"
    assert len(list(dataset.rglob(".cache-lorikeet/thumbnails/*/*.webp"))) == 1


def test_a_caption_is_edited_in_its_file_and_the_edit_undone(dataset):
    page = open_page(dataset.parent)
    wait_for_scan(page)
    rows = get_rows(page)
    wide, twin = rows["wide"], rows["twin"]

    def save(row: dict, text: str, known: str):
        body = {"captions": {row["index"]: text}, "known": {row["index"]: known}}
        return page.post(f"/api/pictures/captions/{KEY}", json=body)

    assert save(wide, "a new one\r\n\r\n second ", wide["caption"]).json() == {"count": 1, "num_undo": 1}
    assert (dataset / "wide.txt").read_bytes() == b"a new one\nsecond\n"
    assert get_rows(page)["wide"]["caption"] == "a new one\nsecond"
    assert save(twin, "now captioned", "").json()["num_undo"] == 2
    assert (dataset / "twin.txt").read_text() == "now captioned\n" and not list(dataset.glob(".*.txt"))
    assert save(wide, "stale", "what another window showed").status_code == 400
    (dataset / "tall.txt").write_text("written by an editor")
    answer = save(rows["tall"], "overwritten", rows["tall"]["caption"])
    assert answer.status_code == 400 and "changed by another program" in answer.json()["error"]
    assert (dataset / "tall.txt").read_text() == "written by an editor"

    for _ in range(2):
        assert undo(page)["count"] == 1
    assert not (dataset / "twin.txt").exists() and (dataset / "wide.txt").read_text() == "wide picture, a tag, b"
    assert undo(page)["count"] == 0


def test_tags_of_many_pictures_are_edited_and_undone_together_also_after_another_scan(dataset):
    page = open_page(dataset.parent)
    wait_for_scan(page)
    before = {path.name: path.read_bytes() for path in dataset.glob("*.txt")}

    def edit(**values: object):
        answer = page.post(f"/api/pictures/tags/{KEY}", json=values)
        return wait_for_work(page) if answer.status_code == 200 and not values.get("dry_run") else answer.json()

    planned = edit(action="replace", tag="a tag", replacement="c", dry_run=True)
    assert planned["count"] == 3 and planned["examples"][0]["after"].endswith("picture, c, b")
    assert {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before
    assert edit(action="remove", tag="b", text="wide")["count"] == 1
    assert (dataset / "wide.txt").read_text() == "wide picture, a tag\n"
    assert edit(action="add", tag="mika", is_at_start=True)["count"] == 5
    assert (dataset / "small.txt").read_text().startswith("mika, small") and (dataset / "twin.txt").exists()
    assert (
        "give a tag" in edit(action="add", tag=" ")["error"] and "give a tag" in edit(action="shell", tag="a")["error"]
    )

    page.post(f"/api/pictures/scan/{KEY}", json={})
    assert wait_for_scan(page)["num_undo"] == 2
    assert undo(page)["count"] == 5 and get_rows(page)["small"]["caption"] == "small picture, a tag, b"
    (dataset / "wide.txt").write_text("mended elsewhere")
    assert "changed since by another program" in undo(page)["problems"][0]
    (dataset / "wide.txt").write_text("wide picture, a tag\n")
    assert undo(page)["count"] == 1 and get_rows(page)["wide"]["caption"] == "wide picture, a tag, b"
    assert {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before


def test_a_stopped_scan_goes_on_and_a_stopped_edit_is_undone(dataset):
    path, folders = dataset.parent / "set.toml", OpenedFolders.open([str(dataset.parent)])
    stopped = PictureSet(path, folders)
    stopped.work.is_stopping = True
    scan(stopped)
    assert "stopped after" in format_lines(stopped.work.problems)[0] and not stopped.pictures

    pictures = PictureSet(path, folders)
    scan(pictures)
    before = {path.name: path.read_bytes() for path in dataset.glob("*.txt")}
    editor = CaptionEditor(pictures, UndoLog(path, folders))

    def stop_at(wanted: str, number: int):
        def report(title: str, completed: int, total: int) -> None:
            if (title, completed) == (wanted, number):
                raise WorkStopped("stopped")

        return report

    captions = plan_tag_edit(pictures, build_tag_edit("add", "mika", ""), range(5))
    with pytest.raises(WorkStopped):
        editor.edit(captions, {}, stop_at("looking at the files", 4))
    assert not editor.log.edits and {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before
    with pytest.raises(WorkStopped):
        editor.edit(captions, {}, stop_at("writing captions", 3))
    assert sum(b"mika" in path.read_bytes() for path in dataset.glob("*.txt")) == 3 == len(editor.log.edits[0].read())
    assert sum("mika" in caption for caption in pictures.captions) == 3
    with pytest.raises(WorkStopped):
        editor.undo(stop_at("undoing", 1))
    assert sum(b"mika" in path.read_bytes() for path in dataset.glob("*.txt")) == 2
    assert editor.undo() == 2 and not editor.log.edits
    assert {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before
    assert editor.edit(captions, {}) == 5


def test_a_page_that_was_started_again_undoes_the_edits_of_the_one_before(dataset):
    (dataset / "tall.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9,b\r\n")  # put back byte by byte
    page = open_page(dataset.parent)
    wait_for_scan(page)
    before = {path.name: path.read_bytes() for path in dataset.glob("*.txt")}
    page.post(f"/api/pictures/tags/{KEY}", json={"action": "add", "tag": "mika"})
    assert wait_for_work(page)["count"] == 5
    wide = get_rows(page)["wide"]
    page.post(f"/api/pictures/captions/{KEY}", json={"captions": {wide["index"]: "new"}})

    page = open_page(dataset.parent)
    assert wait_for_scan(page)["num_undo"] == 2
    assert undo(page)["count"] == 1 and (dataset / "wide.txt").read_text() == "wide picture, a tag, b, mika\n"
    page = open_page(dataset.parent)
    assert wait_for_scan(page)["num_undo"] == 1
    assert undo(page)["count"] == 5 and {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before
    assert wait_for_scan(open_page(dataset.parent))["num_undo"] == 0


def test_what_a_page_wrote_before_it_died_is_undone_by_the_next(dataset):
    path, folders = dataset.parent / "set.toml", OpenedFolders.open([str(dataset.parent)])
    pictures = PictureSet(path, folders)
    scan(pictures)
    before = {path.name: path.read_bytes() for path in dataset.glob("*.txt")}
    captions = plan_tag_edit(pictures, build_tag_edit("add", "mika", ""), range(5))

    def die(title: str, completed: int, total: int) -> None:
        if (title, completed) == ("writing captions", 3):
            os._exit(0)

    if (child := os.fork()) == 0:
        CaptionEditor(pictures, UndoLog(path, folders)).edit(captions, {}, die)
    os.waitpid(child, 0)
    assert sum(b"mika" in path.read_bytes() for path in dataset.glob("*.txt")) == 3
    page = open_page(dataset.parent)
    wait_for_scan(page)
    assert undo(page)["count"] == 3 and {path.name: path.read_bytes() for path in dataset.glob("*.txt")} == before


def test_the_undo_log_is_bounded_and_leads_nowhere_else(dataset, tmp_path):
    path, folders = dataset.parent / "set.toml", OpenedFolders.open([str(dataset.parent)])
    pictures = PictureSet(path, folders)
    scan(pictures)
    editor = CaptionEditor(pictures, UndoLog(path, folders))
    for number in range(MAX_UNDO + 3):
        editor.edit({0: f"caption {number}"}, {})
    assert len(editor.log.edits) == len(list((dataset.parent / ".lorikeet-web").rglob("*.gz"))) == MAX_UNDO

    last = editor.log.edits[-1].path
    rows = json.loads(gzip.decompress(last.read_bytes()))
    (tmp_path / "secret.txt").write_text(rows[0][-1] + "\n")
    rows[0][2] = str(tmp_path / "secret.txt")
    last.write_bytes(gzip.compress(json.dumps(rows).encode()))
    page = open_page(dataset.parent)
    wait_for_scan(page)
    assert "outside of the opened folders" in undo(page)["problems"][0]
    assert (tmp_path / "secret.txt").exists()
    last.write_bytes(b"broken")
    assert "cannot be read" in undo(page)["problems"][0] and not last.exists()


def test_pictures_and_captions_behind_links_out_of_the_folder_stay_hidden(dataset, tmp_path):
    (tmp_path / "secret.png").write_bytes((dataset / "wide.png").read_bytes() + b"x")
    (tmp_path / "secret.txt").write_text("secret")
    (dataset / "link.png").symlink_to(tmp_path / "secret.png")
    (dataset / "small.txt").unlink()
    (dataset / "small.txt").symlink_to(tmp_path / "secret.txt")
    page = open_page(dataset.parent)
    state = wait_for_scan(page)

    assert state["total"] == 4 and "2 pictures are not shown" in state["notes"][0]
    assert "secret" not in page.get(f"/api/pictures/rows/{KEY}").text and {"link", "small"}.isdisjoint(get_rows(page))
    assert "secret" not in page.get(f"/api/pictures/state/{KEY}").text


def test_a_link_that_is_made_after_the_scan_is_not_followed(dataset, tmp_path):
    (tmp_path / "secret.txt").write_text("wide picture, a tag, b")
    (tmp_path / "secret.png").write_bytes((dataset / "wide.png").read_bytes())
    page = open_page(dataset.parent)
    wait_for_scan(page)
    index = get_rows(page)["wide"]["index"]
    for name in ("wide.txt", "wide.png"):
        (dataset / name).unlink()
        (dataset / name).symlink_to(tmp_path / name.replace("wide", "secret"))

    body = {"captions": {index: "new"}}
    assert page.post(f"/api/pictures/captions/{KEY}", json=body).status_code == 403
    assert page.get(f"/thumbnail/{index}/{KEY}").status_code == 403
    assert (tmp_path / "secret.txt").read_text() == "wide picture, a tag, b"


def test_a_dataset_with_folders_elsewhere_is_refused(dataset, tmp_path):
    (tmp_path / "other").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "other" / "a.png")
    write_dataset(dataset.parent / "set.toml", tmp_path / "other")
    state = wait_for_scan(open_page(dataset.parent))

    assert state["total"] == 0 and "restart with --root" in state["problems"][0]


def test_captions_and_names_are_shown_as_text(dataset):
    (dataset / "wide.txt").write_text("<script>alert(1)</script>")
    (dataset / "plain.png").rename(dataset / "<img src=x onerror=alert(2)>.png")
    page = open_page(dataset.parent)
    state = wait_for_scan(page)

    answer = page.get(f"/api/pictures/rows/{KEY}")
    assert answer.headers["content-type"] == "application/json" and state["problems"] == []
    assert any(row["caption"] == "<script>alert(1)</script>" for row in answer.json()["rows"])
    assert "<script>alert" not in page.get(f"/pictures/{KEY}").text


def test_wrong_requests_are_refused(dataset):
    page = open_page(dataset.parent)
    wait_for_scan(page)

    assert page.get("/api/pictures/state/0/images/wide.png").status_code == 400
    assert page.get(f"/thumbnail/99/{KEY}").status_code == 400 == page.get(f"/thumbnail/x/{KEY}").status_code
    assert page.post(f"/api/pictures/captions/{KEY}", content=b"[1]").status_code == 400
    assert page.post(f"/api/pictures/captions/{KEY}", json={"captions": {"77": "a"}}).status_code == 400
