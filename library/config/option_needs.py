"""What an option needs to have an effect, as facts of its field in ``schema*.py``.

``needs=()`` says that an option always has an effect. Otherwise every need has to be met, and the first one that is not
gives the reason for the notice. What is not known yet, such as the model before its files are read, counts as met.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

UNKNOWN: Any = object()
"""The value of a name that is not known yet, such as a key of a dataset file that was not read."""


@dataclass(frozen=True)
class Circumstances:
    """What the effect of options depends on: all their values, and what is known of the launcher and the model."""

    values: Mapping[str, Any]
    traits: "Mapping[Trait, str | None]" = field(default_factory=dict)
    """Traits of the run: None where it has them, or the reason why not; those that are not known yet are missing."""
    model_options: Collection[str] | None = None
    """Options that the model's family has of its own; None: the model is not known."""
    model_title: str = ""

    def get(self, name: str) -> Any:
        return self.values.get(name, UNKNOWN)


class Need(Protocol):
    """One condition for an option to have an effect."""

    @property
    def counts_for_defaults(self) -> bool:
        """Whether the notice names the option also where it is set to its default."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The options whose values it depends on."""
        ...

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        """Say why ``option`` has no effect; None where the need is met, or cannot be decided yet."""
        ...

    def describe(self, option: str) -> str:
        """Describe the need of ``option`` for ``--help`` and docs/options.md."""
        ...


class Trait(Enum):
    """A property of a run that no single option sets; the values describe it in docs/options.md."""

    COMPILED = "`torch_compile`"
    FSDP = "`fsdp`"
    DEEPSPEED = "`deepspeed`"
    LAUNCHED_DEEPSPEED = "DeepSpeed of the launcher"
    TRACKER = "a tracker (`logging_dir` or `log_with`)"
    WANDB = "`log_with` wandb or all"
    RATE = "an optimizer that does not set its own learning rate"
    SHARED_RATE = "a trained part without a rate of its own"
    SCHEDULE = "an optimizer that uses a schedule"
    TRAINED_TEXT = "trained text encoders"
    TRAINED_DENOISER = "a trained denoiser"
    ALPHA = "an adapter type with alpha"
    DROPOUT = "an adapter type with dropout"
    SAMPLER = "what the sampler needs"
    FLOW = "a flow-matching model"
    DIFFUSION = "a model that predicts noise or v"
    V_PREDICTION = "a model that predicts v"
    NOISE_PREDICTION = "a model that predicts the noise"
    GUIDANCE = "a model with a guidance embedding"
    TEXT_ENCODERS = "a model whose text encoders can be trained"
    STORED_QUANTIZED = "a model whose files store weights quantized"


@dataclass(frozen=True)
class Has:
    """The run has a trait."""

    trait: Trait
    reason: str = ""
    """The reason for the notice; by default that of the trait."""

    counts_for_defaults: ClassVar[bool] = False
    names: ClassVar[Sequence[str]] = ()

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        missing = run.traits.get(self.trait)
        return missing and (self.reason or missing)

    def describe(self, option: str) -> str:
        return self.trait.value


@dataclass(frozen=True)
class OfModel:
    """The model's family has this option, as its facts say."""

    counts_for_defaults: ClassVar[bool] = False
    names: ClassVar[Sequence[str]] = ()

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        if run.model_options is None or option in run.model_options:
            return None
        return f"not for {run.model_title}"

    def describe(self, option: str) -> str:
        return "a model that has it"


@dataclass(frozen=True)
class IsSet:
    """Another option is set: neither empty, nor false, nor 0."""

    name: str
    reason: str = ""
    text: str = ""
    """The description, where the name is that of a kind of images and not of an option."""

    counts_for_defaults: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        value = run.get(self.name)
        if value:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return self.reason or f"{self.name} is {'0' if is_number else 'not set'}"

    def describe(self, option: str) -> str:
        return self.text or f"`{self.name}`"


@dataclass(frozen=True)
class IsUnset:
    """Another option, which replaces this one, is not set."""

    name: str
    reason: str = ""

    counts_for_defaults: ClassVar[bool] = True

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        value = run.get(self.name)
        return (self.reason or f"{self.name} is set") if value and value is not UNKNOWN else None

    def describe(self, option: str) -> str:
        return f"no `{self.name}`"


