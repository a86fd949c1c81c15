"""Shared by tests: published configs."""

from torch import nn

from library.models import loading
from library.models.model_configs import load_bundled_config
from library.models.weights import build_empty_model


def part_of(config: str, part: str) -> nn.Module:
    """One part in its real size, without weights."""
    data = load_bundled_config(config)
    settings = dict(data[f"{part}/config.json"])
    if "pos_embed_max_size" in settings:
        settings["pos_embed_max_size"] = 8  # SD3 computes a large grid of places, which are no weights
    return build_empty_model(loading.import_model_class(*data["model_index.json"][part]), settings)
