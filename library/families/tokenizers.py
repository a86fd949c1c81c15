"""Tokenizers for models that bring none: single files, and models with random weights."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

START, END = "<|startoftext|>", "<|endoftext|>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_FEWEST = 150
"""Tokens that every vocabulary has; transformers makes an empty one, silently, where it finds no files."""


def read_tokenizer(cls: Any, place: str, subfolder: str = "", **options: Any) -> Any:
    """The tokenizer in a folder or hub id, which must have a vocabulary."""
    tokenizer = cls.from_pretrained(place, subfolder=subfolder, **options)
    if len(tokenizer) < _FEWEST:
        raise OSError("there is no vocabulary in it (vocab.json and merges.txt, or tokenizer.json)")
    return tokenizer


def load_tokenizer(cls: Any, config: Mapping[str, Any], hub_id: str, cache: str | None) -> Any:
    """The tokenizer of a published model, from sd-scripts' kind of cache folder, or from the hub and into it.

    ``hub_id`` may name a folder in it: ``owner/name:tokenizer``.  What ``config`` says of padding and length counts.
    """
    options = {name: config[name] for name in ("pad_token", "model_max_length") if name in config}
    repository, _, subfolder = hub_id.partition(":")
    name = repository.replace("/", "_")
    kept = Path(cache).expanduser() / name if cache else None
    if kept is not None and kept.is_dir():
        return read_tokenizer(cls, str(kept), **options)
    try:
        tokenizer = read_tokenizer(cls, repository, subfolder, **options)
    except (OSError, ValueError):
        raise OSError(
            f"a single file brings no tokenizer, and {repository} cannot be reached on the hub; with a network it is "
            f"downloaded once; without one, put it into FOLDER/{name} and use --tokenizer_cache_dir FOLDER, or use "
            "the model as a diffusers folder"
        ) from None
    if kept is not None:
        tokenizer.save_pretrained(str(kept))
    return tokenizer


def small_tokenizer(cls: Any, config: Mapping[str, Any]) -> Any:
    """A token for each byte of the text, for a model with random weights, which has no words to know."""
    makers = {"CLIPTokenizer": _clip, "T5Tokenizer": _t5, "T5TokenizerFast": _t5, "Qwen2Tokenizer": _qwen}
    return makers[cls.__name__](cls, config)


def _clip(cls: Any, config: Mapping[str, Any]) -> Any:
    # Through files, since versions of transformers differ in what the constructor takes.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary()), encoding="utf-8")
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        return cls.from_pretrained(folder, model_max_length=config.get("model_max_length", 77),
                                   pad_token=config.get("pad_token", END))  # fmt: skip


def vocabulary() -> dict[str, int]:
    """A token for each letter of byte-level text, inside and at the end of a word, and two special ones."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    return {token: number for number, token in enumerate(tokens)}


def _t5(cls: Any, config: Mapping[str, Any]) -> Any:
    """A token for each letter of Western languages; all others are one unknown token."""
    letters = [_SPACE, *map(chr, [*range(33, 127), *range(161, 256)])]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    settings = {"tokenizer_class": "T5TokenizerFast", "extra_ids": 0, "eos_token": "</s>", "unk_token": "<unk>",
                "pad_token": "<pad>", "model_max_length": config.get("model_max_length", 512)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder, "tokenizer.json")))
        _write(folder, "tokenizer_config.json", settings)
        return cls.from_pretrained(folder)


def _qwen(cls: Any, config: Mapping[str, Any]) -> Any:
    """A token for each byte of the text, and Qwen's marks of who speaks."""
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None, "pad_token": END, "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": _CHAT,
        "model_max_length": config.get("model_max_length", 4096),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, "vocab.json", {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))})
        Path(folder, "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        _write(folder, "tokenizer_config.json", settings)
        return cls.from_pretrained(folder)


def _write(folder: str, name: str, data: Any) -> None:
    Path(folder, name).write_text(json.dumps(data), encoding="utf-8")
