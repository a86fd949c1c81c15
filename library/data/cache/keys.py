"""What entries are found by: a hash of everything that decides their content, and of nothing else.

No key knows a file's name or the place of a picture in a list, so renaming, moving and reordering change nothing.
"""

import hashlib

from ..buckets import BucketAssignment
from ..cutting import CropParams
from ..sample import Sample
from .records import KEY_BYTES

LATENT_KEY_VERSION = 1
"""Raised when the same picture, placement and VAE would give other latents than before."""
TEXT_KEY_VERSION = 1
"""Raised when the same caption and text encoder would give another encoding than before."""


def compute_latent_key(sample: Sample, assignment: BucketAssignment, crop_params: CropParams, *, encoder_fingerprint: str) -> bytes:
    """The latents of one picture as it is cut, with its mask; ``encoder`` stands for the VAE and the kept precision."""
    mask = () if sample.mask is None else ("alpha" if sample.mask.is_alpha else "mask", sample.mask.content_hash)
    return _hash_facts(
        "latents", LATENT_KEY_VERSION, sample.content_hash, *assignment.resized_size, *crop_params.left_top, *assignment.bucket_resolution,
        crop_params.interpolation or "", "mirrored" if crop_params.is_flipped else "", encoder_fingerprint, *mask,
    )  # fmt: skip


def compute_text_key(caption: str, encoder_fingerprint: str) -> bytes:
    """One caption as it is shown; ``encoder`` stands for everything that turns it into numbers."""
    return _hash_facts("text", TEXT_KEY_VERSION, encoder_fingerprint, caption)


def compute_encoder_fingerprint(*facts: str) -> str:
    """One short text for several facts, none of which can be mistaken for a part of another."""
    return _hash_facts(*facts).hex()


def _hash_facts(*facts: str | int) -> bytes:
    text = "".join(f"{len(str(fact))}:{fact}" for fact in facts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
