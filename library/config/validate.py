"""Rules across options; each names the options it speaks of and says the way out."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import ConfigError
from . import validate_adapter
from .network_args import list_arg_names
from .options import ExplicitOptions, OptionConflict
from .schema import RunConfig
from .schema_distributed import DistributedConfig
from .schema_output import LogConfig
from .toml_positions import read_toml_with_lines
from .types import StepsOrRatio
from .validate_adapter import validate_initial_weights, validate_save_options, validate_upload_options
from .validate_distributed import validate_memory_options, validate_parallel_options
from .validate_objective import validate_objective_options


def validate_config(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    """Everything in ``config`` that cannot be honoured together."""
    for rule in _VALIDATORS:
        yield from rule(config, explicit)


def _validate_dataset_config(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    path = config.data.dataset_config
    if path is None:
        yield ("dataset_config",), "missing; name a TOML file, for example dataset_configs/demo.toml"
    elif Path(path).is_dir():
        yield ("dataset_config",), f"{path} is a folder; name the TOML file that speaks of it"
    elif not Path(path).is_file():
        yield ("dataset_config",), f"{path}: no such file (looked in {Path(path).resolve().parent})"


def _validate_max_token_length(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    if config.model.max_token_length not in (75, 150, 225):
        yield ("max_token_length",), f"{config.model.max_token_length}: CLIP reads 75, 150 or 225 tokens"


def _validate_adapter(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    yield from validate_adapter.validate_adapter_options(config, explicit)


def _validate_lr_scheduler(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    optim = config.optim
    if optim.lr_scheduler_type:
        if optim.lr_warmup_steps.value:
            yield ("lr_warmup_steps", "lr_scheduler_type"), "a scheduler class has its own course; it gets no warm-up"
        if "lr_scheduler" in explicit:
            yield ("lr_scheduler", "lr_scheduler_type"), "lr_scheduler_type takes its place; give one of the two"
    elif optim.lr_scheduler in ("constant", "adafactor") and optim.lr_warmup_steps.value > 0:
        yield (
            ("lr_warmup_steps", "lr_scheduler"),
            f"lr_scheduler {optim.lr_scheduler} has no warm-up; use lr_scheduler constant_with_warmup",
        )
    for name, nothing, takers, what in _SCHEDULER_OPTIONS:
        if getattr(optim, name) != nothing and (optim.lr_scheduler not in takers or optim.lr_scheduler_type):
            yield (name, "lr_scheduler"), f"only lr_scheduler {' and '.join(takers)} has {what}"
    if optim.lr_scheduler_args and not optim.lr_scheduler_type and optim.lr_scheduler != "piecewise_constant":
        yield ("lr_scheduler_args", "lr_scheduler"), "only piecewise_constant and lr_scheduler_type take arguments"
    if optim.lr_scheduler == "cosine_with_min_lr" and optim.lr_scheduler_min_lr_ratio is None:
        yield (
            ("lr_scheduler", "lr_scheduler_min_lr_ratio"),
            "cosine_with_min_lr needs lr_scheduler_min_lr_ratio, such as 0.1",
        )
    if not optim.lr_warmup_steps.is_ratio and config.train.max_train_epochs is None:
        if optim.lr_warmup_steps.value >= config.train.max_train_steps:
            yield (
                ("lr_warmup_steps", "max_train_steps"),
                f"the warm-up of {optim.lr_warmup_steps} steps lasts longer than the run of "
                f"{config.train.max_train_steps} steps",
            )


_SCHEDULER_OPTIONS = (
    ("lr_scheduler_num_cycles", 1, ("cosine_with_restarts",), "cycles"),
    ("lr_scheduler_power", 1, ("polynomial",), "a power"),
    ("lr_scheduler_timescale", None, ("inverse_sqrt",), "a time scale"),
    ("lr_scheduler_min_lr_ratio", None, ("cosine_with_min_lr", "warmup_stable_decay"), "a lowest rate"),
    ("lr_decay_steps", StepsOrRatio(0, False), ("warmup_stable_decay",), "a decay of its own"),
)
"""Options, what says nothing, the schedules that read them, and what they are for."""


PER_MODULE_LR_ARGS = {
    *("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio", "network_reg_lrs"),
    *("down_lr_weight", "mid_lr_weight", "up_lr_weight"),
}
"""network_args that give some weights a learning rate of their own."""


def _validate_self_tuning_optimizers(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    """Schedule-free optimizers need no schedule; Adafactor finds a rate of its own unless it is told not to."""
    optim = config.optim
    name = optim.optimizer_type.lower().replace(":", ".").rpartition(".")[2]
    scheduled = bool(optim.lr_scheduler_type) or optim.lr_scheduler not in ("constant", "constant_with_warmup")
    if "schedulefree" in name and scheduled:
        yield ("lr_scheduler", "optimizer_type"), f"{optim.optimizer_type} needs none; use constant_with_warmup"
    relative = [
        word.partition("=")[2].strip()
        for word in optim.optimizer_args
        if word.partition("=")[0].strip() == "relative_step"
    ]
    finds_its_rate = name == "adafactor" and relative != ["False"]
    if finds_its_rate and "learning_rate" in explicit and not relative:
        yield (
            ("learning_rate", "optimizer_args"),
            "Adafactor finds its own learning rate; add relative_step=False to optimizer_args to use this one",
        )
    if finds_its_rate:
        has_own = {
            "unet_lr": optim.unet_lr,
            "text_encoder_lr": optim.text_encoder_lr,
            "network_args": PER_MODULE_LR_ARGS.intersection(list_arg_names(config.adapter.network_args)),
        }
        for name in (name for name, rates in has_own.items() if rates):
            yield (
                (name, "optimizer_args"),
                "Adafactor finds one learning rate for all; add relative_step=False to optimizer_args to have several",
            )
    if finds_its_rate and (optim.lr_scheduler_type or optim.lr_scheduler not in ("constant", "adafactor")):
        yield (
            ("lr_scheduler", "optimizer_args"),
            "Adafactor finds its own learning rate; add relative_step=False to optimizer_args to have a schedule",
        )
    if optim.lr_scheduler == "adafactor" and not finds_its_rate:
        yield ("lr_scheduler", "optimizer_type"), "adafactor means that Adafactor finds its own rate; use constant"


def _validate_train_length(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    if {"max_train_steps", "max_train_epochs"} <= explicit:
        yield ("max_train_steps", "max_train_epochs"), "max_train_epochs decides the length, too; give one of the two"


def _validate_buckets(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    data = config.data
    if data.min_bucket_reso > data.max_bucket_reso:
        yield (
            ("min_bucket_reso", "max_bucket_reso"),
            f"min_bucket_reso {data.min_bucket_reso} is above max_bucket_reso {data.max_bucket_reso}",
        )
    if data.resolution is not None and data.resolution_schedule is not None:
        yield ("resolution", "resolution_schedule"), "resolution_schedule takes its place; give one of the two"


def _validate_prefetch(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    if "prefetch_factor" in explicit and not config.data.max_data_loader_n_workers:
        yield (
            ("prefetch_factor", "max_data_loader_n_workers"),
            "without max_data_loader_n_workers nothing is read ahead",
        )


def _validate_cache(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    cache = config.cache
    if cache.skip_cache_check and not (cache.cache_latents_to_disk or cache.cache_text_encoder_outputs_to_disk):
        yield (
            ("skip_cache_check", "cache_latents_to_disk"),
            "nothing is kept on disk that could be checked; set cache_latents_to_disk, or take this out",
        )
    if "cache_precision" in explicit and not (cache.cache_latents or cache.cache_latents_to_disk):
        yield ("cache_precision", "cache_latents"), "no latents are kept; set cache_latents or cache_latents_to_disk"


def _validate_logging(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    log = config.log
    if log.log_with in ("tensorboard", "all") and log.logging_dir is None:
        yield ("log_with", "logging_dir"), f"log_with {log.log_with} needs a logging_dir to write to"
    tracked = log.log_with not in (None, "none") or (log.log_with is None and log.logging_dir is not None)
    for name in ("log_prefix", "log_tracker_name", "log_tracker_config", "wandb_run_name", "log_config"):
        if name in explicit and getattr(log, name) and not tracked:
            yield (name, "log_with"), "there is no tracker to use it; set log_with, or logging_dir for tensorboard"
    if log.wandb_run_name and tracked and log.log_with not in ("wandb", "all"):
        yield ("wandb_run_name", "log_with"), "wandb is not used; set log_with to wandb or all"
    if log.log_tracker_config and tracked:
        for problem in _validate_tracker_config(log, log.log_tracker_config):
            yield ("log_tracker_config",), problem
    if log.quiet and {"console_log_level", "quiet"} <= explicit and log.console_log_level in ("DEBUG", "INFO"):
        yield ("quiet", "console_log_level"), f"quiet hides what console_log_level {log.console_log_level} asks for"


def _validate_tracker_config(log: LogConfig, path: str) -> Iterator[str]:
    """The file holds a table for each tracker that is used, and nothing else."""
    try:
        tables, lines = read_toml_with_lines(Path(path))
    except ConfigError as error:
        yield from error.problems
        return
    used = log.log_with or "tensorboard"
    for name, table in tables.items():
        if used not in ("all", name):
            yield f"{path}:{lines[(name,)]}: {name} is not the tracker that is used, which is {used}"
        elif not isinstance(table, dict):
            yield f"{path}:{lines[(name,)]}: {name}: expected a table, [{name}]"


def _validate_previews(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    preview = config.preview
    asked = [
        name for name in ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first") if getattr(preview, name)
    ]
    if preview.sample_prompts is None:
        if asked:
            yield (asked[0], "sample_prompts"), "needs prompts; name a file with --sample_prompts"
    elif not Path(preview.sample_prompts).is_file():
        yield ("sample_prompts",), f"{preview.sample_prompts}: no such file"


def _validate_objective(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    yield from validate_objective_options(config)


def _validate_compile(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    names = (
        "dynamo_backend",
        "dynamo_mode",
        "dynamo_fullgraph",
        "dynamo_use_regional_compilation",
        "compile_dynamic",
        "compile_cache_dir",
    )
    if not config.distributed.torch_compile:
        for name in names:
            if name in explicit and getattr(config.distributed, name) != getattr(DistributedConfig, name):
                yield (name, "torch_compile"), "nothing is compiled; set torch_compile"


def _validate_resume(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    state = config.state
    if state.resume is not None and state.auto_resume:
        yield ("resume", "auto_resume"), "name a state with resume, or leave it to auto_resume; not both"
    if state.resume not in (None, "latest") and not (state.resume and Path(state.resume).is_dir()):
        yield (
            ("resume",),
            f"{state.resume or 'empty'}: no such folder; name one that ends in -state, or write latest",
        )
    if state.force_resume and state.resume is None and not state.auto_resume:
        yield ("force_resume",), "nothing is resumed; add resume or auto_resume"
    for name in ("save_last_n_epochs_state", "save_last_n_steps_state"):
        if getattr(state, name) is not None and not state.save_state:
            yield (name, "save_state"), "no states are saved on the way; set save_state"


def _validate_full_bf16(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    precision = config.distributed.mixed_precision
    if config.distributed.full_bf16 and precision not in (None, "bf16"):
        yield ("full_bf16", "mixed_precision"), f"needs mixed_precision bf16, and it is {precision}"


def _validate_output_name(config: RunConfig, explicit: ExplicitOptions) -> Iterator[OptionConflict]:
    name = config.save.output_name
    if not name or Path(name).name != name:
        yield ("output_name",), f"{name!r} is no file name; folders go into output_dir"
    elif name.endswith(".safetensors"):
        yield ("output_name",), "the ending is added; write the name without .safetensors"


_VALIDATORS: tuple[Callable[[RunConfig, ExplicitOptions], Iterator[OptionConflict]], ...] = (
    _validate_dataset_config,
    _validate_max_token_length,
    _validate_adapter,
    _validate_lr_scheduler,
    _validate_self_tuning_optimizers,
    _validate_train_length,
    _validate_buckets,
    _validate_prefetch,
    _validate_cache,
    _validate_logging,
    _validate_previews,
    _validate_objective,
    _validate_compile,
    validate_parallel_options,
    _validate_resume,
    _validate_full_bf16,
    _validate_output_name,
    validate_save_options,
    validate_initial_weights,
    validate_upload_options,
    validate_memory_options,
)
