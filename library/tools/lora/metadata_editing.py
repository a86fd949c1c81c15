"""Show and edit the metadata of a LoRA file; an edited file is a copy with the same tensors and renewed hashes."""

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...adapters.file_reader import read_adapter_file, read_header, read_safetensors
from ...adapters.file_writer import write_adapter_file
from ...adapters.metadata import MODELSPEC_USER_KEYS, add_model_hashes
from ...adapters.validate_file import describe_unknown_keys
from ...errors import FileError
from ...problems import Problem, report_file
from .identification import identify_lora

HASH_KEYS = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
_LONGEST_VALUE = 200


def format_metadata(path: Path, *, as_json: bool) -> Iterator[str]:
    """All keys and values; long ones are cut, except as JSON."""
    metadata = dict(sorted(read_header(path).metadata.items()))
    if as_json:
        yield json.dumps(metadata, indent=1, ensure_ascii=False)
        return
    if not metadata:
        yield f"{path.name}: no metadata"
    for key, value in metadata.items():
        line = value.replace("\n", "\\n")
        if len(line) > _LONGEST_VALUE:
            line = f"{line[:_LONGEST_VALUE]}... ({len(value):,} characters; --json prints all)"
        yield f"{key} = {line}"


def edit_metadata(path: Path, output: Path, changes: Sequence[str], removed: Sequence[str]) -> list[str]:
    """Write a copy with other metadata; return what changed."""
    read_adapter_file(path)  # raises with all that is damaged
    tensors, metadata = read_safetensors(path)
    edited = dict(metadata)
    lines, problems = [], list[Problem]()
    for pattern in removed:
        keys = [key for key in edited if fnmatchcase(key, _complete_key(pattern)) and key not in HASH_KEYS]
        if not keys:
            problems.append(Problem("remove", f"{path.name} has no key {pattern}"))
        lines += [f"- {key}" for key in keys]
        edited = {key: value for key, value in edited.items() if key not in keys}
    for text in changes:
        key, _, value = text.partition("=")
        key = _complete_key(key)
        if edited.get(key) != value:
            lines.append(f"{'~' if key in edited else '+'} {key} = {value[:_LONGEST_VALUE]}")
        edited[key] = value
    if problems:
        raise FileError(problems)
    lora = identify_lora({key: tensor.float() for key, tensor in tensors.items()}, edited)  # as a loader reads it
    if lora.unread:
        raise FileError([report_file(path, describe_unknown_keys(list(tensors), len(tensors)))])
    edited = add_model_hashes(tensors, edited)
    lines += [f"~ {key} = {edited[key]}" for key in HASH_KEYS if edited.get(key) != metadata.get(key)]
    write_adapter_file(output, tensors, edited, is_trained=False)
    return lines


def _complete_key(key: str) -> str:
    """Complete a short key such as ``title`` to ``modelspec.title``."""
    return f"modelspec.{key}" if key in (*MODELSPEC_USER_KEYS, "title", "thumbnail") else key
