"""Which weights a part of a model really has: two names for one model are one, and a changed file is another."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from ..data.cache.file_hashes import FileHashCache
from ..errors import ConfigError
from .base import Family
from .detect import DetectedModel, get_config_reader
from .single_file import select_component_keys

_HASHED_SUFFIXES = (".json", ".txt", ".model", ".safetensors")
"""What a part is loaded from: configuration, vocabulary, weights."""
_SAMPLE_BYTES = 2**20  # bytes


def compute_component_fingerprints(family: Family, model: DetectedModel, components: Sequence[str], file_hashes: FileHashCache) -> list[str]:
    """Texts that change when anything changes that ``parts`` of a model are made of, and with little else."""
    return [f"{part} {text}" for part in components for text in _iter_component_fingerprints(family, model, part, file_hashes)]


def compute_quick_model_fingerprint(model: DetectedModel) -> str:
    """What is seen of a model's weights at a glance: sizes, beginnings and ends of its files, or the id on the hub."""
    digest = hashlib.sha256()
    for kind, place in [(model.source_type, model.path_or_id), *((part.source_type, part.path_or_id) for part in model.component_sources.values())]:
        path = Path(place)
        files = [path] if path.is_file() else sorted(path.rglob("*.safetensors")) if path.is_dir() else []
        if kind in ("random", "hub") or not files:
            digest.update(place.encode())
        _hash_file_ends(digest, files)
    return digest.hexdigest()


def compute_quick_file_fingerprint(files: Sequence[str]) -> str:
    """The same of files that are named."""
    digest = hashlib.sha256()
    _hash_file_ends(digest, [Path(file).expanduser() for file in files])
    return digest.hexdigest()


def _hash_file_ends(digest: Any, files: Sequence[Path]) -> None:
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, file.stat().st_size - _SAMPLE_BYTES))
            digest.update(opened.read(_SAMPLE_BYTES))


def _iter_component_fingerprints(family: Family, model: DetectedModel, component: str, file_hashes: FileHashCache) -> Iterator[str]:
    separate = model.component_sources.get(component)
    is_in_file = separate.source_type == "file" if separate is not None else model.source_type == "file"
    place = model.path_or_id if separate is None else separate.path_or_id
    if separate is None and model.source_type == "random":
        yield place
    elif is_in_file and component.startswith("tokenizer"):
        yield _hash_loaded_component(getattr(family.load(model, torch.float32, (component,)), component))
    elif is_in_file:
        prefixes = family.facts.single_file_prefixes.get(component, ())
        yield file_hashes.get_hash(Path(place), component, lambda path: _hash_single_file_weights(path, prefixes))
        yield _format_config(get_config_reader(model)(f"{component}/config.json") or {})
    else:
        is_hub = (model if separate is None else separate).source_type == "hub"
        folder = _resolve_component_dir(place, component if separate is None else separate.subfolder, is_hub=is_hub)
        for file in sorted(folder.iterdir()):
            if file.name.endswith(_HASHED_SUFFIXES) and file.is_file():
                yield f"{file.name} {file_hashes.get_hash(file)}"


def _resolve_component_dir(path_or_id: str, subfolder: str, *, is_hub: bool) -> Path:
    """Where the files of a part are; those of a hub id are downloaded, as they would be for loading it."""
    root = Path(path_or_id)
    if is_hub:
        patterns = [f"{subfolder}/*{ending}".removeprefix("/") for ending in _HASHED_SUFFIXES]
        root = Path(snapshot_download(path_or_id, allow_patterns=patterns))
    if not (root / subfolder).is_dir():
        raise ConfigError([f"pretrained_model_name_or_path: {path_or_id}: {subfolder} is missing; it is not complete"])
    return root / subfolder


def _hash_single_file_weights(path: Path, prefixes: Sequence[str]) -> str:
    """Those of one part in a single file, so that two files with the same VAE have the same."""
    digest = hashlib.sha256()
    with safe_open(str(path), framework="pt") as file:
        prefix, names = select_component_keys(file.keys(), prefixes)
        for name in sorted(names):
            digest.update(name.removeprefix(prefix).encode())
            _hash_tensor(digest, file.get_tensor(name))
    return digest.hexdigest()


def _hash_loaded_component(component: Any) -> str:
    """Weights and configuration of a module in memory, or the vocabulary of a tokenizer."""
    digest = hashlib.sha256()
    if not isinstance(component, nn.Module):
        digest.update(str(sorted(component.get_vocab().items())).encode())
        return digest.hexdigest()
    config: Any = component.config
    digest.update(_format_config(dict(config) if isinstance(config, dict) else config.to_dict()).encode())
    for name, tensor in sorted(component.state_dict().items()):
        digest.update(name.encode())
        _hash_tensor(digest, tensor)
    return digest.hexdigest()


def _format_config(config: dict[str, Any]) -> str:
    """What begins with an underscore says how a part came about, and the version is that of a library."""
    return str(sorted((name, str(value)) for name, value in config.items() if name[0] != "_" and "version" not in name))


def _hash_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
