"""Reading the small JSON files of a model, from a folder, the hub, or what is shipped; no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

JsonDict = dict[str, Any]
ConfigReader = Callable[[str], JsonDict | None]
"""Path inside the model to its JSON data, or None when there is no such file."""


class ModelError(Exception):
    """Why a model cannot be used."""


def build_folder_reader(directory: Path) -> ConfigReader:
    """A diffusers folder."""
    return lambda name: _read_json(directory / name)


def build_hub_reader(repo_id: str) -> ConfigReader:
    """A repository on the hub; files are downloaded one by one, as they are asked for."""
    return lambda name: _read_hub_json(repo_id, name)


def build_bundled_reader(config: Mapping[str, JsonDict]) -> ConfigReader:
    """A configuration that is shipped with this program."""
    return config.get


def read_required(read: ConfigReader, name: str) -> JsonDict:
    """A file without which the model cannot be used."""
    data = read(name)
    if data is None:
        raise ModelError(f"{name} is missing; the model is not complete")
    return data


def _read_json(path: Path) -> JsonDict | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path.name} is no JSON object")
    return data


def _read_hub_json(repo_id: str, name: str) -> JsonDict | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _read_json(Path(hf_hub_download(repo_id, name)))
    except LocalEntryNotFoundError:
        raise ModelError("no such folder here, and the hub cannot be reached; check the path or the network") from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        raise ModelError(f"no such folder here, and the hub says: {str(error).strip().splitlines()[0]}") from None
