"""A part of a model from a diffusers folder or the hub."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .tokenizers import load_pretrained_tokenizer


def load_pretrained_component(component_class: Any, path_or_id: str, subfolder: str, dtype: torch.dtype, device: torch.device | None) -> Any:
    """Load the part in ``subfolder`` of a folder or hub id."""
    if not issubclass(component_class, nn.Module):
        return load_pretrained_tokenizer(component_class, path_or_id, subfolder)
    options: dict[str, Any] = {"dtype": dtype, **({} if device is None else {"device_map": {"": device}})}
    # Safetensors only: reading a pickle would run code from the file.
    options |= {"subfolder": subfolder, "use_safetensors": True}
    if Path(path_or_id).is_dir():
        return component_class.from_pretrained(path_or_id, variant=_detect_variant(Path(path_or_id, subfolder)), **options).eval()
    try:
        return component_class.from_pretrained(path_or_id, **options).eval()
    except OSError as error:
        try:  # many hub models have their weights in half precision alone
            return component_class.from_pretrained(path_or_id, variant="fp16", **options).eval()
        except OSError:
            raise error from None


def _detect_variant(directory: Path) -> str | None:
    """``fp16`` where a folder has ``model.fp16.safetensors`` and no ``model.safetensors``."""
    names = [path.name.split(".") for path in directory.glob("*.safetensors")]
    if any(len(name) == 2 for name in names):
        return None
    return next((name[1] for name in names if len(name) == 3), None)
