"""Fingerprints of models: weights, configs and vocabularies by content, with file hashes cached by size and mtime."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn

from ..atomic_files import compute_sha256, write_atomic
from ..dataset.scan_cache import SETTLED_AFTER_NS
from ..errors import FileError
from ..models.base import Family
from ..models.checkpoint_shards import list_shard_paths, open_checkpoint
from ..models.detect import DetectedModel, get_config_reader
from ..models.model_configs import is_tokenizer
from ..models.single_file import select_component_keys
from ..problems import Problem


class FileHashCache:
    """File hashes, cached in a JSON file; without a readable and writable one they are computed every time."""

    def __init__(self, cache_file: Path):
        self.cache_file = cache_file
        self._entries: dict[str, list[object]] = _load_entries(cache_file)

    def get_hash(self, file: Path, label: str = "", compute_hash: Callable[[Path], str] | None = None) -> str:
        """Return the SHA-256 of a file, or what ``compute_hash`` returns for its checkpoint, cached under ``label``."""
        key, files = f"{file.resolve()} {label}".rstrip(), [file] if compute_hash is None else list_shard_paths(file)
        stats = [each.stat() for each in files]
        stamp = [sum(status.st_size for status in stats)]
        stamp += [max(getattr(status, name) for status in stats) for name in ("st_mtime_ns", "st_ctime_ns")]
        cached = self._entries.get(key)
        if cached is not None and cached[:-1] == stamp:
            return str(cached[-1])
        is_settled = max(stamp[1:]) < time.time_ns() - SETTLED_AFTER_NS
        digest = (compute_hash or compute_sha256)(file)
        if is_settled:
            self._entries[key] = [*stamp, digest]
            self._save()
        return digest

    def _save(self) -> None:
        with suppress(OSError):  # the cache of hashes only saves time
            write_atomic(self.cache_file, json.dumps(self._entries).encode())


def _load_entries(cache_file: Path) -> dict[str, list[object]]:
    try:
        entries = json.loads(cache_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    usable = isinstance(entries, dict) and all(isinstance(item, list) and len(item) == 4 for item in entries.values())
    return entries if usable else {}


_HASHED_SUFFIXES = (".json", ".txt", ".model", ".safetensors")
"""Files of a component: configs, vocabularies, weights."""

_SAMPLE_BYTES = 2**20


def compute_component_fingerprints(
    family: Family, model: DetectedModel, components: Sequence[str], file_hashes: FileHashCache
) -> list[str]:
    """Return texts that change when the weights, config or vocabulary of a component change."""
    return [
        f"{component} {text}"
        for component in components
        for text in _iter_component_fingerprints(family, model, component, file_hashes)
    ]


def compute_quick_model_fingerprint(model: DetectedModel) -> str:
    """Hash the sizes, first and last bytes of a model's weight files, or its hub id: fast, to compare ranks."""
    digest = hashlib.sha256()
    sources = [(model.source_type, model.path_or_id)]
    sources += [(source.source_type, source.path_or_id) for source in model.component_sources.values()]
    for source_type, path_or_id in sources:
        path = Path(path_or_id)
        files = (
            list_shard_paths(path) if path.is_file() else sorted(path.rglob("*.safetensors")) if path.is_dir() else []
        )
        if source_type in ("random", "hub") or not files:
            digest.update(path_or_id.encode())
        _hash_file_ends(digest, files)
    return digest.hexdigest()


def compute_quick_file_fingerprint(files: Sequence[str]) -> str:
    """Hash the sizes, first and last bytes of these files."""
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


def _iter_component_fingerprints(
    family: Family, model: DetectedModel, component: str, file_hashes: FileHashCache
) -> Iterator[str]:
    separate = model.component_sources.get(component)
    is_in_file = separate.source_type == "file" if separate is not None else model.source_type == "file"
    path_or_id = model.path_or_id if separate is None else separate.path_or_id
    if separate is None and model.source_type == "random":
        yield path_or_id
    elif is_in_file and is_tokenizer(component):
        yield _hash_loaded_component(getattr(family.load(model, torch.float32, (component,)), component))
    elif is_in_file:
        prefixes = family.facts.single_files.prefixes.get(component, ())
        yield file_hashes.get_hash(Path(path_or_id), component, lambda path: _hash_single_file_weights(path, prefixes))
        yield _format_config(get_config_reader(model)(f"{component}/config.json") or {})
    else:
        is_hub = (model if separate is None else separate).source_type == "hub"
        folder = _resolve_component_dir(
            path_or_id, component if separate is None else separate.subfolder, is_hub=is_hub
        )
        for file in sorted(folder.iterdir()):
            if file.name.endswith(_HASHED_SUFFIXES) and file.is_file():
                yield f"{file.name} {file_hashes.get_hash(file)}"


def _resolve_component_dir(path_or_id: str, subfolder: str, *, is_hub: bool) -> Path:
    """Return the directory of a component's files; those of a hub id are downloaded, as for loading."""
    root = Path(path_or_id)
    if is_hub:
        patterns = [f"{subfolder}/*{suffix}".removeprefix("/") for suffix in _HASHED_SUFFIXES]
        root = Path(snapshot_download(path_or_id, allow_patterns=patterns))
    if not (root / subfolder).is_dir():
        raise FileError(
            [Problem("pretrained_model_name_or_path", f"{path_or_id}: {subfolder} is missing; the model is incomplete")]
        )
    return root / subfolder


def _hash_single_file_weights(path: Path, prefixes: Sequence[str]) -> str:
    """Hash one component of a single-file checkpoint, so that two files with the same VAE get the same hash."""
    digest = hashlib.sha256()
    with open_checkpoint(path) as file:
        prefix, names = select_component_keys(file.keys(), prefixes)
        for name in sorted(names):
            digest.update(name.removeprefix(prefix).encode())
            _hash_tensor(digest, file.get_tensor(name))
    return digest.hexdigest()


def _hash_loaded_component(component: Any) -> str:
    """Hash the weights and config of a module in memory, or the vocabulary of a tokenizer."""
    digest = hashlib.sha256()
    if not isinstance(component, nn.Module):
        tokenizer, images = getattr(component, "tokenizer", component), getattr(component, "image_processor", None)
        digest.update(str(sorted(tokenizer.get_vocab().items())).encode())
        digest.update(_format_config(images.to_dict()).encode() if images is not None else b"")
        return digest.hexdigest()
    config: Any = component.config
    digest.update(_format_config(dict(config) if isinstance(config, dict) else config.to_dict()).encode())
    for name, tensor in sorted(component.state_dict().items()):
        digest.update(name.encode())
        _hash_tensor(digest, tensor)
    return digest.hexdigest()


def _format_config(config: dict[str, Any]) -> str:
    """Leave out private keys and library versions, which do not change what a component computes."""
    return str(sorted((name, str(value)) for name, value in config.items() if name[0] != "_" and "version" not in name))


def _hash_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
