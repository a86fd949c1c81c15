"""The place of each layer's weight in a model's files: diffusers folders, and single files of the original code."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ...adapters.component_key_names import ComponentKeys
from ...adapters.original_module_names import DIFFUSERS_KEYS, OriginalModule
from ...adapters.targets_rank_alpha import match_target_modules
from ...adapters.validate_file import list_layer_shapes
from ...config.schema import ModelConfig
from ...errors import ConfigError, FileError, UserError
from ...models.base import BaseModelInfo, Family
from ...models.checkpoint_header import read_checkpoint_header
from ...models.checkpoint_inspection import (
    has_denoiser,
    list_denoiser_formats,
    match_bundled_config,
    reject_unsupported_file,
    reject_unsupported_model,
)
from ...models.checkpoint_shards import list_shard_paths
from ...models.collect_component_keys import collect_component_keys, list_adaptable_components
from ...models.detect import DetectedModel, detect_model
from ...models.families import FAMILIES, FAMILY_FACTS
from ...models.gguf_file import is_gguf
from ...models.loading import load_components_on_meta
from ...models.model_configs import ModelError
from ...models.own_families import get_family_facts
from ...models.single_file import select_component_keys
from ...problems import report_file

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Types of weights, by their names in safetensors files."""

_WRAPPERS = ("model", "text_model", "language_model")
"""Modules around a text encoder that come and go with the versions of transformers."""

