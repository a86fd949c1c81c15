"""The doctor: what it tries is really tried, what hangs or crashes is only reported, and its exit code is honest."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from library.distributed.attempt import Attempt, attempt, found_elsewhere
from library.distributed.claims import Verdict
from library.distributed.devices import Machine
from library.errors import ConfigError
from library.tools import doctor, doctor_checks, doctor_packages
from library.tools.doctor_finding import Finding

ROOT = Path(__file__).resolve().parent.parent
TRIALS = "library.distributed.trials"
TRAIN = ["accelerate", "launch", "train_lora.py", "--dataset_config", str(ROOT / "dataset_configs" / "demo.toml")]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A module whose functions misbehave."""
    (tmp_path / "misbehaving.py").write_text(
        "import os, time, subprocess, sys\n"
        "def hang(path):\n"
        "    subprocess.Popen([sys.executable, '-c', f'import time; time.sleep(4); open({path!r}, \"w\")'])\n"
        "    time.sleep(60)\n"
        "def crash(): os.abort()\n"
        "def fail(): raise ValueError('no such luck')\n"
        "def leave(): sys.exit(3)\n"
        "def answer(word): print('noise'); return {'word': word, 'rank': os.environ.get('RANK')}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_what_hangs_is_ended_with_all_that_it_started(modules):
    began = time.monotonic()
    tried = attempt("misbehaving", "hang", str(modules / "survived"), seconds=1)

    assert (tried.ok, tried.reason) == (False, "no answer within 1 s") and time.monotonic() - began < 10
    time.sleep(4)
    assert not (modules / "survived").exists()


def test_what_crashes_or_fails_is_reported_with_its_reason(modules):
    assert attempt("misbehaving", "crash", seconds=20).reason == "crashed with SIGABRT"
    assert attempt("misbehaving", "fail", seconds=20).reason == "ValueError: no such luck"
    assert attempt("misbehaving", "leave", seconds=20).reason == "ended with exit code 3"


def test_what_ends_without_an_answer_and_what_leaves_children_behind_is_no_trouble(modules):
    (modules / "odd.py").write_text(
        "import os, subprocess, sys\n"
        "def silent(): sys.exit(0)\n"
        "def parent(): subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']); return 1\n"
        "def advised(): sys.stderr.write('Traceback\\nsome.BackendError: no compiler\\n\\nSet VERBOSE=1 for more\\n'); "
        "os._exit(1)\n"
    )
    began = time.monotonic()

    assert attempt("odd", "silent", seconds=20).reason == "ended without an answer"
    assert attempt("odd", "parent", seconds=20).answer == 1
    assert attempt("odd", "advised", seconds=20).reason == "some.BackendError: no compiler"
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("broken", [["wandb", "psutil"], ["torch"]])
def test_a_package_that_cannot_be_imported_is_a_finding_and_no_traceback(broken, tmp_path):
    for package in broken:
        (tmp_path / f"{package}.py").write_text("raise ImportError('libsomething.so: not found')\n")
    done = subprocess.run([sys.executable, "-m", "library", "doctor"], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120)  # fmt: skip

    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    for package in broken:
        (line,) = [line for line in done.stdout.splitlines() if line.split()[1:2] == [f"{package}:"]]
        assert line.startswith("BROKEN") and "libsomething.so: not found" in line
        assert "pip install --force-reinstall" in line


def test_a_compiler_that_does_nothing_is_no_compiler(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    assert "did nothing" in attempt(TRIALS, "compile_one_kernel", "cpu", seconds=120).reason


def test_a_step_whose_loss_is_no_number_is_broken(monkeypatch):
    monkeypatch.setattr(doctor_checks, "attempt", lambda *_, **__: Attempt(True, float("nan"), "", 1.0))

    assert doctor_checks._step("cpu").is_broken


def test_every_device_gets_its_own_step_and_several_need_their_backend(monkeypatch):
    monkeypatch.setattr(doctor_checks, "attempt", lambda *_, **__: Attempt(False, None, "no", 1.0))
    monkeypatch.setattr(doctor_checks, "group_backends", lambda machine: (("nccl", "cuda"),))
    found = {finding.name: finding for finding in doctor_checks.trials(Machine("cuda", 3))}

    assert {"a training step on cuda", "a training step on cuda:1", "a training step on cuda:2"} <= set(found)
    assert found["nccl on cuda"].is_broken


def test_an_answer_comes_back_and_no_launcher_shines_through(modules, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    assert attempt("misbehaving", "answer", "hello", seconds=20).answer == {"word": "hello", "rank": None}


def test_trials_are_real():
    assert attempt(TRIALS, "precision", "cpu", "bf16", seconds=60).answer == "torch.bfloat16"
    fp16 = attempt(TRIALS, "precision", "cpu", "fp16", seconds=60)
    assert not fp16.ok and fp16.reason == "RuntimeError: accelerate computes in float32 instead"
    assert attempt(TRIALS, "all_reduce", "gloo", "cpu", seconds=60).ok
    assert not attempt(TRIALS, "all_reduce", "nccl", "cpu", seconds=60).ok
    (memory,) = attempt(TRIALS, "memory", "cpu", seconds=60).answer
    assert 0 < memory["free"] <= memory["total"]


def test_a_foreign_package_of_our_name_is_found_out(tmp_path, monkeypatch):
    tried = found_elsewhere("library", str(tmp_path))
    assert not tried.ok or Path(tried.answer).parent == ROOT / "library"  # where it is installed, ours is found
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_checks.tempfile, "gettempdir", lambda: str(tmp_path.parent))
    (finding,) = [found for found in doctor_checks.places(tmp_path, {}) if "is ours" in found.name]

    assert finding.is_broken and str(tmp_path) in finding.value and "virtual environment" in finding.fix


def test_a_full_disk_is_broken(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (finding,) = [found for found in doctor_checks.places(tmp_path, {}) if found.name == "disk"]

    assert finding.is_broken and finding.value.startswith("0.0 GiB free")


def test_accelerates_file_is_shown_and_a_broken_one_is_told(tmp_path):
    environment = {"HF_HOME": str(tmp_path)}
    path = tmp_path / "accelerate" / "default_config.yaml"

    def finding() -> Finding:
        return next(found for found in doctor_checks.places(tmp_path, environment) if found.name == "accelerate's file")

    assert "not there" in finding().value and finding().ok
    path.parent.mkdir()
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    assert finding().ok and f"{path}: distributed_type NO, mixed_precision bf16" == finding().value
    path.write_text("mixed_precison: bf16\n")
    assert finding().is_broken and "accelerate cannot read" in finding().value


def test_old_and_missing_packages_are_broken_with_the_command_that_helps(monkeypatch):
    installed = {"torch": "2.6.1+cu124", "peft": None}
    real = doctor_packages.version_of
    monkeypatch.setattr(
        doctor_packages, "version_of", lambda name: installed[name] if name in installed else real(name)
    )
    found = {finding.name: finding for finding in doctor_packages.packages()}

    assert found["torch"].is_broken and found["torch"].fix == "pip install -U 'torch>=2.11'"
    assert found["peft"].is_broken and found["peft"].value == "not installed"
    assert not found["accelerate"].is_broken and not found["deepspeed"].is_broken


def test_the_oldest_packages_are_those_of_the_package_file():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, oldest in doctor_packages.NEEDED.items():
        assert re.search(rf'"{name}>=([\d.]+)"', text)[1] == ".".join(map(str, oldest)), name


def test_a_driver_that_torch_does_not_use_is_said(monkeypatch):
    monkeypatch.setattr(doctor_checks, "command_output", lambda command: "550.90\n550.90")
    driver = doctor_checks.toolkit(Machine())[1]

    assert driver.value == "550.90, not used by torch" and "pytorch.org" in driver.fix and not driver.is_broken
    assert doctor_checks.toolkit(Machine("cuda", 2))[1].ok


def test_numa_is_explained():
    bound = Machine("cuda", 2, numa_nodes=2)
    machines = (Machine(), bound, replace(bound, affinity_obstacle="no pynvml"))

    assert tuple(doctor_checks.machine_facts(machine)[1].value for machine in machines) == (
        "1 NUMA node; processes are not bound: there is one node",
        "2 NUMA nodes; each process is bound to the node of its device",
        "2 NUMA nodes; processes are not bound: no pynvml",
    )


# the report


GOOD, BAD = Finding("a", "fine"), Finding("b", "gone", False, "put it back")
SPARE = replace(BAD, name="c", needed=False)
LOST = Verdict("precision", "bf16", "code", (), "precision: code says bf16", is_error=False)


@pytest.mark.parametrize(
    ("findings", "verdicts", "code", "last"),
    [
        ([GOOD], [], 0, "nothing that training needs is broken"),
        ([GOOD, SPARE], [LOST], 0, "nothing that training needs is broken"),
        ([GOOD, BAD], [], 1, "1 broken"),
        ([BAD], [replace(LOST, is_error=True)], 1, "2 broken"),
    ],
)
def test_the_exit_code_tells_whether_something_needed_is_broken(findings, verdicts, code, last, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda command: (findings, verdicts))
    text, exit_code = doctor.run([])

    assert exit_code == code and text.splitlines()[-1] == last
    assert ("BROKEN  b: gone  -> put it back" in text) == (BAD in findings)
    assert ("no      c: gone  -> put it back" in text) == (SPARE in findings)
    told = json.loads(doctor.run(["--json"])[0])
    assert len(told["findings"]) == len(findings) and len(told["settings"]) == len(verdicts)


def test_the_table_shows_winner_losers_and_contradiction(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = [*TRAIN[:2], "--mixed_precision", "bf16", *TRAIN[2:], "--mixed_precision", "no"]
    findings, verdicts = doctor.of_command(words)
    lines = doctor.as_text(findings, verdicts).splitlines()

    assert findings == []
    at = next(index for index, line in enumerate(lines) if line.startswith("  precision"))
    assert lines[at].split() == ["precision", "no", "--mixed_precision"]
    assert lines[at + 1].strip() == "lost: launch flag --mixed_precision says bf16"
    assert lines[at + 2].strip().startswith("discouraged: precision: --mixed_precision says no and counts")


def test_mistakes_in_the_training_options_are_told_as_well():
    findings, verdicts = doctor.of_command([*TRAIN, "--learning_rat", "1"])

    assert [finding.is_broken for finding in findings] == [True] and "did you mean" in findings[0].value
    assert verdicts


def test_a_plain_python_command_is_understood_and_anything_else_is_refused():
    findings, verdicts = doctor.of_command(["python", *TRAIN[2:], "--mixed_precision", "bf16"])
    assert findings == [] and verdicts[0].value == "bf16"

    with pytest.raises(ConfigError, match="not a command that starts training: ls -l"):
        doctor.of_command(["ls", "-l"])
    with pytest.raises(ConfigError, match="--jsn: unexpected"):
        doctor.run(["--jsn"])


def test_a_step_that_fails_is_broken_and_names_the_reason(monkeypatch):
    monkeypatch.setattr(doctor_checks, "attempt", lambda *_, **__: Attempt(False, None, "RuntimeError: no", 1.0))
    found = {finding.name: finding for finding in doctor_checks.trials(Machine())}

    assert found["a training step on cpu"].is_broken and found["a training step on cpu"].value == "RuntimeError: no"
    assert found["device cpu"].is_broken and not found["compile on cpu"].is_broken
    assert set(found) == {"device cpu", "bf16 on cpu", "fp16 on cpu", "compile on cpu", "a training step on cpu",
                          "gloo on cpu"}  # fmt: skip


def test_a_step_on_the_built_in_model_is_really_trained():
    finding = doctor_checks._step("cpu")

    assert finding.ok and 0 < float(finding.value.split()[1]) < 10, finding
