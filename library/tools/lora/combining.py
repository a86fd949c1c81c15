"""Merge several LoRAs into one: exactly, by concatenating their factors, or by SVD to a rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from ...adapters.kohya_diffusers_comfyui_keys import FileFormat
from ...adapters.metadata import NetworkSizes
from ...adapters.module_adapter import BIAS, DOWN, UP, ModuleAdapter
from ...errors import FileError
from ...log import iter_with_progress
from ...problems import Problem, report_file
from .block_names import BlockFactor, get_factor, is_text_encoder
from .lora_files import SOURCES_KEY, LoraFile, NewLora, Unit, build_single_unit, format_sources, get_kernel, iter_units
from .low_rank import (
    BASE_DEPENDENT_TYPES,
    LowRank,
    Update,
    add_updates,
    build_lora,
    compute_norm,
    decompose,
    factor_update,
    scale_update,
    truncate,
)
from .rank_rule import RankRule
from .resizing import LayerError, measure_error

ADDITIVE_TYPES = ("norm", "full")
"""Differences of whole tensors, which are added element by element."""

SHARED_METADATA = (
    *("ss_base_model_version", "ss_v2", "ss_sd_model_name", "ss_sd_model_hash", "ss_new_sd_model_hash"),
    *("ss_vae_name", "ss_vae_hash", "ss_new_vae_hash", "ss_clip_skip", "ss_model_type"),
    *("modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation"),
    *("modelspec.prediction_type", "modelspec.resolution", "modelspec.encoder_layer", "modelspec.license"),
)
"""Metadata of the base model: true of a merged file, too, if all files that state it agree."""


@dataclass(frozen=True)
class WeightedFile:
    """A file and its weights in a merge."""

    file: LoraFile
    denoiser_weight: float = 1.0
    text_encoder_weight: float = 1.0
    blocks: Sequence[BlockFactor] = ()

    def get_weight(self, module: str) -> float:
        weight = self.text_encoder_weight if is_text_encoder(module) else self.denoiser_weight
        return weight * get_factor(module, self.blocks)

    def describe(self) -> dict[str, object]:
        """Describe the weights of a file for the note of sources in the metadata."""
        described: dict[str, object] = {"weight": self.denoiser_weight}
        if self.text_encoder_weight != self.denoiser_weight:
            described["text_encoder_weight"] = self.text_encoder_weight
        if self.blocks:
            described["blocks"] = {each.name: each.factor for each in self.blocks}
        return described


@dataclass(frozen=True)
class Term:
    """The update of one unit in one file, and its weight."""

    unit: Unit
    weight: float
    source: LoraFile


def list_merge_obstacles(files: Sequence[LoraFile]) -> list[Problem]:
    """List why files cannot be merged into one: other models, or types whose effect depends on the base model."""
    first, found = files[0], list[Problem]()
    for file in files:
        if file.family != first.family and file.lora.components != first.lora.components:
            text = f"is a LoRA of {file.family}, and {first.path.name} one of {first.family}"
            found.append(report_file(file.path, text))
        elif any(
            file.lora.shapes.get(name) != first.lora.shapes.get(name)
            for name in set(file.list_modules()) & set(first.list_modules())
        ):
            text = f"has layers of other sizes than {first.path.name}; it is for another model"
            found.append(report_file(file.path, text))
        dependent = {
            unit.adapter.title: unit.title
            for unit in iter_units(file)
            if unit.adapter.adapter_type in BASE_DEPENDENT_TYPES or unit.adapter.has_magnitudes
        }
        found += [
            report_file(
                file.path,
                f"{layer}: the effect of {title} depends on the weights of the base model, so it cannot be merged with"
                " others alone",
                "merge into a model (--model), and extract from that",
            )
            for title, layer in dependent.items()
        ]
    return found


def merge_loras(
    files: Sequence[WeightedFile], rule: RankRule | None, dtype: torch.dtype
) -> tuple[dict[str, ModuleAdapter], tuple[LayerError, ...]]:
    """Merge; without a rule exactly. Return the updates and what was lost of each layer."""
    updates: dict[str, ModuleAdapter] = {}
    errors: list[LayerError] = []
    problems: list[Problem] = []
    for terms in iter_with_progress(list(_group_terms(files)), "merging", "layer"):
        terms = [term for term in terms if term.weight]
        if not terms:
            continue
        weights = [term for each in terms if (term := _remove_bias(each)) is not None]
        types = {term.unit.adapter.adapter_type for term in weights}
        if types & set(ADDITIVE_TYPES) and len(types) > 1:
            names = " and ".join(sorted(types))
            text = f"{terms[0].unit.title}: has layers of type {names}, which cannot be merged into one"
            problems.append(Problem("", text))
            continue
        if not weights or types & set(ADDITIVE_TYPES):
            updates |= terms[0].unit.split(_add_tensors(terms))
            continue
        merged, error = _merge_terms(weights, rule, dtype)
        if biased := [term for term in terms if BIAS in term.unit.adapter.tensors]:
            bias = _add_tensors([_select_bias(term) for term in biased]).tensors
            merged = ModuleAdapter({**merged.tensors, **bias}, merged.alpha)
        updates |= terms[0].unit.split(merged)
        errors.append(error)
    if problems:
        raise FileError(problems)
    return updates, tuple(errors)


def _remove_bias(term: Term) -> Term | None:
    """The change of the weight alone, unless there is none."""
    tensors = {name: tensor for name, tensor in term.unit.adapter.tensors.items() if name != BIAS}
    return _replace_tensors(term, tensors) if tensors else None


def _select_bias(term: Term) -> Term:
    return _replace_tensors(term, {BIAS: term.unit.adapter.tensors[BIAS]})


def _replace_tensors(term: Term, tensors: Mapping[str, torch.Tensor]) -> Term:
    return replace(term, unit=replace(term.unit, adapter=ModuleAdapter(tensors, term.unit.adapter.alpha)))


def _group_terms(files: Sequence[WeightedFile]) -> list[list[Term]]:
    """The units of all files by their modules; a fused layer stays whole only if it is in every file that has it."""
    by_file = [list(iter_units(each.file)) for each in files]
    owners: dict[str, set[tuple[str | None, ...]]] = {}
    for units in by_file:
        for unit in units:
            for module in unit.modules:
                if module is not None:
                    owners.setdefault(module, set()).add(unit.modules)
    groups: dict[tuple[str | None, ...], list[Term]] = {}
    for weighted, units in zip(files, by_file, strict=True):
        for unit in units:
            weights = {weighted.get_weight(module) for module in unit.modules if module is not None}
            is_whole = len(weights) == 1 and all(len(owners[module]) == 1 for module in unit.modules if module)
            for part in [unit] if is_whole else _split_unit(unit):
                module = next(name for name in part.modules if name is not None)
                groups.setdefault(part.modules, []).append(Term(part, weighted.get_weight(module), weighted.file))
    return list(groups.values())


def _split_unit(unit: Unit) -> list[Unit]:
    if len(unit.modules) == 1:
        return [unit]
    adapter = unit.adapter
    if adapter.adapter_type not in ("lora", "dora"):  # a LoKr of a fused layer, for example
        update = factor_update(adapter)
        factors = update if isinstance(update, LowRank) else truncate(decompose(update), min(update.shape))
        bias = {name: tensor for name, tensor in adapter.tensors.items() if name == BIAS}
        adapter = build_lora(factors, 1.0, (), torch.float64)
        adapter = ModuleAdapter({**adapter.tensors, **bias}, adapter.alpha)
    return [build_single_unit(module, part) for module, part in unit.split(adapter).items()]


def _add_tensors(terms: Sequence[Term]) -> ModuleAdapter:
    total: dict[str, torch.Tensor] = {}
    for term in terms:
        for name, tensor in term.unit.adapter.tensors.items():
            part = tensor.double() * term.weight
            total[name] = total[name] + part.reshape(total[name].shape) if name in total else part
    dtype = terms[0].source.precision
    return ModuleAdapter({name: tensor.to(dtype) for name, tensor in total.items()}, terms[0].unit.adapter.alpha)


def _merge_terms(terms: Sequence[Term], rule: RankRule | None, dtype: torch.dtype) -> tuple[ModuleAdapter, LayerError]:
    first = terms[0]
    module = next(name for name in first.unit.modules if name is not None)
    kernel = get_kernel(module, first.unit.adapter, first.source)
    total = add_updates([scale_update(factor_update(term.unit.adapter), term.weight) for term in terms])
    if rule is None:
        merged = _concatenate(terms, kernel, dtype, total)
    else:
        svd = decompose(total)
        is_conv = bool(kernel) and max(kernel) > 1
        rank = rule.choose_rank(svd.values, min(first.unit.adapter.shape), is_conv=is_conv)
        merged = build_lora(truncate(svd, rank), 1.0, kernel, dtype)
    old_rank = max(term.unit.adapter.rank for term in terms)
    return merged, LayerError(
        first.unit.title, old_rank, merged.rank, compute_norm(total), measure_error(total, merged)
    )


def _concatenate(terms: Sequence[Term], kernel: tuple[int, ...], dtype: torch.dtype, total: Update) -> ModuleAdapter:
    """All factors side by side: each file's own weights stay, to the bit where its weight is 1."""
    adapters = [term.unit.adapter for term in terms]
    scale = adapters[0].scale
    if any(each.adapter_type != "lora" for each in adapters):
        factors = total if isinstance(total, LowRank) else truncate(decompose(total), min(total.shape))
        return build_lora(factors, 1.0, kernel, dtype)
    ups = [
        _multiply(term.unit.adapter.tensors[UP].flatten(1), term.weight * term.unit.adapter.scale / scale)
        for term in terms
    ]
    up = torch.cat([each.to(dtype) for each in ups], 1)
    down = torch.cat([each.tensors[DOWN].flatten(1).to(dtype) for each in adapters])
    return build_lora(LowRank(up, down), scale, kernel, dtype, is_scaled=False)


