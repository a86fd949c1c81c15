"""Every file is looked at once; what is known of unchanged files is believed, and of no others."""

import json
import logging
import multiprocessing
import os
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from library.data import audit, folder_scan, inspection, scan_store
from library.data.audit import audited
from library.data.inspection import Seen, pictures_inspected
from library.data.origin import Origin, Part

CONTEXT = multiprocessing.get_context("spawn")


def write(path: Path, seed: int, size: tuple[int, int] = (12, 9)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, "BMP")


def origins(folder: Path) -> list[Origin]:
    return [Origin(folder, name) for name in sorted(os.listdir(folder)) if not name.startswith(".")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Ten pictures of ten sizes, which count as settled at once; the user's own cache is in the test's folder."""
    monkeypatch.setattr(audit, "SETTLED_AFTER", -(10**15))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for number in range(10):
        write(tmp_path / "a" / f"{number}.bmp", number, (10 + number, 9))
    return tmp_path / "a"


@pytest.fixture
def work(monkeypatch) -> Counter:
    """How often something was decoded, and read."""
    done: Counter = Counter()
    examined, read_bytes = inspection.examined, Origin.read_bytes
    monkeypatch.setattr(inspection, "examined", lambda *given: (done.update(["decoded"]), examined(*given))[1])
    monkeypatch.setattr(Origin, "read_bytes", lambda self: (done.update(["read"]), read_bytes(self))[1])
    return done


def look(folder: Path, pictures: list[Origin] | None = None, cache_dir: Path | None = None) -> dict[Origin, Seen]:
    return audited(pictures_inspected(), {folder: pictures or origins(folder)}, lambda _: cache_dir).found


def did(work: Counter, folder: Path, **options) -> tuple[int, int]:
    """Files read and decoded by one more pass, which finds what a pass without any store finds."""
    work.clear()
    found = look(folder, **options)
    done = (work["read"], work["decoded"])
    assert found == {picture: inspection.look_at(picture) for picture in origins(folder)}
    return done


def test_what_is_known_of_unchanged_files_is_not_found_out_again(folder, work):
    assert did(work, folder) == (10, 10)
    assert did(work, folder) == (0, 0)


def test_exactly_the_changed_files_are_looked_at_again(folder, work):
    (folder / "bad.bmp").write_bytes(b"bad")
    assert did(work, folder) == (11, 11)
    write(folder / "3.bmp", 77)
    write(folder / "new.bmp", 78)
    assert did(work, folder) == (2, 2)
    write(folder / "bad.bmp", 79)
    assert did(work, folder) == (1, 1)
    (folder / "bad.bmp").unlink()
    assert did(work, folder) == (0, 0)


def test_a_file_that_was_touched_renamed_or_copied_is_known_by_its_bytes(folder, work):
    did(work, folder)
    os.utime(folder / "1.bmp", ns=(1, 1))
    (folder / "2.bmp").rename(folder / "two.bmp")
    (folder / "copy.bmp").write_bytes((folder / "3.bmp").read_bytes())
    assert did(work, folder) == (3, 0)
    assert did(work, folder) == (0, 0)


def test_a_file_whose_size_and_time_were_kept_by_the_editor_is_seen_to_be_changed(folder, work):
    """As when a program turns a picture by its EXIF orientation and puts the old time back."""
    did(work, folder)
    before = (folder / "4.bmp").stat()
    write(folder / "4.bmp", 99, (14, 9))
    os.utime(folder / "4.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "4.bmp").stat().st_size == before.st_size
    assert did(work, folder) == (1, 1)


def test_times_are_not_believed_of_a_file_that_was_just_changed(folder, work, monkeypatch):
    """A file system that counts in whole seconds shows two changes in one second as one."""
    stamp_of = audit.stamp_of
    monkeypatch.setattr(audit, "SETTLED_AFTER", scan_store.SETTLED_AFTER)
    whole = (os.stat(folder).st_mtime_ns // 10**9 + 1) * 10**9
    monkeypatch.setattr(audit, "stamp_of", lambda path: (stamp_of(path)[0], whole, whole))
    did(work, folder)
    write(folder / "4.bmp", 99, (14, 9))
    assert did(work, folder) == (10, 1)


def test_another_reader_believes_nothing(folder, work, monkeypatch):
    did(work, folder)
    monkeypatch.setattr(inspection, "VERSION", inspection.VERSION + 1)
    assert did(work, folder) == (10, 10)
    assert did(work, folder) == (0, 0)


def test_facts_in_another_shape_are_not_believed(folder, work, monkeypatch):
    did(work, folder)
    packed = inspection._packed
    with monkeypatch.context() as patch:
        patch.setattr(inspection, "_packed", lambda seen: packed(seen)[:2])
        write(folder / "3.bmp", 77)
        look(folder)
    assert did(work, folder) == (1, 1) and did(work, folder) == (0, 0)


def test_a_broken_store_is_named_and_replaced(folder, work, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("library"), "propagate", True)
    did(work, folder)
    path = folder / ".cache-lorikeet" / "scan" / "pictures.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        broken = [whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]][at % 2]
        path.write_bytes(broken)
        caplog.clear()
        read, decoded = did(work, folder)
        assert (read, decoded) == (10, 10) and str(path) in caplog.text, at
        assert path.read_bytes() == whole
    path.write_text('{"layout": "lorikeet scan 1"}')
    assert did(work, folder) == (10, 10)


def test_what_belongs_to_other_files_of_the_folder_stays_known(folder, work):
    did(work, folder)
    some = origins(folder)[:3]
    write(folder / "0.bmp", 50)
    look(folder, some)
    (folder / "9.bmp").unlink()
    assert did(work, folder) == (0, 0)
    assert "9.bmp" not in (folder / ".cache-lorikeet" / "scan" / "pictures.json").read_text()


def test_a_folder_of_its_own_takes_the_store_of_every_folder(folder, tmp_path, work):
    write(tmp_path / "other" / "a" / "0.bmp", 60)
    for _ in range(2):
        audited(pictures_inspected(), {where: origins(where) for where in (folder, tmp_path / "other" / "a")},
                lambda _: tmp_path / "kept")  # fmt: skip
    assert work["decoded"] == 11
    assert len(list((tmp_path / "kept" / "scan").iterdir())) == 2
    assert not (folder / ".cache-lorikeet").exists()


def test_where_nothing_can_be_written_the_users_own_cache_takes_it_and_this_is_said(folder, tmp_path, work):
    (folder / ".cache-lorikeet").write_text("in the way")
    first = audited(pictures_inspected(), {folder: origins(folder)}, lambda _: None)
    (note,) = first.notes
    assert note.startswith(f"{folder}/.cache-lorikeet/scan cannot be written to: ")
    assert f"is kept in {tmp_path}/user/lorikeet/scan/a-" in note
    assert first.folders == [tmp_path / "user" / "lorikeet" / "scan"]
    assert did(work, folder) == (0, 0)
    write(folder / "3.bmp", 77)
    assert did(work, folder) == (1, 1) and did(work, folder) == (0, 0)


def test_of_two_stores_the_newer_one_counts(folder, work, monkeypatch):
    did(work, folder)
    write_whole = scan_store.write_whole

    def read_only(path: Path, data: bytes) -> None:
        if folder in path.parents:
            raise OSError(30, "Read-only file system")
        write_whole(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(scan_store, "write_whole", read_only)
        write(folder / "3.bmp", 77)
        assert did(work, folder) == (1, 1) and did(work, folder) == (0, 0)
    write(folder / "4.bmp", 78)
    assert did(work, folder) == (1, 1) and did(work, folder) == (0, 0)


def test_where_nothing_can_be_written_at_all_the_run_goes_on(folder, tmp_path, work):
    (folder / ".cache-lorikeet").write_text("in the way")
    (tmp_path / "user").write_text("in the way")
    result = audited(pictures_inspected(), {folder: origins(folder)}, lambda _: None)
    assert len(result.found) == 10 and result.folders == []
    assert result.notes[0].endswith("at the next start, all files have to be read again")


def test_what_was_found_out_before_an_interruption_is_kept(folder, work, monkeypatch):
    monkeypatch.setattr(audit, "_AT_ONCE", 1)
    monkeypatch.setattr(audit, "_MOST_THREADS", 1)
    examined = inspection.examined

    def interrupted(*given):
        if work["decoded"] >= 6:
            raise KeyboardInterrupt
        return examined(*given)

    with monkeypatch.context() as patch:
        patch.setattr(inspection, "examined", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look(folder)
    assert did(work, folder) == (4, 4)


def test_parts_of_a_file_are_known_each_by_its_own_bytes(folder, tmp_path, work):
    contents = [(folder / f"{number}.bmp").read_bytes() for number in range(4)]
    starts = np.cumsum([0, *map(len, contents)]).tolist()

    def parts(contents: list[bytes]) -> list[Origin]:
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "shards" / "x.tar").write_bytes(b"".join(contents))
        return [Origin(tmp_path / "shards", "x.tar", Part(f"{number}.bmp", start, len(content)))
                for number, (start, content) in enumerate(zip(starts, contents, strict=False))]  # fmt: skip

    def looked() -> tuple[tuple[int, int], list[tuple[int, int]]]:
        work.clear()
        seen = look(tmp_path / "shards", parts(contents))
        return (work["read"], work["decoded"]), [one.size for one in seen.values()]

    assert looked() == ((4, 4), [(10, 9), (11, 9), (12, 9), (13, 9)])
    work.clear()
    look(tmp_path / "shards", [Origin(tmp_path / "shards", "x.tar", Part("again.bmp", starts[2], len(contents[2])))])
    assert work == {}
    write(tmp_path / "more.bmp", 5, (12, 9))
    contents[2] = (tmp_path / "more.bmp").read_bytes()
    assert looked() == ((4, 1), [(10, 9), (11, 9), (12, 9), (13, 9)])


def endlessly(folder: str, rounds: int) -> int:
    """Looks while somebody else does, and changes what it sees."""
    found = 0
    for number in range(rounds):
        write(Path(folder) / f"{os.getpid()}.bmp", number)
        found = len(look(Path(folder)))
    return found


def test_several_processes_in_one_folder_do_no_harm(folder, work):
    with CONTEXT.Pool(2) as pool:
        pool.starmap(endlessly, [(str(folder), 20)] * 2)
    did(work, folder)
    assert did(work, folder) == (0, 0)
    assert [path.name for path in (folder / ".cache-lorikeet" / "scan").iterdir()] == ["pictures.json"]


def test_a_killed_writer_leaves_the_old_store_or_the_new_one(folder, work, monkeypatch):
    did(work, folder)
    store = folder / ".cache-lorikeet" / "scan" / "pictures.json"
    before = store.read_bytes()
    write(folder / "3.bmp", 77)
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(scan_store.os, step, lambda *_: os.kill(os.getpid(), 0) or (_ for _ in ()).throw(SystemExit))
            with pytest.raises(SystemExit):
                look(folder)
        assert store.read_bytes() == before
    assert did(work, folder) == (1, 1)


def test_a_file_too_large_to_be_read_is_told_and_not_read(folder, work, monkeypatch):
    monkeypatch.setattr(audit, "MOST_BYTES", 400)
    large = look(folder)[Origin(folder, "9.bmp")]
    assert work["read"] < 10 and large.flaw is not None and large.flaw.kind == "too large"


def test_large_files_are_read_and_decoded_one_at_a_time(folder, monkeypatch):
    now, most = 0, 0
    measured = inspection._measured

    def counting(*given):
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.01)  # so that others would come in between
        result = measured(*given)
        now -= 1
        return result

    monkeypatch.setattr(audit, "_AT_ONCE", 1)
    monkeypatch.setattr(inspection, "_measured", counting)
    monkeypatch.setattr(inspection, "LARGE_PIXELS", 1)
    look(folder)
    assert most == 1


def test_a_name_that_is_no_text_is_kept_as_well_as_any(folder, work):
    odd = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.bmp")
    try:
        write(Path(odd), 5)
    except OSError:
        pytest.skip("this file system knows only names in UTF-8")
    assert did(work, folder) == (11, 11) and did(work, folder) == (0, 0)
    stored = (folder / ".cache-lorikeet" / "scan" / "pictures.json").read_bytes().split(b"\n", 1)[1]
    assert odd.rpartition("/")[2] in [row[0] for row in json.loads(stored)]


def test_a_row_costs_little_memory(folder):
    """Sizes and traits are shared; a million rows have to fit."""
    kept = {f"{number}.bmp": scan_store.Row((number, number, number), f"{number:032x}", [64, 48, 1, ""])
            for number in range(2000)}  # fmt: skip
    inspector = pictures_inspected()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    seen = [inspector.unpacked(row.facts, row.content) for row in kept.values()]
    used = (tracemalloc.get_traced_memory()[0] - before) / len(seen)
    tracemalloc.stop()
    assert used < 100 and folder_scan.FolderScan(folder, scan_store.Kept(kept, (folder,))).rows == kept
