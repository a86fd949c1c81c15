"""Options that are set and have no effect on this run, each with the reason; none of them changes the result.

They are accepted, as sd-scripts does, named together in one line, and set back to their defaults, so that what is
ignored cannot be read by accident.
"""

import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec

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
from .options import ExplicitOptions
from .schema import AdapterConfig, OptimConfig, RunConfig, TrainConfig
from .schema_data import CacheConfig, DataConfig
from .schema_distributed import DistributedConfig, ParallelConfig
from .schema_objective import LossConfig, NoiseConfig
from .schema_output import LogConfig, PreviewConfig, SaveConfig, StateConfig
from .types import StepsOrRatio, split_keyword_args

UnusedOption = tuple[str, str]
"""An option and why it has no effect."""

COMPILE_OPTIONS = (
    *("dynamo_backend", "dynamo_mode", "dynamo_fullgraph", "dynamo_use_regional_compilation"),
    *("compile_dynamic", "compile_cache_dir"),
)
TIMESTEP_WEIGHTING_SCHEMES = ("logit_normal", "mode")
SAMPLERS_WITHOUT_ZERO_SNR = ("heun", "pndm", "lms", "dpm_2", "dpm_2_a", "dpmsingle")
CHECKPOINTING_OPTIONS = ("gradient_checkpointing_every", "activation_memory_budget", "cpu_offload_checkpointing")
SCHEDULER_OPTIONS = (
    ("lr_scheduler_num_cycles", 1, ("cosine_with_restarts",)),
    ("lr_scheduler_power", 1, ("polynomial",)),
    ("lr_scheduler_timescale", None, ("inverse_sqrt",)),
    ("lr_scheduler_min_lr_ratio", None, ("cosine_with_min_lr", "warmup_stable_decay")),
    ("lr_decay_steps", StepsOrRatio(0, False), ("warmup_stable_decay",)),
)
"""Option, its default, and the schedulers that use it."""

_UPLOAD_OPTIONS = ("huggingface_repo_type", "huggingface_path_in_repo", "huggingface_repo_visibility", "async_upload")
_TRACKER_OPTIONS = ("log_prefix", "log_tracker_name", "log_tracker_config", "wandb_run_name", "log_config")
_DROPOUT_OF_LYCORIS = "LyCORIS drops nothing without bypass_mode; networks.lora does"
_NO_CONVOLUTIONS = "convolutions are not trained"
_RATE_OPTIONS = ("learning_rate", "unet_lr", "text_encoder_lr")


def find_unused_options(config: RunConfig, explicit: ExplicitOptions) -> dict[str, str]:
    """Find the options among ``explicit`` that have no effect, whatever the model; return the reason of each."""
    candidates: Iterable[Iterator[UnusedOption]] = (
        _find_unused_lengths(config.train, explicit),
        _find_unused_rates(config.adapter, config.optim),
        _find_unused_scheduler_options(config.optim),
        _find_unused_adapter_options(config.adapter),
        _find_unused_data_options(config.data, config.cache),
        _find_unused_log_options(config.log),
        _find_unused_preview_options(config.preview, config.noise),
        _find_unused_noise_options(config.noise, config.loss, explicit),
        _find_unused_memory_options(config.distributed, config.train, config.parallel),
        _find_unused_save_options(config.save, config.state),
    )
    unused = dict[str, str]()
    for name, reason in (pair for pairs in candidates for pair in pairs):
        if name in explicit:
            unused.setdefault(name, reason)
    return unused


def reset_options(config: RunConfig, names: Iterable[str]) -> RunConfig:
    """Set options back to their defaults."""
    names, groups = set(names), {}
    for group in dataclasses.fields(config):
        value = getattr(config, group.name)
        changes = {field.name: field.default for field in dataclasses.fields(value) if field.name in names}
        groups[group.name] = dataclasses.replace(value, **changes) if changes else value
    return RunConfig(**groups)


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


def resolve_trained_components(adapter: AdapterConfig, optim: OptimConfig) -> tuple[AdapterConfig, OptimConfig]:
    """A learning rate of 0 stands for not training the denoiser or the text encoders."""
    if optim.text_encoder_lr and not any(optim.text_encoder_lr) and adapter.trains_denoiser:
        adapter = dataclasses.replace(adapter, network_train_unet_only=True)
        optim = dataclasses.replace(optim, text_encoder_lr=())
    elif optim.unet_lr == 0 and adapter.trains_text_encoders:
        adapter = dataclasses.replace(adapter, network_train_text_encoder_only=True)
        optim = dataclasses.replace(optim, unet_lr=None)
    return adapter, optim


