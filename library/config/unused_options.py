"""Options that are set and have no effect on this run, each with the reason; none of them changes the result.

They are accepted, as sd-scripts does, named together in one line, and set back to their defaults, so that what is
ignored cannot be read by accident.
"""

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .network_args import (
    LYCORIS_ALGORITHMS,
    OFT_MODULES,
    ROTATION_TYPES,
    TUCKER_ARGS,
    TUCKER_TYPES,
    NetworkArgs,
    drops_in_bypass_mode,
    get_adapter_type,
    get_lycoris_preset,
    list_arg_names,
    parse_network_args,
    validate_network_module,
)
from .option_needs import UNKNOWN, Circumstances, Trait, find_unmet_needs
from .options import ExplicitOptions, build_config, flatten_config, iter_options
from .schema import AdapterConfig, RunConfig
from .schema_objective import NoiseConfig, TimestepSampling
from .schema_optim import OptimConfig
from .types import parse_env_bool, split_keyword_args
from .validate_slider import find_image_options

_DROPOUT_OF_LYCORIS = "LyCORIS drops nothing without bypass_mode; networks.lora does"
_NO_CONVOLUTIONS = "convolutions are not trained"
_SAMPLERS_WITHOUT_ZERO_SNR = ("heun", "pndm", "lms", "dpm_2", "dpm_2_a", "dpmsingle")


@dataclass(frozen=True)
class ModelTraits:
    """What the effect of options depends on in a model."""

    title: str
    prediction_type: str
    """``epsilon``, ``v`` or ``flow``."""
    has_guidance_embedding: bool
    can_train_text_encoders: bool
    options: Collection[str]
    """The options that the model's family has of its own, with those of its components."""
    timestep_sampling: TimestepSampling = "shift"
    """The default of ``timestep_sampling`` for the model's family."""
    is_stored_quantized: bool = True
    """Whether its files store weights quantized; True where they are not known."""

    def list_traits(self, noise: NoiseConfig) -> dict[Trait, str | None]:
        """Say of each trait of models whether this one has it, or why not."""
        traits = list_prediction_traits(self.prediction_type, noise)
        traits[Trait.GUIDANCE] = None if self.has_guidance_embedding else "the model has no guidance embedding"
        missing = f"the text encoders of {self.title} are never trained"
        traits[Trait.TEXT_ENCODERS] = None if self.can_train_text_encoders else missing
        plain = "its files store no weights quantized"
        traits[Trait.STORED_QUANTIZED] = None if self.is_stored_quantized else plain
        return traits


def list_prediction_traits(prediction_type: str, noise: NoiseConfig) -> dict[Trait, str | None]:
    """Say which options of noise and loss mean something to a model that predicts ``epsilon``, ``v`` or ``flow``."""
    is_flow, override = prediction_type == "flow", noise.v_parameterization
    predicts_v = prediction_type == "v" if override is None else override
    return {
        Trait.FLOW: None if is_flow else "only for flow matching",
        Trait.DIFFUSION: "not for flow matching" if is_flow else None,
        Trait.V_PREDICTION: None if predicts_v else "the model predicts the noise; v_parameterization is not set",
        Trait.NOISE_PREDICTION: "the model predicts v" if predicts_v else None,
    }


