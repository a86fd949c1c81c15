"""LoRA files whose model is not at hand: which model they are for is found from the names and shapes in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..adapters.formats import Content, from_file, modern
from ..adapters.keys import PartNames
from ..adapters.updates import DOWN, UP, part_of_name, updates_of
from ..adapters.verify import BrokenFileError, read
from ..errors import UserError
from ..families import FAMILIES
from ..families.configs import names_of
from ..families.detect import Detected, detect
from ..families.known import FACTS
from .lora_parts import models_of, part_names


@dataclass(frozen=True)
class Identified:
    """A LoRA file and the model that it is for."""

    family: str
    content: Content
    parts: Sequence[PartNames]
    metadata: Mapping[str, str]
    is_of_known_size: bool


def read_lora(path: Path) -> Identified:
    """Read a LoRA file of any program that is known here."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {path.absolute().parent})")
    try:
        tensors, metadata = read(path)
    except BrokenFileError as error:
        hint = "; only .safetensors files are read" if path.suffix != ".safetensors" else ""
        raise UserError(f"{error}{hint}") from None
    try:
        return identified(tensors, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def identified(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Identified:
    """The model whose names and shapes these are; where only the names are, the model is of another size."""
    own = [key for key in tensors if part_of_name(modern(key)) is not None]
    if not own:
        first = next(iter(tensors), None)
        raise UserError(f"is no LoRA file: it holds {len(tensors)} tensors, and no name is that of an adapter's"
                        + (f"; the first is {first}" if first else ""))  # fmt: skip
    named: Identified | None = None
    said = next((family for start, family in _ARCHITECTURES.items()
                 if metadata.get("modelspec.architecture", "").startswith(start)), None)  # fmt: skip
    for model in _candidates():
        family = model.family
        models = models_of(FAMILIES.get(family), model)
        parts = [part_names(FAMILIES.get(family), name, model) for name, model in models.items()]
        try:
            content = from_file(tensors, metadata, parts)
        except UserError:
            continue
        if _fits(content, models):
            return Identified(family, content, parts, metadata, True)
        if named is None or (named.family != said and family == said):
            named = Identified(family, content, parts, metadata, False)
    if named is None:
        raise UserError(f"is a LoRA file of a model that is not known here; among its {len(tensors)} keys is {own[0]}")
    return named


def _candidates() -> Iterator[Detected]:
    """Published sizes and the built-in model before tiny ones."""
    every = [(family, config) for family in FACTS for config in names_of(family)]
    published, tiny = (
        [_of_config(*one) for one in every if ("tiny" in one[1]) == is_tiny] for is_tiny in (False, True)
    )
    yield from (*published, detect(None), *tiny)


def _of_config(family: str, config: str) -> Detected:
    return Detected(family, "", 8, kind="random", config=config)


_ARCHITECTURES = {
    "stable-diffusion-v1": "sd1", "stable-diffusion-v2": "sd2", "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3": "sd3", "flux-1": "flux", "z-image": "z_image", "qwen-image": "qwen_image",
}  # fmt: skip
"""What the metadata may say; only asked where no size is known."""


def _fits(content: Content, models: Mapping[str, nn.Module]) -> bool:
    """Whether all LoRA matrices have the sizes of the layers; other kinds are told by their names."""
    for name, update in updates_of(content.state, content.alphas).items():
        part, _, module = name.partition(".")
        weight = models[part].get_submodule(module).weight
        if not isinstance(weight, Tensor) or DOWN not in update.tensors:
            continue
        if update.tensors[DOWN].shape[1:] != weight.shape[1:] or len(update.tensors[UP]) != len(weight):
            return False
    return True