def find_unused_args(adapter: AdapterConfig) -> dict[str, str]:
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


def _find_unused_lengths(train: TrainConfig, explicit: ExplicitOptions) -> Iterator[UnusedOption]:
    if train.max_train_epochs is not None and "max_train_epochs" in explicit:
        yield "max_train_steps", "max_train_epochs is set"


def _find_unused_rates(adapter: AdapterConfig, optim: OptimConfig) -> Iterator[UnusedOption]:
    if is_self_tuning_adafactor(optim):
        for name in _RATE_OPTIONS:
            yield name, "Adafactor with relative_step sets its own"
        if optim.lr_scheduler not in ("constant", "adafactor"):
            yield "lr_scheduler", "Adafactor with relative_step has its own"
    if not adapter.trains_text_encoders:
        yield "text_encoder_lr", "text encoders are not trained"
    if not adapter.trains_denoiser:
        yield "unet_lr", "only text encoders are trained"


def _find_unused_scheduler_options(optim: OptimConfig) -> Iterator[UnusedOption]:
    scheduler = optim.lr_scheduler
    if get_optimizer_name(optim).endswith("schedulefree"):
        if scheduler not in ("constant", "constant_with_warmup"):
            yield "lr_scheduler", f"{optim.optimizer_type} needs no schedule"
        yield "lr_scheduler_type", f"{optim.optimizer_type} needs no schedule"
    elif optim.lr_scheduler_type:
        yield "lr_scheduler", "lr_scheduler_type is set"
    for name, default, schedulers in SCHEDULER_OPTIONS:
        if getattr(optim, name) != default and (scheduler not in schedulers or optim.lr_scheduler_type):
            yield name, f"only for lr_scheduler {' and '.join(schedulers)}"


def _find_unused_adapter_options(adapter: AdapterConfig) -> Iterator[UnusedOption]:
    arguments = parse_network_args(adapter.network_args)[0]
    if adapter.network_module == "lycoris.kohya" and LYCORIS_ALGORITHMS.get(arguments.algo) in ROTATION_TYPES:
        yield "network_alpha", f"{arguments.algo} has no alpha"
    if adapter.network_module == "lycoris.kohya" and adapter.network_dropout and not arguments.bypass_mode:
        yield "network_dropout", _DROPOUT_OF_LYCORIS
    if adapter.dim_from_weights and adapter.network_weights:
        for name in ("network_dim", "network_alpha"):
            yield name, "dim_from_weights takes it from network_weights"


def _find_unused_data_options(data: DataConfig, cache: CacheConfig) -> Iterator[UnusedOption]:
    if data.dataset_config is not None:
        for name in ("train_data_dir", "reg_data_dir", "in_json"):
            yield name, "dataset_config is set"
    elif data.train_data_dir and not data.in_json:
        yield "dataset_repeats", "the names of the folders in train_data_dir set the repeats"
    if not data.max_data_loader_n_workers:
        yield "prefetch_factor", "there are no data loader workers"
    if not (cache.cache_latents_to_disk or cache.cache_text_encoder_outputs_to_disk):
        if cache.skip_cache_check:
            yield "skip_cache_check", "there is no disk cache"
    if not cache.caches_latents:
        yield "cache_precision", "latents are not cached"
    if data.dataset_config is None and not data.validation_split:  # a dataset file may set it for a subset
        for name in ("validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps", "validation_seed"):
            yield name, "validation_split is 0"


def _find_unused_log_options(log: LogConfig) -> Iterator[UnusedOption]:
    has_tracker = log.log_with not in (None, "none") or (log.log_with is None and log.logging_dir is not None)
    for name in _TRACKER_OPTIONS:
        if getattr(log, name) and not has_tracker:
            yield name, "no tracker is set"
    if log.wandb_run_name and log.log_with not in ("wandb", "all"):
        yield "wandb_run_name", "wandb is not used"


def find_unusable_sampler(sampler: str | None, noise: NoiseConfig) -> str | None:
    """Return why previews use ddim instead of a sampler, whatever the model."""
    name = (sampler or "").removeprefix("k_")
    if noise.zero_terminal_snr and name in SAMPLERS_WITHOUT_ZERO_SNR:
        return "it does not support zero_terminal_snr; previews use ddim"
    if name == "lms" and find_spec("scipy") is None:
        return "it needs the package scipy, which is not installed; previews use ddim"
    return None


