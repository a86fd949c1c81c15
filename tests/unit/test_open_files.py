"""Files that are open or mapped are neither removed nor replaced: the rules that ``--refuse_open_files`` sets, and the
code that keeps to them."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from library import atomic_files
from library.atomic_files import replace_path

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "tests" / "support" / "other_systems"
needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells which files are open")


def run_refusing(code: str, folder: Path) -> str:
    """Run code in a process that refuses to remove open files; return what it prints."""
    environment = os.environ | {"TEST_REFUSE_OPEN_FILES": "1", "PYTHONPATH": f"{RULES}{os.pathsep}{ROOT}"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


ATTEMPTS = """
import mmap, os, pathlib, shutil
def attempt(name, function, *arguments):
    try:
        function(*arguments)
        print(name, "done")
    except OSError as error:
        print(name, type(error).__name__)
def write(name):
    pathlib.Path(name).parent.mkdir(exist_ok=True)
    pathlib.Path(name).write_bytes(b"12345678")
    return name
"""


@needs_proc
def test_the_rules_refuse_what_windows_refuses_and_nothing_else(tmp_path):
    printed = run_refusing(
        ATTEMPTS
        + """
for name in ("a", "b", "c", "d", "folder/e", "free", "other"):
    write(name)
opened = open("a", "rb")
with open("b", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
inside = open("folder/e", "rb")
attempt("remove open", os.remove, "a")
attempt("pathlib open", pathlib.Path("a").unlink)
attempt("replace open", os.replace, "free", "a")
attempt("rename open", os.rename, "a", "free")
attempt("remove mapped", os.remove, "b")
attempt("replace mapped", os.replace, "free", "b")
attempt("truncate mapped", open, "b", "wb")
attempt("folder renamed", os.rename, "folder", "elsewhere")
attempt("folder removed", shutil.rmtree, "folder")
os.link("a", "hard")
attempt("hard link of open", os.remove, "hard")
attempt("free removed", os.remove, "c")
attempt("free replaced", os.replace, "free", "d")
attempt("truncate open", open, "a", "wb")
opened.close(); mapped.close(); inside.close()
attempt("closed removed", os.remove, "a")
attempt("unmapped replaced", os.replace, "other", "b")
attempt("closed folder", shutil.rmtree, "folder")
""",
        tmp_path,
    )
    refused = dict(line.rsplit(" ", 1) for line in printed.splitlines())

    expected = "remove open,pathlib open,replace open,rename open,remove mapped,replace mapped,folder renamed"
    assert {name for name, what in refused.items() if what == "PermissionError"} == {
        *expected.split(","),
        "folder removed",
        "hard link of open",
    }
    assert refused["truncate mapped"] == "OSError"
    assert {name for name, what in refused.items() if what == "done"} == {
        "free removed",
        "free replaced",
        "truncate open",
        "closed removed",
        "unmapped replaced",
        "closed folder",
    }


@pytest.mark.slow
@needs_proc
def test_read_adapter_files_and_checkpoints_are_not_mapped(tmp_path):
    """On Windows a file that is read and still mapped could not be overwritten by the run that has read it."""
    printed = run_refusing(
        """
import json, pathlib, torch
from safetensors.torch import save_file, load_file
from library.adapters.file_reader import read_safetensors
from library.training.checkpoint_dir import load_checkpoint_tensors, read_checkpoint_info, write_checkpoint
save_file({"a": torch.arange(4.0)}, "lora.safetensors")
tensors, _ = read_safetensors(pathlib.Path("lora.safetensors"))
pathlib.Path("lora.safetensors").unlink()
folder = pathlib.Path("run-state")
for step in (1, 2):
    write_checkpoint(folder, {"step": step, "saved_at": 0.0}, {"a": torch.full((4,), float(step))})
    loaded = load_checkpoint_tensors(read_checkpoint_info(folder))
print(tensors["a"].tolist(), loaded["a"].tolist())
save_file({"a": torch.ones(4)}, "kept.safetensors")
kept = load_file("kept.safetensors")
try:
    pathlib.Path("kept.safetensors").unlink()
except PermissionError:
    print("safetensors' own tensors map their file")
""",
        tmp_path,
    )

    assert printed.splitlines() == [
        "[0.0, 1.0, 2.0, 3.0] [2.0, 2.0, 2.0, 2.0]",
        "safetensors' own tensors map their file",
    ]


def test_a_file_that_a_reader_holds_for_a_moment_is_replaced_on_windows(tmp_path, monkeypatch):
    source, target = tmp_path / "new", tmp_path / "old"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    released, attempts, replace = threading.Event(), [], os.replace

    def replace_if_free(one, other):
        attempts.append(one)
        if not released.is_set():
            raise PermissionError(13, "used by another process", str(other))
        replace(one, other)

    monkeypatch.setattr(atomic_files.os, "replace", replace_if_free)
    monkeypatch.setattr(atomic_files, "_refuses_files_in_use", lambda: True)
    threading.Timer(0.2, released.set).start()
    replace_path(source, target)

    assert target.read_bytes() == b"new" and len(attempts) > 1


@pytest.mark.parametrize("refuses", [False, True])
def test_a_refusal_that_lasts_is_raised(refuses, tmp_path, monkeypatch):
    def refuse(one, other):
        raise PermissionError(13, "not allowed", str(other))

    monkeypatch.setattr(atomic_files.os, "replace", refuse)
    monkeypatch.setattr(atomic_files, "_refuses_files_in_use", lambda: refuses)
    monkeypatch.setattr(atomic_files, "_IN_USE_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(PermissionError):
        replace_path(tmp_path / "a", tmp_path / "b")

    assert (time.monotonic() - started > 0.2) == refuses
