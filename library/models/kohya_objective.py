"""The objective of commands and run files of sd-scripts: the defaults of its scripts, and what these ignore.

What sd-scripts does otherwise is expressed in values of options, which runs log and their files record.  Options of
noise, timesteps and loss that are not set get the defaults of the script for the family.  Those that the script accepts
and ignores are set back to their defaults and named.  ``--objective_defaults own`` turns this off.  What values of
options mean otherwise there is taken into account where the objective is built: ``convert_values``, and for loss
weightings with ``zero_terminal_snr`` ``scheduler_overrides.use_original_snr``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config import ParsedConfig, RunConfig
from ..config.help import format_default
from ..config.options import build_config, flatten_config
from ..config.schema_objective import LossConfig, NoiseConfig
from ..config.unused_options import ModelTraits, find_unused_options
from ..problems import Problem
from .facts import FamilyFacts, KohyaObjective
from .own_families import get_family_facts

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
    return replace(loaded, notices=[*loaded.notices, *_list_notices(loaded, objective)])


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
    return f"{name} {format_default(value) or 'none'}"


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
    values["max_timestep"] = None if noise.max_timestep == 1000 else noise.max_timestep  # what happens anyway
    for name, reason in ignored.items():
        if name in loaded.locations:
            is_off = values[name] == defaults[name] or not (values[name] or defaults[name])
            yield name, None if is_off else reason


def _list_notices(loaded: ParsedConfig, objective: KohyaObjective) -> Iterator[str]:
    """Say which values mean something else than in ``objective_defaults own``."""
    noise, loss = loaded.config.noise, loaded.config.loss
    is_sampled = noise.weighting_scheme == "logit_normal" and noise.get_timestep_sampling() == "sigma"
    if objective.is_logit_mean_reversed and is_sampled and noise.logit_mean:
        yield f"{loaded.locations['logit_mean']}: above 0 means less noise, as in sd-scripts' script for this model"
    is_scheduled = loss.loss_type in HUBER_LOSSES and loss.huber_schedule == "exponential"
    if objective.max_huber_timestep != 1000 and is_scheduled:
        yield "huber_schedule exponential: sd-scripts takes the timesteps of this model, 0 to 1, for 0 to 1000, so " + (
            "the threshold is near huber_scale at all of them"
        )


def convert_values(
    noise: NoiseConfig, loss: LossConfig, objective: KohyaObjective | None
) -> tuple[NoiseConfig, LossConfig]:
    """Replace values that mean something else in sd-scripts by those that mean the same here.

    Settings keep the values of sd-scripts, so that a run file that is written can be read again.
    """
    if objective is None or noise.objective_defaults != "kohya":
        return noise, loss
    if objective.is_logit_mean_reversed and noise.get_timestep_sampling() == "sigma":
        noise = replace(noise, logit_mean=-noise.logit_mean)
    if loss.huber_schedule == "exponential":
        loss = replace(loss, huber_c=loss.huber_c ** (objective.max_huber_timestep / 1000))
    return noise, loss
