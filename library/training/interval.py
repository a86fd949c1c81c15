"""How far a mean of a few numbers may be off by chance: its 95 % confidence interval, by Student's distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile for 1 to 9 degrees of freedom."""
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class MeanEstimate:
    """A mean, and how far the true one may be from it; endless where a single number tells nothing of that."""

    value: float
    interval: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "MeanEstimate":
        """Of at least one number; the sum is exact, so it does not depend on their order."""
        count = len(values)
        mean = math.fsum(values) / count
        if count == 1:
            return cls(mean, math.inf)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, student_t_quantile(count - 1) * math.sqrt(variance / count))

    def __str__(self) -> str:
        if not 0 < self.interval < math.inf:
            return f"{self.value:.5g}"
        places = max(0, 1 - math.floor(math.log10(self.interval)))  # two of the interval's digits are meaningful
        return f"{self.value:.{places}f} +- {self.interval:.{places}f}"


def student_t_quantile(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's t; from 10 degrees on by its expansion around the normal one."""
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    z = _NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees_of_freedom + second / degrees_of_freedom**2 + third / degrees_of_freedom**3
