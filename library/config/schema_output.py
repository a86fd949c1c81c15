"""The options about LoRA files: what is written, when, where else it goes, and what stands in it."""

from dataclasses import dataclass
from typing import Literal

from .options import define_option


@dataclass(frozen=True)
class SaveConfig:
    """What is written, and when."""

    output_dir: str = define_option("output", "folder for LoRA files and previews")
    output_name: str = define_option("lora", "file name without its ending")
    save_precision: Literal["float", "fp16", "bf16"] | None = define_option(
        None, "precision in the file; without it, as trained"
    )
    save_format: Literal["auto", "kohya", "diffusers", "comfy"] = define_option(
        "auto", "names in the file: as sd-scripts, diffusers or ComfyUI; auto is what all of them read for the model"
    )
    save_every_n_epochs: int | None = define_option(None, "save a LoRA file every n epochs", minimum=1)
    save_every_n_steps: int | None = define_option(None, "save a LoRA file every n steps", minimum=1)
    save_last_n_epochs: int | None = define_option(
        None, "of the files of save_every_n_epochs only the last n are kept", minimum=1
    )
    save_last_n_steps: int | None = define_option(
        None, "of the files of save_every_n_steps only those of the last n steps are kept", minimum=1
    )
    training_comment: str | None = define_option(None, "remark kept in the file's metadata")
    no_metadata: bool = define_option(False, "write only the metadata that loaders need")
    metadata_title: str | None = define_option(None, "title in the file's metadata; without it, output_name")
    metadata_author: str | None = define_option(None, "author in the file's metadata")
    metadata_description: str | None = define_option(None, "description in the file's metadata")
    metadata_license: str | None = define_option(None, "license in the file's metadata")
    metadata_tags: str | None = define_option(None, "tags in the file's metadata, with commas between them")
    metadata_usage_hint: str | None = define_option(None, "how to use the LoRA, in the file's metadata")
    metadata_thumbnail: str | None = define_option(None, "picture of up to 4 MiB that is put into the file's metadata")
    metadata_merged_from: str | None = define_option(None, "what was merged into the LoRA, in the file's metadata")
    metadata_trigger_phrase: str | None = define_option(None, "words that call the LoRA, in the file's metadata")
    metadata_preprocessor: str | None = define_option(None, "what pictures have to go through, in the file's metadata")
    huggingface_repo_id: str | None = define_option(
        None, "hub repository, OWNER/NAME, to which each LoRA file is sent; the token is HF_TOKEN's"
    )
    huggingface_repo_type: Literal["model", "dataset", "space"] = define_option("model", "kind of huggingface_repo_id")
    huggingface_path_in_repo: str | None = define_option(None, "folder in huggingface_repo_id")
    huggingface_repo_visibility: Literal["private", "public"] = define_option(
        "private", "who may see huggingface_repo_id, if this run makes it"
    )
    async_upload: bool = define_option(False, "send files in the background")


@dataclass(frozen=True)
class StateConfig:
    """How a run goes on after it was ended."""

    save_state: bool = define_option(
        False, "beside every LoRA file that is saved, save what is needed to go on from there"
    )
    save_state_on_train_end: bool = define_option(False, "save it at the end, too, so that the run can be made longer")
    save_last_n_epochs_state: int | None = define_option(None, "keep states of the last n epochs only", minimum=1)
    save_last_n_steps_state: int | None = define_option(None, "keep states of the last n steps only", minimum=1)
    resume: str | None = define_option(None, "go on from this state, or from the latest one in output_dir: latest")
    auto_resume: bool = define_option(
        False, "go on from the latest state if there is one, and begin anew if there is none"
    )
    force_resume: bool = define_option(
        False, "go on although settings or pictures have changed that the result depends on"
    )
    requeue_exit_code: int | None = define_option(
        None,
        "exit code after a signal ended the run and its state was saved; without it 128 + the signal's number",
        minimum=0,
        maximum=255,
    )


@dataclass(frozen=True)
class PreviewConfig:
    """Pictures drawn while training."""

    sample_prompts: str | None = define_option(None, "file with prompts: .txt (a line each), .toml or .json")
    sample_every_n_steps: int | None = define_option(None, "draw them every n steps", minimum=1)
    sample_every_n_epochs: int | None = define_option(None, "draw them every n epochs; goes before steps", minimum=1)
    sample_at_first: bool = define_option(False, "draw them before training, too")
    sample_sampler: Literal["ddim", "euler", "euler_a", "heun", "dpmsolver++", "pndm"] | None = define_option(
        None, "sampler for the pictures; without it ddim, or for flow matching the model's own"
    )


@dataclass(frozen=True)
class LogConfig:
    """What is told, and to whom."""

    logging_dir: str | None = define_option(None, "folder for trackers; each run gets a folder in it")
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
    ) = define_option(None, "experiment tracker; without it, tensorboard when there is a logging_dir")
    log_prefix: str | None = define_option(None, "start of the name of the run's folder in logging_dir")
    log_tracker_name: str | None = define_option(None, "project name for the tracker; without it, network_train")
    log_tracker_config: str | None = define_option(None, "TOML file with arguments for the tracker, a table for each")
    wandb_run_name: str | None = define_option(None, "name of the run in wandb")
    log_config: bool = define_option(False, "send the settings to the tracker, without secrets and paths")
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = define_option(
        "INFO", "how much is told"
    )
    console_log_file: str | None = define_option(None, "write messages to this file and not to the terminal")
    console_log_simple: bool = define_option(False, "messages without time and colour")
    quiet: bool = define_option(False, "warnings and errors only, no progress bar")
