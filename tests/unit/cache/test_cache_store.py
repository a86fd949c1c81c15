"""A cache entry is valid or missing: after torn writes, damage, a full disk, a kill, and with several writers."""

import os
import random
import resource
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import CONTEXT

from library.cache.format import RECORD_DTYPE, deserialize_tensors, stack_tensors
from library.cache.keys import KEY_BYTES, stack_keys
from library.cache.maintenance import find_orphan_files, list_writer_files, prune_writer_files, select_prunable_files
from library.cache.model_fingerprint import FileHashCache
from library.cache.store import CacheStore
from library.cache.writer import CacheWriter
from library.errors import UserError


def key(number: int) -> bytes:
    return zlib.crc32(str(number).encode()).to_bytes(4, "little") + number.to_bytes(KEY_BYTES - 4, "little")


def content(number: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and sizes, computed from the number."""
    draw = torch.Generator().manual_seed(number)
    return {
        "moments": torch.randn(2, 3, 4 + number % 5, generator=draw),
        "mask": torch.randint(0, 256, (number % 3, 5), generator=draw, dtype=torch.uint8),
        "text": torch.randn(number % 4, generator=draw).bfloat16(),
    }


def fill(folder: Path, numbers, **settings) -> CacheWriter:
    with CacheWriter(folder, **settings) as writer:
        for number in numbers:
            writer.put(key(number), content(number), f"picture {number}")
    return writer


def find_valid_entries(folder: Path, numbers, *others: Path) -> set[int]:
    """Return which numbers have an entry; each entry must have the right content."""
    store = CacheStore([folder, *others])
    rows = store.find_rows(stack_keys(map(key, numbers)))
    there = {number for number, row in zip(numbers, rows.tolist(), strict=True) if row >= 0}
    damaged = set(store.find_damaged(rows[rows >= 0].tolist()))
    for number, row in zip(numbers, rows.tolist(), strict=True):
        if row in damaged:
            there.discard(number)
        elif row >= 0:
            assert store.read_name(row) == f"picture {number}"
            assert_same(deserialize_tensors(store.read_blob(row)), content(number))
    return there


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def test_entries_are_read_as_written_for_any_number_of_writers_and_shards(tmp_path):
    fill(tmp_path / "a", range(20), max_shard_bytes=600)
    fill(tmp_path / "a", range(20, 25))
    fill(tmp_path / "b", range(25, 30))
    assert len(list((tmp_path / "a").glob("*.shard"))) > 5
    assert find_valid_entries(tmp_path / "a", range(40), tmp_path / "b", tmp_path / "not there") == set(range(30))


def test_tensors_of_a_batch_are_stacked_in_order_or_listed_if_shapes_differ(tmp_path):
    fill(tmp_path, range(12))
    store = CacheStore([tmp_path])
    blobs = [store.read_blob(row) for row in store.find_rows(stack_keys([key(11), key(1), key(6), key(1)])).tolist()]
    assert torch.equal(stack_tensors(blobs, "moments"), torch.stack([content(n)["moments"] for n in (11, 1, 6, 1)]))
    listed = stack_tensors(blobs, "mask")
    assert [tuple(item.shape) for item in listed] == [(2, 5), (1, 5), (0, 5), (1, 5)]
    assert torch.equal(listed[0], content(11)["mask"])


def test_a_refresh_finds_new_entries_even_in_a_file_that_has_grown(tmp_path):
    with CacheWriter(tmp_path) as writer:
        writer.put(key(0), content(0), "picture 0")
        writer.flush()
        store = CacheStore([tmp_path])
        first = store.read_blob(0)
        writer.put(key(1), content(1), "picture 1")
        assert not store.refresh() and len(store) == 1
        writer.flush()
        assert store.refresh() and len(store) == 2
    rows = store.find_rows(stack_keys([key(1), key(0)]))
    assert [store.read_name(row) for row in rows] == ["picture 1", "picture 0"]
    assert_same(deserialize_tensors(store.read_blob(rows[0])), content(1))
    assert_same(deserialize_tensors(first), content(0))


def test_keys_with_equal_prefixes_or_trailing_zeros_are_distinct(tmp_path):
    keys = [b"same-one" + bytes([number]) * 8 for number in (0, 1, 2, 250)] + [bytes(KEY_BYTES), b"a" + bytes(15)]
    with CacheWriter(tmp_path) as writer:
        for number, name in enumerate(keys[:-1]):
            writer.put(name, {"a": torch.tensor(number)}, str(number))
    store = CacheStore([tmp_path])
    rows = store.find_rows(stack_keys([*reversed(keys), b"same-one" + b"\3" * 8]))
    assert [store.read_name(row) if row >= 0 else "" for row in rows] == ["", "4", "3", "2", "1", "0", ""]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["index", "shard"])
def test_files_truncated_at_any_byte_keep_complete_entries_and_the_rest_is_encoded_again(kind, tmp_path):
    fill(tmp_path / "whole", range(4))
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    (torn,) = (name for name in files if name.endswith(kind))
    counts = []
    for end in range(len(files[torn]) + 1):
        folder = tmp_path / str(end)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data[:end] if name == torn else data)
        there = find_valid_entries(folder, range(4))
        assert there == set(range(len(there)))
        counts.append(len(there))
        if end % 37 == 0:
            fill(folder, set(range(4)) - there)
            assert find_valid_entries(folder, range(4)) == set(range(4))
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3, 4}


def test_one_corrupted_byte_invalidates_one_entry(tmp_path):
    fill(tmp_path, range(6))
    index, shard = next(tmp_path.glob("*.index")), next(tmp_path.glob("*.shard"))
    draw = random.Random(1)
    store = CacheStore([tmp_path])
    spans = [
        (int(entry["offset"]), int(entry["offset"] + entry["length"] + entry["name_length"])) for entry in store.entries
    ]
    for path, places in (
        (shard, draw.sample(range(shard.stat().st_size), 60)),
        (index, draw.sample(range(RECORD_DTYPE.itemsize, index.stat().st_size), 60)),
    ):
        data = path.read_bytes()
        for place in places:
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :])
            lost = set(range(6)) - find_valid_or_damaged_entries(tmp_path)
            if path is index:
                assert lost == {place // RECORD_DTYPE.itemsize - 1}
            else:
                assert lost == {number for number, (first, last) in enumerate(spans) if first <= place < last}
        path.write_bytes(data)
    assert find_valid_entries(tmp_path, range(6)) == set(range(6))


def find_valid_or_damaged_entries(folder: Path) -> set[int]:
    """As ``find_valid_entries`` for six entries, but the damage may be in the name of an entry."""
    store = CacheStore([folder])
    rows = store.find_rows(stack_keys(map(key, range(6)))).tolist()
    damaged = set(store.find_damaged([row for row in rows if row >= 0]))
    right = {number for number, row in enumerate(rows) if row >= 0 and row not in damaged}
    for number in right:
        assert_same(deserialize_tensors(store.read_blob(rows[number])), content(number))
    return right


def test_a_dropped_entry_is_gone_for_all_readers_and_can_be_written_again(tmp_path):
    fill(tmp_path, range(3))
    fill(tmp_path, [1])  # another copy
    store = CacheStore([tmp_path])
    with CacheWriter(tmp_path) as writer:
        writer.drop(store.entries[store.find_rows(stack_keys([key(0), key(1)]))])
        writer.flush()
        store.refresh()
        assert find_valid_entries(tmp_path, range(3)) == {1, 2} and len(store) == 2
        writer.put(key(0), content(0), "picture 0")
    assert find_valid_entries(tmp_path, range(3)) == {0, 1, 2}


def test_unrelated_files_are_not_touched(tmp_path):
    fill(tmp_path, range(2))
    index = next(tmp_path.glob("*.index")).read_bytes()
    (tmp_path / "notes.index").write_bytes(b"hello")
    (tmp_path / f"{7:016x}.index").write_bytes(b"x" * 1000)
    (tmp_path / f"{8:016x}.index").write_bytes(index)  # another writer than the one in its name
    newer = np.frombuffer(index[: RECORD_DTYPE.itemsize], RECORD_DTYPE).copy()
    newer["part"] = 99
    (tmp_path / f"{9:016x}.index").write_bytes(newer.tobytes() + index[RECORD_DTYPE.itemsize :])
    assert find_valid_entries(tmp_path, range(2)) == {0, 1} and len(CacheStore([tmp_path])) == 2


def write_on_and_on(folder: str, first: int) -> None:
    with CacheWriter(Path(folder), sync_bytes=2000, max_shard_bytes=20_000) as writer:
        for number in range(first, first + 100_000):
            writer.put(key(number), content(number), f"picture {number}")


@pytest.mark.slow
def test_after_a_kill_each_entry_is_valid_or_missing(tmp_path):
    draw = random.Random(4)
    for attempt in range(20):
        process = CONTEXT.Process(target=write_on_and_on, args=(str(tmp_path), attempt * 100_000), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while not len(CacheStore([tmp_path]).get_index_files()) > attempt and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    store = CacheStore([tmp_path])
    assert len(store.get_index_files()) == 20 and len(store) > 100
    assert store.find_damaged(range(len(store))) == []
    for row in range(len(store)):
        number = int(store.read_name(row).removeprefix("picture "))
        assert store.entries["key"][row] == np.bytes_(key(number).rstrip(b"\0"))
        assert_same(deserialize_tensors(store.read_blob(row)), content(number))


def fill_a_small_disk(folder: str, limit: int, results) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    count = 0
    try:
        with CacheWriter(Path(folder), sync_bytes=1) as writer:
            for number in range(100, 10_000):
                writer.put(key(number), content(number), f"picture {number}")
                count += 1
    except UserError as error:
        results.put((count, str(error)))


@pytest.mark.parametrize("limit", [3 * RECORD_DTYPE.itemsize - 7, 2 * RECORD_DTYPE.itemsize, 5000, 20])
def test_a_full_disk_is_reported_and_existing_entries_survive(limit, tmp_path):
    fill(tmp_path, range(5))
    results = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=fill_a_small_disk, args=(str(tmp_path), limit, results))
    process.start()
    count, message = results.get()
    process.join()
    assert message.startswith(f"{tmp_path}: write error: File too large") and "--cache_dir" in message
    assert find_valid_entries(tmp_path, range(5)) == set(range(5))
    there = find_valid_entries(tmp_path, range(100, 10_000))
    assert there <= set(range(100, 100 + count)) and len(there) >= count - 1
    fill(tmp_path, [100 + count])
    assert find_valid_entries(tmp_path, [100 + count]) == {100 + count}


def test_nothing_is_written_after_a_torn_record(tmp_path, monkeypatch):
    writer = CacheWriter(tmp_path, sync_bytes=1)
    writer.put(key(0), content(0), "picture 0")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device"):
            writer.put(key(1), content(1), "picture 1")
    sizes = {path: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="after an earlier write error"):
        writer.put(key(2), content(2), "picture 2")
    writer.close()
    assert sizes == {path: path.stat().st_size for path in tmp_path.iterdir()}
    assert find_valid_entries(tmp_path, range(3)) == {0}


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


def test_pruning_keeps_one_copy_of_each_needed_entry_only(tmp_path):
    fill(tmp_path, range(4))
    fill(tmp_path, range(3, 8))
    fill(tmp_path, range(8, 10))
    (tmp_path / f"{5:016x}-0000.shard").write_bytes(b"nobody announced this")
    expected = [0, 3, 5]
    before = CacheStore([tmp_path])
    reader = before.read_blob(before.find_rows(stack_keys([key(5)]))[0])
    assert (
        all(bulk.is_busy for bulk in list_writer_files(before, stack_keys(map(key, expected))))
        and find_orphan_files(before) == []
    )
    age(tmp_path)
    found_bulks = list_writer_files(before, stack_keys(map(key, expected)))
    assert sorted(len(bulk.needed_rows) for bulk in found_bulks) == [0, 1, 2] and len(find_orphan_files(before)) == 1
    for bulk in select_prunable_files(found_bulks):
        prune_writer_files(before, bulk)
    assert find_valid_entries(tmp_path, range(10)) == {0, 3, 5} and len(CacheStore([tmp_path])) == 3
    assert_same(deserialize_tensors(reader), content(5))  # open readers are not affected


def test_a_damaged_entry_does_not_survive_pruning(tmp_path):
    fill(tmp_path, range(3))
    shard = next(tmp_path.glob("*.shard"))
    data = bytearray(shard.read_bytes())
    store = CacheStore([tmp_path])
    data[int(store.entries["offset"][1]) + 30] ^= 4
    shard.write_bytes(bytes(data))
    age(tmp_path)
    store = CacheStore([tmp_path])
    for bulk in select_prunable_files(list_writer_files(store, stack_keys([key(1), key(2)]))):
        prune_writer_files(store, bulk)
    assert find_valid_entries(tmp_path, range(3)) == {2} and len(CacheStore([tmp_path])) == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_dropped_entry_does_not_return_when_the_tombstone_writer_is_pruned(is_busy, tmp_path):
    fill(tmp_path, range(3))
    first = next(tmp_path.glob("*.shard"))
    store = CacheStore([tmp_path])
    with CacheWriter(tmp_path) as writer:
        writer.drop(store.entries[store.find_rows(stack_keys([key(1)]))])
        writer.put(key(7), content(7), "picture 7")
    age(tmp_path)
    if is_busy:
        first.touch()
    store, expected = CacheStore([tmp_path]), stack_keys([key(0), key(2)])
    before = sum(path.stat().st_size for path in tmp_path.glob("*.shard"))
    for bulk in select_prunable_files(list_writer_files(store, expected)):
        prune_writer_files(store, bulk)
    assert find_valid_entries(tmp_path, [0, 1, 2, 7]) == ({0, 2, 7} if is_busy else {0, 2})
    if not is_busy:  # its space is freed
        assert sum(path.stat().st_size for path in tmp_path.glob("*.shard")) < 0.7 * before
        age(tmp_path)
        assert select_prunable_files(list_writer_files(CacheStore([tmp_path]), expected)) == []


def test_the_hash_of_a_file_is_computed_again_only_when_the_file_changed(tmp_path, monkeypatch):
    file, memory = tmp_path / "weights", tmp_path / "cache" / "files.json"
    monkeypatch.setattr("library.cache.model_fingerprint.SETTLED_AFTER_NS", 0)
    file.write_bytes(b"one")
    first = FileHashCache(memory).get_hash(file)
    monkeypatch.setattr("library.cache.model_fingerprint.compute_sha256", lambda path: path.read_bytes().decode())
    assert FileHashCache(memory).get_hash(file) == first
    file.write_bytes(b"another")
    assert FileHashCache(memory).get_hash(file) == "another"
    memory.write_text("{broken")
    assert FileHashCache(memory).get_hash(file) == "another" == FileHashCache(file / "no folder").get_hash(file)
    assert sorted(path.name for path in memory.parent.iterdir()) == ["files.json"]


def test_a_file_changed_without_a_trace_in_size_and_time_is_hashed_again(tmp_path, monkeypatch):
    """As by ``cp -p`` or ``rsync -t`` of another model."""
    file, memory = tmp_path / "weights", tmp_path / "cache" / "files.json"
    monkeypatch.setattr("library.cache.model_fingerprint.SETTLED_AFTER_NS", 0)
    file.write_bytes(b"one")
    os.utime(file, ns=(10**18, 10**18))
    first = FileHashCache(memory).get_hash(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(10**18, 10**18))
    second = FileHashCache(memory).get_hash(file)
    assert first != second


def test_the_hash_of_a_file_written_just_now_is_not_cached(tmp_path, monkeypatch):
    """A change within the timestamp resolution of the file system does not change the mtime."""
    file, memory = tmp_path / "weights", tmp_path / "files.json"
    file.write_bytes(b"one")
    FileHashCache(memory).get_hash(file)
    monkeypatch.setattr("library.cache.model_fingerprint.compute_sha256", lambda path: "looked at again")
    assert FileHashCache(memory).get_hash(file) == "looked at again"
