"""When a run of a sweep is hopeless: another run was clearly ahead of it at the same steps.

The rule is conservative, since runs learn at different speeds.  A run is stopped only from the half of its steps on,
when at its last two measurements in a row another run at the same step was ahead of it

- in balance (likeness minus copying minus drift) by at least 0.25, and by more than chance at 99 %; or,
- where runs do not measure pictures, in validation loss, with 95 % intervals of the gain that do not touch.

Only what was measured with the same pictures, captions and models is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...evaluation.recorded_steps import RECORD_END, RecordedStep, read_recorded_steps
from ...evaluation.seed_bootstrap import Resampler
from ...evaluation.verdict import compare_steps, judge_steps
from ...report.metric_series import is_plain_number, read_metrics

MIN_SHARE_OF_STEPS = 0.5
MIN_LEAD, LEAD_CONFIDENCE = 0.25, 0.99
NUM_IN_A_ROW = 2


@dataclass(frozen=True)
class ValidatedStep:
    """The validation of a run at a step: the gain over the base model, with its interval."""

    gain: float
    interval: float
    base: float


@dataclass(frozen=True)
class Measurements:
    """What a run has measured, by step."""

    pictures: Mapping[int, RecordedStep] = field(default_factory=dict)
    validation: Mapping[int, ValidatedStep] = field(default_factory=dict)


def read_measurements(folder: Path, name: str) -> Measurements:
    """Read what a run has measured so far."""
    validation = {}
    for line in read_metrics(folder / f"{name}.metrics.jsonl"):
        values = [line.get(f"validation/{key}") for key in ("gain", "gain_interval", "base")]
        numbers = [float(value) for value in values if value is not None and is_plain_number(value)]
        if len(numbers) == len(values):
            validation[line["step"]] = ValidatedStep(*numbers)
    recorded = read_recorded_steps(folder / f"{name}{RECORD_END}")
    return Measurements({each.step: each for each in recorded}, validation)


def find_hopeless_reason(
    own: Measurements, others: Mapping[str, Measurements], total_steps: int, resampler: Resampler
) -> str:
    """Say why a run is hopeless; empty if it is not."""
    by_pictures = bool(own.pictures)
    measured: Mapping[int, RecordedStep | ValidatedStep] = own.pictures if by_pictures else own.validation
    late = [step for step in sorted(measured) if MIN_SHARE_OF_STEPS * total_steps <= step < total_steps]
    reasons = []
    for step in late[-NUM_IN_A_ROW:]:
        leads = (
            _describe_lead_in_pictures(own.pictures[step], name, each.pictures.get(step), resampler)
            if by_pictures
            else _describe_lead_in_validation(own.validation[step], name, each.validation.get(step))
            for name, each in others.items()
        )
        lead = next(filter(None, leads), "")
        if not lead:
            return ""
        reasons.append(f"at step {step} {lead}")
    return "; ".join(reasons) if len(reasons) == NUM_IN_A_ROW else ""


def _describe_lead_in_pictures(own: RecordedStep, name: str, other: RecordedStep | None, resampler: Resampler) -> str:
    if other is None or other.basis != own.basis:
        return ""
    both: Sequence[RecordedStep] = other, own
    leader, behind = judge_steps([each.to_metrics("", "", None) for each in both], resampler).steps
    lead = compare_steps(leader, behind, resampler, LEAD_CONFIDENCE)
    if lead.low is None or lead.high is None or lead.value < MIN_LEAD or not lead.is_above_zero:
        return ""
    return f"{name} was ahead in balance by {lead.value:.2f} ({lead.low:.2f} to {lead.high:.2f}), more than chance"


def _describe_lead_in_validation(own: ValidatedStep, name: str, other: ValidatedStep | None) -> str:
    if other is None or abs(other.base - own.base) > 1e-5 * abs(own.base):
        return ""
    if other.gain - other.interval <= own.gain + own.interval:
        return ""
    values = f"{other.gain:.3g} +- {other.interval:.2g} below the base model's, against {own.gain:.3g}"
    return f"the validation loss of {name} was {values} +- {own.interval:.2g}"
