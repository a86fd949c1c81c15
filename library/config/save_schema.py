"""The options about LoRA files: what is written, when, where else it goes, and what stands in it."""

from dataclasses import dataclass
from typing import Literal

from .options import define_option


@dataclass(frozen=True)
class SaveConfig:
    """What is written, and when."""

    output_dir: str = define_option("output", "folder for LoRA files and previews")
    output_name: str = define_option("lora", "file name without its ending")
    save_precision: Literal["float", "fp16", "bf16"] | None = define_option(None, "precision in the file; without it, as trained")
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
