"""``python -m library caption FOLDER... --model MODEL``: write captions or tags with a model."""

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..captioning.caption_folder import list_captioned_images
from ..captioning.caption_writer import (
    Captioner,
    CaptionFormat,
    preview_captions,
    select_images,
    write_folder_captions,
)
from ..captioning.onnx_tagger import OnnxTagger, TagSelection, find_tagger
from ..captioning.openai_api import ApiCaptioner
from ..config import parse_config
from ..config.option_needs import IsSet
from ..config.options import define_option, iter_options
from ..log import configure_logging
from .validate_arguments import check_caption_arguments

if TYPE_CHECKING:
    from ..captioning.vision_language import VisionLanguageModel

USAGE = "usage: python -m library caption FOLDER... --model MODEL [--option value ...]"
API_KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class CaptionOptions:
    """The options of this tool."""

    model: str | None = define_option(
        None,
        "folder or hub id: a tagger with model.onnx and selected_tags.csv (SmilingWolf/wd-eva02-large-tagger-v3), or"
        " an image-text-to-text model of transformers (Salesforce/blip-image-captioning-large,"
        " Qwen/Qwen2.5-VL-7B-Instruct); with --api_base, the name of the server's model",
    )
    api_base: str | None = define_option(
        None, "address of a server with OpenAI's chat interface, such as http://127.0.0.1:8080/v1"
    )
    api_timeout: float = define_option(
        300.0, "api_base: seconds to wait for an answer", minimum=0.1, needs=(IsSet("api_base"),)
    )
    prompt: str | None = define_option(
        None, "question, task token (Florence-2) or beginning of the caption (BLIP); default: by model"
    )
    caption_extension: str = define_option(".txt", "extension of caption files")
    caption_prefix: str = define_option("", "put before each caption")
    caption_suffix: str = define_option("", "put after each caption")
    trigger_word: str = define_option("", "put first, unless the caption contains it as whole words")
    if_exists: Literal["keep", "overwrite", "append"] = define_option(
        "keep", "images that have a caption: keep it, overwrite it, or append the tags that it lacks"
    )
    recursive: bool = define_option(False, "search the folders inside")
    batch_size: int = define_option(1, "images at once; with --api_base, requests at once", minimum=1)
    max_new_tokens: int = define_option(256, "length limit of a caption, in tokens", minimum=1)
    num_beams: int = define_option(1, "beams of beam search", minimum=1)
    dtype: Literal["bf16", "fp16", "fp32"] | None = define_option(
        None, "weights of the model; default: bf16 on a GPU, fp32 on a CPU"
    )
    general_threshold: float = define_option(0.35, "taggers: least probability of a general tag", minimum=0, maximum=1)
    character_threshold: float = define_option(
        0.35, "taggers: least probability of a character tag", minimum=0, maximum=1
    )
    remove_underscore: bool = define_option(False, "taggers: spaces instead of underscores, except in emoticons")
    undesired_tags: str = define_option("", "taggers: tags to leave out, separated by commas")
    always_first_tags: str = define_option("", "taggers: tags that come first where they apply, separated by commas")
    use_rating_tags: bool = define_option(False, "taggers: put the rating first")
    dry_run: bool = define_option(False, "print the captions of three images, write nothing")


@dataclass(frozen=True)
class _Arguments:
    caption: CaptionOptions = field(default_factory=CaptionOptions)


def run_caption(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Caption folders; returns 1 if images could not be decoded."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    count = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    folders, own = [Path(word).expanduser() for word in argv[:count]], parse_config(argv[count:], _Arguments)
    options: CaptionOptions = cast(Any, own.config).caption
    check_caption_arguments(options, folders, own, USAGE)
    configure_logging(simple=True)
    own.log_notices()
    return _write_captions(options, folders)


def _write_captions(options: CaptionOptions, folders: Sequence[Path]) -> Generator[str, None, int]:
    images = list_captioned_images(folders, options.caption_extension, recursive=options.recursive)
    style = CaptionFormat(options.caption_prefix, options.caption_suffix, options.trigger_word, options.if_exists)
    build = partial(build_captioner, options)
    if options.dry_run:
        count = len(select_images(images, options.if_exists))
        yield f"{len(images)} images, {count} to caption; the first of them:"
        yield from preview_captions(images, build, style)
        yield "dry run: nothing was written"
        return 0
    summary = write_folder_captions(images, build, style, options.batch_size)
    yield from map(str, summary.problems)
    kept = f", {summary.kept} kept (--if_exists overwrite replaces them)" if summary.kept else ""
    yield f"{summary.written} captions written{kept}"
    return 1 if summary.problems else 0


def build_captioner(options: CaptionOptions) -> Captioner:
    """Build the server client, the tagger or the vision-language model that ``--model`` names."""
    assert options.model is not None
    if options.api_base is not None:
        from ..captioning.vision_language import CHAT_PROMPT

        prompt = options.prompt if options.prompt is not None else CHAT_PROMPT
        key = os.environ.get(API_KEY_VARIABLE)
        limits = options.max_new_tokens, options.api_timeout
        return ApiCaptioner(options.api_base, options.model, prompt, key, *limits)
    folder = find_tagger(options.model)
    if folder is not None:
        return OnnxTagger(folder, _select_tags(options))
    from ..captioning import vision_language

    model: VisionLanguageModel = vision_language.VisionLanguageModel(
        options.model, options.prompt, options.dtype, options.max_new_tokens, options.num_beams
    )
    return model


def _select_tags(options: CaptionOptions) -> TagSelection:
    undesired, first = (
        tuple(tag.strip() for tag in text.split(",") if tag.strip())
        for text in (options.undesired_tags, options.always_first_tags)
    )
    thresholds = options.general_threshold, options.character_threshold
    return TagSelection(*thresholds, options.remove_underscore, undesired, first, options.use_rating_tags)


def _format_help() -> str:
    lines = [f"  --{option.name:<22} {option.syntax:<24} {option.help}" for option in iter_options(_Arguments)]
    return "\n".join([USAGE, "", "Write a caption file next to each image.", "", *lines])
