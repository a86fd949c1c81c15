"""What the model is shown of a caption: text in, text out, and a generator decides chance."""

import math
import random
import re

from ..dataset.schema import SubsetConfig

_WILDCARD = re.compile(r"\{([^}]+)\}")


def shown(caption: str, subset: SubsetConfig, draw: random.Random, *, epoch: int, step: int, steps: int) -> str:
    """The caption as it is shown in ``epoch`` and optimizer ``step`` (both from 0) of a run of ``steps``.

    The order is that of sd-scripts: prefix and suffix, dropout, wildcards, tags, secondary separator.
    """
    if subset.caption_prefix:
        caption = f"{subset.caption_prefix} {caption}"
    if subset.caption_suffix:
        caption = f"{caption} {subset.caption_suffix}"
    if subset.caption_dropout_rate > 0 and draw.random() < subset.caption_dropout_rate:
        return ""
    if subset.caption_dropout_every_n_epochs > 0 and (epoch + 1) % subset.caption_dropout_every_n_epochs == 0:
        return ""
    caption = _one_of(caption, draw) if subset.enable_wildcard else caption.split("\n")[0]
    if subset.shuffle_caption or subset.token_warmup_step > 0 or subset.caption_tag_dropout_rate > 0:
        caption = _tags(caption, subset, draw, step, steps)
    if subset.secondary_separator:
        caption = caption.replace(subset.secondary_separator, subset.caption_separator)
    return caption


def _one_of(caption: str, draw: random.Random) -> str:
    """One of several lines, and one of ``{a|b}``; ``{{`` and ``}}`` are plain braces."""
    caption = draw.choice(caption.split("\n"))
    caption = caption.replace("{{", "\0(").replace("}}", "\0)")  # a caption with a zero byte is not read
    caption = _WILDCARD.sub(lambda match: draw.choice(match[1].split("|")), caption)
    return caption.replace("\0(", "{").replace("\0)", "}")


def _tags(caption: str, subset: SubsetConfig, draw: random.Random, step: int, steps: int) -> str:
    fixed, flexible, suffix = _parts(caption, subset)
    flexible = flexible[: _warmed_up(len(flexible), subset, step, steps)]
    if subset.shuffle_caption:
        draw.shuffle(flexible)
    if subset.caption_tag_dropout_rate > 0:
        flexible = [tag for tag in flexible if draw.random() >= subset.caption_tag_dropout_rate]
    return ", ".join([*fixed, *flexible, *suffix])  # whatever caption_separator is, as in sd-scripts


def _parts(caption: str, subset: SubsetConfig) -> tuple[list[str], list[str], list[str]]:
    """Tags that stay at the start, tags that are shuffled and dropped, tags that stay at the end."""
    mark, separator = subset.keep_tokens_separator, subset.caption_separator
    if mark and mark in caption:
        first, _, rest = caption.partition(mark)
        middle, _, last = rest.partition(mark)
        fixed, flexible, suffix = (
            [tag.strip() for tag in part.split(separator) if tag.strip()] for part in (first, middle, last)
        )
        return fixed, flexible, suffix
    tags = [tag.strip() for tag in caption.strip().split(separator)]
    return tags[: subset.keep_tokens], tags[subset.keep_tokens :], []


def _warmed_up(count: int, subset: SubsetConfig, step: int, steps: int) -> int:
    """How many of ``count`` tags a token warm-up shows; a length below 1 is a share of the run."""
    length = subset.token_warmup_step
    length = math.floor(length * steps) if length < 1 else length
    if not length or step >= length:
        return count
    return math.floor(step * ((count - subset.token_warmup_min) / length)) + subset.token_warmup_min
