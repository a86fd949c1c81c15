"""Download a model of the hub into its cache before a run needs it; what an interruption leaves is gone on with.

huggingface_hub begins a file again after an interruption, since each of its processes writes a file of its own; of a
checkpoint of 24 GB that may be hours.  Here each file is written to one place under a lock, is asked for from the byte
at which it ended, is verified, and then takes its place in the cache, where huggingface_hub finds it.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import UserError
from ..log import ProgressBar
from ..problems import Problem

SMALL_FILES = (".json", ".txt", ".model", ".jinja")
"""Endings of configurations and tokenizers."""

CHUNK_BYTES = 2**20
MAX_ATTEMPTS, WAIT_SECONDS = 5, 1.0
"""How often a connection that was cut is opened again without a new byte, and the wait, which doubles."""

PART_END = ".lorikeet-part"


@dataclass(frozen=True)
class HubFile:
    """One file of a repository."""

    name: str
    size: int


def select_model_files(sizes: Mapping[str, int]) -> list[HubFile]:
    """Select what loading a diffusers model reads: configurations, tokenizers, and the weights of each component.

    Weights in half precision are those of a component without others; pickles and files for other programs are left.
    """
    chosen = []
    names = [name for name in sizes if name.endswith(".safetensors")]
    plain = {str(PurePosixPath(name).parent) for name in names if _is_plain(name)}
    for name, size in sizes.items():
        folder = str(PurePosixPath(name).parent)
        is_weight = name.endswith((".safetensors", ".safetensors.index.json"))
        if is_weight and (folder == "." or (not _is_plain(name) and (folder in plain or ".fp16" not in name))):
            continue
        if is_weight or name.endswith(SMALL_FILES):
            chosen.append(HubFile(name, size))
    # The index comes last: until then the cache holds no model that could be taken for a whole one.
    return sorted(chosen, key=lambda file: (file.name.endswith("model_index.json"), file.size, file.name))


def _is_plain(name: str) -> bool:
    """Whether the weights have no variant such as ``fp16`` in their name."""
    stem = PurePosixPath(name).name.removesuffix(".index.json").removesuffix(".safetensors")
    return "." not in stem


def download_model(repo_id: str) -> Path:
    """Download a model with a progress bar; return its folder in the cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(repo_id, files_metadata=True)
    except Exception as error:  # hub, network and library raise errors of many types
        raise _describe_failure(repo_id, error) from error
    files = select_model_files({file.rfilename: file.size or 0 for file in info.siblings or ()})
    if not any(file.name.endswith(".safetensors") for file in files):
        text = f"{repo_id} has no folders with .safetensors weights"
        raise UserError(Problem("", text, "choose a repository in the format of diffusers"))
    with ProgressBar(sum(file.size for file in files), 0, "downloading", enabled=True, unit="B") as progress:
        for file in files:
            try:
                _download_file(repo_id, info.sha or "main", file, lambda count: progress.update({}, count))
            except (UserError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise _describe_failure(repo_id, error) from error
    patterns = [file.name for file in files]
    return Path(snapshot_download(repo_id, allow_patterns=patterns, endpoint=os.environ.get("HF_ENDPOINT")))


def _describe_failure(repo_id: str, error: Exception) -> UserError:
    first = next(iter(str(error).strip().splitlines()), "")
    cause = f"{repo_id}: cannot be downloaded: {type(error).__name__}: {first}"
    fix = "check the name and the network, and HF_TOKEN for a model with a licence to accept; what is there is kept"
    return UserError(Problem("", cause, fix))


def _download_file(repo_id: str, revision: str, file: HubFile, report: Callable[[int], object]) -> None:
    """Download one file into the cache, unless it is there."""
    from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name

    endpoint = os.environ.get("HF_ENDPOINT")
    if isinstance(try_to_load_from_cache(repo_id, file.name, revision=revision), str):
        report(file.size)
        return
    if file.name.endswith(".safetensors"):
        metadata = get_hf_file_metadata(hf_hub_url(repo_id, file.name, revision=revision, endpoint=endpoint))
        if metadata.etag:
            folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"
            fetch_resumable(metadata.location, folder / metadata.etag, file, report)
            hf_hub_download(repo_id, file.name, revision=revision, endpoint=endpoint)
            return
    hf_hub_download(repo_id, file.name, revision=revision, endpoint=endpoint)
    report(file.size)


def fetch_resumable(url: str, target: Path, file: HubFile, report: Callable[[int], object]) -> None:
    """Fetch a file to ``target``, whose name is its checksum; go on after what an earlier attempt has written."""
    from huggingface_hub.utils._fixes import WeakFileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + PART_END)
    with WeakFileLock(part.with_name(f"{part.name}.lock")):
        if not target.exists():
            report(min(_get_size(part), file.size))
            _fetch_all(url, part, file, report)
            _verify(part, target.name, file)
            os.replace(part, target)
        else:
            report(file.size)


def _fetch_all(url: str, part: Path, file: HubFile, report: Callable[[int], object]) -> None:
    """Ask for the rest again and again while the connection is cut, as long as bytes come."""
    failures = 0
    while (start := _get_size(part)) < file.size or not part.exists():
        try:
            with part.open("ab" if start else "wb") as opened:
                for chunk in _iter_chunks(url, start):
                    opened.write(chunk)
                    report(len(chunk))
        except OSError as error:
            if error.errno is not None:  # a full disk is no network
                raise
        except Exception as error:
            if not _is_cut(error):
                raise
        failures = 0 if _get_size(part) > start else failures + 1
        if failures >= MAX_ATTEMPTS:
            text = f"{file.name}: the connection was cut {failures} times at {_get_size(part):,} of {file.size:,} bytes"
            raise UserError(Problem("", text, "start again later: what is there is kept"))
        if failures:
            time.sleep(WAIT_SECONDS * 2 ** (failures - 1))


def _iter_chunks(url: str, start: int) -> Iterator[bytes]:
    """Iterate over the bytes from ``start`` on, also where a server always begins at the first."""
    from huggingface_hub import get_session
    from huggingface_hub.utils._headers import build_hf_headers

    headers = {**build_hf_headers(), "Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    if not url.startswith(os.environ.get("HF_ENDPOINT") or "https://huggingface.co"):
        headers.pop("authorization", None)  # a signed address elsewhere: the token is for the hub only
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        to_skip = 0 if answer.status_code == 206 else start
        for chunk in answer.iter_bytes():
            rest = chunk[to_skip:]
            to_skip = max(0, to_skip - len(chunk))
            if rest:
                yield rest


def _is_cut(error: Exception) -> bool:
    """Whether the connection failed, and not the request: huggingface_hub uses httpx or httpx2 by its version."""
    return any(base.__name__ == "TransportError" for base in type(error).__mro__)


def _get_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _verify(part: Path, checksum: str, file: HubFile) -> None:
    """Compare size and checksum: SHA-256 of large files, git's SHA-1 of others; a wrong file is removed."""
    hashes = {64: hashlib.sha256(), 40: hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)}
    computed = hashes.get(len(checksum))
    with part.open("rb") as opened:
        while computed is not None and (chunk := opened.read(CHUNK_BYTES)):
            computed.update(chunk)
    if _get_size(part) != file.size or (computed is not None and computed.hexdigest() != checksum):
        part.unlink()
        raise UserError(Problem("", f"{file.name}: what was downloaded is not what the hub has", "start again"))
