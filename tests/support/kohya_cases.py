"""Folders as sd-scripts takes them, and what its own code made of them (see the note in the file)."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

_GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "data" / "kohya_folders.json").read_text("utf-8"))
CASES: list[dict[str, Any]] = _GOLDEN["cases"]


def write_kohya_folders(root: Path, name: str) -> Path:
    """Write one set of folders below ``root``; each image has a color of its own."""
    number = 0
    for folder, files in _GOLDEN["folders"][name].items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            path = root / folder / file
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
                continue
            number += 1
            Image.new("RGB", tuple(content), (number * 9, 255 - number * 7, 90)).save(path)
    return root


def format_case(case: dict[str, Any]) -> str:
    """Name a test case by its folders and the options that make it special."""
    options = [word for word in case["cli"] if word.startswith("--") and not word.endswith("_dir")]
    return f"{case['folder']} {' '.join(options)}"