def find_unused_options(
    config: RunConfig,
    explicit: ExplicitOptions,
    model: ModelTraits | None = None,
    subsets: Sequence[Mapping[str, Any]] | None = None,
    unknown: Collection[str] = (),
) -> dict[str, str | None]:
    """Find the options among ``explicit`` that have no effect, as their facts say; return the reason of each.

    The reason is None for a value that asks for what happens anyway, and of which there is nothing to say.
    ``subsets`` are the settings that a dataset file has for each of its image sources, by the names of options;
    ``unknown`` are options whose values could not be read.
    """
    all_options = list(iter_options(RunConfig))
    if subsets is None:
        is_in_file = config.data.dataset_config is not None
        subsets = [{option.name: UNKNOWN for option in all_options if option.dataset_table and is_in_file}]

    def build_cases(values: Mapping[str, Any]) -> list[Circumstances]:
        run = build_config(RunConfig, dict(values))
        traits = list_config_traits(run)
        traits |= model.list_traits(run.noise) if model is not None else {}
        trains_text = run.adapter.trains_text_encoders and not traits.get(Trait.TEXT_ENCODERS)
        traits[Trait.SHARED_RATE] = explain_own_rates(run, trains_text_encoders=trains_text)
        # Without a model: shift, with which every option has an effect that has one with any family's default.
        sampling = run.noise.get_timestep_sampling(model.timestep_sampling if model is not None else "shift")
        implied = {"timestep_sampling": sampling, **dict.fromkeys(unknown, UNKNOWN)}
        title, options = (model.title, model.options) if model is not None else ("", None)
        return [Circumstances({**values, **implied, **keys}, traits, options, title) for keys in subsets]

    unmet = find_unmet_needs(all_options, explicit, flatten_config(config), build_cases)
    return {**{name: reason for name, reason in find_image_options(config).items() if name in explicit}, **unmet}


def find_unused_tool_options(config: Any, explicit: ExplicitOptions, unknown: Collection[str]) -> dict[str, str | None]:
    """Find the options of a tool among ``explicit`` that have no effect, and why; their needs are each other."""
    return find_unmet_needs(
        iter_options(type(config)),
        explicit,
        flatten_config(config),
        lambda values: [Circumstances({**values, **dict.fromkeys(unknown, UNKNOWN)})],
    )


def list_config_traits(config: RunConfig) -> dict[Trait, str | None]:
    """Say of each trait that does not depend on the model whether a run has it, or why not."""
    adapter, optim, log = config.adapter, config.optim, config.log
    arguments = parse_network_args(adapter.network_args)[0]
    is_lycoris = adapter.network_module == "lycoris.kohya"
    has_tracker = log.log_with not in (None, "none") or (log.log_with is None and log.logging_dir is not None)
    is_compiled_by_launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"
    is_compiled = config.distributed.torch_compile
    is_rotation = is_lycoris and LYCORIS_ALGORITHMS.get(arguments.algo) in ROTATION_TYPES
    missing = {
        Trait.COMPILED: not (is_compiled_by_launcher if is_compiled is None else is_compiled)
        and "torch_compile is not set",
        Trait.FSDP: not _uses_engine("FSDP", config.sharding.fsdp) and "fsdp is not set",
        Trait.DEEPSPEED: not _uses_engine("DEEPSPEED", config.deepspeed.deepspeed) and "deepspeed is not set",
        Trait.LAUNCHED_DEEPSPEED: not _uses_engine("DEEPSPEED", None) and "the launcher does not start DeepSpeed",
        Trait.TRACKER: not has_tracker and "no tracker is set",
        Trait.WANDB: log.log_with not in ("wandb", "all") and "wandb is not used",
        Trait.RATE: is_self_tuning_adafactor(optim) and "Adafactor with relative_step sets its own",
        Trait.SCHEDULE: get_optimizer_name(optim).endswith("schedulefree")
        and f"{optim.optimizer_type} needs no schedule",
        Trait.TRAINED_TEXT: not adapter.trains_text_encoders and "text encoders are not trained",
        Trait.TRAINED_DENOISER: not adapter.trains_denoiser and "only text encoders are trained",
        Trait.ALPHA: is_rotation and f"{arguments.algo} has no alpha",
        Trait.DROPOUT: is_lycoris and not arguments.bypass_mode and _DROPOUT_OF_LYCORIS,
        Trait.SAMPLER: find_unusable_sampler(config.preview.sample_sampler, config.noise),
    }
    return {trait: reason or None for trait, reason in missing.items()}


