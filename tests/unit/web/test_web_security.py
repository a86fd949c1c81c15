"""The web page refuses what is not its user's: hosts, origins, tokens, paths, large bodies."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from web_pages import ORIGIN, open_page

from library.tools.web import bind_listener
from library.web.folders import OpenedFolders, OutsideFolders
from library.web.guard import MAX_BODY_BYTES, HostNames
from library.web.login_sessions import COOKIE, Sessions

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def opened(tmp_path) -> OpenedFolders:
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open-not").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "open" / "inside.txt").write_text("a")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "open" / "linked_folder").symlink_to(tmp_path)
    (tmp_path / "open" / "loop").symlink_to(tmp_path / "open" / "loop")
    return OpenedFolders.open([str(tmp_path / "open")])


@pytest.mark.parametrize(
    "path",
    [*"../secret.txt deep/../../secret.txt link linked_folder/secret.txt /etc/passwd ../open-not".split(), "a\0b"],
)
def test_paths_outside_of_the_folders_are_refused(opened, tmp_path, path):
    with pytest.raises(OutsideFolders):
        opened.resolve(tmp_path / "open" / path)
    with pytest.raises(OutsideFolders):
        opened.resolve_key(f"0/{path}")


@pytest.mark.parametrize("key", ["1/inside.txt", "x/inside.txt", "-1/inside.txt", "", "/etc/passwd"])
def test_addresses_of_other_folders_are_refused(opened, key):
    with pytest.raises(OutsideFolders):
        opened.resolve_key(key)


def test_paths_inside_are_found_and_links_to_folders_are_not_walked(opened, tmp_path):
    path = tmp_path / "open" / "inside.txt"

    assert opened.resolve_key(opened.make_key(path)) == path and opened.format_path(path) == "inside.txt"
    assert [folder for folder, _ in opened.walk()] == [tmp_path / "open", tmp_path / "open" / "deep"]


@pytest.mark.parametrize(
    ("bound_to", "host", "is_accepted"),
    [
        ("127.0.0.1", "127.0.0.1:7860", True),
        ("127.0.0.1", "localhost:7860", True),
        ("127.0.0.1", "[::1]:7860", True),
        ("127.0.0.1", "evil.example:7860", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[::1", False),
        ("0.0.0.0", "192.168.1.5:7860", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "gpu.example:443", True),
    ],
)
def test_host_names_of_other_pages_are_refused(bound_to, host, is_accepted):
    assert HostNames.build(bound_to, ["gpu.example"]).accept(host) == is_accepted


def test_a_rebound_name_gets_no_page(tmp_path):
    assert open_page(tmp_path).get("/runs", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": f"{ORIGIN}:81"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_posts_from_other_pages_are_refused(tmp_path, headers):
    sessions, token = Sessions.build_with_token(60)
    page = open_page(tmp_path, sessions=sessions)

    assert page.post("/login", data={"token": token}, headers=headers).status_code == 403
    assert not sessions.expiry_by_hash
    assert page.post("/login", data={"token": token}).status_code == 303


def test_without_the_token_nothing_is_shown(tmp_path):
    page = open_page(tmp_path, sessions=Sessions.build_with_token(60)[0], host="0.0.0.0")

    for path in ("/", "/runs", "/pictures", "/runs/0/x", "/static/../runs"):
        answer = page.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path
    assert page.get("/api/runs").status_code == 401 and page.post("/api/jobs").status_code == 401
    page.cookies.set(COOKIE, "guessed")
    assert page.get("/api/runs").status_code == 401
    assert page.get("/login").status_code == 200


def test_a_wrong_token_is_answered_late_and_a_right_one_opens_a_session_that_expires(tmp_path):
    sessions, token = Sessions.build_with_token(60)
    page, started = open_page(tmp_path, sessions=sessions), time.monotonic()

    answer = page.post("/login", data={"token": token[:-1]})
    assert answer.status_code == 401 and "not the token" in answer.text and "set-cookie" not in answer.headers
    assert time.monotonic() - started >= 1
    cookie = page.post("/login", data={"token": token}).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and token not in cookie
    assert page.get("/").headers["location"] == "/runs"
    assert all(0 < expiry - time.monotonic() <= 60 for expiry in sessions.expiry_by_hash.values())
    sessions.expiry_by_hash = dict.fromkeys(sessions.expiry_by_hash, time.monotonic())
    assert page.get("/").headers["location"] == "/login"


def test_logging_out_ends_the_session(tmp_path):
    sessions, token = Sessions.build_with_token(60)
    page = open_page(tmp_path, sessions=sessions)
    page.post("/login", data={"token": token})

    assert page.post("/logout").status_code == 303
    assert not sessions.expiry_by_hash and page.get("/").headers["location"] == "/login"


def test_large_bodies_are_refused_with_and_without_their_length(tmp_path):
    page, chunk = open_page(tmp_path, sessions=Sessions.build_with_token(60)[0]), b"a" * 2**16

    assert page.post("/login", content=b"a" * (MAX_BODY_BYTES + 1)).status_code == 413
    assert page.post("/login", content=(chunk for _ in range(17))).status_code == 413
    announced = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    assert page.post("/login", content=b"token=a", headers=announced).status_code == 413  # before it is read
    assert page.post("/login", content=b"token=a").status_code == 401


def test_every_answer_has_the_headers_that_keep_scripts_out(tmp_path):
    page = open_page(tmp_path)

    for path in ("/login", "/static/web/page.css", "/none"):
        headers = page.get(path).headers
        assert "script-src 'self';" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


def test_errors_show_what_was_asked_as_text(tmp_path):
    answer = open_page(tmp_path).get("/runs/0/%3Cscript%3Ealert(1)%3C/script%3E")

    assert answer.status_code == 400 and "<script>alert" not in answer.text and "&lt;script" in answer.text


def test_the_address_can_be_opened_as_soon_as_it_is_printed():
    with bind_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), 5):
        pass


def test_the_command_refuses_wrong_options_all_at_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "library",
        "web",
        "--root",
        str(tmp_path / "none"),
        *"--port 70000 --rot a".split(),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert result.returncode == 2
    assert {line.split(":")[0].strip() for line in result.stderr.splitlines()[1:]} == {"--rot", "--port", "--root"}
