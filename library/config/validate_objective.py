"""Checks of the noise, timestep and loss options: against each other, and against the model's prediction type."""

from collections.abc import Iterator

from ..problems import Problem
from .option_needs import Circumstances, explain_no_effect
from .options import Option, iter_group_options
from .schema import RunConfig
from .schema_objective import LossConfig, NoiseConfig
from .unused_options import list_prediction_traits


def validate_objective_options(noise: NoiseConfig, loss: LossConfig) -> Iterator[Problem]:
    """Check the noise, timestep and loss options, whatever the model."""
    yield from _validate_timesteps(noise)
    for name, value in (
        ("huber_c", loss.huber_c),
        ("huber_scale", loss.huber_scale),
        ("discrete_flow_shift", noise.discrete_flow_shift),
    ):
        if value is not None and value <= 0:
            yield Problem(name, f"must be above 0, got {value:g}")


def validate_preservation_options(config: RunConfig) -> Iterator[Problem]:
    """Check output preservation, whose second forward pass not every engine has."""
    preservation = config.preservation
    option = preservation.active_option
    trigger = (preservation.diff_output_preservation_trigger or "").strip()
    if preservation.is_differential and not trigger:
        yield Problem(
            "diff_output_preservation_class",
            "needs the word that it replaces in captions",
            "set diff_output_preservation_trigger",
            others=("diff_output_preservation_trigger",),
        )
    if option is None:
        return
    # Blocks are computed again after the second forward pass, whose texts have replaced those of the first.
    recomputes = config.train.gradient_checkpointing or config.train.on_oom == "recover"
    other_texts = "gradient checkpointing would compute blocks again with other texts"
    obstacles = {
        "network_dropout": (recomputes and bool(config.adapter.network_dropout), other_texts),
        "cp_size": (recomputes and config.parallel.cp_size > 1, other_texts),
        "pp_size": (config.parallel.pp_size > 1, "a pipeline runs one forward pass for each micro-batch"),
        "gpu_memory": (config.train.gpu_memory is not None, "memory estimates do not count its second forward pass"),
        "cuda_graphs": (config.distributed.cuda_graphs, "a graph has the adapter switched on"),
        "torch_compile": (config.distributed.torch_compile, "compiled blocks have the adapter switched on"),
    }
    for name, (is_used, reason) in obstacles.items():
        if is_used:
            yield Problem(option, f"cannot be combined with {name}: {reason}", "remove one of them", others=(name,))


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
    is_huber = loss.loss_type in ("huber", "smooth_l1")
    if noise.objective_defaults == "kohya" and prediction_type == "flow" and is_huber and loss.huber_schedule == "snr":
        yield Problem(
            "huber_schedule",
            f"snr, the default, stops sd-scripts for {family}, whose noise schedule has no SNR there",
            "set huber_schedule constant or exponential; or objective_defaults own, whose SNR is ((1 - s) / s)^2",
            others=("loss_type", "objective_defaults"),
        )
    override = noise.v_parameterization
    predicts_v = prediction_type == "v" if override is None else override
    if prediction_type != "flow" and noise.zero_terminal_snr and not predicts_v:
        yield Problem(
            "zero_terminal_snr",
            f"needs a model that predicts v, but this {family} model predicts the noise",
            "set v_parameterization",
            others=("v_parameterization",),
        )


def find_options_of_other_models(noise: NoiseConfig, loss: LossConfig, prediction_type: str) -> dict[str, str]:
    """Find active options that mean nothing to a model that predicts ``epsilon``, ``v`` or ``flow``, and why."""
    traits, found = list_prediction_traits(prediction_type, noise), {}
    for option, value in _iter_active_options(noise, loss):
        if unmet := explain_no_effect(option, [Circumstances({option.name: value}, traits)]):
            found[option.name] = unmet[1]
    return found


def find_active_options(noise: NoiseConfig, loss: LossConfig) -> dict[str, object]:
    """Return the options that change something: not the default, and not switched off by 0 or false."""
    return {option.name: value for option, value in _iter_active_options(noise, loss)}


def _iter_active_options(noise: NoiseConfig, loss: LossConfig) -> Iterator[tuple[Option, object]]:
    for group in (noise, loss):
        for option in iter_group_options(type(group)):
            if not option.is_off(value := getattr(group, option.name)):
                yield option, value