@dataclass(frozen=True)
class HasValue:
    """Another option, or the option itself, has one of these values."""

    name: str
    values: tuple[Any, ...]
    reason: str = ""

    counts_for_defaults: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        value = run.get(self.name)
        if value is UNKNOWN or value in self.values:
            return None
        return self.reason or f"only for {self.name} {_join_values(self.values, 'and')}"

    def describe(self, option: str) -> str:
        return f"`{self.name}` {_join_values(self.values, 'or')}"


@dataclass(frozen=True)
class LacksValue:
    """Another option, or the option itself, has none of these values."""

    name: str
    values: tuple[Any, ...]
    reason: str = ""
    text: str = ""
    """The description, where the name is that of a kind of images and not of an option."""

    counts_for_defaults: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        value = run.get(self.name)
        if value is UNKNOWN or value not in self.values:
            return None
        return self.reason or f"{self.name} is {_format_value(value)}"

    def describe(self, option: str) -> str:
        if len(self.values) == 1 and self.values[0] is True:  # 1 equals True
            return f"no `{self.name}`"
        return self.text or f"`{self.name}` other than {_join_values(self.values, 'or')}"


@dataclass(frozen=True)
class AnyOf:
    """One of several needs is met; the last one's reason is given where none is."""

    needs: tuple[Need, ...]
    reason: str = ""

    counts_for_defaults: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str]:
        return [name for need in self.needs for name in need.names]

    def explain_unmet(self, run: Circumstances, option: str) -> str | None:
        reasons = [need.explain_unmet(run, option) for need in self.needs]
        return (self.reason or reasons[-1]) if all(reasons) else None

    def describe(self, option: str) -> str:
        others = [need.describe(option) for need in self.needs if option not in need.names]
        return " or ".join(others)


Needs = Sequence[Need]


def _join_values(values: Sequence[Any], word: str) -> str:
    """Join values as a sentence does: ``a, b or c``."""
    *first, last = map(_format_value, values)
    return f"{', '.join(first)} {word} {last}" if first else last


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


class OptionWithNeeds(Protocol):
    """What ``find_unmet_needs`` reads of an option."""

    @property
    def name(self) -> str: ...
    @property
    def default(self) -> Any: ...
    @property
    def needs(self) -> Needs | None: ...

    def is_off(self, value: Any) -> bool: ...


def explain_no_effect(option: OptionWithNeeds, cases: Sequence[Circumstances]) -> tuple[Need, str] | None:
    """Return the unmet need of the first case and why it is unmet, if an option has an effect in none of the cases.

    The cases are the subsets of images, of which each may have other settings.
    """
    first = None
    for run in cases:
        unmet = next(
            ((need, reason) for need in option.needs or () if (reason := need.explain_unmet(run, option.name))), None
        )
        if unmet is None:
            return None
        first = first or unmet
    return first


def find_unmet_needs(
    options: Iterable[OptionWithNeeds],
    explicit: Collection[str],
    values: Mapping[str, Any],
    build_cases: Callable[[Mapping[str, Any]], Sequence[Circumstances]],
) -> dict[str, str | None]:
    """Find the options among ``explicit`` that have no effect, and why.

    A value that asks for what happens anyway needs no reason: None. An option without effect is set back to its default
    before those are judged that depend on it: ``logit_mean`` has no effect where ``weighting_scheme`` has none.
    """
    candidates = {option.name: option for option in options if option.name in explicit and option.needs}
    unused, values = dict[str, str | None](), dict(values)
    while candidates:
        cases = build_cases(values)
        unmet = {
            name: found
            for name, option in candidates.items()
            if (found := explain_no_effect(option, cases)) is not None
        }
        settled = {name for name in unmet if not unmet.keys() & (set(list_needed_names(candidates[name])) - {name})}
        if not (settled := settled or set(unmet)):
            break
        for name in (name for name in candidates.copy() if name in settled):
            option, (need, reason) = candidates.pop(name), unmet[name]
            unused[name] = reason if need.counts_for_defaults or not option.is_off(values[name]) else None
            values[name] = option.default
    return unused


def list_needed_names(option: OptionWithNeeds) -> list[str]:
    """List the options and kinds of images that the needs of an option name."""
    return [name for need in option.needs or () for name in need.names]
