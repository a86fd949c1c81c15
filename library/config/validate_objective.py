"""Rules for noise, times and losses: among the options, and against what the model was made to predict."""

from collections.abc import Iterator

from .options import flatten_config, iter_options
from .schema import RunConfig
from .schema_objective import LossConfig, NoiseConfig

OptionConflict = tuple[tuple[str, ...], str]
"""The options concerned, the one to change first, and what is wrong."""


DIFFUSION_ONLY_OPTIONS = {
    "v_parameterization": "the model predicts neither v nor the noise",
    "zero_terminal_snr": "its last time is noise alone already",
    "noise_offset": "its last time is noise alone, so it learns how bright pictures are without it",
    "multires_noise_iterations": "its last time is noise alone, so it learns large shapes without it",
    "min_snr_gamma": "it weighs losses of models that predict v or the noise",
    "debiased_estimation_loss": "it weighs losses of models that predict v or the noise",
    "scale_v_pred_loss_like_noise_pred": "it weighs losses of models that predict v",
    "v_pred_like_loss": "it weighs losses of models that predict the noise",
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
"""Options for the continuous times of flow matching, and values of theirs that ask for what is done anyway."""


TIMESTEP_WEIGHTING_SCHEMES = ("logit_normal", "mode")
"""Names of ``weighting_scheme`` that choose times and weigh nothing."""


def validate_objective_options(config: RunConfig) -> Iterator[OptionConflict]:
    """Options of noise, times and loss that cannot be honoured together, whatever the model."""
    noise, loss = config.noise, config.loss
    yield from _validate_noise(noise)
    yield from _validate_timesteps(noise)
    for name in ("huber_schedule", "huber_c", "huber_scale"):
        if loss.loss_type in ("l2", "l1") and getattr(loss, name) != getattr(LossConfig, name):
            yield (name, "loss_type"), f"loss_type {loss.loss_type} has no threshold; set loss_type huber or smooth_l1"
    for name, value in (
        ("huber_c", loss.huber_c),
        ("huber_scale", loss.huber_scale),
        ("discrete_flow_shift", noise.discrete_flow_shift),
    ):
        if value is not None and value <= 0:
            yield (name,), f"{value:g} is too small; it must be above 0"
    sampler = config.preview.sample_sampler
    if noise.zero_terminal_snr and config.preview.sample_prompts and sampler in ("heun", "pndm"):
        yield ("sample_sampler", "zero_terminal_snr"), f"{sampler} cannot draw with zero_terminal_snr; use ddim"


def _validate_noise(noise: NoiseConfig) -> Iterator[OptionConflict]:
    for name, needed in (
        ("noise_offset_random_strength", "noise_offset"),
        ("adaptive_noise_scale", "noise_offset"),
        ("ip_noise_gamma_random_strength", "ip_noise_gamma"),
    ):
        if getattr(noise, name) and not getattr(noise, needed):
            yield (name, needed), f"needs {needed}; set it above 0"
    if noise.multires_noise_discount not in (0, NoiseConfig.multires_noise_discount):
        if not noise.multires_noise_iterations:
            yield (
                ("multires_noise_discount", "multires_noise_iterations"),
                "there are no layers to make fainter; set multires_noise_iterations, 6 to 10 are usual",
            )


def _validate_timesteps(noise: NoiseConfig) -> Iterator[OptionConflict]:
    low, high = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
    if low >= high:
        yield ("min_timestep", "max_timestep"), f"min_timestep {low} is not below max_timestep {high}"
    sampling, scheme = noise.flow_timestep_sampling, noise.weighting_scheme
    if scheme in TIMESTEP_WEIGHTING_SCHEMES and sampling != "sigma":
        yield (
            ("weighting_scheme", "timestep_sampling"),
            f"{scheme} chooses times, and so does timestep_sampling {sampling}; leave one out",
        )
    for name, schemes in (("logit_mean", "logit_normal"), ("logit_std", "logit_normal"), ("mode_scale", "mode")):
        if getattr(noise, name) != getattr(NoiseConfig, name) and scheme != schemes:
            yield (name, "weighting_scheme"), f"only weighting_scheme {schemes} reads it"
    for name, samplings in (
        ("sigmoid_scale", ("sigmoid", "shift", "flux_shift")),
        ("discrete_flow_shift", ("shift", "sigma")),
    ):
        if getattr(noise, name) != getattr(NoiseConfig, name) and sampling not in samplings:
            ways_out = f"leave it out, or set timestep_sampling to {' or '.join(samplings)}"
            yield (name, "timestep_sampling"), f"times are chosen by {sampling}, which does not read it; {ways_out}"


def validate_objective_for_model(config: RunConfig, family: str, prediction_type: str) -> Iterator[OptionConflict]:
    """Options without a meaning for this model, which was made to predict ``epsilon``, ``v`` or ``flow``."""
    wanted = find_active_options(config)
    if prediction_type == "flow":
        for name, why in DIFFUSION_ONLY_OPTIONS.items():
            if name in wanted:
                yield (name,), f"means nothing for {family}, which is trained by flow matching: {why}; leave it out"
        return
    for name, harmless in FLOW_ONLY_OPTIONS.items():
        if name in wanted and wanted[name] not in harmless.split(", "):
            yield (name,), f"means nothing for {family}: it is for models trained by flow matching; leave it out"
    override = config.noise.v_parameterization
    predicts_v = prediction_type == "v" if override is None else override
    for name in ("zero_terminal_snr", "scale_v_pred_loss_like_noise_pred"):
        if name in wanted and not predicts_v:
            yield (
                (name, "v_parameterization"),
                (
                    f"needs a model that predicts v, and this one of {family} predicts "
                    "the noise; set v_parameterization to make it one"
                ),
            )
    if "v_pred_like_loss" in wanted and predicts_v:
        yield (
            ("v_pred_like_loss", "v_parameterization"),
            f"needs a model that predicts the noise, and this one of {family} predicts v; leave it out",
        )


def find_active_options(config: RunConfig) -> dict[str, object]:
    """Options that ask for something: not their default, and not off in other words."""
    values = flatten_config(config)
    return {
        option.name: values[option.name]
        for option in iter_options(RunConfig)
        if option.group in ("noise", "loss")
        and values[option.name] != option.default
        and (values[option.name] or option.default)
    }
