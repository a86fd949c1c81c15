"""Write library/models/known_models.json from the models themselves: ``python -m scripts.known_models``.

To be run when a family, a bundled config or the demo model changes.
"""

import json
from collections.abc import Iterator

from library.models.detect import DetectedModel, detect_model
from library.models.families import FAMILY_FACTS
from library.models.known_models import TABLE_PATH, build_known_model, pack_known_model
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


def write_table() -> None:
    """Write the table."""
    table = {name: pack_known_model(build_known_model(detected)) for name, detected in iter_model_sources()}
    TABLE_PATH.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()
