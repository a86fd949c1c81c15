"""The content of large files as a hash, computed once and remembered by path, size and times of change."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from ..atomic_files import compute_sha256
from ..dataset.scan_cache import SETTLED_AFTER_NS
from ..errors import ConfigError
from ..models.base import Family
from ..models.detect import DetectedModel, get_config_reader
from ..models.single_file import select_component_keys


class FileHashCache:
    """Hashes, and a file that remembers them; where it cannot be read or written, they are computed each time."""

    def __init__(self, cache_file: Path):
        self.cache_file = cache_file
        self._entries: dict[str, list[object]] = _load_entries(cache_file)

    def get_hash(self, file: Path, label: str = "", compute_hash: Callable[[Path], str] | None = None) -> str:
        """The hash of a file; or what ``compute`` makes of it, which ``what`` is the name of."""
        status, place = file.stat(), f"{file.resolve()} {label}".rstrip()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        known = self._entries.get(place)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        is_settled = max(stamp[1:]) < time.time_ns() - SETTLED_AFTER_NS
        found = (compute_hash or compute_sha256)(file)
        if is_settled:
            self._entries[place] = [*stamp, found]
            self._save()
        return found

    def _save(self) -> None:
        """All at once, so that nobody reads a half; of several processes the last one wins, and all are right."""
        draft = self.cache_file.with_name(f"{self.cache_file.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            self.cache_file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self._entries), encoding="utf-8")
            draft.replace(self.cache_file)
        except OSError:  # it only saves time
            with suppress(OSError):
                draft.unlink()


def _load_entries(cache_file: Path) -> dict[str, list[object]]:
    try:
        known = json.loads(cache_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    usable = isinstance(known, dict) and all(isinstance(item, list) and len(item) == 4 for item in known.values())
    return known if usable else {}


_HASHED_SUFFIXES = (".json", ".txt", ".model", ".safetensors")
"""What a part is loaded from: configuration, vocabulary, weights."""


_SAMPLE_BYTES = 2**20  # bytes


def compute_component_fingerprints(
    family: Family, model: DetectedModel, components: Sequence[str], file_hashes: FileHashCache
) -> list[str]:
    """Texts that change when anything changes that ``parts`` of a model are made of, and with little else."""
    return [
        f"{part} {text}"
        for part in components
        for text in _iter_component_fingerprints(family, model, part, file_hashes)
    ]


def compute_quick_model_fingerprint(model: DetectedModel) -> str:
    """What is seen of a model's weights at a glance: sizes, beginnings and ends of its files, or the id on the hub."""
    digest = hashlib.sha256()
    for kind, place in [
        (model.source_type, model.path_or_id),
        *((part.source_type, part.path_or_id) for part in model.component_sources.values()),
    ]:
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


def _iter_component_fingerprints(
    family: Family, model: DetectedModel, component: str, file_hashes: FileHashCache
) -> Iterator[str]:
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
