"""The blocks of a UNet as sd-scripts counts them: how many values an argument needs, and which weight each gets."""

import math
from collections.abc import Iterator

from .network_args import NetworkArgs

UNET_BLOCK_COUNTS = {"sd1": (12, 1, 12), "sd2": (12, 1, 12), "sdxl": (9, 3, 9)}
"""Family -> blocks on the way down, in the middle, and on the way up."""
UNET_OUTER_BLOCK_COUNTS = {"sdxl": (1, 1)}
"""Family -> blocks before and after them, in which nothing is trained."""


def count_unet_blocks(family: str) -> int:
    return sum(UNET_BLOCK_COUNTS[family]) + sum(UNET_OUTER_BLOCK_COUNTS.get(family, (0, 0)))


def validate_block_arg_lengths(network_args: NetworkArgs, family: str) -> Iterator[str]:
    """Lists that do not have a value for each block."""
    for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
        values = getattr(network_args, name)
        if values is not None and len(values) != count_unet_blocks(family):
            yield f"{name}: {len(values)} values for {count_unet_blocks(family)} blocks"
    for name, count in zip(("down_lr_weight", "mid_lr_weight", "up_lr_weight"), UNET_BLOCK_COUNTS[family], strict=True):
        values = getattr(network_args, name)
        if isinstance(values, tuple) and len(values) != count:
            yield f"{name}: {len(values)} values for {count} blocks"


def compute_block_lr_weights(network_args: NetworkArgs, family: str) -> list[float] | None:
    """What the learning rate is multiplied by in each block; nothing where nobody asked."""
    given = (network_args.down_lr_weight, network_args.mid_lr_weight, network_args.up_lr_weight)
    if all(values is None for values in given):
        return None
    weights: list[float] = []
    for values, count in zip(given, UNET_BLOCK_COUNTS[family], strict=True):
        weights += [1.0] * count if values is None else _expand_lr_weight_preset(values, count) if isinstance(values, str) else values
    weights = [0.0 if weight <= network_args.block_lr_zero_threshold else weight for weight in weights]
    before, after = UNET_OUTER_BLOCK_COUNTS.get(family, (0, 0))
    return [1.0] * before + weights + [1.0] * after


def _expand_lr_weight_preset(text: str, count: int) -> list[float]:
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


def get_unet_block_index(kohya_name: str, family: str) -> int | None:
    """The number of the block that a module of a UNet is in, by its name in sd-scripts' files."""
    down, middle, _ = UNET_BLOCK_COUNTS[family]
    pieces = kohya_name.removeprefix("lora_unet_").split("_")
    if family == "sdxl":
        starts = {"input": 1, "middle": 1 + down, "output": 1 + down + middle}
        return starts[pieces[0]] + int(pieces[2]) if pieces[0] in starts else None
    if pieces[0] == "mid":
        return down
    if pieces[0] not in ("down", "up") or pieces[1] != "blocks":
        return None
    layer = 2 if pieces[3].endswith("samplers") else int(pieces[4])
    return (1 if pieces[0] == "down" else down + middle) + 3 * int(pieces[2]) + layer
