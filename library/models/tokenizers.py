"""Tokenizers for models that contain none: single-file checkpoints, and models with random weights."""

import importlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.utils import cached_file, is_torchvision_available

from ..registry import copy_class_name

START_TOKEN, END_TOKEN = "<|startoftext|>", "<|endoftext|>"
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set text = message.content if message.content is string else message.content[0].text %}"
    "{{ '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_MIN_VOCAB_SIZE = 150
"""transformers silently builds an empty vocabulary where files are missing; every real one is larger than this."""


class ImageTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen's processor with images resized by Pillow, whatever is installed, and without videos.

    transformers' own (as of 5.23) fails without a processor of videos, which needs torchvision.
    """

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)


class ImageTextProcessor3(Qwen3VLProcessor):  # type: ignore[misc]
    """Qwen3-VL's processor in the same way; most models read texts alone with it, for which a tokenizer is enough."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)


# A pipeline that is saved names transformers' class.
ImageTextProcessor.__module__, ImageTextProcessor.__name__ = Qwen2VLProcessor.__module__, Qwen2VLProcessor.__name__
ImageTextProcessor3.__module__, ImageTextProcessor3.__name__ = Qwen3VLProcessor.__module__, Qwen3VLProcessor.__name__


def choose_image_processor_class(tokenizer_class: Any) -> Any:
    """Choose the class of a processor that reads images with texts; the functions below build others for texts."""
    return ImageTextProcessor3 if tokenizer_class is Qwen3VLProcessor else tokenizer_class


PILLOW_PROCESSORS = {"Siglip2ImageProcessor": "siglip2"}
"""Processors of images alone, with the package of transformers that has one that resizes with Pillow."""


def build_pillow_processor_class(name: str) -> Any:
    """Build a processor of images that resizes with Pillow, whatever is installed, under the name in folders."""
    package = PILLOW_PROCESSORS[name]
    module = importlib.import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    original = getattr(module, f"{name}Pil")
    return type(name, (original,), {"__module__": original.__module__})


def load_pretrained_tokenizer(tokenizer_class: Any, path_or_id: str, subfolder: str = "", **options: Any) -> Any:
    """Load a tokenizer from a folder or the hub, and check that it has a vocabulary."""
    if tokenizer_class.__name__ in ("Qwen2VLProcessor", "Qwen2_5_VLProcessor"):
        tokenizer_class = ImageTextProcessor
    if tokenizer_class in (ImageTextProcessor, ImageTextProcessor3):
        tokenizer = load_pretrained_tokenizer(Qwen2Tokenizer, path_or_id, subfolder, **options)
        files = {"subfolder": subfolder, "local_files_only": options.get("local_files_only", False)}
        return tokenizer_class(Qwen2VLImageProcessorPil.from_pretrained(path_or_id, **files), tokenizer)
    if tokenizer_class.__name__ in PILLOW_PROCESSORS:
        return tokenizer_class.from_pretrained(path_or_id, subfolder=subfolder, **options)
    if tokenizer_class.__name__ == "Qwen3VLProcessor":
        tokenizer_class = Qwen2Tokenizer  # texts need no more, and the processor of videos needs torchvision
    if tokenizer_class is LlamaTokenizer and _has_byte_level_file(path_or_id, subfolder, options):
        # transformers 5 makes a tokenizer of Llama 2 of each file, also of Llama 3's, whose tokens are of bytes.
        tokenizer_class = PreTrainedTokenizerFast
    if tokenizer_class.__name__ == "PixtralProcessor" and not is_torchvision_available():
        tokenizer_class = AutoTokenizer
    missing = OSError("it has no vocabulary (vocab.json and merges.txt, tokenizer.json, or tokenizer.model)")
    try:
        tokenizer = tokenizer_class.from_pretrained(path_or_id, subfolder=subfolder, **options)
    except (ValueError, TypeError) as error:
        # A class that reads only tokenizer.json, or only tokenizer.model, says so in its own way.
        if "backend tokenizer" in str(error) or "NoneType" in str(error):
            raise missing from None
        raise
    if len(tokenizer if hasattr(tokenizer, "__len__") else tokenizer.tokenizer) < _MIN_VOCAB_SIZE:
        raise missing
    return tokenizer


