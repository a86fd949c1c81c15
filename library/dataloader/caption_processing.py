"""Process captions as sd-scripts does: caption and tag dropout, shuffling, wildcards, token warmup, prefix, suffix."""

import math
import random
import re

from ..dataset.schema import SubsetConfig

_WILDCARD_PATTERN = re.compile(r"\{([^}]+)\}")


def process_caption(
    caption: str, subset: SubsetConfig, rng: random.Random, *, epoch: int, step: int, total_steps: int
) -> str:
    """Draw the caption for an epoch and optimizer step, both counted from 0; the order is that of sd-scripts."""
    if subset.caption_prefix:
        caption = f"{subset.caption_prefix} {caption}"
    if subset.caption_suffix:
        caption = f"{caption} {subset.caption_suffix}"
    if subset.caption_dropout_rate > 0 and rng.random() < subset.caption_dropout_rate:
        return ""
    if subset.caption_dropout_every_n_epochs > 0 and (epoch + 1) % subset.caption_dropout_every_n_epochs == 0:
        return ""
    if subset.enable_wildcard:
        caption = _resolve_wildcards(caption, rng)
    elif not subset.uses_musubi_captions:
        caption = caption.split("\n")[0]
    if subset.shuffle_caption or subset.token_warmup_step > 0 or subset.caption_tag_dropout_rate > 0:
        caption = _process_tags(caption, subset, rng, step, total_steps)
    if subset.secondary_separator:
        caption = caption.replace(subset.secondary_separator, subset.caption_separator)
    return caption


def _resolve_wildcards(caption: str, rng: random.Random) -> str:
    """Choose one line, and one of each ``{a|b}``; ``{{`` and ``}}`` are literal braces."""
    caption = rng.choice(caption.split("\n"))
    caption = caption.replace("{{", "\0(").replace("}}", "\0)")  # captions with a zero byte are rejected when read
    caption = _WILDCARD_PATTERN.sub(lambda match: rng.choice(match[1].split("|")), caption)
    return caption.replace("\0(", "{").replace("\0)", "}")


def _process_tags(caption: str, subset: SubsetConfig, rng: random.Random, step: int, total_steps: int) -> str:
    fixed, flexible, suffix = _split_tags(caption, subset)
    flexible = flexible[: _count_warmed_up_tags(len(flexible), subset, step, total_steps)]
    if subset.shuffle_caption:
        rng.shuffle(flexible)
    if subset.caption_tag_dropout_rate > 0:
        flexible = [tag for tag in flexible if rng.random() >= subset.caption_tag_dropout_rate]
    return ", ".join([*fixed, *flexible, *suffix])  # not caption_separator, as in sd-scripts


def _split_tags(caption: str, subset: SubsetConfig) -> tuple[list[str], list[str], list[str]]:
    """Split into fixed tags at the start, tags to shuffle and drop, and fixed tags at the end."""
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


def _count_warmed_up_tags(num_tags: int, subset: SubsetConfig, step: int, total_steps: int) -> int:
    """Count the tags used so far by the token warmup; a ``token_warmup_step`` below 1 is a fraction of the run."""
    length = subset.token_warmup_step
    length = math.floor(length * total_steps) if length < 1 else length
    if not length or step >= length:
        return num_tags
    return math.floor(step * ((num_tags - subset.token_warmup_min) / length)) + subset.token_warmup_min
