"""Find the model that a LoRA file is for: from its metadata, its layers and their sizes, and the program's key names.

Families share names and sizes of layers: the attention layers of FLUX.1 and of Qwen-Image are called alike in
diffusers, and have equal sizes.  Where nothing in a file tells them apart, and other programs name the layers of the
one otherwise than those of the other, a tool that writes a file needs ``--family``.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ...adapters.component_key_names import ComponentKeys
from ...adapters.file_reader import read_adapter_file
from ...adapters.kohya_diffusers_comfyui_keys import (
    AdapterFileContents,
    convert_from_file_format,
    group_by_file_module,
)
from ...adapters.metadata import NetworkSizes, list_network_sizes
from ...adapters.validate_file import (
    describe_foreign_keys,
    describe_origin,
    describe_unknown_keys,
    find_size_problems,
    group_unread_keys,
)
from ...adapters.validate_tensors import find_tensor_problems
from ...errors import UserError
from ...models.families import FAMILY_FACTS
from ...models.known_models import KnownModel, build_own_models, load_known_models
from ...models.own_families import get_family_facts
from ...problems import Problem, report_file

_NAMES_IN_METADATA: Mapping[str, str] = {
    **{name: name for name in FAMILY_FACTS if name != "flux"},
    "sd-v1": "sd1",
    "sd-1.5": "sd1",
    "sd-v2": "sd2",
    "sdxl-1.0": "sdxl",
    "flux1": "flux",
    "zimage": "z_image",
}
"""The family by how ``ss_base_model_version`` begins in files of sd-scripts, musubi-tuner, ai-toolkit and our own.

``flux`` alone is left out: ``flux-2`` begins with it, too.
"""


@dataclass(frozen=True)
class IdentifiedLora:
    """A LoRA file and the model that it is for."""

    family: str
    contents: AdapterFileContents
    components: Sequence[ComponentKeys]
    metadata: Mapping[str, str]
    is_known_size: bool
    sizes: NetworkSizes
    """Ranks and alphas of the file."""
    shapes: Mapping[str, tuple[int, ...]]
    """The weight shapes of the known model that fits best, by layer; for a LoRA of unknown size only kernels hold."""
    num_tensors: int = 0
    similar_families: tuple[str, ...] = ()
    """Other families whose layers have these names and sizes, which the file does not rule out."""
    unread: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The keys of what else the file contains, which nothing here reads, by what it is."""


@dataclass(frozen=True)
class ModelFit:
    """The agreement of the names and shapes of a file with those of a model."""

    model: KnownModel
    unknown: Sequence[str]
    """The keys of the file that the model does not have."""
    num_misfits: int
    num_layers: int
    """Layers of other sizes than the model's, and all layers that are not damaged."""
    file_modules: tuple[str, ...]
    """The names of its layers in the file."""

    @property
    def is_known_size(self) -> bool:
        """Whether it is this model, except for a few layers."""
        return self.num_misfits <= self.num_layers / 2

    @property
    def num_differences(self) -> tuple[int, float]:
        """Unknown keys, and the share of layers of other sizes, which is 1 for all models of other sizes."""
        return len(self.unknown), self.num_misfits / max(1, self.num_layers) if self.is_known_size else 1.0

    @property
    def num_foreign_names(self) -> int:
        """Layers that sd-scripts, ComfyUI and diffusers name otherwise for this family than the file does."""
        own = {name for part in self.model.components for name in part.list_written_names()}
        return sum(name not in own for name in self.file_modules)

    def list_written_layers(self) -> frozenset[tuple[Hashable, ...]]:
        """List what decides how a converter names the layers of the file: equal sets give equal files."""
        modules: dict[str, list[str]] = {}
        for name in self.file_modules:
            component, group = self.model.lookup[name]
            modules.setdefault(component.name, []).extend(each for each in group.modules if each is not None)
        return frozenset(
            entry
            for part in self.model.components
            if part.name in modules
            for entry in part.list_written_groups(modules[part.name])
        )


def read_lora_file(
    path: Path,
    *,
    can_be_fused: bool = False,
    is_for_inspection: bool = False,
    models: Sequence[KnownModel] = (),
) -> IdentifiedLora:
    """Read a LoRA file in any supported format, and detect its model among ``models``, by default all known ones.

    ``can_be_fused``: also files with updates of fused layers that cannot be split into their parts.
    ``is_for_inspection``: also files that could be of several families, or contain more than is read.
    """
    if not path.is_file():
        raise UserError(report_file(path, f"no such file (looked in {path.absolute().parent})"))
    tensors, metadata = read_adapter_file(path)
    try:
        lora = identify_lora(tensors, metadata, models, is_for_inspection=is_for_inspection)
    except UserError as error:
        raise UserError(report_file(path, str(error))) from None
    if lora.contents.fused and not can_be_fused:
        name, fused = next(iter(lora.contents.fused.items()))
        raise UserError(report_file(path, f"{name}: {fused.reason}", fused.way_out))
    return lora


