"""Randomness as a function: the same (seed, purpose, numbers) gives the same draw on any rank, at any time."""

import hashlib
import random


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed that depends on nothing but its arguments; for ``random.Random`` and ``torch.Generator``."""
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_rng(seed: int, purpose: str, *indices: int) -> random.Random:
    """A generator of its own for one purpose, so that draws for one thing never move those for another."""
    return random.Random(derive_seed(seed, purpose, *indices))
