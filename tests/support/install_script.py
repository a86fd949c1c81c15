"""install.py as a module, and stand-ins for the programs that it asks."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) echo "{name}, {driver}, {capability}";;
  *) echo "| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |";;
esac
"""
PYTHON_OF_AN_ENVIRONMENT = """#!/bin/sh
# Answers as an environment's Python does; the files beside it say what works.
here=$(dirname "$0")
echo "$@" >> "$here/log.txt"
case "$*" in
  "-m pip --version") test ! -e "$here/without_pip";;
  *"index versions"*) cat "$here/index.txt" 2>/dev/null;;
  *"install torch"*) test ! -e "$here/torch_fails";;
  "-c "*) echo 2.13.0+cpu; test ! -e "$here/on_cpu" || { echo "AssertionError: Torch not compiled with CUDA" >&2; exit 1; };;
  *"-m library demo"*) for last; do :; done; touch "$last/demo.safetensors";;
esac
"""


def load_install_script():
    """Import install.py, which lies outside of the package."""
    spec = importlib.util.spec_from_file_location("install_py", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["install_py"] = module  # where dataclasses look for its names
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["install_py"]
    return module


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    path.chmod(0o755)
