"""Tokenizers for models that bring none: single files, and models with random weights."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..demo.stand_in import vocabulary

_CLIP_END = "<|endoftext|>"


def load_tokenizer(cls: Any, hub_id: str, cache: str | None) -> Any:
    """The tokenizer of a published model, from sd-scripts' kind of cache folder, or from the hub and into it."""
    kept = Path(cache).expanduser() / hub_id.replace("/", "_") if cache else None
    repository, _, subfolder = hub_id.partition(":")
    if kept is not None and kept.is_dir():
        return cls.from_pretrained(str(kept))
    try:
        tokenizer = cls.from_pretrained(repository, subfolder=subfolder)
    except (OSError, ValueError):
        raise OSError(
            f"a single file brings no tokenizer, and {repository} cannot be reached on the hub; with a network it is "
            f"downloaded once; without one, put it into FOLDER/{hub_id.replace('/', '_')} and use "
            "--tokenizer_cache_dir FOLDER, or use the model as a diffusers folder"
        ) from None
    if kept is not None:
        tokenizer.save_pretrained(str(kept))
    return tokenizer


def small_tokenizer(cls: Any, config: Mapping[str, Any]) -> Any:
    """A token for each byte of the text, for a model with random weights, which has no words to know."""
    makers = {"CLIPTokenizer": _clip}
    return makers[cls.__name__](cls, config)


def _clip(cls: Any, config: Mapping[str, Any]) -> Any:
    # Through files, since versions of transformers differ in what the constructor takes.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary()), encoding="utf-8")
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        return cls.from_pretrained(folder, model_max_length=config.get("model_max_length", 77),
                                   pad_token=config.get("pad_token", _CLIP_END))  # fmt: skip
