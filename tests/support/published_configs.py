"""Components of published models on the meta device."""

from torch import nn

from library.models import loading
from library.models.model_configs import load_bundled_config
from library.models.weights import build_empty_model


def build_component_on_meta(config: str, component: str) -> nn.Module:
    """Build one component in its published size, without weights."""
    data = load_bundled_config(config)
    settings = dict(data[f"{component}/config.json"])
    if settings.get("_class_name") == "SD3Transformer2DModel":
        settings["pos_embed_max_size"] = 8  # avoids computing a large position table
    return build_empty_model(loading.import_model_class(*data["model_index.json"][component]), settings)
