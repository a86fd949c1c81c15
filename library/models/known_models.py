"""The layers of the published models, of the built-in one and of the tiny ones, from a table, without building them.

``known_models.json`` has for each component the names of its layers by the shape of their weights.  Numbers in braces
are ranges: ``blocks.{0-2,5}.proj``.  ``python -m scripts.known_models`` writes it anew; a test compares it with the
models.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..adapters.component_key_names import ComponentKeys
from ..adapters.kohya_diffusers_comfyui_keys import build_key_lookup
from ..adapters.original_module_names import ModuleGroup
from .collect_component_keys import build_component_keys, list_adaptable_components
from .detect import DetectedModel
from .families import FAMILIES
from .own_families import list_own_configs

TABLE_PATH = Path(__file__).with_name("known_models.json")
Shape = tuple[int, ...]
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class KnownModel:
    """A model of known size: the key names of its components, and the shapes of their layers' weights."""

    family: str
    components: tuple[ComponentKeys, ...]
    shapes: Mapping[str, Shape]
    """Shapes of the weights by the names of their layers, in which the component comes first."""

    @functools.cached_property
    def lookup(self) -> dict[str, tuple[ComponentKeys, ModuleGroup]]:
        """All names of its modules in files, which take long to build: several files may be looked up."""
        return build_key_lookup(self.components)


def load_known_models() -> tuple[KnownModel, ...]:
    """The published models first, the tiny ones last."""
    return tuple(_iter_known_models())


def _iter_known_models() -> Iterator[KnownModel]:
    for entry in json.loads(TABLE_PATH.read_text(encoding="utf-8")).values():
        components, family = list[ComponentKeys](), FAMILIES.get(entry["family"])
        shapes: dict[str, Shape] = {}
        for name, part in entry["components"].items():
            layers = {module: shape for module, shape in _expand_layers(part["layers"])}
            components.append(build_component_keys(family, name, tuple(layers)))
            shapes |= {f"{name}.{module}": shape for module, shape in layers.items()}
        yield KnownModel(entry["family"], tuple(components), shapes)


def build_own_models(family: str) -> tuple[KnownModel, ...]:
    """Build the models of a user's family, of the sizes in its configuration files."""
    configs = list_own_configs(family).values()
    return tuple(
        build_known_model(DetectedModel(family, "", 8, source_type="random", bundled_config=each)) for each in configs
    )


def build_known_model(detected: DetectedModel) -> KnownModel:
    """Read names and shapes from the model on the meta device."""
    from .loading import load_components_on_meta

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


def pack_known_model(model: KnownModel) -> dict[str, Any]:
    """The entry of a model in the table."""
    components = {}
    for part in model.components:
        layers: dict[str, list[str]] = {}
        for module in part.modules:
            if shape := model.shapes.get(f"{part.name}.{module}"):
                layers.setdefault("x".join(map(str, shape)), []).append(module)
        components[part.name] = {
            "layers": {shape: list(_pack_names(names)) for shape, names in layers.items()},
        }
    return {"family": model.family, "components": components}


def _expand_layers(layers: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, Shape]]:
    for shape, names in layers.items():
        sizes = tuple(map(int, shape.split("x")))
        for name in names:
            for module in _expand_name(name):
                yield module, sizes


def _expand_name(name: str) -> Iterator[str]:
    """Yield ``a.0.b`` and ``a.1.b`` for ``a.{0-1}.b``."""
    pieces = re.split(r"\{([^}]*)\}", name)
    ranges = [_parse_ranges(text) for text in pieces[1::2]]
    for numbers in product(*ranges):
        middle = (f"{number}{piece}" for number, piece in zip(numbers, pieces[2::2], strict=True))
        yield pieces[0] + "".join(middle)


def _parse_ranges(text: str) -> list[int]:
    """Parse ranges of numbers: ``0-2,5`` means 0, 1, 2, 5."""
    bounds = [part.split("-") for part in text.split(",")]
    return [number for each in bounds for number in range(int(each[0]), int(each[-1]) + 1)]


def _pack_names(names: Iterable[str]) -> Iterator[str]:
    """Join names that differ in their numbers only."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in _INDEX.findall(name))
        groups.setdefault(_INDEX.sub("{}", name), []).append(numbers)
    for pattern, indices in groups.items():
        for ranges in _find_products(indices):
            yield pattern.format(*map(_format_ranges, ranges))


def _find_products(indices: Iterable[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Write a set of tuples as few products of sets of numbers."""
    last: dict[tuple[int, ...], list[int]] = {}
    for index in indices:
        if not index:
            yield ()
            return
        last.setdefault(index[:-1], []).append(index[-1])
    same: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for start, numbers in last.items():
        same.setdefault(tuple(sorted(numbers)), []).append(start)
    for ends, starts in same.items():
        yield from ((*ranges, ends) for ranges in _find_products(starts))


def _format_ranges(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) + "}"
