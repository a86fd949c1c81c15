"""The parts of a model without their weights, so that names and shapes are known before anything is loaded."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .detect import DetectedModel, get_config_reader
from .empty import build_empty_model
from .loading import import_model_class
from .reading import read_required


def load_components_on_meta(model: DetectedModel, components: Sequence[str]) -> Any:
    """What has these parts as attributes, as the pipeline will have them, on the meta device."""
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    found = {}
    for part in components:
        settings = dict(read_required(read, f"{part}/config.json"))
        if "pos_embed_max_size" in settings:
            settings["pos_embed_max_size"] = 8  # a large grid of places is computed from it, which no name depends on
        found[part] = build_empty_model(import_model_class(*index[part]), settings)
    return SimpleNamespace(**found)
