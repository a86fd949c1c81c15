"""Every module of `library/` follows the import rules, and planted violations are found."""

import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from import_rules import LAYERS, find_import_cycle, find_violations, get_module_name

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "library"
MODULES = sorted(path.relative_to(LIBRARY) for path in LIBRARY.rglob("*.py"))


def test_every_module_follows_the_rules():
    actual = [
        f"library/{path}: {problem}"
        for path in MODULES
        for problem in find_violations(PurePosixPath(path), (LIBRARY / path).read_text(encoding="utf-8"))
    ]

    assert not actual, "\n".join(actual)


def test_every_package_has_a_layer():
    packages = {path.with_suffix("").parts[0] for path in MODULES}

    assert packages == {name for layer in LAYERS for name in layer}


PLANTED = {
    "an import upwards": ("dataloader/x.py", "from ..training import loop", "imports upwards: dataloader -> training"),
    "a peer": ("optim/x.py", "from ..adapters import injection", "imports a peer: optim -> adapters"),
    "a peer through the package": ("optim/x.py", "from .. import distributed", "imports a peer"),
    "a peer below data": ("dataset/x.py", "from ..diffusion import noise", "imports a peer: dataset -> diffusion"),
    "a third-party library": (
        "training/x.py",
        "from diffusers import UNet2DConditionModel",
        "diffusers may be imported only in",
    ),
    "a third-party submodule": (
        "dataloader/x.py",
        "import torch.distributed.run",
        "torch.distributed may be imported only in",
    ),
    "a third-party from-import": (
        "dataloader/x.py",
        "from torch import distributed",
        "torch.distributed may be imported only",
    ),
    "an absolute import of itself": ("dataloader/x.py", "import library.config", "write it relative"),
    "a benchmark": ("training/x.py", "from benchmarks.step import BareLoop", "is not part of the package"),
    "a long file": ("dataloader/x.py", "\n" * 600, "longer than 600 lines"),
    "a long function": ("dataloader/x.py", "def f():\n" + "    a = 1\n" * 60, "f is longer than 60 lines"),
    "a print": ("dataloader/x.py", "def f():\n    print(1)", "print; use the module's logger"),
    "a global": ("dataloader/x.py", "def f():\n    global a\n    a = 1", "global"),
    "mutable module state": ("dataloader/x.py", "seen = {}", "seen is mutable"),
    "a cached function": ("dataloader/x.py", "@functools.lru_cache\ndef f(): ...", "keeps state in the module"),
    "a bare except": ("dataloader/x.py", "def f():\n    try: g()\n    except: pass", "bare except"),
    "args written to": ("cli.py", "def f(args):\n    args.a = 1", "writes to args"),
    "a device name": ("training/x.py", "def f(m):\n    m.to('cuda:0')", "device name 'cuda:0'"),
    "torch.cuda": ("training/x.py", "def f():\n    torch.cuda.empty_cache()", "torch.cuda; ask the accelerator"),
    "a .cuda()": ("models/x.py", "def f(m):\n    m.cuda()", ".cuda(); use .to(device)"),
    "work on import": ("dataloader/x.py", "logging.basicConfig()", "runs when imported"),
    "a nameless file": ("dataloader/utils.py", "a = 1", "a file called utils"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_caught(name):
    path, source, expected = PLANTED[name]

    assert any(expected in problem for problem in find_violations(PurePosixPath(path), f'"""Planted."""\n{source}\n'))


def test_a_module_without_a_docstring_is_caught():
    assert find_violations(PurePosixPath("dataloader/x.py"), "a = 1") == ["no module docstring"]


def test_a_harmless_module_is_not_caught():
    source = '"""Fine."""\nimport math\nfrom ..config import schema\nNAMES = {"a": 1}\ndef f():\n    return math.pi'

    assert find_violations(PurePosixPath("dataloader/x.py"), source) == []


IMPORT = """
import json, logging, os, socket, sys, threading, warnings
import numpy, torch, PIL.Image, diffusers, transformers, peft, accelerate, tqdm, psutil  # what they do is not ours
def refuse(*_): raise OSError("a module opened a connection while it was imported")
socket.socket.connect = refuse
import importlib
def process_state():
    return (dict(os.environ), len(logging.getLogger().handlers), threading.active_count(), torch.get_num_threads(),
            torch.random.get_rng_state().sum().item())
def imported(name):
    before = process_state()
    try:
        importlib.import_module(name)
        return "" if process_state() == before else "importing it changed the process"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
def imported_alone(name):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, imported(name).encode()[:4000]); os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream: said = stream.read().decode()
    os.waitpid(child, 0)
    return said
way = {"together": imported, "alone": imported_alone}[sys.argv[1]]
print(json.dumps({name: said for name in sys.argv[2:] if (said := way(name))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["together", "alone"])
def test_every_module_imports_without_devices_and_network_and_changes_nothing(script):
    """Modules that programs, the registry and the workbench import by name are also imported as the first one."""
    paths = [path for path in MODULES if path.name != "__main__.py"]
    if script == "alone":
        paths = [
            path
            for path in paths
            if path.parts[0] in ("tools", "web") or len(path.parts) == 1 or "families" in path.parts
        ]
    names = [get_module_name(PurePosixPath(path)) for path in paths]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", IMPORT, script, *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {}


def test_there_are_no_import_cycles():
    assert (
        find_import_cycle({PurePosixPath(path): (LIBRARY / path).read_text(encoding="utf-8") for path in MODULES}) == []
    )


@pytest.mark.parametrize(
    ("one", "other", "is_cycle"),
    [
        ("from . import b", "from . import a", True),
        ("from .b import x", "from ..dataloader import a", True),
        ("from . import b", "from . import x", True),  # of the package, which imports the first
        ("from . import b", "def f():\n    from . import a", False),
        ("from . import b", "if TYPE_CHECKING:\n    from . import a", False),
        ("from . import b", "import a", False),
    ],
)
def test_a_planted_import_cycle_is_found(one, other, is_cycle):
    sources = {"dataloader/__init__.py": "from . import a\nx = 1", "dataloader/a.py": one, "dataloader/b.py": other}
    names = find_import_cycle({PurePosixPath(path): source for path, source in sources.items()})

    assert bool(names) == is_cycle and (not is_cycle or {"library.dataloader.a", "library.dataloader.b"} <= {*names})


def test_settings_are_read_and_checked_before_anything_heavy_is_imported():
    script = (
        "import sys; from library.config import parse_config\n"
        "from library.dataset.validate import validate_dataset_config\n"
        "parsed = parse_config(['--dataset_config', 'dataset_configs/demo.toml'])\n"
        "validate_dataset_config(parsed.require_valid().data)\n"
        "heavy = ('torch', 'diffusers', 'transformers', 'peft', 'accelerate', 'PIL')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("command", [["train_lora.py", "--help"], ["-m", "library", "--help"]])
def test_help_imports_nothing_heavy(command):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}

    assert result.returncode == 0 and "usage" in result.stdout
    assert not imported & {"torch", "numpy", "diffusers", "transformers", "peft", "accelerate", "PIL", "tqdm"}
