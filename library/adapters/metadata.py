"""Metadata of LoRA files: sd-scripts' ``ss_*`` keys, ModelSpec 1.0.1, and the hashes that web UIs look up.

Paths are never written: only their last component.  ``ss_datasets`` and ``ss_tag_frequency`` are built in
dataloader/dataset_metadata.py.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..config.option_needs import Has, Trait
from ..config.options import flatten_config, iter_group_options, iter_options
from ..config.schema import AdapterConfig, ModelConfig, RunConfig
from ..config.schema_objective import NoiseConfig, TimestepSampling
from ..config.schema_output import SaveConfig
from ..config.types import FaceCropRange, split_keyword_args
from ..config.validate import THUMBNAIL_TYPES
from .module_adapter import ALPHA, ModuleAdapter, parse_tensor_key


@dataclass(frozen=True)
class BaseModelMetadata:
    """The base model, as its family describes it."""

    base_model_version: str
    architecture: str
    prediction_type: str  # epsilon or v
    implementation: str = "diffusers"
    is_version_2: bool = False
    timestep_sampling: TimestepSampling = "shift"
    """The default of ``timestep_sampling`` of its family."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Metadata that only models of this family have, by key."""


@dataclass(frozen=True)
class RunMetadata:
    """The state of the run when a file is written."""

    step: int
    epoch: int
    max_train_steps: int  # the steps of the whole run
    num_epochs: int
    started_at: float  # seconds since 1970
    saved_at: float
    session_id: int
    num_train_images: int  # counts repeats, but no regularization images
    num_reg_images: int
    num_validation_images: int
    num_batches_per_epoch: int
    resolution: tuple[int, int]  # width, height
    dataset_metadata: Mapping[str, str]  # ss_ keys of the dataset
    model_metadata: Mapping[str, str]  # ss_ keys of the model files
    rank: int | str  # text where modules differ
    alpha: float | str
    optimizer: str  # module.Class(name=value,...)
    mixed_precision: str  # the precision that options and launcher resolve to


def build_metadata(config: RunConfig, model: BaseModelMetadata, run: RunMetadata, software: str) -> dict[str, str]:
    """Build the metadata of one file, without hashes; ``software`` is ``name/version``."""
    minimum = _build_minimum_metadata(config.adapter, model, run)
    if config.save.no_metadata:
        return _convert_values_to_str(minimum)
    is_flow = model.prediction_type == "flow"
    objective = {**(_build_flow_metadata(config.noise, model.timestep_sampling) if is_flow else {}), **model.metadata}
    return _convert_values_to_str(
        {
            **minimum,
            **run.model_metadata,
            **run.dataset_metadata,
            **_build_run_metadata(run),
            **_build_option_metadata(config, is_flow=is_flow),
            **_build_memory_metadata(config.model, config.data.face_crop_aug_range),
            "ss_sd_scripts_commit_hash": "",  # this is another program
            **_build_training_adapter_metadata(config.adapter),
            "ss_cache_latents": config.cache.caches_latents,
            **objective,
            **_build_modelspec_metadata(config.save, config.noise, model, run, software, train=config.adapter.train),
            **_build_token_metadata(config.adapter),
            "modelspec.encoder_layer": str(config.model.clip_skip or 1),
        }
    )


def add_model_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Add sd-scripts' two hashes of the tensors as they will be saved, and renew that of ModelSpec if there is one."""
    model_hash, legacy_hash, position = hashlib.sha256(), hashlib.sha256(), 0
    # Only ss_ keys are hashed: titles and the like may be edited later.
    parts = _iter_file_parts(tensors, {key: value for key, value in metadata.items() if key.startswith("ss_")})
    for part in parts:
        legacy_hash.update(part[max(0, 0x100000 - position) : max(0, 0x110000 - position)])
        if position:  # 0 is the header
            model_hash.update(part)
        position += len(part)
    hashes = {"sshs_model_hash": model_hash.hexdigest(), "sshs_legacy_hash": legacy_hash.hexdigest()[:8]}
    if MODELSPEC_HASH_KEY in metadata:
        hashes[MODELSPEC_HASH_KEY] = f"0x{model_hash.hexdigest()}"
    return {**metadata, **hashes}


