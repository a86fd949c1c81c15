"""What entries are found by: a hash of everything that decides their content, and of nothing else.

No key knows a file's name or the place of a picture in a list, so renaming, moving and reordering change nothing.
"""

import hashlib

from ..buckets import Placement
from ..cutting import Cut
from ..sample import Sample
from .records import KEY_BYTES

LATENT_CODE = 1
"""Raised when the same picture, placement and VAE would give other latents than before."""
TEXT_CODE = 1
"""Raised when the same caption and text encoder would give another encoding than before."""


def latent_key(sample: Sample, placement: Placement, way: Cut, *, encoder: str) -> bytes:
    """The latents of one picture as it is cut, with its mask; ``encoder`` stands for the VAE and the kept precision."""
    mask = () if sample.mask is None else ("alpha" if sample.mask.is_alpha else "mask", sample.mask.content)
    return _hash(
        "latents", LATENT_CODE, sample.content, *placement.resized, *way.crop, *placement.bucket,
        way.interpolation or "", "mirrored" if way.is_mirrored else "", encoder, *mask,
    )  # fmt: skip


def text_key(caption: str, encoder: str) -> bytes:
    """One caption as it is shown; ``encoder`` stands for everything that turns it into numbers."""
    return _hash("text", TEXT_CODE, encoder, caption)


def fingerprint(*facts: str) -> str:
    """One short text for several facts, none of which can be mistaken for a part of another."""
    return _hash(*facts).hex()


def _hash(*facts: str | int) -> bytes:
    text = "".join(f"{len(str(fact))}:{fact}" for fact in facts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
