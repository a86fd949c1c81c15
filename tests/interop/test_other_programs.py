"""Our default files in other programs, if installed: COMFYUI, SD_SCRIPTS and LYCORIS are their folders.

CLIENT_PYTHON is a Python that can import them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from library.models.families import FAMILY_FACTS

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = {"ComfyUI": "COMFYUI", "sd-scripts": "SD_SCRIPTS", "LyCORIS": "LYCORIS"}
FOLDERS = {client: os.environ[name] for client, name in CLIENTS.items() if name in os.environ}
LORA = ("LoRA", "LoRA, convolutions", "LoRA, block_alphas", "LoRA, outer layers", "LoRA, T5")


@pytest.mark.skipif(not FOLDERS, reason=f"none of {', '.join(CLIENTS.values())} names a folder")
def test_other_programs_compute_what_was_trained_or_the_run_says_what_is_lost(tmp_path):
    words = [word for client, folder in FOLDERS.items() for word in (f"--{CLIENTS[client].lower()}", folder)]
    words += ["--python", os.environ.get("CLIENT_PYTHON", sys.executable), "--json", str(tmp_path / "rows.json")]
    result = subprocess.run(
        [sys.executable, "tests/interop/client_table.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    rows = json.loads((tmp_path / "rows.json").read_text()) if not result.returncode else []
    assert {row["family"] for row in rows} >= set(FAMILY_FACTS), result.stderr[-2000:]
    for row in rows:
        for client in FOLDERS:
            is_right = row[client].replace("e-", "").replace("e+", "").isdigit()
            if client == "ComfyUI" and row[client] != "-":
                assert is_right == (client not in row["losses"]), row
                assert is_right or row["adapter"] not in LORA, row
            elif row["format"] == "kohya" and row["adapter"] in LORA and row[client] != "-":
                assert is_right, row
