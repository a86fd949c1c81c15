"""Reduce the ranks of a LoRA, and turn LoHa and LoKr into LoRA."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...adapters.module_adapter import BIAS, DOWN, INPUT_MAGNITUDE, MAGNITUDE, UP, ModuleAdapter
from ...errors import FileError
from ...log import iter_with_progress
from ...problems import report_file
from .lora_files import LoraFile, Unit, get_kernel, iter_units
from .low_rank import (
    LowRank,
    Update,
    add_updates,
    build_lora,
    compute_norm,
    decompose,
    factor_update,
    scale_update,
    truncate,
)
from .rank_rule import RankRule

RESIZABLE_TYPES = ("lora", "dora", "input-dora", "loha", "lokr")


@dataclass(frozen=True)
class LayerError:
    """The difference of a layer's new update from the old one."""

    title: str
    old_rank: int
    new_rank: int
    norm: float
    """Frobenius norm of the old update."""
    error: float
    """Frobenius norm of the difference to the new one, as it is written."""

    @property
    def share(self) -> float:
        return self.error / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class Resized:
    """The new updates, and what was lost."""

    updates: dict[str, ModuleAdapter]
    errors: tuple[LayerError, ...]
    unchanged: dict[str, int]
    """The number of layers of each adapter type that stays as it is."""


def resize_lora(file: LoraFile, rule: RankRule, dtype: torch.dtype) -> Resized:
    """Resize every layer; the factors are written in ``dtype``."""
    for name, fused in file.lora.contents.fused.items():
        if INPUT_MAGNITUDE in fused.update.tensors:
            raise FileError([report_file(file.path, f"{name}: {fused.reason}", fused.way_out)])
    updates: dict[str, ModuleAdapter] = {}
    errors: list[LayerError] = []
    unchanged: dict[str, int] = {}
    for unit in iter_with_progress(list(iter_units(file)), "resizing", "layer"):
        if unit.adapter.adapter_type not in RESIZABLE_TYPES or _has_magnitude_of_lycoris(unit.adapter):
            unchanged[unit.adapter.title] = unchanged.get(unit.adapter.title, 0) + 1
            updates |= unit.split(unit.adapter)
            continue
        resized, error = _resize_unit(file, unit, rule, dtype)
        updates |= unit.split(resized)
        errors.append(error)
    return Resized(updates, tuple(errors), unchanged)


def _has_magnitude_of_lycoris(adapter: ModuleAdapter) -> bool:
    return adapter.adapter_type in ("loha", "lokr") and adapter.has_magnitudes


def _resize_unit(file: LoraFile, unit: Unit, rule: RankRule, dtype: torch.dtype) -> tuple[ModuleAdapter, LayerError]:
    adapter = unit.adapter
    is_lora = DOWN in adapter.tensors
    kernel = get_kernel(next(name for name in unit.modules if name is not None), adapter, file)
    # sd-scripts applies the rank of convolutions to 1x1 convolutions, too.
    limit = rule.get_limit(bool(kernel))
    if is_lora and rule.name == "fixed" and (limit is None or adapter.rank <= limit):
        norm = compute_norm(factor_update(adapter))
        return adapter, LayerError(unit.title, adapter.rank, adapter.rank, norm, 0.0)
    # LoHa and LoKr have no rank that alpha could be divided by: their LoRA has alpha = rank.
    scale = adapter.scale if is_lora and adapter.alpha else 1.0
    update = scale_update(factor_update(adapter), 1 / scale)
    svd = decompose(update)
    rank = rule.choose_rank(svd.values, min(adapter.shape), is_conv=bool(kernel))
    new = build_lora(truncate(svd, rank), scale, kernel, dtype, is_scaled=False)
    kept = {name: each for name, each in adapter.tensors.items() if name in (MAGNITUDE, INPUT_MAGNITUDE, BIAS)}
    new = ModuleAdapter({**new.tensors, **kept}, new.alpha)
    norm, error = abs(scale) * compute_norm(update), measure_error(scale_update(update, scale), new)
    return new, LayerError(unit.title, adapter.rank, rank, norm, error)


def measure_error(update: Update, new: ModuleAdapter) -> float:
    """The norm of the difference between an update and a LoRA as it is stored, rounding included."""
    stored = LowRank(new.tensors[UP].double().flatten(1) * new.scale, new.tensors[DOWN].double().flatten(1))
    if isinstance(update, LowRank):
        return compute_norm(add_updates([update, stored.scale(-1.0)]))
    return float(torch.linalg.matrix_norm(update.double() - stored.multiply_out().to(update.device)))


def format_errors(errors: tuple[LayerError, ...], *, shows_layers: bool) -> Iterator[str]:
    """The errors in words: all together, the worst layers, and the ranks; ``shows_layers``: every layer."""
    if not errors:
        return
    total = math.sqrt(sum(each.norm**2 for each in errors))
    lost = math.sqrt(sum(each.error**2 for each in errors))
    ranks = sorted(each.new_rank for each in errors)
    text = (
        f"rank {ranks[0]}"
        if ranks[0] == ranks[-1]
        else f"ranks {ranks[0]} to {ranks[-1]}, median {ranks[len(ranks) // 2]}"
    )
    share = lost / total if total else 0.0
    yield f"{len(errors)} layers, {text}; error {format_share(share)} of the update norm {total:.4g}"
    if shows_layers:
        width = max(len(each.title) for each in errors)
        yield from (f"  {each.title:<{width}}  {_format_error(each)}" for each in errors)
    elif share > 0:
        worst = sorted(errors, key=lambda each: -each.share)[:3]
        yield "largest errors: " + "; ".join(f"{each.title} {format_share(each.share)}" for each in worst)


def _format_error(error: LayerError) -> str:
    ranks = f"rank {error.new_rank}" if not error.old_rank else f"rank {error.old_rank} -> {error.new_rank}"
    return f"{ranks}, norm {error.norm:.4g}, error {format_share(error.share)}"


def format_share(share: float) -> str:
    """``12.3 %``, or ``3e-07`` where that would be 0."""
    return f"{100 * share:.3g} %" if share >= 1e-4 or share == 0 else f"{share:.1g}"
