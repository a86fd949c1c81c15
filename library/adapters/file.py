"""Writes a LoRA file: under a temporary name, to the disk, checked, then renamed; an older good file is never lost."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..durable import fsync_file, fsync_dir
from ..errors import UserError
from .verify import verify_adapter_file

SAVE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_tensors(tensors: Mapping[str, Tensor], precision: str | None) -> dict[str, Tensor]:
    """Weights in the precision of the file; None leaves them.  Alphas stay float32: they are exact, and tiny."""
    if precision is None:
        return dict(tensors)
    done = {key: each if key.endswith(".alpha") else each.to(SAVE_DTYPES[precision]) for key, each in tensors.items()}
    for key, tensor in done.items():
        if not bool(tensor.isfinite().all()) and bool(tensors[key].isfinite().all()):
            largest = tensors[key].abs().max().item()
            raise UserError(f"{key}: {largest:g} is too large for {precision}; use save_precision bf16 or float")
    return done


def write_adapter_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_trained: bool = True,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write ``tensors`` so that ``path`` is at every moment either the old file or the new one, whole and checked.

    ``check`` raises when it does not like what was written; it gets the file before it has its name.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as the user wants new files to be; safetensors makes private ones
        save_file(dict(tensors), part, dict(metadata))
        part.chmod(mode)
        fsync_file(part)
        verify_adapter_file(part, tensors, metadata, is_trained)
        if check is not None:
            check(part)
        os.replace(part, path)
        fsync_dir(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    finally:
        if part.exists():
            part.unlink()
