"""The inverse of the conversion of a single file: which rows of diffusers' weights are the rows of its tensors.

The conversion of keys renames weights, splits fused ones and moves their rows.  It is run on numbers of rows in the
place of weights, and where these numbers come out says where each row of a tensor in the file is afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import Family
from .checkpoint_header import read_checkpoint_header
from .detect import DetectedModel, get_config_reader
from .loading import load_components_on_meta
from .model_configs import read_required
from .single_file import build_key_conversion, convert_keys, select_component_keys
from .stored_weights import FIRST_ROW, number_rows


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of a tensor in the file that are consecutive rows of a weight of diffusers."""

    first_row: int
    weight: str
    """The name of the weight."""
    start: int
    """The row of the weight with which they begin."""
    count: int
    num_rows: int
    """The rows of the whole weight; for one that the file has without axes, its elements."""
    is_transposed: bool = False
    """Whether the tensor in the file is the transposed weight."""


@dataclass(frozen=True)
class OriginalTensor:
    """A tensor of a single file, put together from weights of diffusers."""

    key: str
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]

    def build(self, read: Callable[[str], Tensor]) -> Tensor:
        """Put it together; ``read`` returns a weight by its name."""
        parts = [_take_rows(read(run.weight), run) for run in self.runs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self.shape)


def _take_rows(weight: Tensor, run: RowRun) -> Tensor:
    if run.is_transposed:
        return weight.T
    return weight.reshape(run.num_rows, -1)[run.start : run.start + run.count]


def read_original_layout(family: Family, detected: DetectedModel, component: str) -> list[OriginalTensor]:
    """Find the tensors of a component in the single file of a model, from its header and shapes alone.

    Raises ``ValueError`` if a tensor of it is more than rows of weights, or a weight that is used is in none.
    """
    model = getattr(load_components_on_meta(detected, (component,)), component)
    config = read_required(get_config_reader(detected), f"{component}/config.json")
    shapes = read_checkpoint_header(Path(detected.path_or_id)).shapes
    prefix, keys = select_component_keys(shapes, family.facts.single_files.prefixes.get(component, ()))
    conversion = build_key_conversion(family.facts, component, config)
    found = find_original_tensors({key: shapes[key] for key in keys}, prefix, model, conversion)
    if component == family.facts.denoiser_name:
        unused = family.get_unused_layers(model)
    else:
        unused = family.get_unused_text_layers(model, component)
    weights = {run.weight for tensor in found for run in tensor.runs}
    for name, _ in model.named_parameters():
        if name not in weights and not name.startswith(tuple(f"{layer}." for layer in unused)):
            raise ValueError(f"the file has no {name}")
    return found


def find_original_tensors(
    shapes: Mapping[str, tuple[int, ...]], prefix: str, model: Any, conversion: Any
) -> list[OriginalTensor]:
    """Convert numbers of rows, and sort what comes out by the tensors that the rows are of."""
    starts, stand_ins, first = list[int](), dict[str, Tensor](), FIRST_ROW
    for key, shape in shapes.items():
        starts.append(first)
        stand_ins[key] = number_rows(shape, first)
        first += shape[0] if shape else 1
    runs: dict[str, list[RowRun]] = {key: [] for key in shapes}
    expected, keys, ends = model.state_dict(), list(shapes), torch.tensor(starts)
    for name, numbers in convert_keys(model, stand_ins, prefix, conversion).items():
        if numbers.dtype is torch.int64 and numbers.numel() and int(numbers.min()) >= FIRST_ROW and name in expected:
            for index, run in _list_runs(name, numbers, expected[name].numel(), ends):
                runs[keys[index]].append(run)
    return [
        OriginalTensor(key, shapes[key], _order_rows(key, shapes[key], found)) for key, found in runs.items() if found
    ]


def _list_runs(name: str, numbers: Tensor, size: int, starts: Tensor) -> list[tuple[int, RowRun]]:
    """List the runs of rows of a converted weight, each with the number of the tensor in the file."""
    flat = numbers.flatten()
    is_transposed = numbers.ndim == 2 and numbers.shape[0] == 1 < len(flat)
    if not is_transposed and len(flat) not in (size, numbers.shape[0] if numbers.ndim else 1):
        raise ValueError(f"{name} is more than rows of the file's tensors")
    owners = torch.searchsorted(starts, flat, right=True) - 1
    cuts = (torch.where((flat.diff() != 1) | (owners.diff() != 0))[0] + 1).tolist()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(flat)], strict=True):
        owner = int(owners[start])
        first = int(flat[start]) - int(starts[owner])
        run = RowRun(first, name, start, end - start, num_rows=len(flat), is_transposed=is_transposed)
        found.append((owner, run))
    return found


def _order_rows(key: str, shape: Sequence[int], runs: Sequence[RowRun]) -> tuple[RowRun, ...]:
    """Order the runs of a tensor, which have to be all of its rows, each once."""
    ordered, end = sorted(runs, key=lambda run: run.first_row), 0
    for run in ordered:
        if run.first_row != end:
            raise ValueError(f"{key} is not rows of weights of diffusers, each once")
        end += run.count
    if end != (shape[0] if shape else 1):
        raise ValueError(f"{key} is not rows of weights of diffusers, each once")
    if len(ordered) > 1 and any(run.is_transposed for run in ordered):
        raise ValueError(f"{key} is several weights, one of them transposed")
    return tuple(ordered)
