"""Options of output: LoRA files, checkpoints, previews and logs."""

from dataclasses import dataclass
from typing import Literal

from .option_needs import AnyOf, Has, HasValue, IsSet, IsUnset, LacksValue, Needs, Trait
from .options import ALWAYS, define_option
from .schema_full import IS_FULL, IS_LORA


@dataclass(frozen=True)
class SaveConfig:
    """LoRA files: when they are saved, their format and metadata, and upload to the hub."""

    output_dir: str = define_option(
        "output",
        "folder for LoRA files and previews",
        needs=ALWAYS,
        changes_result=False,
        is_path=True,
        is_basic=True,
        is_of_one_run=True,
    )
    output_name: str = define_option(
        "lora",
        "file name of the LoRA, without extension",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
        metadata_key="ss_output_name",
        is_of_one_run=True,
    )
    save_precision: Literal["float", "fp16", "bf16"] | None = define_option(
        None,
        "dtype of the saved weights; default: as trained",
        needs=ALWAYS,
        changes_result=False,
        value_aliases=(("fp32", "float"), ("float32", "float")),
    )
    save_format: Literal["auto", "kohya", "diffusers", "comfy"] = define_option(
        "auto",
        "key names: of sd-scripts (kohya), diffusers or ComfyUI; auto: the ones that most programs read",
        needs=(IS_LORA,),
        changes_result=False,
        musubi_default="kohya",
    )
    save_model_as: Literal["safetensors", "diffusers"] | None = define_option(
        None,
        "train full: the model as one file with the names of the base model's file, or as a folder of diffusers;"
        " default: as the base model",
        needs=(AnyOf((IS_FULL, HasValue("save_model_as", ("safetensors",))), "LoRA files are safetensors"),),
        changes_result=False,
        value_aliases=(("diffusers_safetensors", "diffusers"),),
    )
    save_every_n_epochs: int | None = define_option(
        None, "save a LoRA file every n epochs", minimum=1, needs=(IsUnset("save_n_epoch_ratio"),), changes_result=False
    )
    save_every_n_steps: int | None = define_option(
        None, "save a LoRA file every n steps", minimum=1, needs=ALWAYS, changes_result=False, is_basic=True
    )
    save_n_epoch_ratio: int | None = define_option(
        None,
        "save n LoRA files over the run, at ends of epochs; overrides save_every_n_epochs; 0: off",
        minimum=0,
        needs=ALWAYS,
        changes_result=False,
    )
    save_last_n_epochs: int | None = define_option(
        None,
        "keep only the last n files of those saved every save_every_n_epochs epochs",
        minimum=1,
        needs=(AnyOf((IsSet("save_n_epoch_ratio"), IsSet("save_every_n_epochs")), "save_every_n_epochs is not set"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    save_last_n_steps: int | None = define_option(
        None,
        "save_every_n_steps: keep only the files of the last n steps",
        minimum=1,
        needs=(IsSet("save_every_n_steps"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    overwrite: bool = define_option(
        False,
        "overwrite the LoRA file of an earlier run with the same output_name",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
        is_of_one_run=True,
    )
    training_comment: str | None = define_option(
        None,
        "comment in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="ss_training_comment",
    )
    no_metadata: bool = define_option(
        False, "save only the metadata that loaders need", needs=ALWAYS, changes_result=False
    )
    metadata_title: str | None = define_option(
        None, "title in the metadata; default: output_name", needs=(IsUnset("no_metadata"),), changes_result=False
    )
    metadata_author: str | None = define_option(
        None,
        "author in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.author",
    )
    metadata_description: str | None = define_option(
        None,
        "description in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.description",
    )
    metadata_license: str | None = define_option(
        None,
        "license in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.license",
    )
    metadata_tags: str | None = define_option(
        None,
        "comma-separated tags in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.tags",
    )
    metadata_usage_hint: str | None = define_option(
        None,
        "usage hint in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.usage_hint",
    )
    metadata_thumbnail: str | None = define_option(
        None,
        "image of up to 4 MiB to embed in the metadata as a thumbnail",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        is_path=True,
    )
    metadata_merged_from: str | None = define_option(
        None,
        "models that were merged into the LoRA, in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.merged_from",
    )
    metadata_trigger_phrase: str | None = define_option(
        None,
        "trigger phrase in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.trigger_phrase",
    )
    metadata_preprocessor: str | None = define_option(
        None,
        "preprocessor that images need, in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.preprocessor",
    )
    metadata_is_negative_embedding: str | None = define_option(
        None,
        "whether this is a negative embedding, in the metadata",
        needs=(IsUnset("no_metadata"),),
        changes_result=False,
        metadata_key="modelspec.is_negative_embedding",
    )
    huggingface_repo_id: str | None = define_option(
        None,
        "hub repository (OWNER/NAME) to upload each LoRA file to; needs `hf auth login` or HF_TOKEN",
        needs=ALWAYS,
        changes_result=False,
    )
    huggingface_repo_type: Literal["model", "dataset", "space"] = define_option(
        "model", "type of huggingface_repo_id", needs=(IsSet("huggingface_repo_id"),), changes_result=False
    )
    huggingface_path_in_repo: str | None = define_option(
        None, "folder in huggingface_repo_id", needs=(IsSet("huggingface_repo_id"),), changes_result=False
    )
    huggingface_repo_visibility: Literal["private", "public"] = define_option(
        "private",
        "visibility of huggingface_repo_id, if it is created by this run",
        needs=(IsSet("huggingface_repo_id"),),
        changes_result=False,
    )
    async_upload: bool = define_option(
        False, "upload in the background", needs=(IsSet("huggingface_repo_id"),), changes_result=False
    )


@dataclass(frozen=True)
class StateConfig:
    """Checkpoints, to resume a run."""

    save_state: bool = define_option(
        False,
        "save a checkpoint with every LoRA file, the folder OUTPUT_NAME-...-state, to resume from there",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
    )
    save_state_on_train_end: bool = define_option(
        False,
        "save a checkpoint at the end, to continue with more steps later",
        needs=ALWAYS,
        changes_result=False,
    )
    save_last_n_epochs_state: int | None = define_option(
        None,
        "keep only the last n checkpoints of those saved every save_every_n_epochs epochs; unset: save_last_n_epochs",
        minimum=1,
        needs=(IsSet("save_state"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    save_last_n_steps_state: int | None = define_option(
        None,
        "keep only the checkpoints of the last n steps; unset: save_last_n_steps",
        minimum=1,
        needs=(IsSet("save_state"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    save_state_to_huggingface: bool = define_option(
        False,
        "upload each checkpoint to huggingface_repo_id, too",
        needs=(
            IsSet("huggingface_repo_id"),
            AnyOf((IsSet("save_state"), IsSet("save_state_on_train_end")), "no checkpoint is saved"),
        ),
        changes_result=False,
    )
    resume: str | None = define_option(
        None,
        "resume from this checkpoint, a folder OUTPUT_NAME-...-state, or from the latest one in output_dir: latest",
        needs=ALWAYS,
        changes_result=False,
        is_path=True,
        is_in_form=False,
        is_of_one_run=True,
    )
    resume_from_huggingface: bool = define_option(
        False,
        "download the checkpoint that resume names: OWNER/NAME/FOLDER on the hub, or OWNER/NAME/FOLDER:REVISION:TYPE",
        needs=(IsSet("resume"),),
        changes_result=False,
        is_in_form=False,
    )
    auto_resume: bool = define_option(
        False,
        "resume from the latest checkpoint in output_dir; start from scratch if there is none",
        needs=ALWAYS,
        changes_result=False,
        is_in_form=False,
        is_of_one_run=True,
    )
    force_resume: bool = define_option(
        False,
        "resume even if settings or images that change the result differ",
        needs=(AnyOf((IsSet("resume"), IsSet("auto_resume")), "nothing is resumed"),),
        changes_result=False,
        former_name="resume_anyway",
    )
    requeue_exit_code: int | None = define_option(
        None,
        "exit code when a signal (SIGTERM, SIGINT, SIGUSR1) ends the run with a checkpoint; default: 128 + number",
        minimum=0,
        maximum=255,
        needs=ALWAYS,
        changes_result=False,
    )


@dataclass(frozen=True)
class PreviewConfig:
    """Sample images during training."""

    sample_prompts: str | None = define_option(
        None,
        "file of prompts: .txt (one per line), .toml or .json; or a prompt",
        needs=ALWAYS,
        changes_result=False,
        is_path=True,
        is_basic=True,
    )
    sample_every_n_steps: int | None = define_option(
        None,
        "generate samples every n steps",
        minimum=1,
        needs=(IsSet("sample_prompts"), IsUnset("sample_every_n_epochs")),
        is_unset_by_zero=True,
        changes_result=False,
        is_basic=True,
    )
    sample_every_n_epochs: int | None = define_option(
        None,
        "generate samples every n epochs; overrides sample_every_n_steps",
        minimum=1,
        needs=(IsSet("sample_prompts"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    sample_at_first: bool = define_option(
        False,
        "also generate samples before the first step",
        needs=(IsSet("sample_prompts"),),
        changes_result=False,
        is_basic=True,
    )
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
    ) = define_option(
        None,
        "sampler; default: ddim; flow matching always samples with euler",
        needs=(IsSet("sample_prompts"), Has(Trait.DIFFUSION, "flow matching samples with euler"), Has(Trait.SAMPLER)),
        changes_result=False,
    )


_IS_EVALUATED: Needs = (
    AnyOf((IsSet("evaluate_every_n_steps"), IsSet("evaluate_every_n_epochs")), "nothing is evaluated during training"),
)


@dataclass(frozen=True)
class EvaluateConfig:
    """Likeness, copying and drift of pictures during training, as python -m library evaluate measures them."""

    evaluate_every_n_steps: int | None = define_option(
        None,
        "measure likeness, copying and drift of generated pictures every n steps, and at the end",
        minimum=1,
        needs=(IsUnset("slider_prompts", "slider_prompts trains without pictures to compare with"),),
        is_unset_by_zero=True,
        changes_result=False,
        is_basic=True,
    )
    evaluate_every_n_epochs: int | None = define_option(
        None,
        "measure likeness, copying and drift of generated pictures every n epochs, and at the end",
        minimum=1,
        needs=(IsUnset("slider_prompts", "slider_prompts trains without pictures to compare with"),),
        is_unset_by_zero=True,
        changes_result=False,
    )
    evaluation_dataset_config: str | None = define_option(
        None,
        "dataset TOML whose pictures and captions the evaluation uses; default: those of the run. Runs on different"
        " pictures can be compared if they name the same file here",
        needs=_IS_EVALUATED,
        changes_result=False,
        is_path=True,
    )
    evaluation_image_model: str | None = define_option(
        None,
        "folder or hub id of a model that embeds pictures, such as facebook/dinov2-base; default: colors and edges, for"
        " drawings such as those of the demo model only",
        needs=_IS_EVALUATED,
        changes_result=False,
        is_path=True,
    )
    evaluation_text_model: str | None = define_option(
        None,
        "folder or hub id of a CLIP or SigLIP model for prompt following; default: evaluation_image_model, if it reads"
        " texts",
        needs=_IS_EVALUATED,
        changes_result=False,
        is_path=True,
    )
    evaluation_subject: str | None = define_option(
        None,
        "how captions name the subject; default: the words that all training captions have",
        needs=_IS_EVALUATED,
        changes_result=False,
    )
    evaluation_captions: int = define_option(
        4, "captions of each kind", minimum=2, needs=_IS_EVALUATED, changes_result=False
    )
    evaluation_pictures: int = define_option(
        4,
        "pictures of each caption; one gives no confidence intervals",
        minimum=1,
        needs=_IS_EVALUATED,
        changes_result=False,
    )
    evaluation_sampling_steps: int | None = define_option(
        None,
        "sampling steps of each picture; default: that of the model family",
        minimum=1,
        maximum=1000,
        needs=_IS_EVALUATED,
        changes_result=False,
    )

    @property
    def is_active(self) -> bool:
        """Whether anything is evaluated during training."""
        return self.evaluate_every_n_steps is not None or self.evaluate_every_n_epochs is not None


@dataclass(frozen=True)
class LogConfig:
    """Experiment trackers and console output."""

    logging_dir: str | None = define_option(
        None,
        "folder for trackers; each run gets a subfolder",
        needs=(LacksValue("log_with", ("none",)),),
        changes_result=False,
        is_path=True,
    )
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
    ) = define_option(
        None, "experiment tracker; default: tensorboard if logging_dir is set", needs=ALWAYS, changes_result=False
    )
    log_prefix: str | None = define_option(
        None, "prefix of the run's subfolder in logging_dir", needs=(Has(Trait.TRACKER),), changes_result=False
    )
    log_tracker_name: str | None = define_option(
        None, "project name in the tracker; default: network_train", needs=(Has(Trait.TRACKER),), changes_result=False
    )
    log_tracker_config: str | None = define_option(
        None,
        "TOML file of tracker arguments, with a table for each tracker",
        needs=(Has(Trait.TRACKER),),
        changes_result=False,
        is_path=True,
    )
    wandb_run_name: str | None = define_option(
        None, "name of the run in wandb", needs=(Has(Trait.TRACKER), Has(Trait.WANDB)), changes_result=False
    )
    log_config: bool = define_option(
        False,
        "log the settings to the tracker, without secrets and paths",
        needs=(Has(Trait.TRACKER),),
        changes_result=False,
    )
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = define_option(
        "INFO", "minimum level of console messages", needs=ALWAYS, changes_result=False, is_per_machine=True
    )
    console_log_file: str | None = define_option(
        None,
        "write messages to this file instead of the console",
        needs=ALWAYS,
        changes_result=False,
        is_per_machine=True,
        is_in_form=False,
    )
    console_log_simple: bool = define_option(
        False,
        "console messages without time and color",
        needs=ALWAYS,
        changes_result=False,
        is_per_machine=True,
        is_in_form=False,
    )
    quiet: bool = define_option(
        False,
        "warnings and errors only, without a progress bar",
        needs=ALWAYS,
        changes_result=False,
        is_per_machine=True,
        is_in_form=False,
    )
