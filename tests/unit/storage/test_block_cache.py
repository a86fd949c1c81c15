"""The cache of remote files: bounded, never half-written, shared by processes, and no loss without space."""

import multiprocessing
import os
import shutil
import time
from pathlib import Path

from library.storage.block_cache import BlockCache

BLOCK = 10_000


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def set_age(cache: BlockCache, key: str, seconds: float) -> None:
    os.utime(cache._get_path(key), (time.time() - seconds,) * 2)


def test_the_blocks_used_last_stay_and_the_size_is_bounded(tmp_path):
    cache = BlockCache(tmp_path, 20 * BLOCK)
    for number in range(15):
        cache.write(str(number), bytes([number]) * BLOCK)
        set_age(cache, str(number), 100 - number)
    assert cache.read("0") == bytes(BLOCK)  # used now
    for number in range(15, 27):
        cache.write(str(number), bytes([number]) * BLOCK)
    assert count_bytes(tmp_path) <= 20 * (BLOCK + 4)
    assert cache.read("0") is not None and cache.read("1") is None
    assert cache.read("26") == bytes([26]) * BLOCK
    BlockCache(tmp_path, 5 * BLOCK).write("new", bytes(BLOCK))  # a smaller limit than before
    assert count_bytes(tmp_path) <= 5 * (BLOCK + 4)
    cache.write("larger than everything", bytes(21 * BLOCK))
    assert cache.read("larger than everything") is None


def test_damaged_and_half_written_blocks_are_not_read(tmp_path):
    cache = BlockCache(tmp_path, 100 * BLOCK)
    cache.write("a", bytes(BLOCK))
    path = cache._get_path("a")
    for damaged in (path.read_bytes()[:-100], b"", b"x" + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        assert cache.read("a") is None
        assert not path.exists()
    unfinished = path.with_name(f".{path.name}-1-abcd")  # of a process that was killed
    unfinished.write_bytes(bytes(BLOCK))
    os.utime(unfinished, (0, 0))
    assert cache.read("a") is None
    BlockCache(tmp_path, 100 * BLOCK).write("b", bytes(BLOCK))
    assert not unfinished.exists()


def fill(folder: Path, first: int) -> None:
    cache = BlockCache(folder, 30 * BLOCK)
    for number in range(first, first + 60):
        cache.write(str(number), bytes([number]) * BLOCK)
        data = cache.read(str(number))
        assert data is None or data == bytes([number]) * BLOCK


def test_several_processes_fill_one_cache(tmp_path):
    processes = [multiprocessing.get_context("fork").Process(target=fill, args=(tmp_path, 20 * n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert count_bytes(tmp_path) <= 34 * (BLOCK + 4)  # each may add a block before the next count
    cache = BlockCache(tmp_path, 30 * BLOCK)
    kept = {number: data for number in range(120) if (data := cache.read(str(number))) is not None}
    assert kept and all(data == bytes([number]) * BLOCK for number, data in kept.items())


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = BlockCache(tmp_path / "file" / "cache", 100 * BLOCK)
    for number in range(3):
        cache.write(str(number), bytes(BLOCK))
        assert cache.read(str(number)) is None
    (message,) = caplog.messages
    assert "remote files cannot be kept here (Not a directory)" in message and "--remote_cache_dir" in message


def test_the_disk_is_never_filled_to_the_end(tmp_path, caplog, monkeypatch):
    cache = BlockCache(tmp_path, 1000 * BLOCK)
    for number in range(10):
        cache.write(str(number), bytes(BLOCK))
    total = 1000 * BLOCK
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(total, total, 0))
    for number in range(10, 20):
        cache.write(str(number), bytes(BLOCK))
    assert count_bytes(tmp_path) == 0  # there is less room than the part of the disk that is left to others
    (message,) = caplog.messages
    assert "the disk is nearly full" in message and cache.is_failing
    total = 10**15  # of a cluster, with a hundredth free
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(total, total, total // 100))
    for number in range(20, 30):
        cache.write(str(number), bytes(BLOCK))
    assert cache.read("29") is not None and not cache.is_failing
