"""Checks of options against each other that hold for every model; ``validate_config`` lists all of them."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ..errors import ConfigError
from ..problems import Place, Problem
from .network_args import get_adapter_type, parse_network_args
from .operating_systems import validate_output_name
from .options import ExplicitOptions
from .schema import AdapterConfig, ModelConfig, RunConfig, TrainConfig
from .schema_data import DataConfig
from .schema_output import LogConfig, PreviewConfig, SaveConfig, StateConfig
from .toml_positions import read_toml_with_lines
from .types import is_prompt_text
from .validate_adapter import validate_adapter_options, validate_initial_weights, validate_save_format
from .validate_distributed import (
    validate_block_swap_options,
    validate_cuda_graph_options,
    validate_device_map_options,
    validate_parallel_options,
    validate_precision,
    validate_profile_steps,
)
from .validate_embedding import validate_embedding_run
from .validate_full import validate_full_training
from .validate_objective import validate_objective_options, validate_preservation_options
from .validate_optim import (
    validate_learning_rates,
    validate_lr_scheduler,
    validate_optimizer_arguments,
    validate_self_tuning_optimizers,
)
from .validate_slider import validate_slider_run

THUMBNAIL_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
MAX_THUMBNAIL_BYTES = 2**22
MISSING_DATASET = Problem(
    "dataset_config",
    "missing",
    "give a dataset TOML, for example dataset_configs/demo.toml, or the images with --train_data_dir",
)
"""The problem of a run without images, which is none for what needs no images."""

HUB_CHECKPOINT_PATTERN = re.compile(
    r"(?P<repo>[^/:]+/[^/:]+)/(?P<folder>[^:]+?)/?(:(?P<revision>[^:]+)(:(?P<type>model|dataset|space))?)?"
)
"""A checkpoint on the hub, as sd-scripts' ``--resume`` names it beside ``--resume_from_huggingface``."""

_REPO_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def validate_config(config: RunConfig, explicit: ExplicitOptions) -> Iterator[Problem]:
    """Run all checks; ``explicit`` are the options that were set by a flag or in the run TOML."""
    parallel, distributed, deepspeed = config.parallel, config.distributed, config.deepspeed
    checks = (
        validate_dataset_path(config.data),
        validate_max_token_length(config.model),
        validate_step_count(config.train),
        validate_adapter_options(config.adapter, config.optim, explicit),
        validate_optimizer_arguments(config.optim),
        validate_lr_scheduler(config.optim),
        validate_self_tuning_optimizers(config.optim, config.adapter),
        validate_learning_rates(config.optim, config.adapter),
        validate_data_options(config.data),
        validate_log_options(config.log, explicit),
        validate_preview_options(config.preview),
        validate_objective_options(config.noise, config.loss),
        validate_preservation_options(config),
        validate_device_map_options(config),
        validate_parallel_options(parallel, config.adapter, distributed, deepspeed),
        validate_resume_options(config.state),
        validate_precision(distributed),
        validate_save_options(config.save, config.adapter),
        validate_written_folders(
            output_dir=config.save.output_dir,
            logging_dir=config.log.logging_dir,
            cache_dir=config.cache.cache_dir,
            remote_cache_dir=config.data.remote_cache_dir,
        ),
        validate_initial_weights(config.adapter),
        validate_upload_options(config.save),
        validate_block_swap_options(config.train, distributed),
        validate_cuda_graph_options(config),
        validate_profile_steps(config.train),
        validate_full_training(config),
        validate_embedding_run(config),
        validate_slider_run(config),
    )
    return chain.from_iterable(checks)


def validate_dataset_path(data: DataConfig) -> Iterator[Problem]:
    path = data.dataset_config
    if path is None:
        if data.dataset_option is None:
            yield MISSING_DATASET
    elif Path(path).is_dir():
        yield Problem(
            "dataset_config", f"{path} is a folder", "give the dataset TOML that points to it, or --train_data_dir"
        )
    elif not Path(path).is_file():
        yield Problem("dataset_config", f"{path}: no such file (looked in {Path(path).resolve().parent})")


def validate_step_count(train: TrainConfig) -> Iterator[Problem]:
    if train.max_train_steps < 1 and train.max_train_epochs is None:
        yield Problem(
            "max_train_steps",
            "0 trains nothing",
            "write 1 or more, or set max_train_epochs",
            others=("max_train_epochs",),
        )


def validate_max_token_length(model: ModelConfig) -> Iterator[Problem]:
    if model.max_token_length not in (75, 150, 225):
        yield Problem("max_token_length", f"expected 75, 150 or 225, got {model.max_token_length}")


def validate_data_options(data: DataConfig) -> Iterator[Problem]:
    if data.min_bucket_reso > data.max_bucket_reso:
        yield Problem(
            "min_bucket_reso",
            f"min_bucket_reso {data.min_bucket_reso} is above max_bucket_reso {data.max_bucket_reso}",
            others=("max_bucket_reso",),
        )
    if data.conditioning_dropout_prob and data.caption_dropout_rate:
        yield Problem(
            "caption_dropout_rate",
            f"conditioning_dropout_prob empties {2 * data.conditioning_dropout_prob:g} of the captions already",
            "remove one of the two",
            others=("conditioning_dropout_prob",),
        )


