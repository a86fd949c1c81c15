"""ComfyUI loads our files, if installed: COMFYUI is its folder, COMFYUI_PACKAGES the folder of its packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [os.environ[name] for name in ("COMFYUI", "COMFYUI_PACKAGES") if name in os.environ]
USUAL = {("lora", name): "diffusers" for name in ("sd3", "flux", "z_image", "qwen_image")}
ROW = re.compile(r"(\w+) +(\w+) +(\w+) +(\d+) of +(\d+) +(\S+) of a change of (\S+)")


@pytest.mark.skipif("COMFYUI" not in os.environ, reason="COMFYUI names no folder of ComfyUI")
def test_comfyui_loads_every_tensor_of_the_default_files_and_merges_the_trained_updates():
    result = subprocess.run(
        [sys.executable, "tests/interop/comfyui.py", *FOLDERS], cwd=ROOT, capture_output=True, text=True
    )
    rows = {match.groups()[:3]: match.groups()[3:] for match in map(ROW.match, result.stdout.splitlines()) if match}
    assert len({family for family, _, _ in rows}) == 7, result.stderr[-2000:]
    for (family, kind, file_format), (loaded, count, error, change) in rows.items():
        usual = "comfy" if kind != "lora" else USUAL.get((kind, family), "kohya")
        if file_format == usual:
            assert loaded == count and float(error) < 1e-5 * float(change), (family, kind, file_format)
