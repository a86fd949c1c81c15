"""Which weights a part of a model really has: two names for one model are one, and a changed file is another."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from ..data.cache.file_hashes import FileHashes
from ..errors import ConfigError
from .base import Family
from .detect import Detected, reader_of
from .single_file import names_of_part

_ENDINGS = (".json", ".txt", ".model", ".safetensors")
"""What a part is loaded from: configuration, vocabulary, weights."""
_SEEN = 2**20  # bytes


def identity(family: Family, model: Detected, parts: Sequence[str], hashes: FileHashes) -> list[str]:
    """Texts that change when anything changes that ``parts`` of a model are made of, and with little else."""
    return [f"{part} {text}" for part in parts for text in _texts(family, model, part, hashes)]


def glance(model: Detected) -> str:
    """What is seen of a model's weights at a glance: sizes, beginnings and ends of its files, or the id on the hub."""
    digest = hashlib.sha256()
    for kind, place in [(model.kind, model.place), *((part.kind, part.place) for part in model.separate.values())]:
        path = Path(place)
        files = [path] if path.is_file() else sorted(path.rglob("*.safetensors")) if path.is_dir() else []
        if kind in ("random", "hub") or not files:
            digest.update(place.encode())
        _glance(digest, files)
    return digest.hexdigest()


def glance_at(files: Sequence[str]) -> str:
    """The same of files that are named."""
    digest = hashlib.sha256()
    _glance(digest, [Path(file).expanduser() for file in files])
    return digest.hexdigest()


def _glance(digest: Any, files: Sequence[Path]) -> None:
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SEEN))
            opened.seek(max(0, file.stat().st_size - _SEEN))
            digest.update(opened.read(_SEEN))


def _texts(family: Family, model: Detected, part: str, hashes: FileHashes) -> Iterator[str]:
    separate = model.separate.get(part)
    is_in_file = separate.kind == "file" if separate is not None else model.kind == "file"
    place = model.place if separate is None else separate.place
    if separate is None and model.kind == "random":
        yield place
    elif is_in_file and part.startswith("tokenizer"):
        yield _looked_at(getattr(family.load(model, torch.float32, (part,)), part))
    elif is_in_file:
        prefixes = family.facts.prefixes.get(part, ())
        yield hashes.of(Path(place), part, lambda path: _weights(path, prefixes))
        yield _settings(reader_of(model)(f"{part}/config.json") or {})
    else:
        is_hub = (model if separate is None else separate).kind == "hub"
        folder = _folder(place, part if separate is None else separate.subfolder, is_hub=is_hub)
        for file in sorted(folder.iterdir()):
            if file.name.endswith(_ENDINGS) and file.is_file():
                yield f"{file.name} {hashes.of(file)}"


def _folder(place: str, subfolder: str, *, is_hub: bool) -> Path:
    """Where the files of a part are; those of a hub id are downloaded, as they would be for loading it."""
    root = Path(place)
    if is_hub:
        patterns = [f"{subfolder}/*{ending}".removeprefix("/") for ending in _ENDINGS]
        root = Path(snapshot_download(place, allow_patterns=patterns))
    if not (root / subfolder).is_dir():
        raise ConfigError([f"pretrained_model_name_or_path: {place}: {subfolder} is missing; it is not complete"])
    return root / subfolder


def _weights(path: Path, prefixes: Sequence[str]) -> str:
    """Those of one part in a single file, so that two files with the same VAE have the same."""
    digest = hashlib.sha256()
    with safe_open(str(path), framework="pt") as file:
        prefix, names = names_of_part(file.keys(), prefixes)
        for name in sorted(names):
            digest.update(name.removeprefix(prefix).encode())
            _add(digest, file.get_tensor(name))
    return digest.hexdigest()


def _looked_at(part: Any) -> str:
    """Weights and configuration of a module in memory, or the vocabulary of a tokenizer."""
    digest = hashlib.sha256()
    if not isinstance(part, nn.Module):
        digest.update(str(sorted(part.get_vocab().items())).encode())
        return digest.hexdigest()
    config: Any = part.config
    digest.update(_settings(dict(config) if isinstance(config, dict) else config.to_dict()).encode())
    for name, tensor in sorted(part.state_dict().items()):
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


def _settings(config: dict[str, Any]) -> str:
    """What begins with an underscore says how a part came about, and the version is that of a library."""
    return str(sorted((name, str(value)) for name, value in config.items() if name[0] != "_" and "version" not in name))


def _add(digest: Any, tensor: Tensor) -> None:
    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