_OPEN_CLIP_NAMES = {
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
}
_OPEN_CLIP_PARTS = {f"self_attn.{part}_proj": index for index, part in enumerate("qkv")}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, and where its bytes are."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The first byte of the tensor in the file, header included."""
    num_bytes: int

    def read(self, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Read it, or some of its rows."""
        count = self.shape[0] - first_row if num_rows is None and self.shape else num_rows or 0
        row_bytes = self.num_bytes // max(1, self.shape[0]) if self.shape else self.num_bytes
        data = bytearray(row_bytes * (count if self.shape else 1))
        with self.path.open("rb") as file:
            file.seek(self.start + first_row * row_bytes)
            file.readinto(data)
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(count, *self.shape[1:])


@dataclass(frozen=True)
class LayerWeight:
    """The weight of a layer: a tensor, or some rows of the tensor of a fused layer."""

    tensor: StoredTensor
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    """The shape of the weight in diffusers."""
    swaps_halves: bool = False
    """Whether the halves of the rows are in the other order."""
    is_transposed: bool = False

    def read(self, dtype: torch.dtype) -> Tensor:
        """The weight as diffusers has it."""
        if self.is_transposed:
            return self.tensor.read().T.to(dtype).reshape(self.shape)
        return self.restore_order(self.tensor.read(self.first_row, self.num_rows).to(dtype)).reshape(self.shape)

    def restore_order(self, rows: Tensor) -> Tensor:
        """Swap the halves if they are swapped; twice is the identity."""
        return torch.cat(rows.chunk(2)[::-1]) if self.swaps_halves else rows


@dataclass(frozen=True)
class ModelFiles:
    """A model, and where its files have the weights of the layers that a LoRA can change."""

    path: Path
    detected: DetectedModel
    family: Family
    components: tuple[ComponentKeys, ...]
    """The components that the files contain."""
    all_components: tuple[ComponentKeys, ...]
    """The components that a LoRA of the model can change, also text encoders that the files lack."""
    shapes: Mapping[str, tuple[int, ...]]
    """The weight shapes of all layers of all components, by name in a state dict."""
    weights: Mapping[str, LayerWeight]
    biases: Mapping[str, LayerWeight]
    info: BaseModelInfo
    """The names of the model in metadata."""
    targets: frozenset[str]
    """The layers that a LoRA of this family usually has, convolutions included."""
    all_targets: frozenset[str]
    """All linear layers and convolutions."""

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()


def _list_scaled_formats(path: Path, detected: DetectedModel) -> list[str]:
    """List the formats of quantized weights in any component of a file; fp8 without scales is a plain data type."""
    if not path.is_file():
        return list(detected.stored_formats)
    stored = read_checkpoint_header(path).formats.values()
    formats = {each.name for each in stored if each.name != "fp8" or each.scale is not None}
    return sorted(formats | ({"GGUF"} if is_gguf(path) else set()))


def locate_model_weights(text: str) -> ModelFiles:
    """Find the weights of a model; raise with what cannot be read."""
    path = Path(text).expanduser()
    if len(shards := list_shard_paths(path)) > 1:
        fix = "give the model in one file, or as a diffusers folder"
        raise UserError(report_file(path, f"is one of the {len(shards)} files of a model", fix))
    detected = _detect_model(path)
    if formats := _list_scaled_formats(path, detected):
        text = f"is stored quantized ({', '.join(formats)}), and the result would have to be as well"
        raise UserError(report_file(path, text, "give the model in bf16, fp16 or fp32"))
    family = FAMILIES.get(detected.family)
    if family.facts.pipeline.experts is not None:
        fix = "load the LoRA files of both beside the model, in diffusers or ComfyUI"
        raise UserError(report_file(path, f"is {family.facts.title}, which has two transformers", fix))
    names = list_adaptable_components(family)
    pipe = load_components_on_meta(detected, names)
    components, shapes = collect_component_keys(family, pipe), dict[str, tuple[int, ...]]()
    targets, all_targets = set[str](), set[str]()
    found: list[ComponentKeys] = []
    weights: dict[str, LayerWeight] = {}
    biases: dict[str, LayerWeight] = {}
    for component in components:
        layers = {
            f"{component.name}.{name}": layer
            for name, layer in getattr(pipe, component.name).named_modules()
            if getattr(layer, "weight", None) is not None
        }
        own = list_layer_shapes(layers.items())
        shapes |= own
        if not (stored := _list_component_tensors(path, detected, component)):
            continue
        found.append(component)
        all_targets |= {name for name, layer in layers.items() if isinstance(layer, nn.Linear | nn.Conv2d)}
        usual = match_target_modules(getattr(pipe, component.name), _list_usual_targets(family, component.name))
        targets |= {f"{component.name}.{module}" for module in usual}
        places = _OpenClipPlaces(stored) if _is_open_clip(stored) else _NamedPlaces(stored, component)
        for name, shape in own.items():
            module = name.partition(".")[2]
            if (weight := places.find(module, shape, "weight", own)) is not None:
                weights[name] = weight
            if (bias := places.find(module, shape[:1], "bias", own)) is not None:
                biases[name] = bias
    prediction_type = "v_prediction" if detected.prediction_type == "v" else "epsilon"
    pipe.scheduler = SimpleNamespace(config=SimpleNamespace(prediction_type=prediction_type))
    info = family().get_base_model_info(pipe)
    return ModelFiles(
        path=path,
        detected=detected,
        family=family(),
        components=tuple(found),
        all_components=tuple(components),
        shapes=shapes,
        weights=weights,
        biases=biases,
        info=info,
        targets=frozenset(targets),
        all_targets=frozenset(all_targets),
    )


def _list_usual_targets(family: type[Family], component: str) -> tuple[str, ...]:
    if component == family.facts.denoiser_name:
        return (*family.facts.lora.targets, *family.facts.lora.conv_targets)
    return family.facts.lora.text_encoders[component].targets


def _detect_model(path: Path) -> DetectedModel:
    """Single files may lack components, such as text encoders, which is no problem here."""
    try:
        return detect_model(ModelConfig(pretrained_model_name_or_path=str(path)))
    except ConfigError as error:
        if path.is_file() and (detected := _detect_denoiser(path)) is not None:
            return detected
        raise FileError(replace(each, option="") for each in error.problems) from None


def _detect_denoiser(path: Path) -> DetectedModel | None:
    """The model of a single file that has a denoiser and nothing else that is needed for training."""
    try:
        header = read_checkpoint_header(path)
        reject_unsupported_file(header)
        reject_unsupported_model(header, FAMILY_FACTS.values())
    except ModelError:
        return None
    for family, facts in FAMILY_FACTS.items():
        config = match_bundled_config(header, family, facts) if has_denoiser(header, facts) else None
        if config is not None:
            formats = list_denoiser_formats(header, facts)
            return DetectedModel(
                family, "", 1, source_type="file", path_or_id=str(path), bundled_config=config, stored_formats=formats
            )
    return None


def _list_component_tensors(path: Path, detected: DetectedModel, component: ComponentKeys) -> dict[str, StoredTensor]:
    """The tensors of a component by their keys without prefix."""
    if path.is_file():
        tensors = {each.key: each for each in list_stored_tensors(path)}
        prefixes = get_family_facts(detected.family).single_files.prefixes.get(component.name, ())
        if component.is_text_encoder and not any(key.startswith(prefix) for key in tensors for prefix in prefixes):
            return {}
        prefix, keys = select_component_keys(tensors, prefixes)
        return {key.removeprefix(prefix): tensors[key] for key in keys}
    return {each.key: each for file in list_weight_files(path / component.name) for each in list_stored_tensors(file)}


def list_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component, of one variant: ``fp16`` only where there is no other."""
    files = sorted(folder.glob("*.safetensors"))
    variants = {file: len(file.name.split(".")) > 2 for file in files}
    plain = [file for file in files if not variants[file]]
    if not files:
        raise UserError(report_file(folder, "has no .safetensors weights", "pickles (.bin) are never read"))
    return plain or files


def list_stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        found = [
            StoredTensor(
                path=path,
                key=key,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=8 + length + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for key, entry in header.items()
            if key != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise UserError(
            report_file(path, f"is no complete safetensors file ({type(error).__name__})", "download it again")
        ) from None
    end = max((each.start + each.num_bytes for each in found), default=0)
    if path.stat().st_size < end:
        raise UserError(
            report_file(path, f"is truncated: {path.stat().st_size:,} of {end:,} bytes", "download or copy it again")
        )
    return sorted(found, key=lambda each: each.start)


class _NamedPlaces:
    """Weights under the names of diffusers and transformers, or of the original code."""

    def __init__(self, stored: Mapping[str, StoredTensor], component: ComponentKeys):
        strip = _strip_wrappers if component.is_text_encoder else str
        self.stored = {strip(key): tensor for key, tensor in stored.items()}
        self.strip = strip
        self.owners: dict[str, list[tuple[str, OriginalModule, tuple[str | None, ...]]]] = {}
        styles = (component.key_style, *component.other_key_styles)
        for style in (DIFFUSERS_KEYS,) if component.is_text_encoder else (*styles, DIFFUSERS_KEYS):
            key_map = component.get_key_map(style)
            modules = key_map.filter_known_modules(component.modules) if key_map.layout else component.modules
            for group in key_map.group_modules(modules):
                for module in group.modules:
                    if module is not None:
                        self.owners.setdefault(module, []).append((group.name, group.original, group.modules))

    def find(
        self, module: str, shape: tuple[int, ...], end: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> LayerWeight | None:
        """The weight or bias of a layer of this shape; None if the files do not have it."""
        for name, original, parts in self.owners.get(module, []):
            tensor = self.stored.get(f"{self.strip(name)}.{end}")
            if tensor is None or tensor.dtype not in DTYPES:
                continue
            first, total = 0, 0
            component = next(iter(shapes)).partition(".")[0]
            for part in parts:
                if part == module:
                    first = total
                total += shapes.get(f"{component}.{part}", (0,))[0]
            rows = shape[0]
            if not tensor.shape or tensor.shape[0] != total or math.prod(tensor.shape[1:]) != math.prod(shape[1:]):
                continue
            inputs = math.prod(shapes[f"{component}.{module}"][1:])
            return LayerWeight(tensor, first, rows, shape, original.swaps_scale_shift and rows == 2 * inputs)
        return None


class _OpenClipPlaces:
    """Weights under the names of OpenCLIP, whose attention has one tensor for Q, K and V."""

    def __init__(self, stored: Mapping[str, StoredTensor]):
        self.stored = stored

    def find(
        self, module: str, shape: tuple[int, ...], end: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> LayerWeight | None:
        if module == "text_projection":
            tensor = self.stored.get("text_projection") if end == "weight" else None
            return None if tensor is None else LayerWeight(tensor, 0, shape[0], shape, is_transposed=True)
        start, _, rest = module.rpartition("layers.")
        number, _, layer = rest.partition(".")
        if not start or not number.isdecimal():
            return None
        block = f"transformer.resblocks.{number}"
        index = _OPEN_CLIP_PARTS.get(layer)
        key = f"{block}.attn.in_proj_{end}" if index is not None else f"{block}.{_OPEN_CLIP_NAMES.get(layer)}.{end}"
        tensor = self.stored.get(key)
        if tensor is None or tensor.dtype not in DTYPES:
            return None
        if tensor.shape != (shape[0] * (3 if index is not None else 1), *shape[1:]):
            return None
        return LayerWeight(tensor, shape[0] * (index or 0), shape[0], shape)


def _is_open_clip(stored: Mapping[str, StoredTensor]) -> bool:
    return any(".resblocks." in key for key in stored)


def _strip_wrappers(name: str) -> str:
    parts = name.split(".")
    while parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def find_missing_weights(model: ModelFiles, modules: Sequence[str]) -> Iterator[str]:
    """The layers of a LoRA whose weights are not in the model's files."""
    absent = {name for name in modules if name not in model.weights}
    components = {part.name for part in model.components}
    for component in sorted({name.partition(".")[0] for name in absent} - components):
        yield f"{model.path}: contains no {component}, which the LoRA changes"
    if missing := sorted(name for name in absent if name.partition(".")[0] in components):
        yield f"{model.path}: has no weights of their size for {len(missing)} layers, the first is {missing[0]}"
