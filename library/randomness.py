"""Stateless randomness: each draw is a function of (seed, purpose, indices), the same on any rank and after a resume.

A purpose names what is drawn, so that a new draw never shifts the others:
- data, by epoch and sample: "crop", "flip", "caption", "colour"; "stage" for the batch plan of a later stage;
- validation split, by content: "held out/HASH", "caption/HASH", "place/HASH";
- each training step, by the global position of the sample: "dropout", "vae" (sampling of latents), "noise",
  "noise offset", "multires noise", "input noise"; "measured" in validation;
- initial weights of the adapter, by module: "PURPOSE/MODULE";
- "random weights" of a model without files;
- "preview", "probe" (gradient check) and "session" (metadata).
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Derive a 63-bit seed, for ``random.Random`` or ``torch.Generator``.

    The hash must never change: checkpoints store no generator states, and a resumed run draws the same numbers because
    it derives the same seeds.
    """
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_rng(seed: int, purpose: str, *indices: int) -> random.Random:
    """Build an independent generator for one purpose."""
    return random.Random(derive_seed(seed, purpose, *indices))


def derive_generator(seed: int, purpose: str, *indices: int) -> "torch.Generator":
    """Build an independent torch generator on the CPU, whose numbers do not depend on the device that trains."""
    import torch  # settings are checked without it

    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))
