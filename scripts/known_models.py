"""Write library/models/known_models.json from the models themselves: ``python -m scripts.known_models``.

To be run when a family, a bundled config or the demo model changes.
"""

import json
from collections.abc import Iterator

from library.models.collect_component_keys import build_component_keys, list_adaptable_components
from library.models.detect import DetectedModel, detect_model
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.known_models import TABLE_PATH, KnownModel, pack_known_model
from library.models.loading import load_components_on_meta
from library.models.model_configs import list_family_configs


def iter_model_sources() -> Iterator[tuple[str, DetectedModel]]:
    """The published models, the built-in one, and the tiny ones, in the order of the table."""
    every = [(family, config) for family in FAMILY_FACTS for config in list_family_configs(family)]
    published, tiny = (
        [
            (config, DetectedModel(family, "", 8, source_type="random", bundled_config=config))
            for family, config in every
            if ("tiny" in config) == is_tiny
        ]
        for is_tiny in (False, True)
    )
    yield from (*published, ("demo", detect_model(None)), *tiny)


def build_known_model(detected: DetectedModel) -> KnownModel:
    """Read names and shapes from the model on the meta device."""
    family = FAMILIES.get(detected.family)
    names = list_adaptable_components(family)
    pipe = load_components_on_meta(detected, names)
    models = {name: getattr(pipe, name) for name in names}
    shapes = {
        f"{name}.{module}": tuple(layer.weight.shape)
        for name, model in models.items()
        for module, layer in model.named_modules()
        if getattr(layer, "weight", None) is not None
    }
    components = tuple(build_component_keys(family, name, model) for name, model in models.items())
    return KnownModel(detected.family, components, shapes)


def write_table() -> None:
    """Write the table."""
    table = {name: pack_known_model(build_known_model(detected)) for name, detected in iter_model_sources()}
    TABLE_PATH.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()
