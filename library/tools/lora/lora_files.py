"""Read the LoRA files that a tool works on, as units that are decomposed together, and write the result."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...adapters.alpha_folding import ALPHA_METADATA_KEYS, change_alpha
from ...adapters.client_compatibility import format_client_losses, list_client_losses, needs_equal_alphas
from ...adapters.component_key_names import ComponentKeys
from ...adapters.file_reader import read_adapter_file
from ...adapters.file_writer import cast_tensors, list_changing_layers, verify_layers, write_adapter_file
from ...adapters.fused_qkv import FusionError, fuse_adapters, split_adapter
from ...adapters.kohya_diffusers_comfyui_keys import FileFormat, convert_from_file_format, convert_to_file_format
from ...adapters.metadata import NetworkSizes, add_model_hashes, list_network_sizes, update_network_metadata
from ...adapters.module_adapter import DOWN, PEFT_SUFFIXES, ModuleAdapter, iter_named_tensors
from ...adapters.original_module_names import OriginalModule
from ...adapters.peft_metadata import PEFT_METADATA_KEY
from ...errors import FileError, UserError
from ...models.known_models import load_known_models
from ...models.own_families import get_family_facts
from ...problems import Problem, report_file
from .identification import (
    IdentifiedLora,
    find_stated_families,
    identify_lora,
    read_lora_file,
    select_models,
)
from .model_weights import ModelFiles

SOURCES_KEY = "lorikeet.sources"
"""Metadata key: the files that a file was made from, and how."""


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file and its model."""

    path: Path
    lora: IdentifiedLora

    @property
    def family(self) -> str:
        return self.lora.family

    @property
    def updates(self) -> dict[str, ModuleAdapter]:
        """Updates by module name, as in a state dict; those of fused layers that cannot be split are not included."""
        return self.lora.contents.updates

    @property
    def precision(self) -> torch.dtype:
        """The widest type of its tensors."""
        types = [tensor.dtype for tensor in self.lora.contents.state_dict.values()]
        types += [
            tensor.dtype for fused in self.lora.contents.fused.values() for tensor in fused.update.tensors.values()
        ]
        return max(types, key=lambda dtype: torch.finfo(dtype).bits)

    def list_modules(self) -> list[str]:
        """All layers, also those of fused updates."""
        fused = self.lora.contents.fused.values()
        more = [f"{each.component}.{module}" for each in fused for module in each.group.modules if module is not None]
        return [*self.lora.contents.alphas, *more]


def read_lora_files(
    paths: Sequence[str], family: str | None = None, *, is_for_inspection: bool = False
) -> list[LoraFile]:
    """Read all files, or raise with the problems of all; ``family`` tells what they are for."""
    files, problems, models = [], list[Problem](), select_models(load_known_models(), family)
    for text in paths:
        path = Path(text).expanduser()
        try:
            lora = read_lora_file(path, can_be_fused=True, is_for_inspection=is_for_inspection, models=models)
            files.append(LoraFile(path, lora))
        except UserError as error:
            problems += error.problems
    if problems:
        raise FileError(problems)
    return files


