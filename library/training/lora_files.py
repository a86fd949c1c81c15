"""LoRA files whose model is not at hand: which model they are for is found from the names and shapes in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..adapters.formats import AdapterFileContents, convert_from_file_format, upgrade_diffusers_key
from ..adapters.keys import ComponentKeys
from ..adapters.updates import DOWN, UP, parse_tensor_key, group_updates
from ..adapters.verify import InvalidAdapterFileError, read_safetensors
from ..errors import UserError
from ..families import FAMILIES
from ..families.configs import list_family_configs
from ..families.detect import DetectedModel, detect_model
from ..families.known import FAMILY_FACTS
from .lora_parts import load_meta_components, build_component_keys


@dataclass(frozen=True)
class IdentifiedLora:
    """A LoRA file and the model that it is for."""

    family: str
    contents: AdapterFileContents
    components: Sequence[ComponentKeys]
    metadata: Mapping[str, str]
    is_known_size: bool


def read_lora_file(path: Path) -> IdentifiedLora:
    """Read a LoRA file of any program that is known here."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (looked in {path.absolute().parent})")
    try:
        tensors, metadata = read_safetensors(path)
    except InvalidAdapterFileError as error:
        hint = "; only .safetensors files are read" if path.suffix != ".safetensors" else ""
        raise UserError(f"{error}{hint}") from None
    try:
        return identify_lora(tensors, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def identify_lora(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> IdentifiedLora:
    """The model whose names and shapes these are; where only the names are, the model is of another size."""
    own = [key for key in tensors if parse_tensor_key(upgrade_diffusers_key(key)) is not None]
    if not own:
        first = next(iter(tensors), None)
        raise UserError(f"is no LoRA file: it holds {len(tensors)} tensors, and no name is that of an adapter's"
                        + (f"; the first is {first}" if first else ""))  # fmt: skip
    named: IdentifiedLora | None = None
    said = next((family for start, family in _MODELSPEC_ARCHITECTURES.items()
                 if metadata.get("modelspec.architecture", "").startswith(start)), None)  # fmt: skip
    for model in _iter_candidates():
        family = model.family
        models = load_meta_components(FAMILIES.get(family), model)
        parts = [build_component_keys(FAMILIES.get(family), name, model) for name, model in models.items()]
        try:
            content = convert_from_file_format(tensors, metadata, parts)
        except UserError:
            continue
        if _has_matching_shapes(content, models):
            return IdentifiedLora(family, content, parts, metadata, True)
        if named is None or (named.family != said and family == said):
            named = IdentifiedLora(family, content, parts, metadata, False)
    if named is None:
        raise UserError(f"is a LoRA file of a model that is not known here; among its {len(tensors)} keys is {own[0]}")
    return named


def _iter_candidates() -> Iterator[DetectedModel]:
    """Published sizes and the built-in model before tiny ones."""
    every = [(family, config) for family in FAMILY_FACTS for config in list_family_configs(family)]
    published, tiny = (
        [_build_detected(*one) for one in every if ("tiny" in one[1]) == is_tiny] for is_tiny in (False, True)
    )
    yield from (*published, detect_model(None), *tiny)


def _build_detected(family: str, config: str) -> DetectedModel:
    return DetectedModel(family, "", 8, source_type="random", bundled_config=config)


_MODELSPEC_ARCHITECTURES = {
    "stable-diffusion-v1": "sd1", "stable-diffusion-v2": "sd2", "stable-diffusion-xl": "sdxl",
    "stable-diffusion-3": "sd3", "flux-1": "flux", "z-image": "z_image", "qwen-image": "qwen_image",
}  # fmt: skip
"""What the metadata may say; only asked where no size is known."""


def _has_matching_shapes(contents: AdapterFileContents, models: Mapping[str, nn.Module]) -> bool:
    """Whether all LoRA matrices have the sizes of the layers; other kinds are told by their names."""
    for name, update in group_updates(contents.state_dict, contents.alphas).items():
        part, _, module = name.partition(".")
        weight = models[part].get_submodule(module).weight
        if not isinstance(weight, Tensor) or DOWN not in update.tensors:
            continue
        if update.tensors[DOWN].shape[1:] != weight.shape[1:] or len(update.tensors[UP]) != len(weight):
            return False
    return True
