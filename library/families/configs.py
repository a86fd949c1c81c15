"""The shipped configurations: the JSON files of published models, and of tiny ones, without weights; no torch.

A configuration is one file, ``configs/NAME.json``: the path of each JSON file inside a diffusers folder -> its data.
NAME is the family, or the family and a variant: ``sdxl``, ``sdxl_tiny``.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from .reading import JsonDict

_CONFIG_DIR = Path(__file__).parent / "configs"

BundledConfig = Mapping[str, JsonDict]


def list_bundled_configs() -> list[str]:
    """All of them, each family's main one before its variants."""
    return sorted(path.stem for path in _CONFIG_DIR.glob("*.json"))


def list_family_configs(family: str) -> list[str]:
    """Those of one family, the main one first."""
    return [name for name in list_bundled_configs() if name == family or name.startswith(f"{family}_")]


def load_bundled_config(name: str) -> BundledConfig:
    data: BundledConfig = json.loads((_CONFIG_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return data
