"""What would help where nothing fits: switches that save memory, one after the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import RunConfig
from ...config.checks import conflicts
from ...config.options import build, flat
from ...families import FAMILIES
from ...families.detect import Detected
from ...families.unloaded import unloaded
from ..resting import blocks_of
from .forecast import Devices, Load, Row, forecast
from .weightless import Heaviest

FEW = 3
"""Ways that are tried with each switch, where plain ones are not wanted."""


@dataclass(frozen=True)
class WayOut:
    """Switches, and what then needs least."""

    words: str
    row: Row


def way_out(
    config: RunConfig, given: frozenset[str], model: Detected, load: Load, devices: Devices, rows: Sequence[Row]
) -> WayOut | None:
    """The first so many of the switches by which something fits, but for those that gain nothing; or else all.

    None where devices are too small for what no switch changes; ``rows`` are those that do not fit.
    """
    said, together, names = list[str](), dict[str, Any](), _looked_at(rows, devices.count)
    found, best = None, min((row for row in rows if row.way.name in names), key=lambda row: row.need.total)
    if best.need.reserve + best.need.adapters > devices.memory:
        return None
    for words, values in _switches(config, model, load):
        more = {**together, **values}
        row = _with(more, config, given, model, load, devices, names)
        if row is None or row.need.total >= best.need.total:
            continue
        together, best = more, row
        said = [word for word in said if not words.startswith(word) and word.split()[0] != words.split()[0]] + [words]
        found = WayOut(" ".join(said), row)
        if row.need.total <= devices.memory:
            break
    return found


def _looked_at(rows: Sequence[Row], count: int) -> list[str]:
    """Ways in which no layer and no chain of blocks is cut; where others are asked for, those that need least."""
    plain = {"one device", f"DDP {count}", f"FSDP {count}", f"ZeRO 3, {count}"} & {row.way.name for row in rows}
    return sorted(plain) or [row.way.name for row in sorted(rows, key=lambda row: row.need.total)[:FEW]]


def _switches(config: RunConfig, model: Detected, load: Load) -> Iterator[tuple[str, dict[str, Any]]]:
    """First those that cost nothing, last those that change what is learnt."""
    kept = {"cache_latents": config.cache.latents, "cache_text_encoder_outputs": config.cache.texts}
    for name, is_kept in kept.items():
        if not is_kept:
            yield f"--{name}", {name: True}
    if (config.distributed.mixed_precision or "no") == "no":
        yield "--mixed_precision bf16", {"mixed_precision": "bf16"}
    if not config.train.gradient_checkpointing:
        yield "--gradient_checkpointing", {"gradient_checkpointing": True}
    for kind in ("int8", "nf4") if config.model.base_storage == "float" else ():
        yield f"--base_storage {kind}", {"base_storage": kind}
    if not config.train.blocks_to_swap:
        part = FAMILIES.get(model.family).denoiser
        count = len(blocks_of(getattr(unloaded(model, (part,)), part)))
        yield f"--blocks_to_swap {count}", {"blocks_to_swap": count}
    if not config.train.cpu_offload_checkpointing:
        yield ("--gradient_checkpointing --cpu_offload_checkpointing",
               {"gradient_checkpointing": True, "cpu_offload_checkpointing": True})  # fmt: skip
    if len(load.heaviest.captions) > 1:
        yield "--train_batch_size 1 (or batch_size = 1 in the dataset file)", {"train_batch_size": 1}


def _with(
    values: Mapping[str, Any], config: RunConfig, given: frozenset[str], model: Detected, load: Load, devices: Devices,
    names: Sequence[str],
) -> Row | None:  # fmt: skip
    """What needs least with these settings, of ways of these names."""
    changed: RunConfig = build(RunConfig, {**flat(config), **values})
    if set(conflicts(changed, given | set(values))) - set(conflicts(config, given)):
        return None
    heaviest = load.heaviest
    if "train_batch_size" in values:
        heaviest = Heaviest(heaviest.size, heaviest.captions[:1])
    rows = forecast(changed, given, model, replace(load, heaviest=heaviest), devices, names)
    return min(rows, key=lambda row: row.need.total, default=None)