def explain_own_rates(config: RunConfig, *, trains_text_encoders: bool) -> str | None:
    """Say which options give every trained part a learning rate of its own; None if one has that of all.

    An optimizer by its import path gets the rate of all beside those of the parts, and some, such as Ranger21 and
    Apollo of pytorch_optimizer, compute with it.
    """
    adapter, optim, full = config.adapter, config.optim, config.full
    if "." in (path := optim.optimizer_type.replace(":", ".")) and not path.startswith("torch.optim."):
        return None
    setters = list[str]()
    if adapter.trains_denoiser:
        has_blocks = adapter.is_full and full.block_lr is not None and optim.learning_rate != 0
        setters.append("block_lr" if has_blocks else "" if optim.unet_lr is None else "unet_lr")
    if trains_text_encoders:
        names = full.text_encoder_rate_names if adapter.is_full else ()
        has_own = bool(optim.text_encoder_lr) and not (names and None in full.text_encoder_rates)
        setters += (names or ["text_encoder_lr"]) if has_own else [""]
    if adapter.trains_embedding:
        setters.append("" if adapter.embedding_lr is None else "embedding_lr")
    if not setters or "" in setters:
        return None
    *others, last = setters
    return f"{', '.join(others)} and {last} are set" if others else f"{last} is set"


def _uses_engine(name: str, switch: bool | None) -> bool:
    """Whether our option, or accelerate's launcher where it is not set, requests an engine."""
    is_launched = bool(parse_env_bool(os.environ.get(f"ACCELERATE_USE_{name}")))
    return is_launched if switch is None else switch


def reset_options(config: Any, names: Iterable[str]) -> Any:
    """Set options back to their defaults, but for those that dataset files have as well.

    Checkpoints and LoRA files record these for each subset, whether it uses them or not.
    """
    names, groups = set(names), {}
    for group in dataclasses.fields(config):
        value = getattr(config, group.name)
        changes = {
            field.name: field.default
            for field in dataclasses.fields(value)
            if field.name in names and not field.metadata["facts"].dataset_table
        }
        groups[group.name] = dataclasses.replace(value, **changes) if changes else value
    return type(config)(**groups)


def resolve_lycoris_preset(adapter: AdapterConfig) -> AdapterConfig:
    """A preset of LyCORIS without text encoders, or sd-scripts' OFT, stands for not training them."""
    is_valid = (
        validate_network_module(adapter.network_module) is None and not parse_network_args(adapter.network_args)[1]
    )
    preset = get_lycoris_preset(adapter) if is_valid else None
    has_no_text = adapter.network_module in OFT_MODULES or (preset is not None and preset.text_pattern is None)
    if has_no_text and adapter.trains_denoiser:
        return dataclasses.replace(adapter, network_train_unet_only=True)
    return adapter


def resolve_trained_components(
    adapter: AdapterConfig, optim: OptimConfig, *, has_block_rates: bool = False
) -> tuple[AdapterConfig, OptimConfig]:
    """A learning rate of 0 stands for not training the denoiser, unless its blocks have rates, or the text encoders."""
    if optim.text_encoder_lr and not any(optim.text_encoder_lr) and adapter.trains_denoiser:
        adapter = dataclasses.replace(adapter, network_train_unet_only=True, train_text_encoder=False)
        optim = dataclasses.replace(optim, text_encoder_lr=())
    elif optim.unet_lr == 0 and adapter.trains_text_encoders and not has_block_rates:
        adapter = dataclasses.replace(adapter, network_train_text_encoder_only=True)
        optim = dataclasses.replace(optim, unet_lr=None)
    return adapter, optim