def find_exact_dtype(files: Sequence[WeightedFile], dtype: torch.dtype) -> torch.dtype:
    """The type in which concatenated factors are not rounded to less than float32."""
    for terms in _group_terms(files):
        scale = terms[0].unit.adapter.scale
        for term in terms:
            factor = term.weight * term.unit.adapter.scale / scale
            if term.unit.adapter.adapter_type != "lora" or (factor and math.frexp(abs(factor))[0] != 0.5):
                return torch.float32
    return dtype


def _multiply(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor.double() * factor


def build_merged_lora(
    files: Sequence[WeightedFile],
    updates: Mapping[str, ModuleAdapter],
    path: Path,
    file_format: FileFormat | None,
    how: str,
) -> NewLora:
    """The merged file: the metadata that all files agree on, and a note of the sources."""
    loras = [each.file for each in files]
    first = loras[0].lora
    names = ", ".join(each.file.path.stem for each in files)
    metadata = select_shared_metadata([file.lora.metadata for file in loras]) | {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "",
        "ss_network_alpha": "",
        "ss_network_args": "{}",
        "ss_output_name": path.stem,
        "ss_training_comment": f"merged from {names}: {how}",
        "modelspec.title": path.stem,
        "modelspec.date": datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        "modelspec.merged_from": names,
        SOURCES_KEY: format_sources(loras, f"merge, {how}", [each.describe() for each in files]),
    }
    known = all(file.lora.is_known_size for file in loras)
    embeddings = {key: tensor for file in loras for key, tensor in file.lora.contents.embeddings.items()}
    return NewLora(
        updates=updates,
        components=first.components,
        file_format=file_format or first.contents.file_format,
        metadata=metadata,
        shapes=first.shapes if known else None,
        sizes=NetworkSizes(frozenset(), frozenset()),
        equalizes_alphas=True,
        embeddings=embeddings,
    )


def select_shared_metadata(sources: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Select the metadata of the base model in which all files that have the key agree."""
    shared = {}
    for key in SHARED_METADATA:
        values = {metadata[key] for metadata in sources if key in metadata}
        if len(values) == 1:
            shared[key] = values.pop()
    return shared
