"""Every image is scanned once; cached results are used for unchanged files only."""

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

from library.dataset import image_inspection, scan, scan_cache
from library.dataset.image_inspection import InspectedImage, build_image_inspector
from library.dataset.image_ref import ByteRange, ImageRef
from library.dataset.scan import scan_images
from library.dataset.scan_cache import CachedScan, ScanCache

CONTEXT = multiprocessing.get_context("spawn")


def write_image(path: Path, seed: int, size: tuple[int, int] = (12, 9)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, "BMP")


def list_images(folder: Path) -> list[ImageRef]:
    return [ImageRef(folder, name) for name in sorted(os.listdir(folder)) if not name.startswith(".")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Ten images of ten sizes with old timestamps; the user cache directory is in the test's folder."""
    monkeypatch.setattr(scan, "SETTLED_AFTER_NS", -(10**15))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for number in range(10):
        write_image(tmp_path / "a" / f"{number}.bmp", number, (10 + number, 9))
    return tmp_path / "a"


@pytest.fixture
def work(monkeypatch) -> Counter:
    """Counts of decoded and read images."""
    result: Counter = Counter()
    examined, read_bytes = image_inspection.inspect_bytes, ImageRef.read_bytes
    monkeypatch.setattr(
        image_inspection, "inspect_bytes", lambda *given: (result.update(["decoded"]), examined(*given))[1]
    )
    monkeypatch.setattr(ImageRef, "read_bytes", lambda self: (result.update(["read"]), read_bytes(self))[1])
    return result


def run_scan(
    folder: Path, images: list[ImageRef] | None = None, cache_dir: Path | None = None
) -> dict[ImageRef, InspectedImage]:
    return scan_images(build_image_inspector(), {folder: images or list_images(folder)}, lambda _: cache_dir).images


def count_work(work: Counter, folder: Path, **options) -> tuple[int, int]:
    """Count the images read and decoded by one more scan, whose results equal those of a scan without a cache."""
    work.clear()
    results = run_scan(folder, **options)
    result = (work["read"], work["decoded"])
    assert results == {image: image_inspection.inspect_image(image) for image in list_images(folder)}
    return result


def test_unchanged_files_are_not_scanned_again(folder, work):
    assert count_work(work, folder) == (10, 10)
    assert count_work(work, folder) == (0, 0)


def test_exactly_the_changed_files_are_scanned_again(folder, work):
    (folder / "bad.bmp").write_bytes(b"bad")
    assert count_work(work, folder) == (11, 11)
    write_image(folder / "3.bmp", 77)
    write_image(folder / "new.bmp", 78)
    assert count_work(work, folder) == (2, 2)
    write_image(folder / "bad.bmp", 79)
    assert count_work(work, folder) == (1, 1)
    (folder / "bad.bmp").unlink()
    assert count_work(work, folder) == (0, 0)


def test_a_touched_renamed_or_copied_file_is_recognized_by_its_content(folder, work):
    count_work(work, folder)
    os.utime(folder / "1.bmp", ns=(1, 1))
    (folder / "2.bmp").rename(folder / "two.bmp")
    (folder / "copy.bmp").write_bytes((folder / "3.bmp").read_bytes())
    assert count_work(work, folder) == (3, 0)
    assert count_work(work, folder) == (0, 0)


def test_a_change_that_preserves_size_and_mtime_is_noticed(folder, work):
    """As when a program rotates an image by its EXIF orientation and restores the old mtime."""
    count_work(work, folder)
    before = (folder / "4.bmp").stat()
    write_image(folder / "4.bmp", 99, (14, 9))
    os.utime(folder / "4.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "4.bmp").stat().st_size == before.st_size
    assert count_work(work, folder) == (1, 1)


def test_the_times_of_a_recently_changed_file_are_not_trusted(folder, work, monkeypatch):
    """A file system with timestamps of whole seconds shows two changes in one second as one."""
    stat_file = scan.stat_file
    monkeypatch.setattr(scan, "SETTLED_AFTER_NS", scan_cache.SETTLED_AFTER_NS)
    whole = (os.stat(folder).st_mtime_ns // 10**9 + 1) * 10**9
    monkeypatch.setattr(scan, "stat_file", lambda path: (stat_file(path)[0], whole, whole))
    count_work(work, folder)
    write_image(folder / "4.bmp", 99, (14, 9))
    assert count_work(work, folder) == (10, 1)


def test_another_version_ignores_the_cache(folder, work, monkeypatch):
    count_work(work, folder)
    monkeypatch.setattr(image_inspection, "INSPECTION_VERSION", image_inspection.INSPECTION_VERSION + 1)
    assert count_work(work, folder) == (10, 10)
    assert count_work(work, folder) == (0, 0)


def test_facts_of_another_shape_are_ignored(folder, work, monkeypatch):
    count_work(work, folder)
    packed = image_inspection._pack_image
    with monkeypatch.context() as patch:
        patch.setattr(image_inspection, "_pack_image", lambda seen: packed(seen)[:2])
        write_image(folder / "3.bmp", 77)
        run_scan(folder)
    assert count_work(work, folder) == (1, 1) and count_work(work, folder) == (0, 0)


def test_a_damaged_cache_is_reported_and_replaced(folder, work, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("library"), "propagate", True)
    count_work(work, folder)
    path = folder / ".cache-lorikeet" / "scan" / "images.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        broken = [whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]][at % 2]
        path.write_bytes(broken)
        caplog.clear()
        read, decoded = count_work(work, folder)
        assert (read, decoded) == (10, 10) and str(path) in caplog.text, at
        assert path.read_bytes() == whole
    path.write_text('{"layout": "lorikeet scan 1"}')
    assert count_work(work, folder) == (10, 10)


def test_entries_of_files_that_are_not_requested_are_kept(folder, work):
    count_work(work, folder)
    some = list_images(folder)[:3]
    write_image(folder / "0.bmp", 50)
    run_scan(folder, some)
    (folder / "9.bmp").unlink()
    assert count_work(work, folder) == (0, 0)
    assert "9.bmp" not in (folder / ".cache-lorikeet" / "scan" / "images.json").read_text()


def test_cache_dir_holds_the_caches_of_all_folders(folder, tmp_path, work):
    write_image(tmp_path / "other" / "a" / "0.bmp", 60)
    for _ in range(2):
        scan_images(
            build_image_inspector(),
            {root: list_images(root) for root in (folder, tmp_path / "other" / "a")},
            lambda _: tmp_path / "kept",
        )
    assert work["decoded"] == 11
    assert len(list((tmp_path / "kept" / "scan").iterdir())) == 2
    assert not (folder / ".cache-lorikeet").exists()


def test_without_write_access_the_user_cache_directory_is_used_and_noted(folder, tmp_path, work):
    (folder / ".cache-lorikeet").write_text("in the way")
    first = scan_images(build_image_inspector(), {folder: list_images(folder)}, lambda _: None)
    (note,) = first.notes
    assert note.startswith(f"{folder}/.cache-lorikeet/scan is not writable: ")
    assert f"scan results are cached in {tmp_path}/user/lorikeet/scan/a-" in note
    assert first.cache_folders == [tmp_path / "user" / "lorikeet" / "scan"]
    assert count_work(work, folder) == (0, 0)
    write_image(folder / "3.bmp", 77)
    assert count_work(work, folder) == (1, 1) and count_work(work, folder) == (0, 0)


def test_of_two_caches_the_newer_one_is_used(folder, work, monkeypatch):
    count_work(work, folder)
    write_atomic = scan_cache.write_atomic

    def read_only(path: Path, data: bytes) -> None:
        if folder in path.parents:
            raise OSError(30, "Read-only file system")
        write_atomic(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(scan_cache, "write_atomic", read_only)
        write_image(folder / "3.bmp", 77)
        assert count_work(work, folder) == (1, 1) and count_work(work, folder) == (0, 0)
    write_image(folder / "4.bmp", 78)
    assert count_work(work, folder) == (1, 1) and count_work(work, folder) == (0, 0)


def test_the_scan_works_where_nothing_is_writable(folder, tmp_path, work):
    (folder / ".cache-lorikeet").write_text("in the way")
    (tmp_path / "user").write_text("in the way")
    result = scan_images(build_image_inspector(), {folder: list_images(folder)}, lambda _: None)
    assert len(result.images) == 10 and result.cache_folders == []
    assert result.notes[0].endswith("all images will be scanned again at the next start")


def test_results_before_an_interruption_are_cached(folder, work, monkeypatch):
    monkeypatch.setattr(scan, "_IMAGES_PER_TASK", 1)
    monkeypatch.setattr(scan, "_MAX_THREADS", 1)
    examined = image_inspection.inspect_bytes

    def interrupted(*given):
        if work["decoded"] >= 6:
            raise KeyboardInterrupt
        return examined(*given)

    with monkeypatch.context() as patch:
        patch.setattr(image_inspection, "inspect_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_scan(folder)
    assert count_work(work, folder) == (4, 4)


def test_parts_of_a_file_are_cached_by_their_own_content(folder, tmp_path, work):
    contents = [(folder / f"{number}.bmp").read_bytes() for number in range(4)]
    starts = np.cumsum([0, *map(len, contents)]).tolist()

    def write_parts(contents: list[bytes]) -> list[ImageRef]:
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "shards" / "x.tar").write_bytes(b"".join(contents))
        return [
            ImageRef(tmp_path / "shards", "x.tar", ByteRange(f"{number}.bmp", start, len(content)))
            for number, (start, content) in enumerate(zip(starts, contents, strict=False))
        ]

    def scan_parts() -> tuple[tuple[int, int], list[tuple[int, int]]]:
        work.clear()
        seen = run_scan(tmp_path / "shards", write_parts(contents))
        return (work["read"], work["decoded"]), [one.size for one in seen.values()]

    assert scan_parts() == ((4, 4), [(10, 9), (11, 9), (12, 9), (13, 9)])
    work.clear()
    run_scan(
        tmp_path / "shards",
        [ImageRef(tmp_path / "shards", "x.tar", ByteRange("again.bmp", starts[2], len(contents[2])))],
    )
    assert work == {}
    write_image(tmp_path / "more.bmp", 5, (12, 9))
    contents[2] = (tmp_path / "more.bmp").read_bytes()
    assert scan_parts() == ((4, 1), [(10, 9), (11, 9), (12, 9), (13, 9)])


def scan_repeatedly(folder: str, rounds: int) -> int:
    """Scan and change images while another process does the same."""
    actual = 0
    for number in range(rounds):
        write_image(Path(folder) / f"{os.getpid()}.bmp", number)
        actual = len(run_scan(Path(folder)))
    return actual


def test_several_processes_may_scan_one_folder(folder, work):
    with CONTEXT.Pool(2) as pool:
        pool.starmap(scan_repeatedly, [(str(folder), 20)] * 2)
    count_work(work, folder)
    assert count_work(work, folder) == (0, 0)
    assert [path.name for path in (folder / ".cache-lorikeet" / "scan").iterdir()] == ["images.json"]


def test_a_killed_writer_leaves_the_old_or_the_new_cache(folder, work, monkeypatch):
    count_work(work, folder)
    store = folder / ".cache-lorikeet" / "scan" / "images.json"
    before = store.read_bytes()
    write_image(folder / "3.bmp", 77)
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(scan_cache.os, step, lambda *_: os.kill(os.getpid(), 0) or (_ for _ in ()).throw(SystemExit))
            with pytest.raises(SystemExit):
                run_scan(folder)
        assert store.read_bytes() == before
    assert count_work(work, folder) == (1, 1)


def test_a_file_over_the_size_limit_is_reported_and_not_read(folder, work, monkeypatch):
    monkeypatch.setattr(scan, "MAX_FILE_BYTES", 400)
    large = run_scan(folder)[ImageRef(folder, "9.bmp")]
    assert work["read"] < 10 and large.defect is not None and large.defect.kind == "too large"


def test_large_files_are_read_and_decoded_one_at_a_time(folder, monkeypatch):
    now, most = 0, 0
    measured = image_inspection._measure_image

    def counting(*given):
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.01)  # so that other processes could interleave
        result = measured(*given)
        now -= 1
        return result

    monkeypatch.setattr(scan, "_IMAGES_PER_TASK", 1)
    monkeypatch.setattr(image_inspection, "_measure_image", counting)
    monkeypatch.setattr(image_inspection, "LARGE_IMAGE_PIXELS", 1)
    run_scan(folder)
    assert most == 1


def test_a_file_name_that_is_not_utf8_is_cached(folder, work):
    odd = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.bmp")
    try:
        write_image(Path(odd), 5)
    except OSError:
        pytest.skip("this file system knows only names in UTF-8")
    assert count_work(work, folder) == (11, 11) and count_work(work, folder) == (0, 0)
    stored = (folder / ".cache-lorikeet" / "scan" / "images.json").read_bytes().split(b"\n", 1)[1]
    assert odd.rpartition("/")[2] in [row[0] for row in json.loads(stored)]


def test_a_cached_result_takes_little_memory():
    """Sizes and traits are shared objects, so that a million results fit in memory."""
    cached = [CachedScan((number, number, number), f"{number:032x}", [64, 48, 1, ""]) for number in range(2000)]
    inspector = build_image_inspector()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    seen = [inspector.unpack(entry.facts, entry.content) for entry in cached]
    used = (tracemalloc.get_traced_memory()[0] - before) / len(seen)
    tracemalloc.stop()
    assert used < 100


def test_a_cache_reads_the_entries_that_it_wrote(tmp_path):
    entry = CachedScan((1, 2, 3), "0" * 32, [64, 48, 1, ""])
    cache = ScanCache(tmp_path, None, "images", "version")
    cache.update("1.png", entry)
    assert cache.write() is None
    assert ScanCache(tmp_path, None, "images", "version").entries == {"1.png": entry}
    assert ScanCache(tmp_path, None, "images", "another version").entries == {}
