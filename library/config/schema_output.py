"""Options of output: LoRA files, training states, previews and logs."""

from dataclasses import dataclass
from typing import Literal

from .options import define_option


@dataclass(frozen=True)
class SaveConfig:
    """LoRA files: when they are saved, their format and metadata, and upload to the hub."""

    output_dir: str = define_option("output", "folder for LoRA files and previews")
    output_name: str = define_option("lora", "file name of the LoRA, without extension")
    save_precision: Literal["float", "fp16", "bf16"] | None = define_option(
        None, "dtype of the saved weights; default: as trained"
    )
    save_format: Literal["auto", "kohya", "diffusers", "comfy"] = define_option(
        "auto", "key names: of sd-scripts (kohya), diffusers or ComfyUI; auto: the ones that most programs read"
    )
    save_every_n_epochs: int | None = define_option(None, "save a LoRA file every n epochs", minimum=1)
    save_every_n_steps: int | None = define_option(None, "save a LoRA file every n steps", minimum=1)
    save_n_epoch_ratio: int | None = define_option(
        None, "save n LoRA files over the run, at ends of epochs; overrides save_every_n_epochs; 0: off", minimum=0
    )
    save_last_n_epochs: int | None = define_option(
        None, "save_every_n_epochs: keep only the files of the last n epochs", minimum=1
    )
    save_last_n_steps: int | None = define_option(
        None, "save_every_n_steps: keep only the files of the last n steps", minimum=1
    )
    overwrite: bool = define_option(False, "overwrite the LoRA file of an earlier run with the same output_name")
    training_comment: str | None = define_option(None, "comment in the metadata")
    no_metadata: bool = define_option(False, "save only the metadata that loaders need")
    metadata_title: str | None = define_option(None, "title in the metadata; default: output_name")
    metadata_author: str | None = define_option(None, "author in the metadata")
    metadata_description: str | None = define_option(None, "description in the metadata")
    metadata_license: str | None = define_option(None, "license in the metadata")
    metadata_tags: str | None = define_option(None, "comma-separated tags in the metadata")
    metadata_usage_hint: str | None = define_option(None, "usage hint in the metadata")
    metadata_thumbnail: str | None = define_option(None, "image of up to 4 MiB to embed in the metadata as a thumbnail")
    metadata_merged_from: str | None = define_option(None, "models that were merged into the LoRA, in the metadata")
    metadata_trigger_phrase: str | None = define_option(None, "trigger phrase in the metadata")
    metadata_preprocessor: str | None = define_option(None, "preprocessor that images need, in the metadata")
    huggingface_repo_id: str | None = define_option(
        None, "hub repository (OWNER/NAME) to upload each LoRA file to; needs `hf auth login` or HF_TOKEN"
    )
    huggingface_repo_type: Literal["model", "dataset", "space"] = define_option("model", "type of huggingface_repo_id")
    huggingface_path_in_repo: str | None = define_option(None, "folder in huggingface_repo_id")
    huggingface_repo_visibility: Literal["private", "public"] = define_option(
        "private", "visibility of huggingface_repo_id, if it is created by this run"
    )
    async_upload: bool = define_option(False, "upload in the background")


@dataclass(frozen=True)
class StateConfig:
    """Training states, to resume a run."""

    save_state: bool = define_option(False, "save the training state with every LoRA file, to resume from there")
    save_state_on_train_end: bool = define_option(
        False, "save the training state at the end, to continue with more steps later"
    )
    save_last_n_epochs_state: int | None = define_option(None, "keep only the states of the last n epochs", minimum=1)
    save_last_n_steps_state: int | None = define_option(None, "keep only the states of the last n steps", minimum=1)
    resume: str | None = define_option(
        None, "resume from this state folder, or from the latest one in output_dir: latest"
    )
    auto_resume: bool = define_option(False, "resume from the latest state in output_dir; start from scratch if none")
    force_resume: bool = define_option(False, "resume even if settings or images that change the result differ")
    requeue_exit_code: int | None = define_option(
        None,
        "exit code when a signal (SIGTERM, SIGINT) ends the run and the state is saved; default: 128 + signal number",
        minimum=0,
        maximum=255,
    )


@dataclass(frozen=True)
class PreviewConfig:
    """Sample images during training."""

    sample_prompts: str | None = define_option(
        None, "file of prompts: .txt (one per line), .toml or .json; or a prompt"
    )
    sample_every_n_steps: int | None = define_option(None, "generate samples every n steps", minimum=1)
    sample_every_n_epochs: int | None = define_option(
        None, "generate samples every n epochs; overrides sample_every_n_steps", minimum=1
    )
    sample_at_first: bool = define_option(False, "also generate samples before the first step")
    sample_sampler: (
        Literal[
            "ddim",
            "ddpm",
            "pndm",
            "lms",
            "euler",
            "euler_a",
            "heun",
            "dpm_2",
            "dpm_2_a",
            "dpmsolver",
            "dpmsolver++",
            "dpmsingle",
            "k_lms",
            "k_euler",
            "k_euler_a",
            "k_dpm_2",
            "k_dpm_2_a",
        ]
        | None
    ) = define_option(None, "sampler; default: ddim; flow matching always samples with euler")


@dataclass(frozen=True)
class LogConfig:
    """Experiment trackers and console output."""

    logging_dir: str | None = define_option(None, "folder for trackers; each run gets a subfolder")
    log_with: (
        Literal[
            "none",
            "tensorboard",
            "wandb",
            "all",
            "aim",
            "clearml",
            "comet_ml",
            "dvclive",
            "mlflow",
            "swanlab",
            "trackio",
        ]
        | None
    ) = define_option(None, "experiment tracker; default: tensorboard if logging_dir is set")
    log_prefix: str | None = define_option(None, "prefix of the run's subfolder in logging_dir")
    log_tracker_name: str | None = define_option(None, "project name in the tracker; default: network_train")
    log_tracker_config: str | None = define_option(
        None, "TOML file of tracker arguments, with a table for each tracker"
    )
    wandb_run_name: str | None = define_option(None, "name of the run in wandb")
    log_config: bool = define_option(False, "log the settings to the tracker, without secrets and paths")
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = define_option(
        "INFO", "minimum level of console messages"
    )
    console_log_file: str | None = define_option(None, "write messages to this file instead of the console")
    console_log_simple: bool = define_option(False, "console messages without time and color")
    quiet: bool = define_option(False, "warnings and errors only, without a progress bar")
