"""The file that ``accelerate config`` writes: where it is, and what is really written in it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .launch_command import ACCELERATE, LaunchCommand

MANY = ("MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON")
"""Values of ``distributed_type`` for which accelerate starts several processes; MULTI_CPU is not among them."""


@dataclass(frozen=True)
class LaunchFile:
    """accelerate's own settings, by the names of its launch options."""

    path: Path
    content: Mapping[str, Any] = field(default_factory=dict)
    dynamo: Mapping[str, Any] = field(default_factory=dict)

    @property
    def distributed_type(self) -> str:
        return str(self.content.get("distributed_type", "NO"))


def default_path(environment: Mapping[str, str]) -> Path:
    """Where accelerate looks when no file is named."""
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def launch_file(launch: LaunchCommand | None) -> LaunchFile | None:
    """The file that this command reads; ``--cpu`` alone keeps accelerate from reading its default file."""
    if launch is None or launch.launcher != ACCELERATE:
        return None
    named = launch.given.get("config_file")
    if named is not None:
        return read_launch_file(Path(named))
    path = default_path(launch.environment)
    return read_launch_file(path) if path.is_file() and not launch.given.get("cpu") else None


def read_launch_file(path: Path) -> LaunchFile:
    """Read and check; accelerate's own words when it would refuse the file."""
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(str(path))
        raw = _raw(path)
    except Exception as error:  # whatever is wrong with a hand-written file, it is the file that has to change
        raise ConfigError([f"{path}: accelerate cannot read its settings: {_first_line(error)}"]) from None
    content = {key: value for key, value in raw.items() if value is not None}
    if content.pop("fp16", False):
        content.setdefault("mixed_precision", "fp16")
    if (backend := content.pop("dynamo_backend", "NO")) != "NO":
        content["dynamo_config"] = {"dynamo_backend": backend}
    dynamo = {f"dynamo_{key.removeprefix('dynamo_')}": value
              for key, value in (content.pop("dynamo_config", None) or {}).items()}  # fmt: skip
    return LaunchFile(path, content, dynamo)


def _raw(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return dict(json.loads(text))
    import yaml  # type: ignore[import-untyped, unused-ignore]

    return dict(yaml.safe_load(text))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