MODELSPEC_HASH_KEY = "modelspec.hash_sha256"
"""Hash of all tensors, which some programs write."""


def _iter_file_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The header of a safetensors file and the bytes of its tensors, which are not copied."""
    # In which order safetensors writes keys depends on their names and types.
    small = save({key: torch.zeros(1, dtype=tensor.dtype) for key, tensor in tensors.items()}, dict(metadata))
    header = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])
    names = sorted(header.keys() - {"__metadata__"}, key=lambda name: int(header[name]["data_offsets"][0]))
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield tensors[name].contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class NetworkSizes:
    """All ranks and alphas in a file; where a layer has no alpha, it is the rank."""

    dim: frozenset[int]
    alpha: frozenset[float]


def list_network_sizes(tensors: Mapping[str, Tensor]) -> NetworkSizes:
    """List the ranks and alphas of the layers in a file of any format."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (parsed := parse_tensor_key(key)) is not None:
            layers.setdefault(parsed[0], {})[parsed[1]] = tensor
    ranks = {name: ModuleAdapter(own, 0).rank for name, own in layers.items()}
    alphas = frozenset(float(own.get(ALPHA, ranks[name])) for name, own in layers.items())
    return NetworkSizes(frozenset(ranks.values()), alphas)


def update_network_metadata(metadata: Mapping[str, str], before: NetworkSizes, now: NetworkSizes) -> dict[str, str]:
    """Change sd-scripts' keys for ranks and alphas where a conversion, such as folding or fusing, has changed these."""
    changed = dict(metadata)
    for name, old, new in (("dim", before.dim, now.dim), ("alpha", before.alpha, now.alpha)):
        if old == new or not new:
            continue
        if f"ss_network_{name}" in metadata:
            changed[f"ss_network_{name}"] = str(next(iter(new))) if len(new) == 1 else "Dynamic"
        try:
            arguments = json.loads(changed.get("ss_network_args", "{}"))
            kept = {key: value for key, value in arguments.items() if not re.search(rf"{name}s?$", key)}
        except (ValueError, AttributeError):
            continue
        if len(kept) < len(arguments):  # conv_alpha, block_dims
            changed["ss_network_args"] = json.dumps(kept)
    return changed


def _build_minimum_metadata(config: AdapterConfig, model: BaseModelMetadata, run: RunMetadata) -> dict[str, Any]:
    """Build the metadata that loaders and web UIs need, even with ``no_metadata``."""
    base = {"ss_v2": model.is_version_2, "ss_base_model_version": model.base_model_version}
    if not config.has_adapter:
        return base
    return {
        **base,
        "ss_network_module": config.network_module,
        "ss_network_dim": run.rank,
        "ss_network_alpha": run.alpha,
        "ss_network_args": json.dumps({name: value or "" for name, value in split_keyword_args(config.network_args)}),
    }


def _build_run_metadata(run: RunMetadata) -> dict[str, Any]:
    return {
        "ss_session_id": run.session_id,
        "ss_training_started_at": run.started_at,
        "ss_training_finished_at": run.saved_at,
        "ss_optimizer": run.optimizer,
        "ss_mixed_precision": run.mixed_precision,
        "ss_steps": run.step,
        "ss_max_train_steps": run.max_train_steps,
        "ss_epoch": run.epoch,
        "ss_num_epochs": run.num_epochs,
        "ss_num_train_images": run.num_train_images,
        "ss_num_reg_images": run.num_reg_images,
        "ss_num_validation_images": run.num_validation_images,
        "ss_num_batches_per_epoch": run.num_batches_per_epoch,
    }


