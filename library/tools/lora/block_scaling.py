"""Scale the updates of some blocks, or remove them."""

from collections.abc import Mapping, Sequence

from ...adapters.module_adapter import BIAS, UP, ModuleAdapter
from ...errors import FileError
from ...problems import Problem, report_file
from .block_names import BlockFactor, find_unused_names, get_factor, is_selected
from .lora_files import LoraFile

_SCALED_TENSORS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "lora": ((UP,), (BIAS,)),
    "loha": (("hada_w1_a",), (BIAS,)),
    "lokr": (("lokr_w1", "lokr_w1_a"), (BIAS,)),
    "full": (("diff",), (BIAS,)),
    "norm": (("w_norm",), ("b_norm",)),
    "glora": (("a1",), ("b1",), (BIAS,)),
}
"""The tensors of each adapter type that its update is proportional to; one of each group is scaled."""


def scale_blocks(file: LoraFile, factors: Sequence[BlockFactor]) -> dict[str, ModuleAdapter]:
    """Multiply the updates of the selected layers; those with factor 0 are removed."""
    _require_selection(file, factors)
    updates: dict[str, ModuleAdapter] = {}
    obstacles: dict[str, str] = {}
    for module, update in file.updates.items():
        factor = get_factor(module, factors)
        if factor == 1:
            updates[module] = update
        elif factor != 0:
            if update.has_magnitudes or update.adapter_type not in _SCALED_TENSORS:
                obstacles.setdefault(update.title, module)
            else:
                updates[module] = _scale_adapter(update, factor)
    problems = []
    for title, module in obstacles.items():
        factor_text = "only removed (factor 0) or kept"
        reason = f"the effect of {title} is not proportional to any of its tensors, so it can be {factor_text}"
        problems.append(report_file(file.path, f"{module}: {reason}"))
    if problems:
        raise FileError(problems)
    return _require_layers(file, updates)


def prune_blocks(file: LoraFile, removed: Sequence[str], kept: Sequence[str]) -> dict[str, ModuleAdapter]:
    """Remove the selected layers, or all but these."""
    names = [BlockFactor(name, 0.0) for name in removed or kept]
    _require_selection(file, names)
    updates = {
        module: update
        for module, update in file.updates.items()
        if any(is_selected(each.name, module) for each in names) == bool(kept)
    }
    return _require_layers(file, updates)


def _require_selection(file: LoraFile, factors: Sequence[BlockFactor]) -> None:
    """Every name has to select a layer, and updates of fused layers cannot be taken apart."""
    problems = [
        Problem("blocks", f"{name} selects no layer of {file.path.name}", "lora inspect lists its blocks")
        for name in find_unused_names(factors, file.list_modules())
    ]
    for name, fused in file.lora.contents.fused.items():
        problems.append(report_file(file.path, f"{name}: {fused.reason}", fused.way_out))
    if problems:
        raise FileError(problems)


def _require_layers(file: LoraFile, updates: dict[str, ModuleAdapter]) -> dict[str, ModuleAdapter]:
    if not updates:
        raise FileError([report_file(file.path, "no layer is left")])
    return updates


def _scale_adapter(adapter: ModuleAdapter, factor: float) -> ModuleAdapter:
    tensors = dict(adapter.tensors)
    for names in _SCALED_TENSORS[adapter.adapter_type]:
        name = next((each for each in names if each in tensors), None)
        if name is not None:
            tensors[name] = (tensors[name].double() * factor).to(tensors[name].dtype)
    return ModuleAdapter(tensors, adapter.alpha)
