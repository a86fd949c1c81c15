"""Extract the difference of two models as LoRA, DoRA or LoKr, layer by layer: two weights are in memory at a time."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...adapters.client_compatibility import choose_file_format
from ...adapters.merge import compute_delta_weight, compute_merged_weight
from ...adapters.metadata import NetworkSizes
from ...adapters.module_adapter import MAGNITUDE, ModuleAdapter
from ...adapters.original_module_names import OriginalModule
from ...errors import FileError
from ...log import iter_with_progress
from ...problems import Problem, report_file
from .lora_files import SOURCES_KEY, NewLora, Unit, build_single_unit
from .low_rank import build_lora, decompose, truncate
from .model_weights import ModelFiles
from .rank_rule import RankRule
from .resizing import LayerError, measure_error

_ROUNDING_SHARE = 3e-5
"""The part of a difference of low rank that may be rounding of the weights; its square is what a rank is chosen by."""


@dataclass(frozen=True)
class ExtractionSettings:
    """The layers that are extracted, the adapter type, and the precision."""

    rule: RankRule | None
    """The rule for ranks; LoKr may have None, and then its second factor stays whole."""
    adapter_type: str = "lora"
    factor: int = 8
    with_all_layers: bool = False
    with_convolutions: bool = True
    min_difference: float = 0.0
    dtype: torch.dtype = torch.float32
    """The dtype of the computation."""
    save_dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    fuses_layers: bool = True
    """Whether layers that are one in the original model get one ``lora_A``, as in sd-scripts' files."""


@dataclass
class Extraction:
    """The result of an extraction, filled layer by layer."""

    updates: dict[str, ModuleAdapter] = field(default_factory=dict)
    errors: list[LayerError] = field(default_factory=list)
    num_equal: int = 0
    """Layers without a difference."""
    skipped_components: list[str] = field(default_factory=list)
    """Text encoders that are left out because they differ by no more than ``min_difference``."""
    num_left_out: int = 0
    """Differing weights and biases that no layer of the result covers."""
    left_out_norm: float = 0.0

    @property
    def covered_norm(self) -> float:
        return math.sqrt(sum(each.norm**2 for each in self.errors))


def list_extraction_obstacles(base: ModelFiles, tuned: ModelFiles) -> list[Problem]:
    """List why the difference of two models cannot be taken: other families or sizes."""
    if base.detected.family != tuned.detected.family:
        text = f"is a model of {tuned.detected.family}, and {base.path} one of {base.detected.family}"
        return [report_file(tuned.path, text)]
    shared = base.weights.keys() & tuned.weights.keys()
    if sizes := [name for name in sorted(shared) if base.shapes[name] != tuned.shapes[name]]:
        both = f"{list(tuned.shapes[sizes[0]])} and {list(base.shapes[sizes[0]])}"
        return [report_file(tuned.path, f"{sizes[0]} has other sizes than in {base.path}: {both}")]
    return [] if shared else [report_file(tuned.path, f"has no layer in common with {base.path}")]


def extract(base: ModelFiles, tuned: ModelFiles, settings: ExtractionSettings) -> Extraction:
    """Extract layer by layer."""
    if problems := list_extraction_obstacles(base, tuned):
        raise FileError(problems)
    skipped = _find_similar_components(base, tuned, settings.min_difference)
    result = Extraction(skipped_components=sorted(skipped))
    units = [unit for unit in _list_units(base, tuned, settings) if unit[0].partition(".")[0] not in skipped]
    covered = {module for unit in units for module in unit}
    for modules in iter_with_progress(units, "extracting", "layer"):
        if (extracted := _extract_unit(base, tuned, modules, settings)) is None:
            result.num_equal += 1
        else:
            result.updates |= extracted[0]
            result.errors.append(extracted[1])
    _measure_left_out(base, tuned, covered, skipped, result)
    return result


def _find_similar_components(base: ModelFiles, tuned: ModelFiles, limit: float) -> set[str]:
    """The components whose largest difference is not above the limit; with limit 0 layers are looked at one by one."""
    similar = {part.name for part in base.components} if limit > 0 else set[str]()
    for name in base.weights.keys() & tuned.weights.keys():
        component = name.partition(".")[0]
        if component in similar and float(_read_difference(base, tuned, [name], torch.float32)[1].abs().max()) > limit:
            similar.discard(component)
    return similar


