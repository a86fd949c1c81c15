"""Reading the small JSON files of a model, from a folder, the hub, or what is shipped; no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Reader = Callable[[str], Json | None]
"""Path inside the model to its JSON data, or None when there is no such file."""


class Problem(Exception):
    """Why a model cannot be used."""


def from_folder(folder: Path) -> Reader:
    """A diffusers folder."""
    return lambda name: _local(folder / name)


def from_hub(repository: str) -> Reader:
    """A repository on the hub; files are downloaded one by one, as they are asked for."""
    return lambda name: _remote(repository, name)


def from_config(config: Mapping[str, Json]) -> Reader:
    """A configuration that is shipped with this program."""
    return config.get


def needed(read: Reader, name: str) -> Json:
    """A file without which the model cannot be used."""
    data = read(name)
    if data is None:
        raise Problem(f"{name} is missing; the model is not complete")
    return data


def _local(path: Path) -> Json | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Problem(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise Problem(f"{path.name} is no JSON object")
    return data


def _remote(repository: str, name: str) -> Json | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _local(Path(hf_hub_download(repository, name)))
    except LocalEntryNotFoundError:
        raise Problem("no such folder here, and the hub cannot be reached; check the path or the network") from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        raise Problem(f"no such folder here, and the hub says: {str(error).strip().splitlines()[0]}") from None
