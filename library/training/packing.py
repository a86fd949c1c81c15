"""A nest of dicts, lists, numbers and tensors as JSON and a flat table of tensors, and back: no pickle, no code."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten_state(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of ``tree``; its tensors go into ``tensors`` under names that begin with ``name``."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {"dict": [[key, flatten_state(value, f"{name}/{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        items = [flatten_state(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
        return items if isinstance(tree, list) else {"tuple": items}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise TypeError(f"{name} is a {type(tree).__name__}, which cannot be kept in a file")


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The other way round."""
    if isinstance(tree, list):
        return [unflatten_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(unflatten_state(item, tensors) for item in value)
    return {key: unflatten_state(item, tensors) for key, item in value}
