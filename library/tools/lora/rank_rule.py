"""The rank that a layer gets from its singular values: fixed, by one of sd-scripts' three rules, or by two others."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RuleName = Literal["fixed", "sv_ratio", "sv_fro", "sv_cumulative", "energy", "threshold"]
MIN_SINGULAR_VALUE = 1e-6
"""A layer whose largest singular value is not above this keeps one rank, as in sd-scripts."""


@dataclass(frozen=True)
class RankRule:
    """A rule that chooses ranks of at most ``rank``, or ``conv_rank`` for convolutions; None is no limit."""

    rank: int | None = None
    conv_rank: int | None = None
    name: RuleName = "fixed"
    value: float = 0.0

    def get_limit(self, is_conv: bool) -> int | None:
        return self.conv_rank if is_conv and self.conv_rank is not None else self.rank

    def choose_rank(self, values: Tensor, num_values: int, *, is_conv: bool) -> int:
        """The rank for these singular values, largest first; ``num_values`` counts the zeros that are left out, too."""
        limit = min(len(values), self.get_limit(is_conv) or len(values))
        if float(values[0]) <= MIN_SINGULAR_VALUE * (self.name != "threshold"):
            return 1
        return max(1, min(limit, self._count_values(values, num_values)))

    def describe(self) -> str:
        """Describe the rule in words, for summaries and metadata."""
        limits = [f"rank {self.rank}"] if self.rank is not None else []
        if self.conv_rank is not None and self.conv_rank != self.rank:
            limits.append(f"convolutions {self.conv_rank}")
        if self.name == "fixed":
            return ", ".join(limits)
        return ", ".join([f"{self.name} {self.value:g}", *(f"at most {limit}" for limit in limits)])

    def _count_values(self, values: Tensor, num_values: int) -> int:
        match self.name:
            case "sv_ratio":
                count = int((values > values[0] / self.value).sum())
            case "sv_cumulative":
                count = _find_share(values, self.value)
            case "sv_fro":
                count = _find_share(values.square(), self.value**2)
            case "energy":  # the smallest rank that holds this share of the squares
                return _find_share(values.square(), self.value)
            case "threshold":
                return int((values > self.value).sum())
            case _:
                return len(values)
        # sd-scripts keeps one more than its rule asks for, and counts all singular values of the full matrix.
        return max(1, min(count, num_values - 1)) + 1


def _find_share(values: Tensor, share: float) -> int:
    """Count the first values that together have this share of the sum."""
    shares = values.cumsum(0) / values.sum()
    return int(torch.searchsorted(shares, share)) + 1