def _build_option_metadata(config: RunConfig, *, is_flow: bool) -> dict[str, Any]:
    """Record the options whose fields name a key; those for flow-matching models only where they are for the model."""
    values, recorded = flatten_config(config), {}
    for option in iter_options(RunConfig):
        if option.metadata_key.startswith("ss_") and (is_flow or Has(Trait.FLOW) not in (option.needs or ())):
            value = values[option.name]
            recorded[option.metadata_key] = None if option.is_dropped_at_zero and not value else value
    rates, length = list(config.optim.text_encoder_lr), config.model.max_token_length
    return recorded | {
        "ss_text_encoder_lr": rates if len(rates) > 1 else rates[0] if rates else None,  # as in sd-scripts
        "ss_max_token_length": length if length > 75 else None,
    }


def _build_training_adapter_metadata(config: AdapterConfig) -> dict[str, Any]:
    return {"ss_training_adapter": Path(config.training_adapter).name} if config.training_adapter else {}


def _build_memory_metadata(model: ModelConfig, face_range: FaceCropRange | None) -> dict[str, Any]:
    """Build the keys of options of sd-scripts that save memory, most not needed here, or crop around faces."""
    return {
        "ss_full_fp16": False,
        "ss_lowram": False,
        "ss_fp8_base": False,  # the denoiser only
        "ss_fp8_base_unet": model.quantize_base == "fp8",
        "ss_face_crop_aug_range": None if face_range is None else (face_range.low, face_range.high),
    }


def _build_flow_metadata(noise: NoiseConfig, default_sampling: TimestepSampling) -> dict[str, Any]:
    """Build the keys that are written for flow-matching models only, as sd-scripts does."""
    return {
        "ss_timestep_sampling": noise.get_timestep_sampling(default_sampling),
        "ss_weighting_scheme": noise.weighting_scheme or "none",
        "ss_model_prediction_type": noise.model_prediction_type,
    }


def _convert_values_to_str(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else str(value) for key, value in values.items()}


MODELSPEC_USER_KEYS: Mapping[str, str] = {
    option.metadata_key.removeprefix("modelspec."): option.name
    for option in iter_group_options(SaveConfig)
    if option.metadata_key.startswith("modelspec.")
}
"""Keys set by the user, and the option of each."""


_ARCHITECTURE_ENDS = {"lora": "/lora", "full": "", "embedding": "/textual-inversion"}


def _build_token_metadata(config: AdapterConfig) -> dict[str, Any]:
    """Record the new word, which programs read from the name of the file alone."""
    if not config.trains_embedding:
        return {}
    return {"ss_token_string": config.token_string, "ss_num_vectors_per_token": config.num_vectors_per_token}


def _build_modelspec_metadata(
    save: SaveConfig,
    noise: NoiseConfig,
    model: BaseModelMetadata,
    run: RunMetadata,
    software: str,
    *,
    train: str,
) -> dict[str, Any]:
    width, height = run.resolution
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{model.architecture}{_ARCHITECTURE_ENDS[train]}",
        "implementation": model.implementation,
        "implementation_version": software,
        "title": save.metadata_title or save.output_name,
        "date": datetime.fromtimestamp(int(run.saved_at), tz=timezone.utc).isoformat(),
        "resolution": f"{width}x{height}",
        "prediction_type": model.prediction_type,
    }
    given = {key: getattr(save, option) for key, option in MODELSPEC_USER_KEYS.items()}
    values |= {key: value for key, value in given.items() if value is not None}
    if save.metadata_thumbnail is not None:
        path = Path(save.metadata_thumbnail).expanduser()
        encoded = base64.b64encode(path.read_bytes()).decode()
        values["thumbnail"] = f"data:{THUMBNAIL_TYPES[path.suffix.lower()]};base64,{encoded}"
    if noise.min_timestep is not None or noise.max_timestep is not None:
        low, high = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
        values["timestep_range"] = f"{low},{high}"
    return {f"modelspec.{key}": value for key, value in values.items()}
