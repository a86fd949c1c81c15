"""install.py makes, continues, repairs and refuses environments, and finishes only where torch runs on the GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from install_script import NVIDIA_SMI, PYTHON_OF_AN_ENVIRONMENT, load_install_script, write_program

ROOT = Path(__file__).resolve().parents[2]
needs_scripts = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for programs are scripts of sh")


@pytest.fixture
def installer():
    return load_install_script()


class Machine:
    """A machine with a GPU and an environment whose Python is a stand-in: nothing is downloaded or installed."""

    def __init__(self, installer, capfd, folder: Path) -> None:
        self.installer, self.capfd, self.venv = installer, capfd, folder / "venv"
        self.bin = self.venv / "bin"
        self.programs = folder / "programs"
        write_program(self.bin / "python", PYTHON_OF_AN_ENVIRONMENT)
        (self.venv / installer.MARKER).touch()

    def add_gpu(self, cuda: str, capability: str) -> None:
        text = NVIDIA_SMI.format(name="NVIDIA X", driver="600", capability=capability, cuda=cuda)
        write_program(self.programs / "nvidia-smi", text)

    def set(self, name: str, text: str = "") -> None:
        (self.bin / name).write_text(text, "utf-8")

    def install(self, *words: str) -> tuple[int, str, list[str]]:
        """Return the exit code, what was printed, and the commands that the environment's Python got."""
        log = self.bin / "log.txt"
        log.unlink(missing_ok=True)
        code = self.installer.main(["--venv", str(self.venv), *words])
        printed = "".join(self.capfd.readouterr())
        return code, printed, log.read_text("utf-8").splitlines() if log.exists() else []

    @property
    def is_finished(self) -> bool:
        return (self.venv / self.installer.STAMP).is_file()


