"""Loading a model in parts: each from where it is, straight to dtype and device, into one diffusers pipeline.

Weights never lie in memory twice: models are made empty, and filled from mapped files tensor by tensor.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from ..errors import ConfigError
from .detect import Detected, detect, reader_of
from .empty import empty
from .folder import load_from_folder
from .random_model import random_part
from .reading import Json, Reader, needed
from .single_file import load_from_file
from .tokenizers import load_tokenizer, small_tokenizer

if TYPE_CHECKING:
    from .base import Family

logger = logging.getLogger(__name__)


def load(
    family: "Family",
    model: Detected | str | None,
    dtype: torch.dtype,
    parts: Sequence[str],
    into: Any,
    device: torch.device | None,
) -> Any:
    """A pipeline with ``parts`` and the scheduler, or ``into`` with them added; see ``Family.load``."""
    if not isinstance(model, Detected):
        model = detect(model)
    read = reader_of(model)
    index = needed(read, "model_index.json")
    loaded = {}
    logger.info("loading %s of %s", ", ".join(parts), model.place)
    for part in parts:
        with _told(model, part), _without_bars():
            # The VAE of SD 1.x and SDXL overflows in half precision; it is small and runs once for each picture.
            precision = torch.float32 if part == "vae" else dtype
            loaded[part] = _part(family, model, read, class_of(*index[part]), part, precision, device)
    with _told(model, "scheduler"):
        settings = {**needed(read, "scheduler/scheduler_config.json"), **model.scheduler}
        loaded["scheduler"] = class_of(*index["scheduler"]).from_config(settings)
    return _joined(into, _pipeline(family.facts.pipeline, index, loaded), None)


def load_without_weights(family: "Family", model: Detected, dtype: torch.dtype) -> Any:
    """The whole pipeline as ``load`` makes it, on the meta device: all sizes are right, and there are no numbers."""
    read = reader_of(model)
    index = needed(read, "model_index.json")
    loaded = {}
    for part in family.parts:
        cls = class_of(*index[part])
        with _told(model, part), _without_bars():
            if part.startswith("tokenizer"):
                loaded[part] = _part(family, model, read, cls, part, dtype, None)
                continue
            made = empty(cls, needed(read, f"{part}/config.json"))
        for weight in made.parameters():
            weight.data = weight.data.to(torch.float32 if part == "vae" else dtype)
        loaded[part] = made.to("meta")
    settings = {**needed(read, "scheduler/scheduler_config.json"), **model.scheduler}
    loaded["scheduler"] = class_of(*index["scheduler"]).from_config(settings)
    return _pipeline(family.facts.pipeline, index, loaded)


def _part(
    family: "Family", model: Detected, read: Reader, cls: Any, part: str, dtype: torch.dtype,
    device: torch.device | None,
) -> Any:  # fmt: skip
    """One part from where it is."""
    separate = model.separate.get(part)
    if separate is not None and separate.kind != "file":
        return load_from_folder(cls, separate.place, separate.subfolder, dtype, device)
    if separate is None and model.config is None:
        return load_from_folder(cls, model.place, part, dtype, device)
    if part.startswith("tokenizer"):
        if model.kind == "random":
            return small_tokenizer(cls, needed(read, f"{part}/tokenizer_config.json"))
        settings = needed(read, f"{part}/tokenizer_config.json")
        return load_tokenizer(cls, settings, family.tokenizers[part], family.options.tokenizer_cache_dir)
    config = needed(read, f"{part}/config.json")
    if separate is None and model.kind == "random":
        return random_part(cls, config, part, dtype, device)
    place = model.place if separate is None else separate.place
    return load_from_file(cls, place, config, family.facts.prefixes.get(part, ()), dtype, device)


def class_of(library: str, name: str) -> Any:
    """What model_index.json names."""
    if library not in ("diffusers", "transformers"):
        raise ValueError(f"model_index.json names {name} of {library}, and only diffusers and transformers are used")
    return getattr(importlib.import_module(library), name)


def _pipeline(name: str, index: Json, loaded: dict[str, Any]) -> Any:
    """The pipeline around what is loaded; everything else in it is None."""
    cls = class_of("diffusers", name)
    modules, settings = cls._get_signature_keys(cls)
    wanted = {key: value for key, value in index.items() if key in settings and not isinstance(value, list)}
    if "requires_safety_checker" in settings:
        wanted["requires_safety_checker"] = False
    return cls(**{**dict.fromkeys(modules), **loaded, **wanted})


def _joined(into: Any, fresh: Any, device: torch.device | None) -> Any:
    """``into`` with the parts of ``fresh`` beside its own."""
    if device is not None:
        fresh.to(device)
    if into is None:
        return fresh
    own = {name: part for name, part in into.components.items() if part is not None}
    _, settings = type(into)._get_signature_keys(into)
    settings = {key: into.config[key] for key in settings if key in into.config}
    # Made anew around its parts: a pipeline measures them when it is made.
    type(into).__init__(into, **{**fresh.components, **own, **settings})
    return into


@contextmanager
def _told(model: Detected, part: str) -> Iterator[None]:
    """What damaged or missing files raise becomes the user's to mend."""
    try:
        yield
    except torch.OutOfMemoryError:  # of which nothing in these files is at fault
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        place = model.separate[part].place if part in model.separate else model.place
        raise ConfigError(
            [f"pretrained_model_name_or_path: {place}: its {part} cannot be loaded: {_first_line(error)}"]
        ) from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of other libraries for as long as this lasts: every process would draw its own."""
    shown = [each for each in (diffusers_logging, transformers_logging) if each.is_progress_bar_enabled()]
    for each in shown:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in shown:
            each.enable_progress_bar()


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if "use_safetensors" in text:  # transformers' way out, which is none here
        return "it has no .safetensors weights; pickles (.bin) can run code when they are opened and are never read"
    return text
