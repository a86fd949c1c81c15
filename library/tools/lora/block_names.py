"""The blocks of a model by the names that users know, and factors by block.

U-Nets have the 26 blocks of the web UIs' block weights: ``IN00`` to ``IN11``, ``MID``, ``OUT00`` to ``OUT11``, and
``BASE``, the text encoders.  Transformers have their blocks as diffusers calls them: ``transformer_blocks.7``.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

BASE = "BASE"
_IN, _OUT = tuple(f"IN{number:02}" for number in range(12)), tuple(f"OUT{number:02}" for number in range(12))
BLOCK_WEIGHT_LISTS: dict[int, tuple[str, ...]] = {
    12: (BASE, *(_IN[number] for number in (4, 5, 7, 8)), "MID", *_OUT[:6]),
    17: (BASE, *(_IN[number] for number in (1, 2, 4, 5, 7, 8)), "MID", *_OUT[3:]),
    20: (BASE, *_IN[:9], "MID", *_OUT[:9]),
    26: (BASE, *_IN, "MID", *_OUT),
}
"""The blocks of a list of block weights, by its length, as in sd-scripts: 12 and 20 for SDXL."""

_ORIGINAL_NAMES = {
    "double_blocks": "transformer_blocks",
    "joint_blocks": "transformer_blocks",
    "single_blocks": "single_transformer_blocks",
}
"""Blocks of FLUX.1 and SD3 in the original code, and in diffusers."""

_UNET_UNIT = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(?:\.|$)")
_LBW_RANGE = re.compile(r"(IN|OUT)(\d{1,2})(?:-(?:IN|OUT)?(\d{1,2}))?")


def is_text_encoder(module: str) -> bool:
    return module.startswith("text_encoder")


def get_block(module: str) -> str:
    """The block of a layer, named as in a state dict: ``IN04``, ``transformer_blocks.7``, ``text_encoder.layers.3``."""
    component, _, rest = module.partition(".")
    if component == "unet":
        return _get_unet_block(rest)
    numbered = re.match(r"(?:[^.]+\.)*?([^.]+\.\d+)(?:\.|$)", rest)
    block = numbered[1] if numbered else rest
    return f"{component}.{block}" if is_text_encoder(module) else block


def _get_unet_block(module: str) -> str:
    if module.startswith("mid_block"):
        return "MID"
    if match := _UNET_UNIT.match(module):
        layer = 2 if match[3].endswith("samplers") else int(match[4])
        number = 3 * int(match[2]) + layer
        return f"IN{number + 1:02}" if match[1] == "down" else f"OUT{number:02}"
    return "IN00" if module == "conv_in" else module


@dataclass(frozen=True)
class BlockFactor:
    """A factor for the layers that a name selects."""

    name: str
    factor: float
    is_from_list: bool = False
    """Whether it is one of a list of block weights, which may name blocks without layers."""


def is_selected(name: str, module: str) -> bool:
    """Whether a name selects a layer: a component, a block, a range of blocks, or the beginning of a layer's name.

    See ``docs/lora_tools.md``.
    """
    component, _, rest = module.partition(".")
    if name.upper() in (BASE, "TEXT_ENCODERS"):
        return is_text_encoder(module)
    if name.lower() == "denoiser":
        return not is_text_encoder(module)
    block = get_block(module)
    if name.upper() in ("IN", "MID", "OUT"):
        return component == "unet" and re.sub(r"\d+$", "", block) == name.upper()
    if match := _LBW_RANGE.fullmatch(name.upper()):
        first, last = int(match[2]), int(match[3] or match[2])
        return any(block == f"{match[1]}{number:02}" for number in range(first, last + 1))
    parts = name.split(".")
    candidates = (module.split("."), rest.split("."), block.split("."))
    return any(_begins_with(candidate, parts) for candidate in candidates) or (
        parts[0] in _ORIGINAL_NAMES and _begins_with(rest.split("."), [_ORIGINAL_NAMES[parts[0]], *parts[1:]])
    )


def _begins_with(words: Sequence[str], parts: Sequence[str]) -> bool:
    return len(words) >= len(parts) and all(map(_matches_part, words, parts))


def _matches_part(word: str, part: str) -> bool:
    """Whether a part of a name matches a pattern, in which ``3-7`` is a range of numbers and ``*`` any text."""
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        return word.isdecimal() and int(match[1]) <= int(word) <= int(match[2])
    return fnmatchcase(word, part)


def get_factor(module: str, factors: Sequence[BlockFactor]) -> float:
    """The factor of a layer: that of the first name that selects it, otherwise 1."""
    return next((each.factor for each in factors if is_selected(each.name, module)), 1.0)


def find_unused_names(factors: Iterable[BlockFactor], modules: Sequence[str]) -> list[str]:
    """Names that select no layer."""
    return [
        each.name
        for each in factors
        if not each.is_from_list and not any(is_selected(each.name, module) for module in modules)
    ]


def parse_block_factors(text: str) -> list[BlockFactor]:
    """``IN04=0.5`` or ``IN04=0.5,MID=0``, or a list of 12, 17, 20 or 26 numbers; ``ValueError`` says what is wrong."""
    words = [word.strip() for word in text.strip().strip("[]").split(",") if word.strip()]
    if words and not any("=" in word for word in words):
        if len(words) not in BLOCK_WEIGHT_LISTS:
            raise ValueError(f"has {len(words)} numbers; a list of block weights has 12, 17, 20 or 26")
        return [
            BlockFactor(name, _parse_number(word), is_from_list=True)
            for name, word in zip(BLOCK_WEIGHT_LISTS[len(words)], words, strict=True)
        ]
    return list(_iter_named_factors(words))


def _iter_named_factors(words: Iterable[str]) -> Iterator[BlockFactor]:
    for word in words:
        name, equals, number = word.partition("=")
        if not equals or not name:
            raise ValueError(f"{word!r}: expected NAME=FACTOR, such as IN04=0.5 or transformer_blocks.3-7=0")
        yield BlockFactor(name.strip(), _parse_number(number))


def _parse_number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None
    if number != number or abs(number) == float("inf"):
        raise ValueError(f"{word!r} is not a finite number")
    return number