def identify_lora(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    models: Sequence[KnownModel] = (),
    *,
    is_for_inspection: bool = True,
) -> IdentifiedLora:
    """Find the model that has layers of these names and shapes, or else of these names; only then read the contents.

    So a file that is damaged is an error of its own model, and not a file of another one.
    """
    if problem := describe_foreign_keys(list(tensors)):
        raise UserError(problem)
    unread = group_unread_keys(tensors) if is_for_inspection else {}
    hidden = {key for keys in unread.values() for key in keys}
    tensors = {key: tensor for key, tensor in tensors.items() if key not in hidden}
    known = models or load_known_models()
    fits = _find_best_fits(tensors, find_stated_families(metadata), known)
    fit = fits[0]
    model, unknown = fit.model, fit.unknown
    if unknown:
        text = describe_unknown_keys(unknown, len(tensors), f"{model.family}, which fits the others best")
        if not text.startswith("contains") and len(unknown) > len(tensors) / 2:
            text = f"LoRA of an unknown model; one of its {len(tensors)} keys is {unknown[0]}"
        if len({each.family for each in known}) == 1:
            text = f"is no LoRA of {model.family}: {text}; without --family its model is detected"
        raise UserError(text + describe_origin(metadata))
    contents = convert_from_file_format(
        tensors, metadata, model.components, model.shapes if fit.is_known_size else None
    )
    others = [each for each in fits[1:] if each.model.family != model.family]
    written = fit.list_written_layers()
    if not is_for_inspection and any(each.list_written_layers() != written for each in others):
        raise UserError(_describe_ambiguity([model.family, *(each.model.family for each in others)]))
    return IdentifiedLora(
        family=model.family,
        contents=contents,
        components=model.components,
        metadata=metadata,
        is_known_size=fit.is_known_size,
        sizes=list_network_sizes(tensors),
        shapes=model.shapes,
        num_tensors=len(tensors),
        similar_families=tuple(dict.fromkeys(each.model.family for each in others)),
        unread=unread,
    )


def select_models(models: Sequence[KnownModel], family: str | None) -> Sequence[KnownModel]:
    """Return the models of a family that the user names, or all of them."""
    if family is None:
        return models
    if found := [model for model in models if model.family == family]:
        return found
    if get_family_facts(family) and (own := build_own_models(family)):  # raises with the name that may be meant
        return own
    text = "its layers are in no table, and it has no pipeline.configs"
    raise UserError(Problem("family", text, "give one of the families of this program", value=family))


def _describe_ambiguity(families: Sequence[str]) -> str:
    names = list(dict.fromkeys(families))
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"its layers have the names and sizes of {listed}, and its metadata name none of them; give --family with the"
        f" one that it was trained for, such as --family {names[-1]}"
    )


def _find_best_fits(
    tensors: Mapping[str, Tensor], stated: frozenset[str], models: Sequence[KnownModel]
) -> list[ModelFit]:
    """The models with the most names and shapes of the file; of equal ones those of a stated family come alone.

    Where the file states none of them, the names decide that sd-scripts and musubi-tuner, ComfyUI and diffusers give
    the layers: they write the fused layers of FLUX.1 as one, and the separate ones of Qwen-Image apart.
    """
    of_stated = _fit_models(tensors, [model for model in models if model.family in stated])
    if complete := [fit for fit in of_stated if fit.num_layers and fit.num_differences == (0, 0)]:
        return complete  # the other models take long to look at
    fits = _fit_models(tensors, models)
    fewest = min(fit.num_differences for fit in fits)
    best = [fit for fit in fits if fit.num_differences == fewest]
    if of_stated := [fit for fit in best if fit.model.family in stated]:
        return of_stated
    if len({fit.model.family for fit in best}) == 1:
        return best
    foreign = [fit.num_foreign_names for fit in best]
    return [fit for fit, number in zip(best, foreign, strict=True) if number == min(foreign)]


def _fit_models(tensors: Mapping[str, Tensor], models: Sequence[KnownModel]) -> list[ModelFit]:
    fits: list[ModelFit] = []
    is_whole: dict[str, bool] = {}
    for model in models:
        modules, unknown, _ = group_by_file_module(tensors, model.lookup)
        for name, own in modules.items():
            if name not in is_whole:
                is_whole[name] = not any(find_tensor_problems(own))
        whole = {name: own for name, own in modules.items() if is_whole[name]}
        num_misfits = len(list(find_size_problems(whole, model.lookup, model.shapes)))
        fits.append(ModelFit(model, unknown, num_misfits, len(whole), tuple(modules)))
    return fits


def find_stated_families(metadata: Mapping[str, str]) -> frozenset[str]:
    """The families that a file may be for by its metadata; empty if these name none that is known.

    FLUX.1 and FLUX.1 Kontext have one architecture: there the version of the base model tells more.
    """
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    by_architecture = [(facts.lora.modelspec_architecture, name) for name, facts in FAMILY_FACTS.items()]
    first = _find_families(architecture, by_architecture)
    second = _find_families(metadata.get("ss_base_model_version", ""), [*_NAMES_IN_METADATA.items(), *by_architecture])
    return first & second or first | second


def _find_families(stated: str, names: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The families whose names have the most words of the stated one, from its beginning."""
    words = _split_words(stated)
    lengths = {(len(own), family) for name, family in names if (own := _split_words(name)) and words[: len(own)] == own}
    longest = max((length for length, _ in lengths), default=0)
    return frozenset(family for length, family in lengths if length == longest)


def _split_words(text: str) -> list[str]:
    return [word for word in re.split(r"[-_\s.]+", text.lower()) if word]
