"""Remote files over HTTP: ranges, retries, failures in one line, and nothing half-read."""

import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from remote_servers import Proxy, run_file_server, run_proxy

from library.storage.filesystems import AccessDeniedError, MissingFileError, RemoteError, RemoteOutage
from library.storage.remote_info import format_address
from library.storage.remote_path import RemotePath, build_remote_path, prefetch_files, strip_query
from library.storage.remote_store import BLOCK_BYTES, RemoteSettings, RemoteStore

DATA = random.Random(0).randbytes(3 * BLOCK_BYTES + 12345)
NAME = "a #1%20ü+=.bin"


@pytest.fixture
def proxy(tmp_path) -> Iterator[Proxy]:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / NAME).write_bytes(DATA)
    with run_file_server(tmp_path / "files") as url, run_proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy:
        yield proxy


def make_store(tmp_path: Path, **settings) -> RemoteStore:
    return RemoteStore(RemoteSettings(str(tmp_path / "cache"), **{"retry_seconds": 5.0, **settings}))


def open_path(url: str, store: RemoteStore) -> RemotePath:
    path = build_remote_path(url, store)
    assert isinstance(path, RemotePath)
    return path


def test_ranges_are_requested_once_and_read_from_the_cache(tmp_path, proxy):
    path = open_path(f"{proxy.url}/", make_store(tmp_path)) / NAME
    assert (path.name, path.suffix, str(path).rpartition("/")[2]) == (NAME, ".bin", "a%20%231%2520%C3%BC+=.bin")
    with path.open() as file:
        file.seek(BLOCK_BYTES - 10)
        assert file.read(20) == DATA[BLOCK_BYTES - 10 : BLOCK_BYTES + 10]
    assert proxy.count("GET") == 1 and f"bytes=0-{2 * BLOCK_BYTES - 1}" in proxy.requests[-1]
    assert path.read_bytes() == DATA
    assert proxy.count("GET") == 2
    other = open_path(f"{proxy.url}/", make_store(tmp_path)) / NAME  # of another run
    assert other.read_bytes() == DATA and proxy.count("GET") == 2
    assert pickle.loads(pickle.dumps(other)).read_bytes() == DATA
    assert other.is_file() and not (other.parent / "b.bin").is_file() and other.stat().st_size == len(DATA)


@pytest.mark.parametrize("fault", ["503", "cut", "reset"])
def test_failures_that_pass_are_not_noticed(tmp_path, proxy, fault: str):
    proxy.faults += [f"{fault} GET", f"{fault} GET", f"{fault} HEAD"]
    path = open_path(f"{proxy.url}/", make_store(tmp_path)) / NAME
    assert path.read_bytes() == DATA
    assert not proxy.faults


def test_a_server_that_stays_down_is_given_up_in_one_line_and_not_waited_for_again(tmp_path, proxy):
    path = open_path(f"{proxy.url}/", make_store(tmp_path, retry_seconds=0.6)) / NAME
    path.get_info()
    proxy.faults += ["503 GET"] * 20
    with pytest.raises(
        RemoteOutage, match=r"the server fails \(503, .*\), tried for 1 seconds; --remote_retry_seconds"
    ):
        path.read_bytes()
    started, before = time.monotonic(), proxy.count("GET")
    with pytest.raises(RemoteOutage):
        path.read_bytes()
    assert time.monotonic() - started < 0.5 and proxy.count("GET") == before + 1
    proxy.faults.clear()
    assert path.read_bytes() == DATA


