"""Reading some parts of a diffusers pipeline, leaving the others out, and the VAE in float32 always."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..errors import ConfigError


def load_parts(cls: Any, source: str, dtype: torch.dtype, parts: Sequence[str], **options: Any) -> Any:
    """Load ``parts`` of a diffusers folder or hub id, and its scheduler; everything else in the pipeline is None."""
    folder = Path(source).expanduser()  # a path from a file has not been through a shell
    source = str(folder) if folder.exists() else source
    absent = dict.fromkeys(set(cls._get_signature_keys(cls)[0]) - {*parts, "scheduler"})
    # The VAE of SD 1.x and SDXL overflows in half precision; it is small and runs once for each picture.
    precisions = {"vae": torch.float32, "default": dtype}
    try:
        # Safetensors only: reading a pickle would run code from the file.
        return cls.from_pretrained(source, dtype=precisions, use_safetensors=True, **absent, **options)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # a damaged file
        raise ConfigError(
            [f"pretrained_model_name_or_path: {source}: cannot be loaded: {_first_line(error)}"]
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def full_precision(vae: Any) -> torch.autocast:
    """A context in which autocast, if it is on, leaves the VAE alone."""
    return torch.autocast(vae.device.type, enabled=False)
