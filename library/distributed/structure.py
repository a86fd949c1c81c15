"""What a strategy has to know of a denoiser to take it apart."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .chain import Chain

Cuts = Mapping[str, tuple[str, tuple[int, ...]]]
"""Layer -> ``rows`` or ``columns``, and the sizes of pieces that are cut each for itself."""


@dataclass(frozen=True)
class Structure:
    """Its blocks one after the other, where they simply follow each other, and how its layers can be cut."""

    chain: Chain = field(default_factory=Chain)
    cuts: Cuts = field(default_factory=dict)
