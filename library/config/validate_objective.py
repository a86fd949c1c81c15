"""Checks of the noise, timestep and loss options: against each other, and against the model's prediction type."""

from collections.abc import Iterator
from dataclasses import fields

from .options import OptionConflict
from .schema_objective import LossConfig, NoiseConfig
from .schema_output import PreviewConfig

DIFFUSION_ONLY_OPTIONS = {
    "v_parameterization": "it predicts neither v nor the noise",
    "zero_terminal_snr": "its last timestep is pure noise already",
    "noise_offset": "its last timestep is pure noise, so it learns brightness without it",
    "multires_noise_iterations": "its last timestep is pure noise, so it learns low frequencies without it",
    "min_snr_gamma": "it weights the loss of models that predict v or the noise",
    "debiased_estimation_loss": "it weights the loss of models that predict v or the noise",
    "scale_v_pred_loss_like_noise_pred": "it weights the loss of models that predict v",
    "v_pred_like_loss": "it weights the loss of models that predict the noise",
}
"""Options without a meaning for flow matching, and why."""

FLOW_ONLY_OPTIONS = {
    "timestep_sampling": "uniform",
    "weighting_scheme": "none, uniform",
    "sigmoid_scale": "",
    "discrete_flow_shift": "",
    "logit_mean": "",
    "logit_std": "",
    "mode_scale": "",
}
"""Options for flow matching, and the values that ask for what diffusion models do anyway."""

TIMESTEP_WEIGHTING_SCHEMES = ("logit_normal", "mode")
"""Values of ``weighting_scheme`` that sample timesteps and do not weight the loss."""


def validate_objective_options(
    noise: NoiseConfig, loss: LossConfig, preview: PreviewConfig
) -> Iterator[OptionConflict]:
    """Check the noise, timestep and loss options, whatever the model."""
    yield from _validate_noise(noise)
    yield from _validate_timesteps(noise)
    for name in ("huber_schedule", "huber_c", "huber_scale"):
        if loss.loss_type in ("l2", "l1") and getattr(loss, name) != getattr(LossConfig, name):
            yield (name, "loss_type"), f"no effect with loss_type {loss.loss_type}; set loss_type huber or smooth_l1"
    for name, value in (
        ("huber_c", loss.huber_c),
        ("huber_scale", loss.huber_scale),
        ("discrete_flow_shift", noise.discrete_flow_shift),
    ):
        if value is not None and value <= 0:
            yield (name,), f"must be above 0, got {value:g}"
    sampler = preview.sample_sampler
    if noise.zero_terminal_snr and preview.sample_prompts and sampler in ("heun", "pndm"):
        yield ("sample_sampler", "zero_terminal_snr"), f"{sampler} does not support zero_terminal_snr; use ddim"


def _validate_noise(noise: NoiseConfig) -> Iterator[OptionConflict]:
    for name, required in (
        ("noise_offset_random_strength", "noise_offset"),
        ("adaptive_noise_scale", "noise_offset"),
        ("ip_noise_gamma_random_strength", "ip_noise_gamma"),
    ):
        if getattr(noise, name) and not getattr(noise, required):
            yield (name, required), f"no effect without {required}; set it above 0"
    discount, iterations = "multires_noise_discount", "multires_noise_iterations"
    if noise.multires_noise_discount not in (0, NoiseConfig.multires_noise_discount):
        if not noise.multires_noise_iterations:
            yield (discount, iterations), f"no effect without {iterations}; 6 to 10 are usual"


def _validate_timesteps(noise: NoiseConfig) -> Iterator[OptionConflict]:
    low, high = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
    if low >= high:
        yield ("min_timestep", "max_timestep"), f"min_timestep {low} is not below max_timestep {high}"
    sampling, scheme = noise.flow_timestep_sampling, noise.weighting_scheme
    if scheme in TIMESTEP_WEIGHTING_SCHEMES and sampling != "sigma":
        problem = f"{scheme} samples timesteps, and so does timestep_sampling {sampling}; remove one of them"
        yield ("weighting_scheme", "timestep_sampling"), problem
    for name, required in (("logit_mean", "logit_normal"), ("logit_std", "logit_normal"), ("mode_scale", "mode")):
        if getattr(noise, name) != getattr(NoiseConfig, name) and scheme != required:
            yield (name, "weighting_scheme"), f"only used by weighting_scheme {required}"
    for name, samplings in (
        ("sigmoid_scale", ("sigmoid", "shift", "flux_shift")),
        ("discrete_flow_shift", ("shift", "sigma")),
    ):
        if getattr(noise, name) != getattr(NoiseConfig, name) and sampling not in samplings:
            problem = f"not used by timestep_sampling {sampling}; remove it, or use {' or '.join(samplings)}"
            yield (name, "timestep_sampling"), problem


def validate_objective_for_model(
    noise: NoiseConfig, loss: LossConfig, family: str, prediction_type: str
) -> Iterator[OptionConflict]:
    """Check the objective options against a model that predicts ``epsilon``, ``v`` or ``flow``."""
    active = find_active_options(noise, loss)
    if prediction_type == "flow":
        for name, why in DIFFUSION_ONLY_OPTIONS.items():
            if name in active:
                yield (name,), f"not applicable to {family}, a flow-matching model: {why}; remove it"
        return
    for name, harmless in FLOW_ONLY_OPTIONS.items():
        if name in active and active[name] not in harmless.split(", "):
            yield (name,), f"not applicable to {family}: only for flow-matching models; remove it"
    override = noise.v_parameterization
    predicts_v = prediction_type == "v" if override is None else override
    for name in ("zero_terminal_snr", "scale_v_pred_loss_like_noise_pred"):
        if name in active and not predicts_v:
            problem = (
                f"needs a model that predicts v, but this {family} model predicts the noise; set v_parameterization"
            )
            yield (name, "v_parameterization"), problem
    if "v_pred_like_loss" in active and predicts_v:
        problem = f"needs a model that predicts the noise, but this {family} model predicts v; remove it"
        yield ("v_pred_like_loss", "v_parameterization"), problem


def find_active_options(noise: NoiseConfig, loss: LossConfig) -> dict[str, object]:
    """Return the options that change something: not the default, and not switched off by 0 or false."""
    values = [(field, getattr(group, field.name)) for group in (noise, loss) for field in fields(group)]
    return {field.name: value for field, value in values if value != field.default and (value or field.default)}
