"""A part of a model from a diffusers folder or the hub."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .tokenizers import read_tokenizer


def load_from_folder(cls: Any, place: str, subfolder: str, dtype: torch.dtype, device: torch.device | None) -> Any:
    """Load the part in ``subfolder`` of a folder or hub id."""
    if not issubclass(cls, nn.Module):
        return read_tokenizer(cls, place, subfolder)
    options: dict[str, Any] = {"dtype": dtype, **({} if device is None else {"device_map": {"": device}})}
    # Safetensors only: reading a pickle would run code from the file.
    options |= {"subfolder": subfolder, "use_safetensors": True}
    if Path(place).is_dir():
        return cls.from_pretrained(place, variant=_variant(Path(place, subfolder)), **options).eval()
    try:
        return cls.from_pretrained(place, **options).eval()
    except OSError as error:
        try:  # many hub models have their weights in half precision alone
            return cls.from_pretrained(place, variant="fp16", **options).eval()
        except OSError:
            raise error from None


def _variant(folder: Path) -> str | None:
    """``fp16`` where a folder has ``model.fp16.safetensors`` and no ``model.safetensors``."""
    names = [path.name.split(".") for path in folder.glob("*.safetensors")]
    if any(len(name) == 2 for name in names):
        return None
    return next((name[1] for name in names if len(name) == 3), None)
