"""The blocks of a UNet as sd-scripts counts them: how many values an argument needs, and which weight each gets."""

import math
from collections.abc import Iterator

from .network_args import NetworkArguments

DOWN_MID_UP = {"sd1": (12, 1, 12), "sd2": (12, 1, 12), "sdxl": (9, 3, 9)}
"""Family -> blocks on the way down, in the middle, and on the way up."""
OUTSIDE = {"sdxl": (1, 1)}
"""Family -> blocks before and after them, in which nothing is trained."""


def block_count(family: str) -> int:
    return sum(DOWN_MID_UP[family]) + sum(OUTSIDE.get(family, (0, 0)))


def wrong_counts(arguments: NetworkArguments, family: str) -> Iterator[str]:
    """Lists that do not have a value for each block."""
    for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
        values = getattr(arguments, name)
        if values is not None and len(values) != block_count(family):
            yield f"{name}: {len(values)} values for {block_count(family)} blocks"
    for name, count in zip(("down_lr_weight", "mid_lr_weight", "up_lr_weight"), DOWN_MID_UP[family], strict=True):
        values = getattr(arguments, name)
        if isinstance(values, tuple) and len(values) != count:
            yield f"{name}: {len(values)} values for {count} blocks"


def block_weights(arguments: NetworkArguments, family: str) -> list[float] | None:
    """What the learning rate is multiplied by in each block; nothing where nobody asked."""
    given = (arguments.down_lr_weight, arguments.mid_lr_weight, arguments.up_lr_weight)
    if all(values is None for values in given):
        return None
    weights: list[float] = []
    for values, count in zip(given, DOWN_MID_UP[family], strict=True):
        weights += [1.0] * count if values is None else _curve(values, count) if isinstance(values, str) else values
    weights = [0.0 if weight <= arguments.block_lr_zero_threshold else weight for weight in weights]
    before, after = OUTSIDE.get(family, (0, 0))
    return [1.0] * before + weights + [1.0] * after


def _curve(text: str, count: int) -> list[float]:
    name, _, base = text.partition("+")
    steps = [place / max(count - 1, 1) for place in range(count)]
    shapes = {
        "sine": [math.sin(math.pi / 2 * step) for step in steps],
        "cosine": [math.sin(math.pi / 2 * step) for step in reversed(steps)],
        "linear": steps,
        "reverse_linear": list(reversed(steps)),
        "zeros": [0.0] * count,
    }
    return [value + float(base or 0) for value in shapes[name]]


def block_of(original: str, family: str) -> int | None:
    """The number of the block that a module of a UNet is in, by its name in sd-scripts' files."""
    down, middle, _ = DOWN_MID_UP[family]
    pieces = original.removeprefix("lora_unet_").split("_")
    if family == "sdxl":
        starts = {"input": 1, "middle": 1 + down, "output": 1 + down + middle}
        return starts[pieces[0]] + int(pieces[2]) if pieces[0] in starts else None
    if pieces[0] == "mid":
        return down
    if pieces[0] not in ("down", "up") or pieces[1] != "blocks":
        return None
    layer = 2 if pieces[3].endswith("samplers") else int(pieces[4])
    return (1 if pieces[0] == "down" else down + middle) + 3 * int(pieces[2]) + layer
