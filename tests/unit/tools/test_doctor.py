"""The doctor: real checks in child processes, which may crash or hang; its report, and its exit code."""

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
from launcher_cases import TRAIN, check_launch_command, use_environment, write_accelerate_config

from library.distributed.devices import Machine
from library.distributed.launcher_settings import ResolvedSetting, SettingSource
from library.errors import ConfigError
from library.tools import doctor, doctor_checks
from library.tools.doctor_checks import CheckFailed, Finding, run_in_child

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def failing_module(tmp_path, monkeypatch):
    """A module whose functions crash, hang or fail."""
    (tmp_path / "failing_module_under_test.py").write_text(
        "import os, time, subprocess, sys\n"
        "def start(seconds, code='0'):\n"
        "    subprocess.Popen([sys.executable, '-c', f'import time; time.sleep({seconds}); {code}'])\n"
        "def hang(path): start(4, f'open({path!r}, \"w\")'); time.sleep(60)\n"
        "def crash(): os.abort()\n"
        "def fail(): raise ValueError('no such luck\\n\\nSet VERBOSE=1 for more')\n"
        "def leave(): sys.exit(3)\n"
        "def be_silent(): os._exit(0)\n"
        "def leave_child(): start(30); return 1\n"
        "def is_imported(name): return name in sys.modules\n"
        "def answer(word): print('noise'); return word, os.environ.get('RANK'), os.environ.get('ACCELERATE_USE_CPU')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import failing_module_under_test

    yield failing_module_under_test
    del sys.modules["failing_module_under_test"]


@pytest.mark.parametrize("preload", [("torch",), ()], ids=["forked", "spawned"])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("crash", "crashed with SIGABRT"),
        ("fail", "ValueError: no such luck"),
        ("leave", "exit code 3"),
        ("be_silent", "exit code 0"),
    ],
)
def test_a_check_that_crashes_or_fails_is_reported_with_its_reason(function, reason, preload, failing_module):
    with pytest.raises(CheckFailed, match=f"^{reason}$"):
        run_in_child(getattr(failing_module, function), timeout=60, preload=preload)


@pytest.mark.slow
def test_a_check_that_hangs_is_killed_with_everything_that_it_started(failing_module, tmp_path):
    start = time.monotonic()
    with pytest.raises(CheckFailed, match="no answer within 2 s"):
        run_in_child(failing_module.hang, str(tmp_path / "survived"), timeout=2, preload=())
    assert time.monotonic() - start < 20
    time.sleep(4)
    assert not (tmp_path / "survived").exists()

    assert run_in_child(failing_module.leave_child, timeout=60) == 1  # the child is not waited for


def test_a_check_returns_its_answer_and_sees_no_launcher(failing_module, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    assert run_in_child(failing_module.answer, "hello", timeout=60, preload=()) == ("hello", None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="checks are forked on Linux only")
def test_packages_are_imported_once_for_all_checks(failing_module):
    for preload in (("torch",), ()):
        assert run_in_child(failing_module.is_imported, "torch", timeout=120, preload=preload) == bool(preload)
    assert {"torch", "diffusers", "transformers", "peft"} <= {*doctor_checks.PRELOAD}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [["wandb", "psutil"], ["torch"]])