def test_files_that_are_missing_forbidden_or_changed(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(DATA)
    with run_file_server(tmp_path / "files", statuses={"secret": 403, "login": 401}) as url:
        store = make_store(tmp_path)
        for name, kind, message in (
            ("gone", MissingFileError, "does not exist"),
            ("secret", AccessDeniedError, "access denied"),
            ("login", RemoteOutage, "credentials are missing or not valid"),
        ):
            with pytest.raises(kind, match=message) as caught:
                open_path(f"{url}/{name}?signature=geheim", store).read_bytes()
            assert type(caught.value) is kind and "geheim" not in str(caught.value)
        path = open_path(f"{url}/a?signature=geheim", store)
        assert path.get_info().size == len(DATA) and "geheim" not in f"{path}{path!r}"
        (tmp_path / "files" / "a").write_bytes(DATA[:1000])
        with pytest.raises(RemoteError, match="it has changed"):
            path.read_bytes()
        assert open_path(f"{url}/a", make_store(tmp_path)).read_bytes() == DATA[:1000]
    with pytest.raises(RemoteError, match="ftp:// is not supported; use s3://"):
        open_path("ftp://host/a", store).read_bytes()
    with pytest.raises(RemoteError, match="http servers list no folders"):
        open_path(url, store).list_folder(recursive=False)
    assert strip_query("https://a/b.tar?x=y") == "https://a/b.tar" and strip_query("s3://a/b?c") == "s3://a/b?c"


def test_urls_with_a_password_an_encoded_slash_or_several_queries(tmp_path, proxy):
    """As of Firebase, whose names have slashes, and of scripts, whose query is the name."""
    store = make_store(tmp_path)
    path = open_path(f"{proxy.url.replace('//', '//me:geheim@')}/{quote(NAME)}?x=y", store)
    assert "geheim" not in f"{path}{path!r}{strip_query('https://me:geheim@host/a?x=y')}"
    assert path.read_bytes() == DATA and (path.parent / path.name).read_bytes() == DATA
    assert format_address(path.url, path.query).startswith("http://me:geheim@127.0.0.1")
    (tmp_path / "files" / "a").mkdir()
    (tmp_path / "files" / "a" / "b c").write_bytes(b"1")
    path = open_path(f"{proxy.url}/a%2fb%20c?alt=media", store)
    again = path.parent / path.name
    assert path.name == "a%2Fb c" and again.read_bytes() == b"1" and again.url.endswith("/a%2Fb%20c")
    first = open_path(f"{proxy.url}/{quote(NAME)}?id=1", store)
    assert first == open_path(f"{proxy.url}/{quote(NAME)}?id=2", store)
    with pytest.raises(RemoteError, match="has several queries"):
        first.read_bytes()


def test_a_signed_url_that_expires_is_no_fault_of_the_file(tmp_path):
    (tmp_path / "files").mkdir()
    for name in "ab":
        (tmp_path / "files" / name).write_bytes(DATA)
    statuses = {"c": 403}
    with run_file_server(tmp_path / "files", statuses=statuses) as url:
        store = make_store(tmp_path)
        signed, other = open_path(f"{url}/a?signature=geheim", store), open_path(f"{url}/b", store)
        assert signed.is_file() and other.is_file()
        statuses |= {"a": 403, "b": 403}
        with pytest.raises(RemoteOutage, match=r"access denied .*; the signed URL may have expired$"):
            signed.read_bytes()
        with pytest.raises(RemoteError, match="access denied") as caught:
            other.read_bytes()
        assert not isinstance(caught.value, RemoteOutage)


@pytest.mark.parametrize("has_stamps", [True, False])
def test_a_server_without_ranges_is_asked_once(tmp_path, has_stamps: bool):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(DATA)
    with (
        run_file_server(tmp_path / "files", has_ranges=False, has_stamps=has_stamps) as url,
        run_proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy,
    ):
        path = open_path(f"{proxy.url}/a", make_store(tmp_path))
        with path.open() as file:
            for start in (2 * BLOCK_BYTES, 0, 5):
                file.seek(start)
                assert file.read(100) == DATA[start : start + 100]
        assert proxy.count("GET") == 1
        again = open_path(f"{proxy.url}/a", make_store(tmp_path))
        assert again.read_bytes() == DATA
        assert proxy.count("GET") == (1 if has_stamps else 2)  # without stamps, the file may have changed
        small = make_store(tmp_path, cache_bytes=2 * BLOCK_BYTES)
        (tmp_path / "files" / "b").write_bytes(DATA)
        with pytest.raises(
            RemoteError, match=r"no byte ranges, only all 0.0 GiB, which do not fit into --remote_cache"
        ):
            open_path(f"{proxy.url}/b", small).open().read(100)


def test_a_forked_worker_does_not_disturb_the_connections_of_its_parent(tmp_path, proxy):
    """The finalizer of the parent's file system would close them in the worker too; both share one epoll instance."""
    (tmp_path / "files" / "b").write_bytes(DATA)
    store = make_store(tmp_path)
    assert (open_path(proxy.url, store) / NAME).read_bytes() == DATA
    pid = os.fork()
    if pid == 0:
        is_equal = open_path(f"{proxy.url}/b", make_store(tmp_path / "worker")).read_bytes() == DATA
        gc.collect()
        is_equal &= open_path(f"{proxy.url}/b", make_store(tmp_path / "again")).read_bytes() == DATA
        os._exit(not is_equal)
    assert os.waitpid(pid, 0)[1] == 0
    started = time.monotonic()
    assert open_path(f"{proxy.url}/b", store).read_bytes() == DATA
    assert time.monotonic() - started < 5


def count_requested_bytes(proxy: Proxy) -> int:
    ranges = [request.rpartition("bytes=")[2].partition("-") for request in proxy.requests if "bytes=" in request]
    return sum(int(last) - int(first) + 1 for first, _, last in ranges)


@pytest.mark.parametrize("cache_bytes", [2 * BLOCK_BYTES, 1000])
def test_what_does_not_fit_into_the_cache_is_not_requested_ahead(tmp_path, proxy, cache_bytes: int):
    (tmp_path / "files" / "large").write_bytes(DATA * 4)
    folder = open_path(proxy.url, make_store(tmp_path, cache_bytes=cache_bytes))
    with (folder / "large").open() as file:
        while len(data := file.read(100_000)):
            assert data == (DATA * 4)[file.tell() - len(data) : file.tell()]
    assert count_requested_bytes(proxy) < 2.1 * 4 * len(DATA)  # a read across two blocks requests both
    proxy.requests.clear()
    prefetch_files([folder / "large", folder / NAME])
    assert proxy.count("GET") == 0


@pytest.mark.slow
def test_many_files_are_requested_at_once(tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(60):
        (tmp_path / "files" / str(number)).write_bytes(bytes([number]) * 100)
    with (
        run_file_server(tmp_path / "files") as url,
        run_proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy,
    ):
        proxy.seconds = 0.02
        folder = open_path(proxy.url, make_store(tmp_path))
        paths = [folder / str(number) for number in range(60)]
        prefetch_files([*paths, folder / "missing", Path("local")])
        assert proxy.max_at_once > 8
        before = len(proxy.requests)
        assert [path.read_bytes() for path in paths] == [bytes([number]) * 100 for number in range(60)]
        assert len(proxy.requests) == before
        pid = os.fork()
        if pid == 0:  # as a data loader worker: other threads, another event loop
            prefetch_files(folder / str(number) for number in range(60, 70))
            os._exit((folder / "7").read_bytes() != bytes([7]) * 100)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_large_file_of_a_server_without_ranges_is_sent_once(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(DATA * 8)
    with (
        run_file_server(tmp_path / "files", has_ranges=False) as url,
        run_proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy,
    ):
        assert open_path(f"{proxy.url}/a", make_store(tmp_path)).read_bytes() == DATA * 8
        assert proxy.count("GET") == 1
        path = open_path(f"{proxy.url}/a", make_store(tmp_path / "other"))
        prefetch_files([path])
        assert proxy.count("GET") == 2 and path.read_bytes() == DATA * 8 and proxy.count("GET") == 2


def test_a_process_killed_while_it_downloads_leaves_nothing_half_written(tmp_path, proxy):
    proxy.faults += ["slow GET"]
    code = (
        "from library.storage.remote_path import build_remote_path\n"
        "from library.storage.remote_store import RemoteSettings, RemoteStore\n"
        f"(build_remote_path({proxy.url!r}, RemoteStore(RemoteSettings({str(tmp_path / 'cache')!r}))) / {NAME!r})"
        ".read_bytes()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not proxy.count("GET"):
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    path = open_path(proxy.url, make_store(tmp_path)) / NAME
    assert path.read_bytes() == DATA
    assert proxy.count("GET") == 2
