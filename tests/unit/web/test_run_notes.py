"""Runs are marked with a star and a note, and deleted ones are put back byte by byte."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from web_pages import open_page, write_run

from library.web.jobs import Job
from library.web.run_notes import MAX_NOTE_LENGTH
from library.web.validate_requests import HEADER


def read_tree(folder: Path) -> dict[str, bytes]:
    """The content of all files, by path; the hidden folder of the page's own files is left out."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".lorikeet-web" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_full_run(folder: Path, name: str) -> None:
    """Write one file of every kind that a run writes, and checkpoints."""
    write_run(folder, name, previews=2)
    ends = ".safetensors -000001.safetensors -step00000500-ema.safetensors _high_noise.safetensors _emb.safetensors "
    ends += ".log .report.html .before_after.png .evaluation.jsonl .error-rank0.txt .nan-step00000007-rank0.json"
    for end in ends.split():
        (folder / f"{name}{end}").write_text(f"{name}{end}")
    for state in (f"{name}-step00000500-state", f"{name}-state"):
        (folder / state).mkdir()
        (folder / state / "weights.safetensors").write_text(state)
    (folder / f"{name}.toml").write_text(f"{HEADER}seed = 1\n")


def test_a_star_and_a_note_are_kept_beside_the_run_and_shown_as_text(tmp_path):
    write_run(tmp_path, "one")
    page, note = open_page(tmp_path), "라미 <b>best</b>\nsecond line"
    page.post("/api/runs/notes", json={"run": "0/one", "is_favorite": True})
    answer = page.post("/api/runs/notes", json={"run": "0/one", "note": f"  {note}\n"})

    assert answer.json() == {"is_favorite": True, "note": note}
    for path in ("/runs", "/api/runs/rows", "/runs/0/one"):
        text = open_page(tmp_path).get(path).text
        assert 'aria-pressed="true"' in text and "라미 &lt;b&gt;best&lt;/b&gt;\nsecond line" in text, path
    assert page.post("/api/runs/notes", json={"run": "0/one", "note": "x" * (MAX_NOTE_LENGTH + 1)}).status_code == 400
    page.post("/api/runs/notes", json={"run": "0/one", "is_favorite": False, "note": ""})
    assert not (tmp_path / "one.notes.json").exists(), "a run without marks has no file"


@pytest.mark.parametrize("text", ["[1]", '{"note": 3, "is_favorite": "yes"}', "\0", "[" * 100_000])
def test_damaged_marks_are_none(tmp_path, text):
    write_run(tmp_path, "one")
    (tmp_path / "one.notes.json").write_text(text)
    assert 'data-star aria-pressed="false"' in open_page(tmp_path).get("/runs").text


def test_a_deleted_run_takes_its_own_files_and_comes_back_as_it_was(tmp_path):
    folder = tmp_path / "out"
    write_full_run(folder, "demo")
    for other in ("demo2", "demo-more", "demo-000001"):  # names that begin like it
        write_full_run(folder, other)
    (folder / "demo.txt").write_text("of the user")
    before = read_tree(folder)
    page = open_page(tmp_path)
    page.post("/api/runs/notes", json={"run": "0/out/demo", "note": "a note"})
    with_note = read_tree(folder)

    assert page.post("/api/runs/delete", json={"runs": ["0/out/demo"]}).json() == {"count": 1}
    left = read_tree(folder)
    own = [name for name in with_note if name.removeprefix("sample/").startswith(("demo.", "demo_", "demo-st"))]
    assert with_note.keys() - left.keys() == {*own} - {"demo.txt"} and len(own) > 20
    assert all(left[name] == before[name] for name in left)
    rows = page.get("/api/deleted").text
    assert "demo" in rows and "kB" in rows and "demo</a>" not in page.get("/api/runs/rows").text
    entry = rows.split('data-entry="')[1].split('"')[0]

    (folder / "demo.run.json").write_text("{}")  # another run of that name was started since
    refused = page.post("/api/deleted/restore", json={"entry": entry})
    assert refused.status_code == 400 and "demo.run.json" in refused.text and "is there again" in refused.text
    (folder / "demo.run.json").unlink()
    assert page.post("/api/deleted/restore", json={"entry": entry}).status_code == 200
    assert read_tree(folder) == with_note and not (folder / ".lorikeet-web").exists()