def _find_unused_preview_options(preview: PreviewConfig, noise: NoiseConfig) -> Iterator[UnusedOption]:
    if reason := find_unusable_sampler(preview.sample_sampler, noise):
        yield "sample_sampler", reason
    if preview.sample_prompts is None:
        for name in ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first", "sample_sampler"):
            if getattr(preview, name):
                yield name, "no sample_prompts"


def _find_unused_noise_options(
    noise: NoiseConfig, loss: LossConfig, explicit: ExplicitOptions
) -> Iterator[UnusedOption]:
    for name, required in (
        ("noise_offset_random_strength", "noise_offset"),
        ("adaptive_noise_scale", "noise_offset"),
        ("ip_noise_gamma_random_strength", "ip_noise_gamma"),
    ):
        is_needed = name != "adaptive_noise_scale" or required in explicit
        if getattr(noise, name) and not getattr(noise, required) and is_needed:
            yield name, f"{required} is 0"
    if noise.multires_noise_discount != NoiseConfig.multires_noise_discount and not noise.multires_noise_iterations:
        yield "multires_noise_discount", "multires_noise_iterations is 0"
    for name, required in (("logit_mean", "logit_normal"), ("logit_std", "logit_normal"), ("mode_scale", "mode")):
        if getattr(noise, name) != getattr(NoiseConfig, name) and noise.weighting_scheme != required:
            yield name, f"only for weighting_scheme {required}"
    sampling = noise.flow_timestep_sampling
    if noise.weighting_scheme in TIMESTEP_WEIGHTING_SCHEMES and sampling != "sigma":
        yield "weighting_scheme", f"timestep_sampling {sampling} samples the timesteps"
    for name, samplings in (
        ("sigmoid_scale", ("sigmoid", "shift", "flux_shift")),
        ("discrete_flow_shift", ("shift", "sigma")),
    ):
        if getattr(noise, name) != getattr(NoiseConfig, name) and sampling not in samplings:
            yield name, f"not for timestep_sampling {sampling}"
    for name in ("huber_schedule", "huber_c", "huber_scale"):
        if loss.loss_type in ("l2", "l1") and getattr(loss, name) != getattr(LossConfig, name):
            yield name, f"loss_type is {loss.loss_type}"


def _find_unused_memory_options(
    distributed: DistributedConfig, train: TrainConfig, parallel: ParallelConfig
) -> Iterator[UnusedOption]:
    is_compiled_by_launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"
    if distributed.torch_compile or (distributed.torch_compile is None and is_compiled_by_launcher):
        yield "fused_layers", "torch_compile fuses by itself"
    else:
        for name in COMPILE_OPTIONS:
            if getattr(distributed, name) != getattr(DistributedConfig, name):
                yield name, "torch_compile is not set"
    if distributed.mixed_precision in ("no", "fp8"):
        yield "fused_layers", "mixed_precision is neither fp16 nor bf16"
    if not train.gradient_checkpointing and train.on_oom != "recover":
        for name in CHECKPOINTING_OPTIONS:
            if getattr(train, name) != getattr(TrainConfig, name):
                yield name, "gradient_checkpointing is not set"
    if not train.blocks_to_swap and train.block_swap_window_mb:
        yield "block_swap_window_mb", "blocks_to_swap is not set"
    if parallel.pp_size == 1:
        yield "pp_schedule", "pp_size is 1"


def _find_unused_save_options(save: SaveConfig, state: StateConfig) -> Iterator[UnusedOption]:
    for unit in ("epochs", "steps"):
        every = f"save_every_n_{unit}"
        has_every = getattr(save, every) is not None or (unit == "epochs" and save.save_n_epoch_ratio)
        if getattr(save, f"save_last_n_{unit}") is not None and not has_every:
            yield f"save_last_n_{unit}", f"{every} is not set"
        if getattr(state, f"save_last_n_{unit}_state") is not None and not state.save_state:
            yield f"save_last_n_{unit}_state", "save_state is not set"
    if save.huggingface_repo_id is None:
        for name in _UPLOAD_OPTIONS:
            if getattr(save, name) != getattr(SaveConfig, name):
                yield name, "huggingface_repo_id is not set"
    if state.resume is None and not state.auto_resume:
        yield "force_resume", "nothing is resumed"
