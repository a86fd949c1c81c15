"""A forecast in words and as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from .forecast import Devices, Load, Row
from .need import Need
from .ways_out import WayOut

GB = 2**30
"""As the makers of GPUs count."""


def told(rows: Sequence[Row], out: WayOut | None, load: Load, devices: Devices) -> str:
    """Of one way or several: which fit, the fastest first; which do not; and what would help where nothing fits."""
    return "\n".join(_lines(rows, out, load, devices))


def recorded(rows: Sequence[Row], out: WayOut | None, devices: Devices) -> dict[str, Any]:
    """The same for programs."""
    fastest = max(row.pictures_a_second for row in rows)
    found: dict[str, Any] = {"gpu_memory": devices.memory, "layouts": [row.record(fastest, devices.memory)
                                                                       for row in rows]}  # fmt: skip
    if out is not None:
        found["way_out"] = {"options": out.words, **out.row.record(fastest, devices.memory)}
    return found


def _lines(rows: Sequence[Row], out: WayOut | None, load: Load, devices: Devices) -> Iterator[str]:
    (width, height), count = load.heaviest.size, len(load.heaviest.captions)
    number = "1 device" if devices.count == 1 else f"{devices.count} devices"
    pictures = "1 picture" if count == 1 else f"{count} pictures"
    precision = rows[0].way.config.distributed.mixed_precision or "no"
    yield (f"{number} of {devices.memory / GB:.4g} GB, mixed_precision {precision}; the largest micro-batch is"
           f" {pictures} of {width}x{height}")  # fmt: skip
    fitting = [row for row in rows if row.need.total <= devices.memory]
    if fitting:
        yield "what fits, the fastest first (GB on the device that needs most):"
        yield from _table(fitting)
        yield _assumptions(devices)
    others = sorted((row for row in rows if row.need.total > devices.memory), key=lambda row: row.need.total)
    if others:
        lacks = ", ".join(f"{row.way.name} by {(row.need.total - devices.memory) / GB:.1f}" for row in others)
        yield f"too large, by so many GB: {lacks}"
    if not fitting and out is None:
        yield "nothing fits, and no switch would change that: such devices have no room for their own context"
    elif out is not None:
        rest = out.row.need.total - devices.memory
        what = f"would need {out.row.need.total / GB:.1f} GB on each: {_parts(out.row.need)}"
        still = "" if rest <= 0 else f"; that is {rest / GB:.1f} GB too much still, so take larger or more devices"
        yield f"nothing fits; with {out.words}, {out.row.way.name} {what}{still}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    names = [field.name for field in fields(Need)]
    used = [name for name in names if any(getattr(row.need, name) for row in rows)]
    lines = [["speed", "all", *used, "way", "options"]]
    for row in rows:
        speed = f"{row.pictures_a_second / rows[0].pictures_a_second:.2f}"
        sizes = [f"{getattr(row.need, name) / GB:.2f}" for name in used]
        lines.append([speed, f"{row.need.total / GB:.2f}", *sizes, row.way.name, row.way.words])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(size) if place < len(used) + 2 else cell.ljust(size)
                 for place, (cell, size) in enumerate(zip(line, widths, strict=True))]  # fmt: skip
        yield f"  {'  '.join(cells)}".rstrip()


def _assumptions(devices: Devices) -> str:
    flops, link = devices.assumed.flops / 1e12, devices.assumed.link / 1e9
    return (f"speed: pictures a second beside the first; a ranking, for devices of {flops:g} TFLOP/s with links of"
            f" {link:g} GB/s (--gpu_tflops, --link_speed). reserve: assumed, for the device's own context")  # fmt: skip


def _parts(need: Need) -> str:
    parts = ((field.name, getattr(need, field.name)) for field in fields(need))
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in parts if size >= GB / 20)