def _has_byte_level_file(path_or_id: str, subfolder: str, options: Mapping[str, Any]) -> bool:
    """Whether the tokenizer has a ``tokenizer.json`` that splits texts into bytes before it looks tokens up."""
    path = cached_file(
        path_or_id,
        "tokenizer.json",
        subfolder=subfolder,
        local_files_only=options.get("local_files_only", False),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path is not None and "ByteLevel" in str(json.loads(Path(path).read_text("utf-8")).get("pre_tokenizer"))


def load_cached_tokenizer(
    tokenizer_class: Any, config: Mapping[str, Any], repo_id: str, cache_dir: str | None, local_files_only: bool
) -> Any:
    """Load a published tokenizer from ``tokenizer_cache_dir`` as sd-scripts does, or from the hub and cache it there.

    ``repo_id`` may have a subfolder: ``owner/name:tokenizer``.  Padding and length are taken from ``config``.
    """
    if tokenizer_class is ByT5Tokenizer:
        return tokenizer_class()  # of bytes: it has no files
    options = {name: config[name] for name in ("pad_token", "model_max_length") if name in config}
    repository, _, subfolder = repo_id.partition(":")
    number = re.search(r"_\d+$", subfolder)  # one of several tokenizers of a repository
    name = repository.replace("/", "_") + (number[0] if number else "")
    cached = Path(cache_dir).expanduser() / name if cache_dir else None
    if cached is not None and cached.is_dir():
        return load_pretrained_tokenizer(tokenizer_class, str(cached), **options)
    try:
        tokenizer = load_pretrained_tokenizer(
            tokenizer_class, repository, subfolder, local_files_only=local_files_only, **options
        )
    except (OSError, ValueError):
        raise OSError(
            f"a single file contains no tokenizer, and {repository} cannot be downloaded from the hub; without "
            f"network, put it into FOLDER/{name} and set --tokenizer_cache_dir FOLDER, or use a diffusers folder"
        ) from None
    if cached is not None:
        tokenizer.save_pretrained(str(cached))
    return tokenizer


def build_byte_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    """Build a tokenizer with one token per byte, for models with random weights."""
    if tokenizer_class is ImageTextProcessor3:
        return ImageTextProcessor3(_build_qwen3_image_processor(), _build_chat_tokenizer(Qwen2Tokenizer, config))
    builders: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
        "ByT5Tokenizer": lambda tokenizer_class, _: tokenizer_class(),
        "ChatGLMTokenizer": _build_sentencepiece_tokenizer,
        "CLIPTokenizer": _build_clip_tokenizer,
        "T5Tokenizer": _build_t5_tokenizer,
        "T5TokenizerFast": _build_t5_tokenizer,
        "Qwen2Tokenizer": _build_chat_tokenizer,
        "PixtralProcessor": _build_chat_tokenizer,
        "Qwen3VLProcessor": _build_chat_tokenizer,
        "Qwen2VLProcessor": _build_image_text_processor,
        "Qwen2_5_VLProcessor": _build_image_text_processor,
        "LlamaTokenizer": _build_llama_tokenizer,
        "GemmaTokenizer": _build_gemma_tokenizer,
        **dict.fromkeys(PILLOW_PROCESSORS, lambda processor_class, settings: processor_class(**settings)),
        "TokenizersBackend": _build_fast_tokenizer,  # PreTrainedTokenizerFast of transformers 5
    }
    return builders[tokenizer_class.__name__](tokenizer_class, config)


def _build_clip_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    # Built from files, because the constructor's arguments differ between versions of transformers.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(build_byte_vocabulary()), encoding="utf-8")
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        return tokenizer_class.from_pretrained(
            folder, model_max_length=config.get("model_max_length", 77), pad_token=config.get("pad_token", END_TOKEN)
        )


