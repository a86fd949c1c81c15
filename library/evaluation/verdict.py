"""Which step of a run is the best, which of several runs is better, and whether that is more than chance.

The limits were set by looking at pictures of overtrained LoRAs of the demo model (docs/evaluate.md): likeness has come
where it is near the best likeness of all evaluated files and far enough on the way to real pictures; copying and
drift have come above a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .file_metrics import COPYING, DRIFT, LIKENESS, FileMetrics
from .seed_bootstrap import CONFIDENCE, Estimate, Resampler

MIN_LIKENESS, SHARE_OF_BEST_LIKENESS = 0.4, 0.85
MAX_COPYING, MAX_DRIFT = 0.15, 0.33
ROUNDING = 1e-9
"""The balances of equal steps differ by less."""
_SIGNS = {LIKENESS: 1.0, COPYING: -1.0, DRIFT: -1.0}


@dataclass(frozen=True)
class JudgedStep:
    """A LoRA file with what has come at its step."""

    metrics: FileMetrics
    balance: Estimate
    """Likeness minus copying minus drift, by which steps are ordered."""
    has_likeness: bool
    has_copying: bool
    has_drift: bool

    @property
    def is_good(self) -> bool:
        """Whether likeness has come, and copying and drift have not."""
        return self.has_likeness and not (self.has_copying or self.has_drift)

    @property
    def name(self) -> str:
        metrics = self.metrics
        return f"{metrics.run} step {metrics.step}" if metrics.step else f"{metrics.run} ({metrics.file})"

    def list_reasons(self) -> list[str]:
        """Say why it is not good: "likeness has not come"."""
        was_measured = LIKENESS in self.metrics.statistics
        reasons = [
            (f"likeness {'has not come' if was_measured else 'was not measured'}", not self.has_likeness),
            ("it copies single training pictures", self.has_copying),
            ("captions without the subject have drifted", self.has_drift),
        ]
        return [reason for reason, applies in reasons if applies]

    def describe(self) -> str:
        """Say what has come: "likeness, no copying, drift"; of one picture and no other captions, nothing is known."""
        parts = [(LIKENESS, self.has_likeness), (COPYING, self.has_copying), (DRIFT, self.has_drift)]
        known = [(name, has) for name, has in parts if name in self.metrics.statistics]
        return ", ".join(name if has else f"no {name}" for name, has in known) or "nothing to judge by"


@dataclass(frozen=True)
class Comparison:
    """The best step of a run beside the best step of all."""

    winner: JudgedStep
    other: JudgedStep
    difference: Estimate
    """The balance of the winner minus that of the other."""

    @property
    def is_more_than_chance(self) -> bool:
        return self.difference.is_above_zero

    def __str__(self) -> str:
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        if value < -ROUNDING:  # it was preferred for being good
            interval = "" if low is None or high is None else f" ({-high:.2f} to {-low:.2f})"
            return (
                f"{self.winner.name} is preferred to {self.other.name}, where {' and '.join(self.other.list_reasons())}"
                f", although its balance is lower by {-value:.2f}{interval}"
            )
        text = f"{self.winner.name} is ahead of {self.other.name} by {abs(value):.2f}"
        if low is None:
            return f"{text}; one seed says nothing of chance"
        chance = "more than chance" if self.is_more_than_chance else "which may be chance"
        return f"{text} ({low:.2f} to {high:.2f}), {chance}"


@dataclass(frozen=True)
class EvaluationVerdict:
    """The result of an evaluation."""

    steps: tuple[JudgedStep, ...]
    best_by_run: dict[str, JudgedStep]
    best: JudgedStep
    comparisons: tuple[Comparison, ...]
    """The other runs beside the best one, those that are nearest to it first."""

    def format_sentence(self) -> str:
        """Say in one sentence which step is the best, and of several runs, by how much."""
        best, alternatives = self.best, len(self.best_by_run) > 1
        if not best.is_good:
            text = f"no step is good; the best is {best.name}, but {' and '.join(best.list_reasons())}"
        else:
            text = f"best is {best.name}: likeness has come, {_describe_absent(best)}"
        if alternatives:
            text += "; " + "; ".join(map(str, self.comparisons))
        return text[0].upper() + text[1:] + "."


def judge_steps(steps: Sequence[FileMetrics], resampler: Resampler) -> EvaluationVerdict:
    """Judge all steps of all runs, and compare the best step of each run."""
    likeness = {id(each): _estimate(each, LIKENESS, resampler) for each in steps}
    best_likeness = max((found.value for found in likeness.values() if found is not None), default=0.0)
    needed = max(MIN_LIKENESS, SHARE_OF_BEST_LIKENESS * best_likeness)
    judged = tuple(_judge_step(each, needed, resampler) for each in steps)
    best_by_run: dict[str, JudgedStep] = {}
    for run in dict.fromkeys(each.metrics.run for each in judged):
        best_by_run[run] = _find_best([each for each in judged if each.metrics.run == run])
    best = _find_best(list(best_by_run.values()))
    others = [each for each in best_by_run.values() if each is not best]
    # One comparison for each other run: together they are wrong as seldom as one alone.
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    comparisons = [Comparison(best, each, compare_steps(best, each, resampler, confidence)) for each in others]
    comparisons.sort(key=lambda each: abs(each.difference.value))
    return EvaluationVerdict(judged, best_by_run, best, tuple(comparisons))


def compare_steps(
    first: JudgedStep, second: JudgedStep, resampler: Resampler, confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate the balance of one step minus that of another, with the same seeds drawn for both."""
    terms = [
        (sign * weight, each.metrics.statistics[name].statistic, each.metrics.statistics[name].group)
        for sign, each in ((1.0, first), (-1.0, second))
        for name, weight in _SIGNS.items()
        if name in first.metrics.statistics and name in second.metrics.statistics
    ]
    return resampler.estimate_sum(terms, confidence)


def _judge_step(step: FileMetrics, needed_likeness: float, resampler: Resampler) -> JudgedStep:
    terms = [
        (weight, step.statistics[name].statistic, step.statistics[name].group)
        for name, weight in _SIGNS.items()
        if name in step.statistics
    ]
    copying, drift = (_estimate(step, name, resampler) for name in (COPYING, DRIFT))
    likeness = _estimate(step, LIKENESS, resampler)
    return JudgedStep(
        step,
        resampler.estimate_sum(terms),
        likeness is not None and likeness.value >= needed_likeness,
        copying is not None and copying.value > MAX_COPYING,
        drift is not None and drift.value > MAX_DRIFT,
    )


def _find_best(steps: Sequence[JudgedStep]) -> JudgedStep:
    """Find the good step of the largest balance; if none is good, the step of the largest balance."""
    return max(steps, key=lambda each: (each.is_good, each.balance.value))


def _estimate(step: FileMetrics, name: str, resampler: Resampler) -> Estimate | None:
    found = step.statistics.get(name)
    return None if found is None else resampler.estimate(found.statistic, found.group)


def _describe_absent(step: JudgedStep) -> str:
    """Say which of copying and drift have not come, and which are not known."""
    known = [name for name in (COPYING, DRIFT) if name in step.metrics.statistics]
    unknown = [name for name in (COPYING, DRIFT) if name not in known]
    parts = [f"{' and '.join(known)} {'have' if len(known) > 1 else 'has'} not"] if known else []
    parts += [f"{' and '.join(unknown)} {'were' if len(unknown) > 1 else 'was'} not measured"] if unknown else []
    return ", ".join(parts)