def test_a_run_that_cannot_be_moved_stays_whole(tmp_path, monkeypatch):
    write_full_run(tmp_path, "demo")
    before, rename = read_tree(tmp_path), os.rename

    def refuse_last(source, target):
        if "-state" in str(source) and "deleted" in str(target):
            raise PermissionError(13, "in use", str(source))
        rename(source, target)

    monkeypatch.setattr("library.web.deleted_runs.os.rename", refuse_last)
    answer = open_page(tmp_path).post("/api/runs/delete", json={"runs": ["0/demo"]})
    assert answer.status_code == 400 and "in use" in answer.text
    assert read_tree(tmp_path) == before and "data-entry" not in open_page(tmp_path).get("/runs").text


def test_a_running_run_a_strange_entry_and_a_settings_file_of_the_user_stay(tmp_path):
    write_full_run(tmp_path, "alive")
    (tmp_path / ".alive.lock").touch()
    write_full_run(tmp_path, "done")
    (tmp_path / "done.toml").write_text("seed = 1\n")
    (tmp_path / "done").mkdir()
    page = open_page(tmp_path)

    answer = page.post("/api/runs/delete", json={"runs": ["0/done", "0/alive"]})
    assert answer.status_code == 400 and "alive" in answer.text and (tmp_path / "done.safetensors").exists()
    assert page.post("/api/runs/delete", json={"runs": []}).status_code == 400
    page.post("/api/runs/delete", json={"runs": ["0/done"]})
    assert (tmp_path / "done.toml").exists() and (tmp_path / "done").is_dir()
    entry = page.get("/api/deleted").text.split('data-entry="')[1].split('"')[0]
    for wrong in ("0/alive", "0", "0/.lorikeet-web/deleted", "0/../x", "1/x", ""):
        for action in ("restore", "remove"):
            assert page.post(f"/api/deleted/{action}", json={"entry": wrong}).status_code in (400, 403, 404), wrong
    assert page.post("/api/deleted/remove", json={"entry": entry}).status_code == 200
    assert not (tmp_path / ".lorikeet-web").exists() and (tmp_path / "alive.safetensors").exists()


def test_no_run_is_deleted_if_one_of_them_waits_in_the_queue(tmp_path):
    for name in ("first", "waiting"):
        write_full_run(tmp_path, name)
    page, before = open_page(tmp_path), read_tree(tmp_path)
    page.app.state.workbench.queue.jobs.append(Job("1", "waiting", str(tmp_path), ["false"]))
    answer = page.post("/api/runs/delete", json={"runs": ["0/first", "0/waiting"]})
    assert answer.status_code == 400 and "waiting: is in the queue" in answer.text and read_tree(tmp_path) == before


def test_files_that_cannot_come_back_are_not_removed_with_the_entry(tmp_path, monkeypatch):
    write_full_run(tmp_path, "demo")
    rename, contents = os.rename, set(read_tree(tmp_path).values())

    def refuse_second(source, target):
        if Path(source).parent != tmp_path or "-state" in str(source):
            raise PermissionError(13, "in use", str(source))
        rename(source, target)

    monkeypatch.setattr("library.web.deleted_runs.os.rename", refuse_second)
    page = open_page(tmp_path)
    assert page.post("/api/runs/delete", json={"runs": ["0/demo"]}).status_code == 400
    assert {path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} >= contents
    assert "data-entry" in page.get("/api/deleted").text, "what was moved can be put back"


def test_two_requests_at_once_put_a_run_back_once(tmp_path, monkeypatch):
    write_full_run(tmp_path, "demo")
    page, before, rename = open_page(tmp_path), read_tree(tmp_path), os.rename
    page.post("/api/runs/delete", json={"runs": ["0/demo"]})
    entry = page.get("/api/deleted").text.split('data-entry="')[1].split('"')[0]
    has_moved_all, last = threading.Event(), max((tmp_path / ".lorikeet-web").glob("deleted/*/sample/*")).name

    def rename_slowly(source, target):
        rename(source, target)
        if source.name == "demo-000001.safetensors":
            has_moved_all.wait(0.4)  # by a second request, if it is let in
        if source.name == last:
            has_moved_all.set()
            time.sleep(0.2)

    def restore(_):
        return page.post("/api/deleted/restore", json={"entry": entry}).status_code

    monkeypatch.setattr("library.web.deleted_runs.os.rename", rename_slowly)
    with ThreadPoolExecutor() as threads:
        assert sorted(threads.map(restore, range(2))) == [200, 400]
    assert read_tree(tmp_path) == before


def test_nothing_is_moved_through_a_link_out_of_the_folders(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    write_full_run(tmp_path / "open", "demo")
    (tmp_path / "open" / ".lorikeet-web").symlink_to(tmp_path / "elsewhere")
    answer = open_page(tmp_path / "open").post("/api/runs/delete", json={"runs": ["0/demo"]})
    assert answer.status_code == 403 and not list((tmp_path / "elsewhere").iterdir())
