"""Checks of the noise, timestep and loss options: against each other, and against the model's prediction type."""

from collections.abc import Iterator
from dataclasses import fields

from ..problems import Problem
from .schema_objective import LossConfig, NoiseConfig

DIFFUSION_ONLY_OPTIONS = dict.fromkeys(
    """
    v_parameterization zero_terminal_snr noise_offset noise_offset_random_strength adaptive_noise_scale
    multires_noise_iterations multires_noise_discount min_snr_gamma debiased_estimation_loss
    scale_v_pred_loss_like_noise_pred v_pred_like_loss
    """.split(),
    "not for flow matching",
)
"""Options without a meaning for flow matching: its last timestep is pure noise, and it predicts neither v nor noise."""

FLOW_ONLY_OPTIONS = (
    *("timestep_sampling", "weighting_scheme", "sigmoid_scale", "discrete_flow_shift"),
    *("logit_mean", "logit_std", "mode_scale"),
)
"""Options for flow matching."""


def validate_objective_options(noise: NoiseConfig, loss: LossConfig) -> Iterator[Problem]:
    """Check the noise, timestep and loss options, whatever the model."""
    yield from _validate_noise(noise)
    yield from _validate_timesteps(noise)
    for name, value in (
        ("huber_c", loss.huber_c),
        ("huber_scale", loss.huber_scale),
        ("discrete_flow_shift", noise.discrete_flow_shift),
    ):
        if value is not None and value <= 0:
            yield Problem(name, f"must be above 0, got {value:g}")


def _validate_noise(noise: NoiseConfig) -> Iterator[Problem]:
    if noise.adaptive_noise_scale and not noise.noise_offset:
        yield Problem("adaptive_noise_scale", "needs noise_offset", "set it above 0", others=("noise_offset",))


def _validate_timesteps(noise: NoiseConfig) -> Iterator[Problem]:
    low, high = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
    if low >= high:
        yield Problem("min_timestep", f"min_timestep {low} is not below max_timestep {high}", others=("max_timestep",))


def validate_objective_for_model(
    noise: NoiseConfig, loss: LossConfig, family: str, prediction_type: str
) -> Iterator[Problem]:
    """Check the objective options against a model that predicts ``epsilon``, ``v`` or ``flow``."""
    for name, reason in find_options_of_other_models(noise, loss, prediction_type).items():
        yield Problem(name, f"not applicable to {family}, {reason}", "remove it")
    if prediction_type == "flow":
        return
    active = find_active_options(noise, loss)
    override = noise.v_parameterization
    predicts_v = prediction_type == "v" if override is None else override
    for name in ("zero_terminal_snr", "scale_v_pred_loss_like_noise_pred"):
        if name in active and not predicts_v:
            yield Problem(
                name,
                f"needs a model that predicts v, but this {family} model predicts the noise",
                "set v_parameterization",
                others=("v_parameterization",),
            )
    if "v_pred_like_loss" in active and predicts_v:
        yield Problem(
            "v_pred_like_loss",
            f"needs a model that predicts the noise, but this {family} model predicts v",
            "remove it",
            others=("v_parameterization",),
        )


def find_options_of_other_models(noise: NoiseConfig, loss: LossConfig, prediction_type: str) -> dict[str, str]:
    """Find active options that mean nothing to a model that predicts ``epsilon``, ``v`` or ``flow``, and why."""
    active = find_active_options(noise, loss)
    if prediction_type == "flow":
        return {name: reason for name, reason in DIFFUSION_ONLY_OPTIONS.items() if name in active}
    harmless = {"timestep_sampling": "uniform", "weighting_scheme": "none uniform"}
    return {
        name: "only for flow matching"
        for name in FLOW_ONLY_OPTIONS
        if name in active and active[name] not in harmless.get(name, "").split()
    }


def find_active_options(noise: NoiseConfig, loss: LossConfig) -> dict[str, object]:
    """Return the options that change something: not the default, and not switched off by 0 or false."""
    values = [(field, getattr(group, field.name)) for group in (noise, loss) for field in fields(group)]
    return {field.name: value for field, value in values if value != field.default and (value or field.default)}
