"""Rules across the options about files; no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .network_args import list_arg_names, get_adapter_type, parse_network_args
from .schema import RunConfig

THUMBNAIL_TYPES: Mapping[str, str] = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
"""What a thumbnail may be."""
_REPO_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_RANK_ARG_SUFFIXES = ("_dim", "_dims", "_alpha", "_alphas", "_patterns", "_indices", "train_blocks")
_UPLOAD_OPTIONS = ("huggingface_repo_type", "huggingface_path_in_repo", "huggingface_repo_visibility", "async_upload")
MAX_THUMBNAIL_BYTES = 2**22
METADATA_OPTIONS = ("title", "author", "description", "license", "tags", "usage_hint", "thumbnail", "merged_from",
            "trigger_phrase", "preprocessor")  # fmt: skip


def validate_save_format(adapter_types: Iterable[str], file_format: str) -> list[str]:
    """Why adapters of these kinds cannot be written so."""
    found = []
    for kind in sorted(set(adapter_types)):
        if kind in ("oft", "boft") and file_format in ("kohya", "comfy"):
            found.append(f"{kind} turns what goes into a layer, and the files of sd-scripts and ComfyUI what comes out "
                         "of it; take save_format auto, which peft reads")  # fmt: skip
        if kind in ("loha", "lokr") and file_format == "diffusers":
            found.append(f"diffusers does not load {kind}; take save_format auto or comfy")
    return found


def validate_save_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    save = config.save
    for what in ("epochs", "steps"):
        last, every = f"save_last_n_{what}", f"save_every_n_{what}"
        if getattr(save, last) is not None and getattr(save, every) is None:
            yield (last, every), f"nothing is saved that could be too old; set {every}"
    if save.save_format != "auto" and not parse_network_args(config.adapter.network_args)[1]:
        for problem in validate_save_format([get_adapter_type(config.adapter)], save.save_format):
            yield ("save_format", "network_module"), problem
    for name in METADATA_OPTIONS:
        if getattr(save, f"metadata_{name}") is not None and save.no_metadata:
            yield (f"metadata_{name}", "no_metadata"), "no_metadata leaves it out; take one of the two out"
    if save.metadata_thumbnail is not None:
        for problem in _validate_thumbnail(Path(save.metadata_thumbnail).expanduser()):
            yield ("metadata_thumbnail",), problem


def validate_upload_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Where files are sent."""
    save = config.save
    if save.huggingface_repo_id is None:
        for name in (
            "huggingface_repo_type",
            "huggingface_path_in_repo",
            "huggingface_repo_visibility",
            "async_upload",
        ):
            if name in explicit and getattr(save, name):
                yield (name, "huggingface_repo_id"), "nothing is sent anywhere; name a repository"
    elif not _REPO_ID_PATTERN.fullmatch(save.huggingface_repo_id):
        yield ("huggingface_repo_id",), f"{save.huggingface_repo_id!r} is no repository of the hub; write OWNER/NAME"
    if ".." in (save.huggingface_path_in_repo or "").split("/"):
        yield ("huggingface_path_in_repo",), f"{save.huggingface_path_in_repo}: leads out of the repository"


def validate_initial_weights(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """LoRA files that a run starts from."""
    adapter = config.adapter
    for name in ("network_weights", "base_weights"):
        places = getattr(adapter, name)
        for place in [places] if isinstance(places, str) else places or ():
            if not Path(place).expanduser().is_file():
                yield (name,), f"{place}: no such file (looked in {Path(place).expanduser().absolute().parent})"
    if adapter.dim_from_weights and adapter.network_weights is None:
        yield ("dim_from_weights", "network_weights"), "there is no file that could say; name it with network_weights"
    sizes = [word for word in list_arg_names(adapter.network_args) if word.endswith(_RANK_ARG_SUFFIXES)]
    if adapter.dim_from_weights and sizes:
        yield ("network_args", "dim_from_weights"), f"{sizes[0]}: dim_from_weights takes it from the file; leave it out"
    given_sizes = [name for name in ("network_dim", "network_alpha") if name in explicit]
    if adapter.dim_from_weights and given_sizes:
        yield (given_sizes[0], "dim_from_weights"), "dim_from_weights takes it from the file; give one of the two"
    if len(adapter.base_weights_multiplier) > len(adapter.base_weights):
        yield (
            ("base_weights_multiplier", "base_weights"),
            f"{len(adapter.base_weights_multiplier)} strengths for {len(adapter.base_weights)} files",
        )


def _validate_thumbnail(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: no such file"
    elif path.suffix.lower() not in THUMBNAIL_TYPES:
        yield f"{path}: expected a picture, {', '.join(THUMBNAIL_TYPES)}"
    elif path.stat().st_size > MAX_THUMBNAIL_BYTES:
        yield f"{path}: larger than 4 MiB, and it would stand in every file; make it smaller"