def read_lora_files_for_model(paths: Sequence[str], model: ModelFiles) -> list[LoraFile]:
    """Read files as LoRAs of a model, or raise with the problems of all.

    Keys and sizes decide, as with ``base_weights``: families share them, so that the file alone does not tell which of
    them it is for.
    """
    files, problems = [], list[Problem]()
    for text in paths:
        path = Path(text).expanduser()
        try:
            files.append(LoraFile(path, _read_lora_for_model(path, model)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise FileError(problems)
    return files


def _read_lora_for_model(path: Path, model: ModelFiles) -> IdentifiedLora:
    tensors, metadata = read_adapter_file(path)  # whose errors name the file
    try:
        return _fit_lora_to_model(tensors, metadata, model)
    except UserError as error:
        raise UserError(report_file(path, str(error))) from None


def _fit_lora_to_model(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], model: ModelFiles) -> IdentifiedLora:
    family, components = model.detected.family, model.all_components
    try:
        contents = convert_from_file_format(tensors, metadata, components, model.shapes)
    except UserError:
        other = identify_lora(tensors, metadata).family  # raises if the file is damaged
        if other == family:
            raise
        raise UserError(f"is a LoRA of {other}, and {model.path.name} a model of {family}") from None
    return IdentifiedLora(
        family=family,
        contents=contents,
        components=components,
        metadata=metadata,
        is_known_size=True,
        sizes=list_network_sizes(tensors),
        shapes=model.shapes,
    )


def describe_other_family(file: LoraFile) -> str | None:
    """The notice for a file that fits, although its metadata name another family; None if they do not."""
    stated = find_stated_families(file.lora.metadata)
    architectures = {get_family_facts(family).lora.modelspec_architecture for family in stated}
    if not stated or get_family_facts(file.family).lora.modelspec_architecture in architectures:
        return None
    return (
        f"{file.path.name}: its metadata say that it is for {' or '.join(sorted(stated))}; its layers and sizes are"
        f" those of {file.family}"
    )


@dataclass(frozen=True)
class Unit:
    """A matrix that is decomposed as one: a layer, or the parts of a fused layer, as sd-scripts' tools see it."""

    modules: tuple[str | None, ...]
    """Modules of the state dict; None for a part without an update."""
    adapter: ModuleAdapter
    original: OriginalModule

    @property
    def title(self) -> str:
        """The first layer, and how many more."""
        names = [module for module in self.modules if module is not None]
        return names[0] if len(names) == 1 else f"{names[0]} (+{len(names) - 1})"

    def split(self, adapter: ModuleAdapter) -> dict[str, ModuleAdapter]:
        """The parts of a new adapter of this unit."""
        parts = split_adapter(adapter, self.original)
        return {
            module: part
            for module, part in zip(self.modules, parts, strict=True)
            if module is not None and part is not None
        }


def iter_units(file: LoraFile) -> Iterator[Unit]:
    """All updates of a file; the parts of a fused layer together if they are one in the file, or share ``lora_A``."""
    updates, contents = file.updates, file.lora.contents
    for fused in contents.fused.values():
        modules = tuple(module and f"{fused.component}.{module}" for module in fused.group.modules)
        yield Unit(modules, fused.update, fused.group.original)
    for component in file.lora.components:
        prefix = f"{component.name}."
        own = {name.removeprefix(prefix): each for name, each in updates.items() if name.startswith(prefix)}
        for group in component.get_key_map().group_modules(own):
            parts = [None if module is None else own[module] for module in group.modules]
            if len(parts) > 1 and (contents.file_format == "kohya" or _shares_down(parts)):
                try:
                    fused_adapter = fuse_adapters(parts, group.original)
                except FusionError:
                    pass
                else:
                    yield Unit(
                        tuple(module and prefix + module for module in group.modules), fused_adapter, group.original
                    )
                    continue
            for module in group.modules:
                if module is not None:
                    yield build_single_unit(prefix + module, own[module])


def build_single_unit(module: str, adapter: ModuleAdapter) -> Unit:
    """One layer alone."""
    return Unit((module,), adapter, OriginalModule(module, (module,)))


def _shares_down(parts: Sequence[ModuleAdapter | None]) -> bool:
    """Whether fusing the parts does not raise the rank."""
    found = [part for part in parts if part is not None]
    return len(found) > 1 and all(
        part.adapter_type in ("lora", "dora")
        and part.alpha == found[0].alpha
        and part.tensors[DOWN].shape == found[0].tensors[DOWN].shape
        and torch.equal(part.tensors[DOWN], found[0].tensors[DOWN])
        for part in found
    )


def get_kernel(module: str, adapter: ModuleAdapter, file: LoraFile) -> tuple[int, ...]:
    """The kernel with which the LoRA of a layer is stored; empty for linear layers."""
    if DOWN in adapter.tensors:
        return adapter.kernel
    return tuple(file.lora.shapes.get(module, ())[2:])


@dataclass(frozen=True)
class NewLora:
    """A LoRA file to be written."""

    updates: Mapping[str, ModuleAdapter]
    components: Sequence[ComponentKeys]
    file_format: FileFormat
    metadata: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] | None
    """The shapes of the model's weights, against which the file is checked; None for a model of unknown size."""
    sizes: NetworkSizes
    """The ranks and alphas that the metadata tells of."""
    alpha_dtype: torch.dtype = torch.float32
    equalizes_alphas: bool = False
    """Write one alpha for all layers where diffusers would mix up several; the products stay."""
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenLora:
    """A file that was written, as the summary describes it."""

    path: Path
    file_format: FileFormat
    num_tensors: int
    num_bytes: int
    losses: str
    """The parts that other programs do not read right; empty if there are none."""

    def describe(self) -> str:
        text = f"{self.path}: {self.file_format} format, {self.num_tensors} tensors, {self.num_bytes / 1e6:.1f} MB"
        return text + (f"\nnot every program reads it right (docs/files.md): {self.losses}" if self.losses else "")


