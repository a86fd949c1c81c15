"""The parts of a model without their weights, so that names and shapes are known before anything is loaded."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .detect import Detected, reader_of
from .empty import empty
from .loading import class_of
from .reading import needed


def unloaded(model: Detected, parts: Sequence[str]) -> Any:
    """What has these parts as attributes, as the pipeline will have them, on the meta device."""
    read = reader_of(model)
    index = needed(read, "model_index.json")
    found = {}
    for part in parts:
        settings = dict(needed(read, f"{part}/config.json"))
        if "pos_embed_max_size" in settings:
            settings["pos_embed_max_size"] = 8  # a large grid of places is computed from it, which no name depends on
        found[part] = empty(class_of(*index[part]), settings)
    return SimpleNamespace(**found)
