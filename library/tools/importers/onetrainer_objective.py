"""Noise, timesteps and loss of a OneTrainer configuration."""

from .equivalents import FLOW_FAMILIES
from .imported import KeyReader, to_number, to_positive_number, to_switch
from .keys import onetrainer as keys

NUM_TIMESTEPS = 1000


def read_objective(config: KeyReader) -> None:
    """Prediction type, noise, timesteps, loss and its weights."""
    is_flow = config.result.family in FLOW_FAMILIES
    _read_noise(config, is_flow)
    _read_loss(config)
    _read_weighting(config, is_flow)
    if is_flow:
        _read_flow_timesteps(config)
    else:
        _read_diffusion_timesteps(config)
    low = config.read("min_noising_strength", 0.0, to_number)
    high = config.read("max_noising_strength", 1.0, to_number)
    if low > 0:
        config.result.options["min_timestep"] = int(NUM_TIMESTEPS * low)
    if high < 1:
        config.result.options["max_timestep"] = int(NUM_TIMESTEPS * high)
    if is_flow and (low > 0 or high < 1) and config.result.options.get("discrete_flow_shift", 1) != 1:
        reason = "the range is cut after the shift here, before it there"
        config.list_change("min_noising_strength" if low > 0 else "max_noising_strength", reason)


def _read_noise(config: KeyReader, is_flow: bool) -> None:
    result = config.result
    is_rescaled = config.read("rescale_noise_scheduler_to_zero_terminal_snr", False, to_switch)
    forces = {name: config.read(f"force_{name}_prediction", False, to_switch) for name in ("v", "epsilon")}
    offset = config.read("offset_noise_weight", None, to_positive_number)
    if is_flow:
        if offset:
            config.list_change("offset_noise_weight", "not for flow-matching models here; remove it")
        return
    if is_rescaled:
        result.options |= {"zero_terminal_snr": True, "v_parameterization": True}
    elif forces["v"] or forces["epsilon"]:
        result.options["v_parameterization"] = forces["v"]
    result.set_option("noise_offset", offset)


def _read_loss(config: KeyReader) -> None:
    """Read the loss; a sum of several losses is listed as not taken over."""
    result = config.result
    strengths = {
        loss: config.read(f"{loss}_strength", 1.0 if loss == "mse" else 0.0, to_number)
        for loss in ("mse", "mae", "huber")
    }
    delta = config.read("huber_delta", 1.0, to_number)
    active = {loss: strength for loss, strength in strengths.items() if strength}
    chosen = max(active, key=lambda loss: active[loss]) if active else "mse"
    if chosen == "mae":
        result.options["loss_type"] = "l1"
    elif chosen == "huber":
        result.options |= {"loss_type": "huber", "huber_schedule": "constant", "huber_c": delta}
        config.list_change("huber_strength", "torch's Huber loss; here the smooth one of sd-scripts, twice as large")
    if len(active) > 1:
        reason = f"one loss at a time here; {chosen} is used"
        result.list_change("mse_strength, mae_strength, huber_strength", list(strengths.values()), reason)
    elif active and active[chosen] != 1:
        reason = "the loss is not scaled here; with Adam this only changes gradient clipping"
        config.list_change(f"{chosen}_strength", reason)


def _read_weighting(config: KeyReader, is_flow: bool) -> None:
    result = config.result
    name = config.read("loss_weight_fn", "CONSTANT")
    strength = config.read("loss_weight_strength", 5.0, to_number)
    if gamma := config.read("min_snr_gamma", None, to_positive_number):  # of earlier versions
        name, strength = "MIN_SNR_GAMMA", gamma
    if name == "MIN_SNR_GAMMA" and not is_flow:
        result.options["min_snr_gamma"] = strength
    elif name == "DEBIASED_ESTIMATION" and not is_flow:
        result.options["debiased_estimation_loss"] = True
        if result.options.get("v_parameterization"):
            config.list_change("loss_weight_fn", "1 / (SNR + 1) for v-prediction here, its square root there")
    elif name not in ("CONSTANT", None):
        config.list_change(
            "loss_weight_fn", "no such weights here; remove it, or set weighting_scheme or min_snr_gamma"
        )


def _read_diffusion_timesteps(config: KeyReader) -> None:
    name = config.read("timestep_distribution", "UNIFORM")
    shift = config.read("timestep_shift", 1.0, to_number)
    config.read("dynamic_timestep_shifting")  # for flow matching only, there too
    weights = [key for key in ("noising_weight", "noising_bias") if config.read(key, 0.0, to_number)]
    for key in ("timestep_distribution", *weights) if name != "UNIFORM" else ():
        config.list_change(key, "timesteps are uniform for this model; min_timestep and max_timestep cut them")
    if shift != 1:
        config.list_change("timestep_shift", "timesteps are uniform for this model")


def _read_flow_timesteps(config: KeyReader) -> None:
    """Read distribution and shift of the timesteps; OneTrainer's dynamic shift is FLUX.1's, except for Qwen-Image."""
    options, family = config.result.options, config.result.family
    name = config.read("timestep_distribution", "UNIFORM")
    weight = config.read("noising_weight", 0.0, to_number)
    bias = config.read("noising_bias", 0.0, to_number)
    shift = config.read("timestep_shift", 1.0, to_number)
    is_dynamic = config.read("dynamic_timestep_shifting", False, to_switch) and family not in keys.FIXED_SHIFTS
    if is_dynamic and family == "z_image":
        options["timestep_sampling"] = "flux_shift"
        if weight:
            options["sigmoid_scale"] = weight + 1
        if name != "LOGIT_NORMAL" or bias:
            config.list_change("timestep_distribution", "logit-normal of mean 0 with the shift by image size", name)
        return
    options["timestep_sampling"] = "sigma"
    if not is_dynamic:
        options["discrete_flow_shift"] = shift
    if name == "LOGIT_NORMAL":
        options["weighting_scheme"] = "logit_normal"
        options |= {key: value for key, value in (("logit_mean", bias),) if value}
        options |= {key: value for key, value in (("logit_std", weight + 1),) if value != 1}
    elif name == "HEAVY_TAIL":
        options |= {"weighting_scheme": "mode", "mode_scale": weight}
    elif name == "UNIFORM" and shift == 1 and not is_dynamic:
        options["timestep_sampling"] = "uniform"
        del options["discrete_flow_shift"]
    elif name != "UNIFORM":
        config.list_change(
            "timestep_distribution", "no such timesteps here; uniform ones are used, see timestep_sampling"
        )