def build_byte_vocabulary() -> dict[str, int]:
    """CLIP's byte-level alphabet, inside and at the end of a word, and the two special tokens."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START_TOKEN, END_TOKEN]
    return {token: index for index, token in enumerate(tokens)}


def _build_t5_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    """Build a tokenizer with one token per Latin-1 letter; all others are unknown."""
    letters = [_METASPACE, *map(chr, [*range(33, 127), *range(161, 256)])]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    settings = {
        "tokenizer_class": "T5TokenizerFast",
        "extra_ids": 0,
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": config.get("model_max_length", 512),
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder, "tokenizer.json")))
        _write_json(folder, "tokenizer_config.json", settings)
        return tokenizer_class.from_pretrained(folder)


def _build_sentencepiece_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    """Build a tokenizer that reads a model of sentencepiece, with one token per Latin-1 letter."""
    from sentencepiece import SentencePieceTrainer

    class SelfContainedTokenizer(tokenizer_class):  # type: ignore[misc]
        """A tokenizer that is saved from memory: the file that it was read from is temporary."""

        def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
            path = Path(save_directory, "tokenizer.model")
            path.write_bytes(self.tokenizer.sp_model.serialized_model_proto())
            return (str(path),)

    copy_class_name(SelfContainedTokenizer, tokenizer_class)
    letters = "".join(map(chr, [*range(33, 127), *range(161, 256)]))
    with tempfile.TemporaryDirectory() as folder:
        SentencePieceTrainer.train(
            sentence_iterator=iter([letters]),
            model_prefix=str(Path(folder, "tokenizer")),
            model_type="char",
            vocab_size=len(letters) + 4,  # unknown, start, end, and the beginning of a word
            normalization_rule_name="identity",
            character_coverage=1.0,
            minloglevel=2,
        )
        return SelfContainedTokenizer(str(Path(folder, "tokenizer.model")), model_max_length=config["model_max_length"])


def _build_llama_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    return _build_byte_fallback_tokenizer(tokenizer_class, config, ("<unk>", "<pad>", "</s>", "<s>"))


def _build_gemma_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    return _build_byte_fallback_tokenizer(tokenizer_class, config, ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))


def _build_byte_fallback_tokenizer(tokenizer_class: Any, config: Mapping[str, Any], special: tuple[str, ...]) -> Any:
    """Build a tokenizer with one token per byte, as of a model that falls back to bytes for unknown letters."""
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    settings = ("pad_token", "model_max_length", "add_bos_token", "add_eos_token", "padding_side")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    options = {name: config[name] for name in settings if name in config}
    return tokenizer_class(vocab=vocabulary, merges=[], **options)


def _build_fast_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    tokenizer = _build_chat_tokenizer(Qwen2Tokenizer, config)
    options = {"pad_token": END_TOKEN, "model_max_length": tokenizer.model_max_length}
    options |= {name: config[name] for name in ("eos_token",) if name in config}
    if config.get("add_bos_token"):
        start = [("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))]
        processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=start)
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer_class(tokenizer_object=tokenizer.backend_tokenizer, **options)


def _build_chat_tokenizer(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    """A tokenizer of this class; a processor's place is taken by one without images."""
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "pad_token": END_TOKEN,
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": config.get("model_max_length", 4096),
    }
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    added = {token["content"]: int(number) for number, token in config.get("added_tokens_decoder", {}).items()}
    settings["additional_special_tokens"] += added
    with tempfile.TemporaryDirectory() as folder:
        _write_json(folder, "vocab.json", letters | added)
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        _write_json(folder, "tokenizer_config.json", settings)
        if tokenizer_class.__name__.endswith("Processor"):
            tokenizer_class = Qwen2Tokenizer
        return tokenizer_class.from_pretrained(folder)


def _build_image_text_processor(tokenizer_class: Any, config: Mapping[str, Any]) -> Any:
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})  # of Qwen2.5-VL
    return ImageTextProcessor(images, _build_chat_tokenizer(Qwen2Tokenizer, config))


def _build_qwen3_image_processor() -> Any:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": 65536, "longest_edge": 16777216},
        patch_size=16,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def _write_json(directory: str, name: str, data: Any) -> None:
    Path(directory, name).write_text(json.dumps(data), encoding="utf-8")