def write_lora(path: Path, new: NewLora, precision: str | None = None) -> WrittenLora:
    """Write, verify and read back a LoRA file; the file must be as sound as one that ``convert`` writes."""
    file_format, updates = new.file_format, dict(new.updates)
    if new.equalizes_alphas and needs_equal_alphas(updates, new.components, file_format):
        alpha = max(update.alpha for update in updates.values())
        updates = {module: change_alpha(update, alpha) for module, update in updates.items()}
    state = {
        key: tensor
        for module, update in updates.items()
        for key, tensor in iter_named_tensors(module, update, PEFT_SUFFIXES)
    }
    alphas = {module: update.alpha for module, update in updates.items()}
    try:
        tensors, alpha_metadata = convert_to_file_format(state, alphas, new.components, file_format, new.alpha_dtype)
        tensors = cast_tensors(tensors, precision)
    except UserError as error:
        raise UserError(report_file(path, str(error))) from None
    has_embeddings = bool(new.embeddings) and file_format != "diffusers"
    tensors |= {key: tensor for key, tensor in new.embeddings.items() if has_embeddings}
    replaced = {*ALPHA_METADATA_KEYS, PEFT_METADATA_KEY}
    metadata = {key: value for key, value in new.metadata.items() if key not in replaced} | alpha_metadata
    metadata = update_network_metadata(metadata, new.sizes, list_network_sizes(tensors))

    def check(part: Path) -> None:
        verify_layers(part, list_changing_layers(updates), new.components, new.shapes)

    write_adapter_file(path, tensors, add_model_hashes(tensors, metadata), is_trained=False, check=check)
    losses = format_client_losses(list_client_losses(updates, new.components, file_format))
    return WrittenLora(path, file_format, len(tensors), path.stat().st_size, losses)


def build_result(
    file: LoraFile,
    updates: Mapping[str, ModuleAdapter],
    file_format: FileFormat | None,
    how: str,
    *,
    equalizes_alphas: bool = False,
) -> NewLora:
    """The result of a tool that changes one file: its metadata follow, with new ranks and alphas, and how it was made.

    ``how`` is added to ``ss_training_comment``, as by sd-scripts' tools.
    """
    contents = file.lora.contents
    metadata = dict(file.lora.metadata)
    comment = metadata.get("ss_training_comment", "")
    metadata["ss_training_comment"] = "; ".join(filter(None, [how, "" if comment == "None" else comment]))
    metadata[SOURCES_KEY] = format_sources([file], how)
    return NewLora(
        updates=updates,
        components=file.lora.components,
        file_format=file_format or contents.file_format,
        metadata=metadata,
        shapes=file.lora.shapes if file.lora.is_known_size else None,
        sizes=file.lora.sizes,
        alpha_dtype=contents.alpha_dtype,
        equalizes_alphas=equalizes_alphas,
        embeddings=contents.embeddings,
    )


def format_sources(files: Sequence[LoraFile], how: str, more: Sequence[Mapping[str, object]] = ()) -> str:
    """The note of sources: file names without folders, their hashes, and what was done."""
    sources = [
        {
            "file": file.path.name,
            "hash": file.lora.metadata.get("sshs_model_hash", ""),
            **(more[number] if number < len(more) else {}),
        }
        for number, file in enumerate(files)
    ]
    return json.dumps({"made_by": how, "sources": sources})