def find_unused_args(adapter: AdapterConfig, optim: OptimConfig) -> dict[str, str]:
    """Find valid arguments without effect on this adapter, and why; they have none in sd-scripts either."""
    arguments, problems = parse_network_args(adapter.network_args)
    if problems or validate_network_module(adapter.network_module) is not None:
        return {}
    adapter_type, preset = get_adapter_type(adapter), get_lycoris_preset(adapter)
    has_convolutions = preset.has_convolutions if preset is not None else bool(arguments.conv_dim)
    unused = dict[str, str]()
    if not has_convolutions or arguments.conv_dim == 0:
        unused |= dict.fromkeys(TUCKER_ARGS, _NO_CONVOLUTIONS)
    if preset is None:
        switches = {item.name for item in dataclasses.fields(NetworkArgs) if "effective_types" in item.metadata}
        if adapter_type in TUCKER_TYPES:
            switches -= {*TUCKER_ARGS}
        unused |= dict.fromkeys([*switches, "wd_on_output"], "only for network_module lycoris.kohya")
        unused["dropout"] = "network_dropout is the option for it"
        if arguments.algo == "lora":
            unused["algo"] = f"the type is that of {adapter.network_module}"
        if arguments.conv_dim is None:
            unused["conv_alpha"] = _NO_CONVOLUTIONS
    else:
        unused |= _find_args_without_effect(adapter_type)
        if not preset.has_convolutions:
            unused |= dict.fromkeys(("conv_dim", "conv_alpha"), _NO_CONVOLUTIONS)
    unused["unit"] = "only for networks.dylora"
    unused["verbose"] = "the log counts the layers with an adapter"
    if adapter.network_module == "networks.lora_lumina":
        unused["mlp_dim"] = "sd-scripts looks for mlp in names, which Lumina's feed_forward layers do not have"
    if is_self_tuning_adafactor(optim):
        rates = [item.name for item in dataclasses.fields(NetworkArgs) if item.metadata.get("sets_rate")]
        unused |= dict.fromkeys(rates, "Adafactor with relative_step sets its own")
    if drops_in_bypass_mode(adapter):
        unused = {name: reason for name, reason in unused.items() if name not in ("dropout", "bypass_mode")}
    names, defaults = list_arg_names(adapter.network_args), NetworkArgs()
    is_on = {name: name == "algo" or getattr(arguments, name) != getattr(defaults, name) for name in unused}
    return {name: reason for name, reason in unused.items() if name in names and is_on[name]}


def _find_args_without_effect(adapter_type: str) -> dict[str, str]:
    """Find the arguments that LyCORIS does not read for an adapter type."""
    unused = {"dropout": _DROPOUT_OF_LYCORIS}
    for item in dataclasses.fields(NetworkArgs):
        types = item.metadata.get("effective_types")
        if types is not None and adapter_type not in types:
            unused[item.name] = f"not for {adapter_type}" if types else "not read by LyCORIS"
        elif item.metadata["adapter_types"] == ("lokr",) and adapter_type != "lokr":
            unused[item.name] = "only for lokr"
    if adapter_type != "dora":
        unused |= {"wd_on_output": "only for DoRA", "bypass_mode": "the result is the same"}
    if adapter_type in ROTATION_TYPES:
        unused |= dict.fromkeys(("dora_wd", "rs_lora"), f"not for {adapter_type}")
    return unused


def remove_args(adapter: AdapterConfig, names: Collection[str]) -> AdapterConfig:
    return dataclasses.replace(
        adapter, network_args=tuple(arg for arg in adapter.network_args if list_arg_names([arg])[0] not in names)
    )


def is_self_tuning_adafactor(optim: OptimConfig) -> bool:
    """Whether this is Adafactor with ``relative_step``, its default, which sets its own learning rate."""
    relative_step = [value for key, value in split_keyword_args(optim.optimizer_args) if key == "relative_step"]
    return get_optimizer_name(optim) == "adafactor" and relative_step != ["False"]


def get_optimizer_name(optim: OptimConfig) -> str:
    """The class name of the optimizer in lower case, without its package."""
    return optim.optimizer_type.lower().replace(":", ".").rpartition(".")[2]


def find_unusable_sampler(sampler: str | None, noise: NoiseConfig) -> str | None:
    """Return why previews use ddim instead of a sampler, whatever the model."""
    name = (sampler or "").removeprefix("k_")
    if noise.zero_terminal_snr and name in _SAMPLERS_WITHOUT_ZERO_SNR:
        return "it does not support zero_terminal_snr; previews use ddim"
    if name == "lms" and find_spec("scipy") is None:
        return "it needs the package scipy, which is not installed; previews use ddim"
    return None
