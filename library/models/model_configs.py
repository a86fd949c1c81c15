"""The shipped configurations: the JSON files of published models, and of tiny ones, without weights; no torch.

A configuration is one file, ``configs/NAME.json``: the path of each JSON file inside a diffusers folder -> its data.
NAME is the family, or the family and a variant: ``sdxl``, ``sdxl_tiny``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONFIG_DIR = Path(__file__).parent / "configs"


JsonDict = dict[str, Any]


BundledConfig = Mapping[str, JsonDict]


def list_bundled_configs() -> list[str]:
    """All of them, each family's main one before its variants."""
    return sorted(path.stem for path in _CONFIG_DIR.glob("*.json"))


def list_family_configs(family: str) -> list[str]:
    """Those of one family, the main one first."""
    return [name for name in list_bundled_configs() if name == family or name.startswith(f"{family}_")]


def load_bundled_config(name: str) -> BundledConfig:
    data: BundledConfig = json.loads((_CONFIG_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return data


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


MAX_TEXT_TOKENS = 512
"""Tokens, for text encoders that name no limit of their own."""


@dataclass(frozen=True)
class EncodedSizes:
    """In numbers, whatever the precision that they are kept in."""

    latent_channels: int
    vae_scale_factor: int  # pixels of a side that become one of a latent
    text_elements: int  # of one caption, at most

    def count_moment_elements(self, size: tuple[int, int]) -> int:
        """Mean and spread of a picture of this size in pixels."""
        return 2 * self.latent_channels * (size[0] // self.vae_scale_factor) * (size[1] // self.vae_scale_factor)


def read_encoded_sizes(read: Callable[[str], JsonDict | None]) -> EncodedSizes | None:
    """``read`` gives a JSON file of the model; nothing when they do not tell."""
    vae = read("vae/config.json") or {}
    channels = vae.get("latent_channels", vae.get("z_dim"))
    blocks = vae.get("block_out_channels", vae.get("dim_mult"))
    if not isinstance(channels, int) or not isinstance(blocks, list):
        return None
    encoders = [
        config
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3")
        if (config := read(f"{name}/config.json")) is not None
    ]
    # A summary of the whole text is used beside the words only where there are several encoders.
    text = sum(
        _count_token_elements(config) + (_count_pooled_elements(config) if len(encoders) > 1 else 0)
        for config in encoders
    )
    return EncodedSizes(channels, 2 ** (len(blocks) - 1), text)


def _count_token_elements(config: JsonDict) -> int:
    inner = config.get("text_config", config)
    width, tokens = inner.get("hidden_size", inner.get("d_model", 0)), inner.get("max_position_embeddings")
    return int(width) * min(int(tokens or MAX_TEXT_TOKENS), MAX_TEXT_TOKENS)


def _count_pooled_elements(config: JsonDict) -> int:
    return int(config.get("projection_dim", 0))
