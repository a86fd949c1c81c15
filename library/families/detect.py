"""Which family a model belongs to, read from its small JSON files, and why; loads no weights and no torch."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Json = dict[str, Any]
Reader = Callable[[str], Json | None]
"""Path inside the model to its JSON data, or None when there is no such file."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Detected:
    """What can be known of a model before it is loaded."""

    family: str
    reason: str
    pixel_step: int
    """Sides of training pictures are multiples of this."""


def detect(source: str | None) -> Detected:
    """Look at a diffusers folder or hub id; without a source it is the built-in model."""
    if source is None:
        # Its VAE divides sizes by 8 and its UNet by 2.
        reason = "no model is named, so the built-in one is used: a stand-in of random weights, which draws nothing yet"
        return Detected("sd1", reason, pixel_step=16)
    try:
        return _from_json(_reader(source))
    except _Problem as problem:
        raise ConfigError([f"pretrained_model_name_or_path: {source}: {problem}"]) from None


class _Problem(Exception):
    """Why a model cannot be used."""


def _from_json(read: Reader) -> Detected:
    index = read("model_index.json")
    if index is None:
        raise _Problem("no model_index.json in it, so it is no diffusers model; name the folder that has one")
    name = index.get("_class_name")
    if name != "StableDiffusionPipeline":
        raise _Problem(f"its model_index.json says {name}; not yet: this version trains StableDiffusionPipeline, "
                       "that is Stable Diffusion 1")  # fmt: skip
    unet, vae, scheduler = (_part(read, file) for file in (
        "unet/config.json", "vae/config.json", "scheduler/scheduler_config.json"))  # fmt: skip
    for file in ("text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        _part(read, file)
    _check_scheduler(scheduler)
    if unet.get("cross_attention_dim") == 1024:
        raise _Problem("its UNet reads text of width 1024, so it is Stable Diffusion 2; not yet: this version trains "
                       "Stable Diffusion 1")  # fmt: skip
    if unet.get("in_channels", 4) != 4:
        raise _Problem(f"its UNet takes {unet['in_channels']} channels and not 4; inpainting and editing models "
                       "cannot be trained")  # fmt: skip
    reason = f"model_index.json says {name}, and the UNet reads text of width {unet.get('cross_attention_dim')}"
    return Detected("sd1", reason, pixel_step=_shrinks(vae) * _shrinks(unet))


def _part(read: Reader, name: str) -> Json:
    config = read(name)
    if config is None:
        raise _Problem(f"{name} is missing; the model is not complete")
    return config


def _check_scheduler(config: Json) -> None:
    """What training takes from the scheduler, known before any weights are loaded."""
    predicts, steps = config.get("prediction_type", "epsilon"), config.get("num_train_timesteps", 1000)
    if predicts not in ("epsilon", "v_prediction"):
        raise _Problem(f"its scheduler says prediction_type {predicts!r}; only epsilon and v_prediction can be trained")
    if steps != 1000:
        raise _Problem(f"its scheduler says num_train_timesteps {steps}; only 1000 is supported")


def _shrinks(config: Json) -> int:
    """By what a VAE's or UNet's sizes are divided: every block but the last halves them."""
    blocks = config.get("block_out_channels")
    if not isinstance(blocks, list) or not blocks:
        raise _Problem("the config.json of its UNet or VAE names no block_out_channels; the file is damaged")
    return int(2 ** (len(blocks) - 1))


def _reader(source: str) -> Reader:
    path = Path(source).expanduser()
    if path.is_dir():
        return lambda name: _local(path / name)
    if path.is_file():
        raise _Problem("it is a single file; not yet: this version reads diffusers folders and hub ids")
    if _HUB_ID.fullmatch(source) and not source.endswith((".safetensors", ".ckpt")):
        return lambda name: _remote(source, name)
    raise _Problem(f"no such folder (looked in {path.absolute().parent}), and no hub id such as owner/name")


def _local(path: Path) -> Json | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _Problem(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise _Problem(f"{path.name} is no JSON object")
    return data


def _remote(repository: str, name: str) -> Json | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _local(Path(hf_hub_download(repository, name)))
    except LocalEntryNotFoundError:
        raise _Problem("no such folder here, and the hub cannot be reached; check the path or the network") from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the hub's own errors are among these
        raise _Problem(f"no such folder here, and the hub says: {str(error).strip().splitlines()[0]}") from None