def validate_log_options(log: LogConfig, explicit: ExplicitOptions) -> Iterator[Problem]:
    if log.log_with in ("tensorboard", "all") and log.logging_dir is None:
        yield Problem("log_with", f"{log.log_with} needs logging_dir", others=("logging_dir",))
    has_tracker = log.log_with not in (None, "none") or (log.log_with is None and log.logging_dir is not None)
    if log.log_tracker_config and has_tracker:
        yield from _validate_tracker_config(log.log_with or "tensorboard", log.log_tracker_config)
    if log.quiet and {"console_log_level", "quiet"} <= explicit and log.console_log_level in ("DEBUG", "INFO"):
        yield Problem(
            "quiet",
            f"contradicts console_log_level {log.console_log_level}",
            "remove one of them",
            others=("console_log_level",),
        )


def _validate_tracker_config(tracker: str, path: str) -> Iterator[Problem]:
    """The file must hold a table for each tracker in use, and nothing else."""
    try:
        tables, lines = read_toml_with_lines(Path(path))
    except ConfigError as error:
        yield from (Problem("log_tracker_config", str(each)) for each in error.problems)
        return
    for name, table in tables.items():
        place = Place(path, lines[(name,)], key=name)
        if tracker not in ("all", name):
            yield Problem("log_tracker_config", f"{place}: not the tracker in use ({tracker})")
        elif not isinstance(table, dict):
            yield Problem("log_tracker_config", f"{place}: expected a table, [{name}]")


def validate_preview_options(preview: PreviewConfig) -> Iterator[Problem]:
    prompts = preview.sample_prompts
    if prompts is not None and not is_prompt_text(prompts) and not Path(prompts).is_file():
        yield Problem("sample_prompts", f"{prompts}: no such file")


def validate_resume_options(state: StateConfig) -> Iterator[Problem]:
    if state.resume is not None and state.auto_resume:
        yield Problem("resume", "cannot be combined with auto_resume", "remove one of them", others=("auto_resume",))
    if state.resume is not None and state.resume_from_huggingface:
        if HUB_CHECKPOINT_PATTERN.fullmatch(state.resume) is None or ".." in state.resume.split("/"):
            yield Problem(
                "resume",
                f"{state.resume!r} is no checkpoint on the hub",
                "expected OWNER/NAME/FOLDER, with :REVISION or :REVISION:model, dataset or space after it",
                others=("resume_from_huggingface",),
            )
    elif state.resume not in (None, "latest") and not (state.resume and Path(state.resume).is_dir()):
        yield Problem(
            "resume", f"no such folder: {state.resume!r}", "give a checkpoint, a folder that ends in -state, or latest"
        )


def validate_save_options(save: SaveConfig, adapter: AdapterConfig) -> Iterator[Problem]:
    name = save.output_name
    if not name or Path(name).name != name:
        yield Problem("output_name", f"{name!r} is not a file name", "folders belong in output_dir")
    elif name.endswith(".safetensors"):
        yield Problem("output_name", "remove .safetensors", "the extension is added")
    else:
        yield from validate_output_name(name, save.output_dir)
    if save.save_format != "auto" and not parse_network_args(adapter.network_args)[1]:
        for problem in validate_save_format([get_adapter_type(adapter)], save.save_format):
            yield replace(problem, option="save_format", others=("network_module",))
    if save.metadata_thumbnail is not None:
        yield from _validate_thumbnail(Path(save.metadata_thumbnail).expanduser())


def validate_written_folders(**folders: str | None) -> Iterator[Problem]:
    for name, folder in folders.items():
        if folder is not None and "://" in folder:
            yield Problem(
                name, f"{folder} is a URL", "files are written to folders only, such as one that mounts the bucket"
            )


def _validate_thumbnail(path: Path) -> Iterator[Problem]:
    if not path.is_file():
        yield Problem("metadata_thumbnail", f"{path}: no such file")
    elif path.suffix.lower() not in THUMBNAIL_TYPES:
        yield Problem("metadata_thumbnail", f"{path}: unsupported image type", f"expected {', '.join(THUMBNAIL_TYPES)}")
    elif path.stat().st_size > MAX_THUMBNAIL_BYTES:
        yield Problem(
            "metadata_thumbnail",
            f"{path}: larger than 4 MiB",
            "it is stored in every LoRA file, so give a smaller image",
        )


def validate_upload_options(save: SaveConfig) -> Iterator[Problem]:
    if save.huggingface_repo_id is not None and not _REPO_ID_PATTERN.fullmatch(save.huggingface_repo_id):
        yield Problem(
            "huggingface_repo_id", f"{save.huggingface_repo_id!r} is not a repository id", "expected OWNER/NAME"
        )
    if ".." in (save.huggingface_path_in_repo or "").split("/"):
        yield Problem("huggingface_path_in_repo", f"{save.huggingface_path_in_repo}: outside the repository")