def test_a_package_that_cannot_be_imported_is_a_finding_and_no_traceback(broken, tmp_path):
    for package in broken:
        (tmp_path / f"{package}.py").write_text("raise ImportError('libsomething.so: not found')\n")
    result = subprocess.run(
        [sys.executable, "-m", "library", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=120,
    )

    assert result.returncode == 1 and "Traceback" not in result.stdout + result.stderr
    for package in broken:
        (line,) = [line for line in result.stdout.splitlines() if line.split()[1:2] == [f"{package}:"]]
        assert line.startswith("error") and "libsomething.so: not found" in line
        assert "pip install --force-reinstall" in line


@pytest.mark.slow
def test_a_package_that_crashes_the_interpreter_is_reported(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text("import os; os.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert doctor.find_broken_modules(["json", "crashing"]) == {"crashing": "crashed with SIGABRT"}


# real checks


@pytest.mark.slow
def test_the_training_step_check_reports_the_compute_precision():
    steps = {precision: doctor_checks.check_training_step for precision in ("no", "bf16")}
    losses = {name: float(run_in_child(step, "cpu", name, timeout=240).split()[1]) for name, step in steps.items()}

    assert 0 < abs(losses["no"] - losses["bf16"]) < 0.1 < losses["no"] < 10
    with pytest.raises(CheckFailed, match=r"^--mixed_precision fp16: not supported on a CPU"):
        run_in_child(doctor_checks.check_training_step, "cpu", "fp16", timeout=240)


def test_processes_all_reduce_and_memory_is_read():
    assert run_in_child(doctor_checks.check_all_reduce, "cpu", timeout=120) == "works"
    assert re.fullmatch(r"[\d.]+ GiB free", run_in_child(doctor_checks.check_memory, "cpu", timeout=120))


@pytest.mark.slow
def test_a_cxx_compiler_that_writes_no_output_is_reported(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    with pytest.raises(CheckFailed, match=r"torch\.compile did nothing"):
        run_in_child(doctor_checks.check_compile, "cpu", timeout=120, preload=())


def run_failing_checks(machine: Machine, monkeypatch) -> dict[str, Finding]:
    """Findings on this machine if every check fails."""

    def fail(function, *arguments, **_):
        if function is doctor_checks.describe_machine:
            return doctor_checks.describe_machine()
        raise CheckFailed("RuntimeError: no")

    monkeypatch.setattr("library.distributed.devices.detect_machine", lambda environment: machine)
    monkeypatch.setattr(doctor_checks, "run_in_child", fail)
    return {finding.name: finding for finding in doctor_checks.run_checks()}


def test_without_a_training_step_or_memory_training_is_impossible(monkeypatch):
    actual = run_failing_checks(Machine(), monkeypatch)

    assert {name for name, finding in actual.items() if finding.is_error} == {
        "training step on cpu, mixed_precision no",
        "memory of cpu",
    }
    assert {name for name, finding in actual.items() if not finding.ok and not finding.needed} == {
        "training step on cpu, mixed_precision bf16",
        "training step on cpu, mixed_precision fp16",
        "torch.compile on cpu",
        "gloo all-reduce on cpu",
    }
    assert actual["memory of cpu"].value == "RuntimeError: no"


def test_every_device_trains_a_step_and_several_devices_need_their_backend(monkeypatch):
    monkeypatch.setattr("library.distributed.devices.list_backends", lambda machine: (("nccl", "cuda"),))
    actual = run_failing_checks(Machine("cuda", 3), monkeypatch)

    assert {"training step on cuda:1", "training step on cuda:2", "memory of cuda"} <= set(actual)
    assert actual["nccl all-reduce on cuda"].is_error and actual["training step on cuda:2"].is_error


def test_a_check_that_works_is_shown_with_its_time(monkeypatch):
    monkeypatch.setattr(doctor_checks, "run_in_child", lambda *_, **__: "loss 1.5")
    finding = doctor_checks.run_check(doctor_checks.Check("a", len, (), "fix"))

    assert (finding.ok, finding.value, finding.fix) == (True, "loss 1.5 (0 s)", "")


# findings about the machine


def test_a_foreign_library_package_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.check_import_path()

    assert finding.is_error and str(tmp_path) in finding.value and "virtual environment" in finding.fix


def test_a_full_disk_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    finding = doctor.check_disk(tmp_path)

    assert finding.is_error and finding.value.startswith("0.0 GiB free")


def test_the_accelerate_config_is_shown_and_a_broken_one_is_an_error(tmp_path, monkeypatch):
    use_environment(monkeypatch, tmp_path)
    assert "does not exist" in doctor_checks.check_accelerate_config().value
    path = write_accelerate_config(tmp_path, mixed_precision="bf16")
    finding = doctor_checks.check_accelerate_config()
    assert finding.ok and finding.value.startswith(f"{path}: ") and "mixed_precision: bf16" in finding.value
    path.write_text("mixed_precison: bf16\n")
    finding = doctor_checks.check_accelerate_config()
    assert finding.is_error and "accelerate cannot read" in finding.value


@pytest.mark.slow
def test_old_and_missing_packages_are_errors_with_the_command_that_installs_them(monkeypatch):
    installed = {"torch": "2.6.1+cu124", "peft": None}
    real = doctor.find_version
    monkeypatch.setattr(doctor, "find_version", lambda name: installed[name] if name in installed else real(name))
    actual = {finding.name: finding for finding in doctor.check_packages()}

    assert actual["torch"].is_error and actual["torch"].fix == "pip install -U 'torch>=2.11'"
    assert actual["peft"].is_error and actual["peft"].value == "not installed"
    assert not actual["accelerate"].is_error and not actual["deepspeed"].is_error


def test_minimum_versions_are_those_of_pyproject_toml():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, oldest in doctor.NEEDED.items():
        assert re.search(rf'"{name}>=([\d.]+)"', text)[1] == ".".join(map(str, oldest)), name


def test_a_driver_that_torch_does_not_use_is_a_warning(monkeypatch):
    result = SimpleNamespace(stdout="550.90\n550.90\n")
    monkeypatch.setattr(doctor_checks.subprocess, "run", lambda *_, **__: result)
    driver = doctor_checks.check_driver(is_used=False)

    assert driver.value == "550.90, not used by torch" and "pytorch.org" in driver.fix
    assert not driver.ok and not driver.is_error and doctor_checks.check_driver(is_used=True).ok


def test_the_numa_default_is_explained():
    described = [doctor_checks.describe_numa(*case) for case in ((1, ""), (2, ""), (2, "no pynvml"))]

    assert described == [
        "1 node, processes are not bound",
        "2 nodes, each process is bound to the node of its device",
        "2 nodes, processes are not bound: no pynvml",
    ]


# report and exit code


GOOD, BAD = Finding("a", "fine", fix="none needed"), Finding("b", "gone", False, "put it back")
SPARE = replace(BAD, name="c", needed=False)
SETTING = ResolvedSetting("mixed_precision", "no", "run.toml:4", (SettingSource("--x", "no"),))


def run_doctor(*argv: str) -> tuple[str, int]:
    lines, report = doctor.run_doctor(argv), []
    while True:
        try:
            report.append(next(lines))
        except StopIteration as stop:
            return "\n".join(report), stop.value


@pytest.mark.parametrize(
    ("results", "code", "last"),
    [
        ([GOOD], 0, "no errors"),
        ([GOOD, SETTING, SPARE], 0, "no errors"),
        ([GOOD, BAD], 1, "1 error"),
        ([BAD, SETTING, BAD], 1, "2 errors"),
    ],
)
def test_the_exit_code_says_whether_something_needed_fails(results, code, last, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda command: iter(results))
    text, exit_code = run_doctor()

    assert exit_code == code and text.splitlines()[-1] == last
    assert ("error   b: gone  -> put it back" in text) == (BAD in results)
    assert ("warning c: gone  -> put it back" in text) == (SPARE in results)
    report = json.loads(run_doctor("--json")[0])
    assert report["ok"] == (code == 0) and len(report["settings"]) == results.count(SETTING)
    assert len(report["findings"]) + len(report["settings"]) == len(results)
    assert all(finding["ok"] != bool(finding["fix"]) for finding in report["findings"])


def test_findings_are_printed_as_soon_as_they_are_known(monkeypatch):
    def examine(command):
        yield GOOD
        raise AssertionError("the second check was started before the first line was read")

    monkeypatch.setattr(doctor, "examine", examine)

    assert next(doctor.run_doctor([])) == "ok      a: fine"


def test_a_setting_is_shown_with_its_source_and_what_it_overrides():
    line = "setting mixed_precision                 no        run.toml:4"

    assert doctor.format_setting(replace(SETTING, overridden=())) == line
    assert doctor.format_setting(SETTING) == f"{line}; overridden: no (--x)"
    assert doctor.format_setting(replace(SETTING, warning="why")) == f"{line}\nwarning why"


def test_mistakes_in_the_training_options_of_a_command_are_problems():
    settings, problems = check_launch_command(f"accelerate launch {TRAIN} --learning_rat 1")

    assert settings and "--learning_rat" in problems and "did you mean" in problems


def test_a_plain_python_command_is_accepted_and_other_commands_are_refused():
    settings, problems = check_launch_command(f"python {TRAIN} --mixed_precision bf16")
    assert settings["mixed_precision"].value == "bf16" and not problems

    with pytest.raises(ConfigError, match="not a training command: ls -l"):
        check_launch_command("ls -l")
    with pytest.raises(ConfigError, match="--jsn: unexpected argument"):
        run_doctor("--jsn")
