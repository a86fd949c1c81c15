"""Servers of remote files on this machine: S3 (moto's), plain HTTP with or without ranges, and a proxy with faults."""

import http.client
import http.server
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

BUCKET = "training-data"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Proxy:
    """Forwards requests to a server and counts them; each fault is used once, by the next request it applies to."""

    port: int
    requests: list[str] = field(default_factory=list)  # method, path and range
    faults: list[str] = field(default_factory=list)  # "503", "cut", "slow" or "reset", with " PATTERN" of the request
    seconds: float = 0.0  # that each answer takes
    max_at_once: int = 0
    failing_after: tuple[str, int] | None = None  # from the nth request of a pattern on, 503

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take_fault(self, request: str) -> str | None:
        if self.failing_after and re.search(self.failing_after[0], request):
            if self.count(self.failing_after[0]) > self.failing_after[1]:
                return "503"
        for fault in self.faults:
            kind, _, pattern = fault.partition(" ")
            if re.search(pattern, request):
                self.faults.remove(fault)
                return kind
        return None

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


@contextmanager
def run_proxy(target: tuple[str, int]) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    proxy = Proxy(0)
    lock, active = threading.Lock(), [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            request = f"{self.command} {unquote(self.path)} {self.headers.get('Range', '')}"
            with lock:
                proxy.requests.append(request)
                active[0] += 1
                proxy.max_at_once = max(proxy.max_at_once, active[0])
                fault = proxy.take_fault(request)
            try:
                time.sleep(proxy.seconds)
                self.answer(fault)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                with lock:
                    active[0] -= 1

        def answer(self, fault: str | None) -> None:
            if fault == "reset":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if fault == "503":
                body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                self.send_response(503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")
                return
            upstream = http.client.HTTPConnection(*target)
            length = int(self.headers.get("Content-Length", 0))
            upstream.request(self.command, self.path, self.rfile.read(length), dict(self.headers))
            answer = upstream.getresponse()
            body = answer.read()
            upstream.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            if fault == "cut":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif fault == "slow":
                for start in range(0, len(body), max(1, len(body) // 4)):
                    self.wfile.write(body[start : start + max(1, len(body) // 4)])
                    self.wfile.flush()
                    time.sleep(0.3)
            else:
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, *arguments: Any) -> None:
            pass

    with _serve(Handler) as port:
        proxy.port = port
        yield proxy


@contextmanager
def run_file_server(
    folder: Path, *, has_ranges: bool = True, has_stamps: bool = True, statuses: Mapping[str, int] | None = None
) -> Iterator[str]:
    """Serve the files of a folder over HTTP; ``statuses`` are answered for some paths instead."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = unquote(self.path.partition("?")[0]).lstrip("/")
            path = folder / name
            status = (statuses or {}).get(name, 200 if path.is_file() else 404)
            data = path.read_bytes() if status == 200 else b""
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if has_ranges else None
            total = len(data)
            if wanted and status == 200:
                status, end = 206, min(int(wanted[2] or total - 1), total - 1)
                data = data[int(wanted[1]) : end + 1]
            self.send_response(status)
            if status == 206 and wanted:
                self.send_header("Content-Range", f"bytes {wanted[1]}-{int(wanted[1]) + len(data) - 1}/{total}")
            if status < 300 and has_stamps:
                self.send_header("ETag", f'"{os.stat(path).st_mtime_ns}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    with _serve(Handler) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _serve(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class S3Server:
    """An S3 server behind a proxy."""

    def __init__(self, proxy: Proxy, client: Any):
        self.proxy, self.client = proxy, client

    def upload(self, files: Mapping[str, bytes]) -> None:
        for key, data in files.items():
            self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def upload_folder(self, folder: Path, prefix: str) -> str:
        """Upload every file and return the URL of the folder."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.upload({f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files})
        return f"s3://{BUCKET}/{prefix}"


@contextmanager
def run_s3_server(environment: dict[str, str]) -> Iterator[S3Server]:
    """Run moto's S3 server and a proxy; ``environment`` gets what makes clients use it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with run_proxy((host, port)) as proxy:
            environment.update(CREDENTIALS, AWS_ENDPOINT_URL=proxy.url)
            client = boto3.client(
                "s3",
                endpoint_url=f"http://{host}:{port}",
                aws_access_key_id="key",
                aws_secret_access_key="secret",
                region_name="us-east-1",
            )
            client.create_bucket(Bucket=BUCKET)
            s3fs.S3FileSystem.clear_instance_cache()  # those of another server
            yield S3Server(proxy, client)
    finally:
        server.stop()
