"""A part of a model from a single .safetensors file, in diffusers' or the original names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .configs import as_folder
from .empty import empty, fill


def load_from_file(
    cls: Any, place: str, config: Mapping[str, Any], prefixes: Sequence[str], dtype: torch.dtype,
    device: torch.device | None,
) -> Any:  # fmt: skip
    """Make the part of ``config`` and fill it from a file, where its weights' names may begin with a prefix."""
    tensors = _read(place, prefixes)
    if cls.__module__.startswith("transformers."):
        model = empty(cls, config)
        missing = fill(model, _text_names(model, tensors), dtype, device)
    else:
        with as_folder({"config.json": dict(config)}) as folder:
            model = cls.from_single_file(tensors, config=str(folder), torch_dtype=dtype, device=device)
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{len(missing)} weights are missing in the file, for example {missing[0]}")
    return model.eval()


def _read(place: str, prefixes: Sequence[str]) -> dict[str, Tensor]:
    """The weights that begin with a prefix, without it; all of them when no prefix is there."""
    with safe_open(place, framework="pt") as file:
        names = list(file.keys())
        prefix = next((each for each in prefixes if any(name.startswith(each) for name in names)), "")
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names if name.startswith(prefix)}


def _text_names(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names as the installed transformers has them."""
    from diffusers.loaders import single_file_utils

    if any(".resblocks." in name for name in tensors):
        convert: Any = single_file_utils.convert_open_clip_checkpoint
        tensors = convert(model, dict(tensors), prefix="")
    known = model.state_dict()
    inner = "text_model."
    has_inner = any(name.startswith(inner) for name in known)
    named = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(inner)
        named[inner + bare if has_inner and inner + bare in known else bare] = tensor
    if "text_projection.weight" in known and "text_projection.weight" not in named:
        named["text_projection.weight"] = torch.eye(len(known["text_projection.weight"]))  # files of SD3 leave it out
    return named
