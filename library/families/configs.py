"""The shipped configurations: the JSON files of published models, and of tiny ones, without weights; no torch.

A configuration is one file, ``configs/NAME.json``: the path of each JSON file inside a diffusers folder -> its data.
NAME is the family, or the family and a variant: ``sdxl``, ``sdxl_tiny``.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from .reading import Json

_FOLDER = Path(__file__).parent / "configs"

Config = Mapping[str, Json]


def names() -> list[str]:
    """All of them, each family's main one before its variants."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def names_of(family: str) -> list[str]:
    """Those of one family, the main one first."""
    return [name for name in names() if name == family or name.startswith(f"{family}_")]


def read_config(name: str) -> Config:
    data: Config = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return data