def _list_units(base: ModelFiles, tuned: ModelFiles, settings: ExtractionSettings) -> Iterator[list[str]]:
    """List the layers that are decomposed, with the parts of a fused layer as one unit."""
    chosen = base.all_targets if settings.with_all_layers else base.targets
    for component in base.components:
        prefix = f"{component.name}."
        modules = [
            name.removeprefix(prefix)
            for name in base.weights
            if name.startswith(prefix) and name in chosen and name in tuned.weights
            if settings.with_convolutions or math.prod(base.shapes[name][2:]) == 1
        ]
        key_map = component.get_key_map()
        known = key_map.filter_known_modules(modules) if key_map.layout else modules
        for group in key_map.group_modules(known):
            parts = [prefix + module for module in group.modules if module is not None]
            is_whole = settings.fuses_layers and settings.adapter_type != "lokr" and len(parts) == len(group.modules)
            yield from [parts] if is_whole else [[part] for part in parts]


def _read_difference(
    base: ModelFiles, tuned: ModelFiles, modules: Sequence[str], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The tuned weight and its difference to the base weight; the parts of a fused layer are below each other."""
    new = torch.cat([tuned.weights[module].read(dtype) for module in modules])
    old = torch.cat([base.weights[module].read(dtype) for module in modules])
    return new, new - old


def _extract_unit(
    base: ModelFiles, tuned: ModelFiles, modules: list[str], settings: ExtractionSettings
) -> tuple[dict[str, ModuleAdapter], LayerError] | None:
    new, difference = _read_difference(base, tuned, modules, settings.dtype)
    if not bool(difference.any()):
        return None
    if not bool(difference.isfinite().all()):
        raise FileError([report_file(tuned.path, f"{modules[0]}: NaN or infinite values", "the file is damaged")])
    kernel = tuple(difference.shape[2:])
    matrix = (_scale_rows(new, new - difference) if settings.adapter_type == "dora" else difference).flatten(1)
    matrix = matrix.to(settings.device)
    if settings.adapter_type == "lokr":
        adapter = _factor_lokr(matrix, kernel, settings)
        error = float(torch.linalg.vector_norm(_compute_update(adapter) - difference.double().flatten(1)))
    else:
        rule = settings.rule
        if rule is None:
            raise AssertionError("preflight asks for a rank")
        svd = decompose(matrix, _ROUNDING_SHARE if rule.name in ("fixed", "energy", "sv_fro") else 0.0)
        is_conv = math.prod(kernel) > 1
        rank = rule.choose_rank(svd.values, min(matrix.shape), is_conv=is_conv)
        adapter = build_lora(truncate(svd, rank), 1.0, kernel, torch.float64)
        adapter = ModuleAdapter(
            {name: each.cpu().to(settings.save_dtype) for name, each in adapter.tensors.items()}, adapter.alpha
        )
        error = measure_error(difference.flatten(1), adapter)
        if settings.adapter_type == "dora":
            adapter = _add_magnitude(adapter, new)
            merged = compute_merged_weight((new - difference).double(), adapter)
            error = float(torch.linalg.vector_norm(merged - new.double()))
    norm = float(torch.linalg.vector_norm(difference.double()))
    if len(modules) == 1:
        unit = build_single_unit(modules[0], adapter)
    else:
        rows = tuple(base.shapes[module][0] for module in modules)
        unit = Unit(
            tuple(modules), adapter, OriginalModule(modules[0], tuple(modules), rows, base.shapes[modules[0]][1])
        )
    return unit.split(adapter), LayerError(unit.title, 0, adapter.rank, norm, error)


def _scale_rows(new: Tensor, old: Tensor) -> Tensor:
    """DoRA: the smallest difference that gives each row its direction; its length is the magnitude's."""
    rows, others = new.flatten(1), old.flatten(1)
    scales = (rows * others).sum(1) / rows.square().sum(1).clamp_min(torch.finfo(rows.dtype).tiny)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (rows * scales[:, None] - others).reshape(new.shape)


def _add_magnitude(adapter: ModuleAdapter, new: Tensor) -> ModuleAdapter:
    """DoRA: the norms of the rows of the tuned weight, which are right whatever the rank."""
    norms = torch.linalg.vector_norm(new.double().flatten(1), dim=1).to(adapter.tensors["up"].dtype)
    shape = (1, -1, 1, 1) if new.dim() == 4 else (-1,)
    return ModuleAdapter({**adapter.tensors, MAGNITUDE: norms.reshape(shape)}, adapter.alpha)


def _factor_lokr(matrix: Tensor, kernel: tuple[int, ...], settings: ExtractionSettings) -> ModuleAdapter:
    """The nearest Kronecker product: the elements are rearranged so that it is a product of two vectors."""
    area = math.prod(kernel)
    outputs, inputs = len(matrix), matrix.shape[1] // area
    rows, columns = _find_divisor(outputs, settings.factor), _find_divisor(inputs, settings.factor)
    inner = (outputs // rows, inputs // columns * area)
    rearranged = matrix.reshape(rows, inner[0], columns, inner[1]).permute(0, 2, 1, 3).reshape(rows * columns, -1)
    svd = torch.linalg.svd(rearranged, full_matrices=False)
    root = svd.S[0].sqrt()
    first, second = (svd.U[:, 0] * root).reshape(rows, columns), (svd.Vh[0] * root).reshape(inner)
    tensors, alpha = {"lokr_w1": first}, 1.0
    if settings.rule is None:
        tensors["lokr_w2"] = second.reshape(inner[0], -1, *kernel)
    else:
        parts = decompose(second)
        rank = settings.rule.choose_rank(parts.values, min(inner), is_conv=area > 1)
        factors, alpha = truncate(parts, rank), float(rank)
        tensors |= {"lokr_w2_a": factors.up, "lokr_w2_b": factors.down}
    return ModuleAdapter(
        {name: each.cpu().to(settings.save_dtype).contiguous() for name, each in tensors.items()}, alpha
    )


def _find_divisor(size: int, limit: int) -> int:
    return max(number for number in range(1, limit + 1) if size % number == 0)


def _compute_update(adapter: ModuleAdapter) -> Tensor:
    update: Tensor = compute_delta_weight(adapter, torch.float64).flatten(1) * adapter.scale
    return update


def _measure_left_out(
    base: ModelFiles, tuned: ModelFiles, covered: set[str], skipped: set[str], result: Extraction
) -> None:
    """The differences that no layer of the result covers: norms, biases, embeddings, other layers."""
    total = 0.0
    for places, others in ((base.weights, tuned.weights), (base.biases, tuned.biases)):
        for name in places.keys() & others.keys():
            is_covered = name in covered and places is base.weights
            if is_covered or name.partition(".")[0] in skipped:
                continue
            difference = others[name].read(torch.float32) - places[name].read(torch.float32)
            square = float(difference.double().square().sum())
            result.num_left_out += square > 0
            total += square
    result.left_out_norm = math.sqrt(total)


def build_extracted_lora(
    base: ModelFiles, tuned: ModelFiles, settings: ExtractionSettings, result: Extraction, path: Path, to: str | None
) -> NewLora:
    """The extracted file and its metadata."""
    rule = "" if settings.rule is None else f", {settings.rule.describe()}"
    modules = {"lora": "networks.lora", "dora": "lycoris.kohya", "lokr": "lycoris.kohya"}
    arguments = {} if settings.adapter_type == "lora" else {"algo": settings.adapter_type}
    how = f"{settings.adapter_type} extracted from {tuned.path.stem}, the base model is {base.path.stem}{rule}"
    metadata = {
        "ss_base_model_version": base.info.base_model_version,
        "ss_v2": str(base.info.base_model_version.startswith("sd_v2")),
        "ss_network_module": modules[settings.adapter_type],
        "ss_network_dim": "",
        "ss_network_alpha": "",
        "ss_network_args": json.dumps(arguments),
        "ss_sd_model_name": base.path.name,
        "ss_output_name": path.stem,
        "ss_training_comment": how,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{base.info.architecture}/lora",
        "modelspec.implementation": base.family.facts.lora.modelspec_implementation,
        "modelspec.title": path.stem,
        "modelspec.date": datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        SOURCES_KEY: json.dumps({"made_by": how, "sources": [{"file": base.path.name}, {"file": tuned.path.name}]}),
    }
    file_format: Any = to or choose_file_format(result.updates, base.components, base.family.facts.lora.format)
    sizes = NetworkSizes(frozenset(), frozenset())
    return NewLora(
        updates=result.updates,
        components=base.components,
        file_format=file_format,
        metadata=metadata,
        shapes=base.shapes,
        sizes=sizes,
        equalizes_alphas=True,
    )