@pytest.fixture
def machine(installer, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/bin")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setattr(installer.sys, "platform", "linux")
    return Machine(installer, capfd, tmp_path)


def find_torch(commands: list[str]) -> list[str]:
    return [re.search(r"torch==\S+", command)[0] for command in commands if "install torch" in command]


@needs_scripts
def test_an_installation_whose_torch_runs_on_the_gpu_is_finished(machine):
    machine.add_gpu("12.4", "8.6")
    machine.set("index.txt", "Available versions: 2.13.0+cu126, 2.12.0+cu126")
    code, printed, commands = machine.install()

    assert code == 0 and machine.is_finished, printed
    assert find_torch(commands) == ["torch==2.13.0+cu126"]
    assert any("-m library demo" in command for command in commands)


@needs_scripts
def test_torch_that_does_not_run_on_the_gpu_fails_the_installation(machine):
    machine.add_gpu("13.0", "8.9")
    machine.set("on_cpu")
    (machine.venv / machine.installer.STAMP).touch()  # of an installation before this one
    code, printed, commands = machine.install("--skip_check")

    assert code == 2 and not machine.is_finished
    assert "training would run on the CPU: torch 2.13.0+cpu does not run on NVIDIA X" in printed
    assert "(AssertionError: Torch not compiled with CUDA)" in printed
    assert "--torch_index https://download.pytorch.org/whl/cu130" in printed and "--device cpu" in printed
    assert find_torch(commands) == ["torch==2.13.0"], "PyPI's build for Linux, which is for CUDA 13"

    code, printed, commands = machine.install("--device", "cpu")
    assert code == 0 and machine.is_finished, printed
    assert "https://download.pytorch.org/whl cannot be reached or has no torch 2.13.0 for cpu" in printed
    assert not any(command.startswith("-c ") for command in commands)

    machine.set("index.txt", "2.13.0+cpu")
    assert find_torch(machine.install("--device", "cpu")[2]) == ["torch==2.13.0+cpu"]


@needs_scripts
def test_a_device_that_no_driver_names_is_tried_unless_nothing_is_checked(machine):
    machine.set("index.txt", "2.13.0+cu130")
    machine.set("on_cpu")

    assert machine.install("--device", "cuda")[0] == 2
    assert machine.install("--device", "cuda", "--skip_check")[0] == 0  # for an image


@needs_scripts
@pytest.mark.parametrize(
    ("system", "cuda", "capability"), [("linux", "12.8", "8.9"), ("linux", "13.0", "6.1"), ("win32", "13.0", "8.9")]
)
def test_an_index_that_cannot_be_reached_installs_no_build_that_cannot_run(
    machine, monkeypatch, system, cuda, capability
):
    monkeypatch.setattr(machine.installer.sys, "platform", system)
    machine.add_gpu(cuda, capability)
    code, printed, commands = machine.install()

    assert code == 2 and find_torch(commands) == []
    assert "cannot be reached or has no torch 2.13.0 for cu1" in printed and "--torch_index URL" in printed


@needs_scripts
def test_torch_that_pip_cannot_install_is_not_looked_for_elsewhere(machine):
    machine.add_gpu("12.4", "8.6")
    machine.set("index.txt", "2.13.0+cu126")
    machine.set("torch_fails")
    code, printed, commands = machine.install()

    assert code == 2 and find_torch(commands) == ["torch==2.13.0+cu126"] and not machine.is_finished
    assert "exit code 1; the same command goes on" in printed


@needs_scripts
def test_an_environment_of_someone_else_is_used_only_if_asked(machine):
    (machine.venv / machine.installer.MARKER).unlink()
    code, printed, commands = machine.install()
    assert code == 2 and "--use_existing installs into it" in printed and "--venv FOLDER" in printed
    assert commands == []
    assert machine.install("--dry_run")[0] == 2

    code, printed, _ = machine.install("--use_existing")
    assert code == 0 and machine.is_finished, printed
    assert not (machine.venv / machine.installer.MARKER).exists(), "so that --repair does not remove it"

    machine.set("without_pip")
    code, printed, _ = machine.install("--use_existing")
    assert code == 2 and "has no pip that works" in printed


@needs_scripts
def test_a_folder_that_is_no_environment_is_left_alone(machine, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "1.png").touch()
    for words in ([], ["--use_existing"]):
        code, printed, _ = machine.install(*words, "--venv", str(pictures))
        assert code == 2 and "is there and is no environment" in printed
    code, printed, _ = machine.install("--venv", str(pictures / "1.png"))
    assert code == 2 and "is there and is no environment" in printed

    assert [path.name for path in pictures.iterdir()] == ["1.png"]


@needs_scripts
def test_a_dry_run_makes_an_environment_only_where_one_is_needed(machine):
    def is_made(*words: str) -> bool:
        return f"-m venv {machine.venv}" in machine.install("--dry_run", *words)[1]

    assert not is_made()
    assert is_made("--repair") and machine.bin.is_dir()
    machine.set("without_pip")
    assert is_made() and machine.bin.is_dir()


@pytest.mark.slow
def test_an_unfinished_environment_is_made_again(installer, tmp_path, capsys):
    venv = tmp_path / "venv"
    options = installer.build_parser().parse_args([])
    with pytest.raises(installer.InstallError, match="exit code 3"):
        installer.prepare_environment([sys.executable, "-c", "raise SystemExit(3)"], venv, options)
    assert (venv / installer.MARKER).is_file(), "written first, so that it is known whose folder this is"

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "left.txt").touch()
    installer.prepare_environment([sys.executable], venv, options)
    assert "is unfinished and is made again" in capsys.readouterr().out
    assert installer.ask([str(installer.get_venv_python(venv)), "-m", "pip", "--version"])
    assert (venv / installer.MARKER).is_file() and not (venv / "left.txt").exists()

    before = (venv / "pyvenv.cfg").stat().st_mtime_ns
    installer.prepare_environment([sys.executable], venv, options)
    assert (venv / "pyvenv.cfg").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_probe_computes_with_the_torch_of_the_environment(installer):
    run = subprocess.run([sys.executable, "-c", installer.PROBE, "cpu"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

    hardware = installer.Hardware("cuda", "NVIDIA X", "600", (13, 0), 8.9)
    with pytest.raises(installer.InstallError, match=r"training would run on the CPU: torch 2\..* on NVIDIA X \(.+\)"):
        installer.check_device(Path(sys.executable), hardware, ["cu130"], False)  # the tests see no GPU


def test_a_repair_removes_only_what_it_has_made(installer, tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "mine.txt").touch()
    with pytest.raises(installer.InstallError, match="not made by this program"):
        installer.remove_environment(venv, False)
    (venv / installer.MARKER).touch()
    installer.remove_environment(venv, True)
    assert venv.exists()
    installer.remove_environment(venv, False)

    assert not venv.exists()
    installer.remove_environment(venv, False)


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights there")
def test_a_removal_that_fails_says_so_and_can_be_repeated(installer, tmp_path, monkeypatch):
    venv = tmp_path / "venv"
    (venv / "a_library").mkdir(parents=True)
    (venv / "lib64").symlink_to(venv / "a_library")
    (venv / installer.MARKER).touch()

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(installer.shutil, "rmtree", fail)
        with pytest.raises(installer.InstallError, match="a_library cannot be removed: Permission denied; close"):
            installer.remove_environment(venv, False)
    assert (venv / installer.MARKER).is_file()
    installer.remove_environment(venv, False)
    assert not venv.exists()


@pytest.mark.parametrize("name", ["start.sh", "start.command", "start.bat"])
def test_start_scripts_open_the_page_of_this_environment(name):
    data = (ROOT / "scripts" / name).read_bytes()
    text = data.decode("ascii")

    if name == "start.bat":
        assert data.count(b"\n") == data.count(b"\r\n") and ".venv\\Scripts\\python.exe" in text
    else:
        assert b"\r" not in data and os.access(ROOT / "scripts" / name, os.X_OK) == (os.name != "nt")
    if name != "start.command":
        assert "install.py" in text and "-m library web --open_browser" in text


@needs_scripts
def test_the_start_script_runs_the_python_of_the_environment(tmp_path):
    for name in ("start.sh", "start.command"):
        (tmp_path / "a b" / "scripts").mkdir(parents=True, exist_ok=True)
        target = tmp_path / "a b" / "scripts" / name
        target.write_bytes((ROOT / "scripts" / name).read_bytes())
        target.chmod(0o755)
    python = tmp_path / "a b" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n', "utf-8")
    python.chmod(0o755)
    for name in ("start.sh", "start.command"):
        command = [str(tmp_path / "a b" / "scripts" / name), "--port", "7861"]
        result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd="/")
        assert result.stdout.split("\n")[0] == f"{tmp_path / 'a b'} -m library web --open_browser --port 7861"


@needs_scripts
def test_the_start_script_installs_until_that_has_finished(installer, tmp_path, monkeypatch):
    write_program(tmp_path / "scripts" / "start.sh", (ROOT / "scripts" / "start.sh").read_text("utf-8"))
    write_program(tmp_path / "programs" / "python3", '#!/bin/sh\necho installs with "$@"\n')
    write_program(tmp_path / ".venv" / "bin" / "python", "#!/bin/sh\necho starts\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/bin")

    def start() -> list[str]:
        result = subprocess.run([str(tmp_path / "scripts" / "start.sh")], capture_output=True, text=True, check=True)
        return result.stdout.splitlines()

    assert start() == ["starts"], "an environment of the user's own"
    (tmp_path / ".venv" / installer.MARKER).touch()
    assert start() == ["installs with install.py", "starts"]
    (tmp_path / ".venv" / installer.STAMP).touch()
    assert start() == ["starts"]


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ([], "install"),
        (["{python}"], "start"),
        (["{python}", "{marker}"], "install"),
        (["{python}", "{marker}", "{stamp}"], "start"),
        (["{marker}", "{stamp}"], "install"),
    ],
)
def test_the_start_script_for_windows_asks_for_the_same_files(installer, files, label):
    names = {"python": "Scripts\\python.exe", "marker": installer.MARKER, "stamp": installer.STAMP}
    there = {f".venv\\{name.format(**names)}" for name in files}
    text = (ROOT / "scripts" / "start.bat").read_text("ascii")
    tests = re.findall(r'^if (not )?exist "(.+)" goto (\w+)$|^:(\w+)$', text, re.MULTILINE)

    reached = next(
        goto or reaches for negated, path, goto, reaches in tests if reaches or (path in there) != bool(negated)
    )
    assert reached == label
