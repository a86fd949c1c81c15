"""The objective of commands and run files of sd-scripts: the defaults of its scripts, and what these ignore.

What sd-scripts does otherwise is expressed in values of options, which runs log and their files record.  Options of
noise, timesteps and loss that are not set get the defaults of the script for the family.  Those that the script accepts
and ignores are set back to their defaults and named.  Values that mean something else there are converted, with a
notice.  ``--objective_defaults own`` turns this off.  The SNR of loss weightings with ``zero_terminal_snr`` is left to
``noise_schedulers.use_original_snr``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import ParsedConfig, RunConfig
from ..config.options import build_config, flatten_config
from ..config.schema_objective import LossConfig, NoiseConfig
from ..config.unused_options import ModelTraits, find_unused_options
from ..problems import Problem
from .detect import get_family_facts
from .facts import FamilyFacts, KohyaObjective

HUBER_LOSSES = ("huber", "smooth_l1")


def resolve_objective_defaults(loaded: ParsedConfig, family: str, model: ModelTraits) -> ParsedConfig:
    """Apply ``objective_defaults``: by default those of sd-scripts if the settings were written for it."""
    objective = get_family_facts(family).options.kohya_objective
    if objective is None:
        return loaded  # an explicit kohya is reported by validate_objective_defaults
    if "objective_defaults" not in loaded.locations and loaded.has_kohya_objective:
        loaded = _set_options(loaded, {"objective_defaults": "kohya"})
    if loaded.config.noise.objective_defaults != "kohya":
        return loaded
    loaded = _set_unset_options(loaded, objective, model)
    loaded = loaded.without_unused(dict(_find_ignored_options(loaded, objective)))
    return _convert_options(loaded, objective)


def validate_objective_defaults(noise: NoiseConfig, facts: FamilyFacts) -> Iterator[Problem]:
    """Check that sd-scripts has a script for the model, if its objective is asked for."""
    if noise.objective_defaults == "kohya" and facts.options.kohya_objective is None:
        yield Problem("objective_defaults", f"sd-scripts has no training script for {facts.title}", "use own")


def _set_options(loaded: ParsedConfig, values: Mapping[str, Any]) -> ParsedConfig:
    return replace(loaded, config=build_config(RunConfig, {**flatten_config(loaded.config), **values}))


def _set_unset_options(loaded: ParsedConfig, objective: KohyaObjective, model: ModelTraits) -> ParsedConfig:
    """Give options that are not set, and have an effect on this run, the defaults of sd-scripts."""
    unset = {name: value for name, value in objective.defaults.items() if name not in loaded.locations}
    unused = find_unused_options(_set_options(loaded, unset).config, frozenset(unset), model)
    used = {name: value for name, value in unset.items() if name not in unused}
    return replace(_set_options(loaded, used), kohya_objective=tuple(map(_format_setting, used.items())))


def _format_setting(setting: tuple[str, str | float]) -> str:
    name, value = setting
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _find_ignored_options(loaded: ParsedConfig, objective: KohyaObjective) -> Iterator[tuple[str, str | None]]:
    """Find the options that are set and that the script for this model accepts and ignores, and why.

    The reason is None for a value that asks for what happens anyway.
    """
    noise, loss = loaded.config.noise, loaded.config.loss
    ignored = dict.fromkeys(objective.ignored, "sd-scripts ignores it for this model")
    weighted = objective.weighted_prediction_types
    if (
        noise.weighting_scheme in ("sigma_sqrt", "cosmap")
        and weighted is not None
        and noise.model_prediction_type not in weighted
    ):
        ignored["weighting_scheme"] = f"sd-scripts weights the loss with model_prediction_type {weighted[0]} only"
    if loss.huber_schedule == "snr":
        ignored["huber_scale"] = "sd-scripts ignores it with huber_schedule snr"
    values, defaults = flatten_config(loaded.config), flatten_config(RunConfig())
    for name, reason in ignored.items():
        if name in loaded.locations:
            is_off = values[name] == defaults[name] or not (values[name] or defaults[name])
            yield name, None if is_off else reason


def _reverse_logit_mean(noise: NoiseConfig, loss: LossConfig, objective: KohyaObjective) -> float | None:
    is_used = noise.weighting_scheme == "logit_normal" and noise.flow_timestep_sampling == "sigma"
    return -noise.logit_mean if is_used and noise.logit_mean and objective.is_logit_mean_reversed else None


def _scale_huber_threshold(noise: NoiseConfig, loss: LossConfig, objective: KohyaObjective) -> float | None:
    is_used = loss.loss_type in HUBER_LOSSES and loss.huber_schedule == "exponential"
    exponent = objective.max_huber_timestep / 1000
    return loss.huber_c**exponent if is_used and exponent != 1 and loss.huber_c > 0 else None


_CONVERSIONS: Mapping[str, tuple[Callable[[NoiseConfig, LossConfig, KohyaObjective], float | None], str]] = {
    "logit_mean": (_reverse_logit_mean, "above 0 means less noise in sd-scripts' script for this model"),
    "huber_c": (
        _scale_huber_threshold,
        "sd-scripts' exponential schedule takes the timesteps of this model, 0 to 1, for 0 to 1000",
    ),
}
"""Options whose values mean something else in sd-scripts: how each is converted, and why."""


def _convert_options(loaded: ParsedConfig, objective: KohyaObjective) -> ParsedConfig:
    """Convert values that mean something else in sd-scripts, each with a notice."""
    noise, loss = loaded.config.noise, loaded.config.loss
    for name, (convert, reason) in _CONVERSIONS.items():
        value = convert(noise, loss, objective)
        if value is None:
            continue
        place = loaded.locations.get(name)
        before = flatten_config(loaded.config)[name]
        notice = f"{place or name}: {before:g} stands for {value:g} here; {reason}"
        loaded = replace(
            _set_options(loaded, {name: value}),
            notices=[*loaded.notices, notice],
            adjustments={**loaded.adjustments, name: notice},
        )
    return loaded
