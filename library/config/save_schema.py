"""The options about LoRA files: what is written, when, where else it goes, and what stands in it."""

from dataclasses import dataclass
from typing import Literal

from .options import opt


@dataclass(frozen=True)
class SaveConfig:
    """What is written, and when."""

    output_dir: str = opt("output", "folder for LoRA files and previews")
    output_name: str = opt("lora", "file name without its ending")
    save_precision: Literal["float", "fp16", "bf16"] | None = opt(None, "precision in the file; without it, as trained")
    save_format: Literal["auto", "kohya", "diffusers", "comfy"] = opt(
        "auto", "names in the file: as sd-scripts, diffusers or ComfyUI; auto is what all of them read for the model"
    )
    save_every_n_epochs: int | None = opt(None, "save a LoRA file every n epochs", minimum=1)
    save_every_n_steps: int | None = opt(None, "save a LoRA file every n steps", minimum=1)
    save_last_n_epochs: int | None = opt(
        None, "of the files of save_every_n_epochs only the last n are kept", minimum=1
    )
    save_last_n_steps: int | None = opt(
        None, "of the files of save_every_n_steps only those of the last n steps are kept", minimum=1
    )
    training_comment: str | None = opt(None, "remark kept in the file's metadata")
    no_metadata: bool = opt(False, "write only the metadata that loaders need")
    metadata_title: str | None = opt(None, "title in the file's metadata; without it, output_name")
    metadata_author: str | None = opt(None, "author in the file's metadata")
    metadata_description: str | None = opt(None, "description in the file's metadata")
    metadata_license: str | None = opt(None, "license in the file's metadata")
    metadata_tags: str | None = opt(None, "tags in the file's metadata, with commas between them")
    metadata_usage_hint: str | None = opt(None, "how to use the LoRA, in the file's metadata")
    metadata_thumbnail: str | None = opt(None, "picture of up to 4 MiB that is put into the file's metadata")
    metadata_merged_from: str | None = opt(None, "what was merged into the LoRA, in the file's metadata")
    metadata_trigger_phrase: str | None = opt(None, "words that call the LoRA, in the file's metadata")
    metadata_preprocessor: str | None = opt(None, "what pictures have to go through, in the file's metadata")
    huggingface_repo_id: str | None = opt(
        None, "hub repository, OWNER/NAME, to which each LoRA file is sent; the token is HF_TOKEN's"
    )
    huggingface_repo_type: Literal["model", "dataset", "space"] = opt("model", "kind of huggingface_repo_id")
    huggingface_path_in_repo: str | None = opt(None, "folder in huggingface_repo_id")
    huggingface_repo_visibility: Literal["private", "public"] = opt(
        "private", "who may see huggingface_repo_id, if this run makes it"
    )
    async_upload: bool = opt(False, "send files in the background")
