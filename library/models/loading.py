"""Models without weights, and what fills them."""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging as transformers_logging

from ..errors import ConfigError
from .detect import DetectedModel, detect_model, get_config_reader
from .model_configs import ConfigReader, JsonDict, read_required
from .single_file import load_single_file_component
from .tokenizers import build_byte_tokenizer, load_cached_tokenizer, load_pretrained_tokenizer
from .weights import build_empty_model, build_random_component

if TYPE_CHECKING:
    from .base import Family


def load_pretrained_component(
    component_class: Any, path_or_id: str, subfolder: str, dtype: torch.dtype, device: torch.device | None
) -> Any:
    """Load the part in ``subfolder`` of a folder or hub id."""
    if not issubclass(component_class, nn.Module):
        return load_pretrained_tokenizer(component_class, path_or_id, subfolder)
    options: dict[str, Any] = {"dtype": dtype, **({} if device is None else {"device_map": {"": device}})}
    # Safetensors only: reading a pickle would run code from the file.
    options |= {"subfolder": subfolder, "use_safetensors": True}
    if Path(path_or_id).is_dir():
        return component_class.from_pretrained(
            path_or_id, variant=_detect_variant(Path(path_or_id, subfolder)), **options
        ).eval()
    try:
        return component_class.from_pretrained(path_or_id, **options).eval()
    except OSError as error:
        try:  # many hub models have their weights in half precision alone
            return component_class.from_pretrained(path_or_id, variant="fp16", **options).eval()
        except OSError:
            raise error from None


def _detect_variant(directory: Path) -> str | None:
    """``fp16`` where a folder has ``model.fp16.safetensors`` and no ``model.safetensors``."""
    names = [path.name.split(".") for path in directory.glob("*.safetensors")]
    if any(len(name) == 2 for name in names):
        return None
    return next((name[1] for name in names if len(name) == 3), None)


logger = logging.getLogger(__name__)


def load_pipeline(
    family: "Family",
    model: DetectedModel | str | None,
    dtype: torch.dtype,
    components: Sequence[str],
    pipe: Any,
    device: torch.device | None,
) -> Any:
    """A pipeline with ``parts`` and the scheduler, or ``into`` with them added; see ``Family.load``."""
    if not isinstance(model, DetectedModel):
        model = detect_model(model)
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    loaded = {}
    logger.info("loading %s of %s", ", ".join(components), model.path_or_id)
    for part in components:
        with _raise_config_error(model, part), _disable_progress_bars():
            # The VAE of SD 1.x and SDXL overflows in half precision; it is small and runs once for each picture.
            precision = torch.float32 if part == "vae" else dtype
            loaded[part] = _load_component(
                family, model, read, import_model_class(*index[part]), part, precision, device
            )
    with _raise_config_error(model, "scheduler"):
        settings = {**read_required(read, "scheduler/scheduler_config.json"), **model.scheduler_overrides}
        loaded["scheduler"] = import_model_class(*index["scheduler"]).from_config(settings)
    return _merge_into_pipeline(pipe, _build_pipeline(family.facts.pipeline_class, index, loaded), None)


def load_pipeline_on_meta(family: "Family", model: DetectedModel, dtype: torch.dtype) -> Any:
    """The whole pipeline as ``load`` makes it, on the meta device: all sizes are right, and there are no numbers."""
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    loaded = {}
    for part in family.components:
        cls = import_model_class(*index[part])
        with _raise_config_error(model, part), _disable_progress_bars():
            if part.startswith("tokenizer"):
                loaded[part] = _load_component(family, model, read, cls, part, dtype, None)
                continue
            made = build_empty_model(cls, read_required(read, f"{part}/config.json"))
        for weight in made.parameters():
            weight.data = weight.data.to(torch.float32 if part == "vae" else dtype)
        loaded[part] = made.to("meta")
    settings = {**read_required(read, "scheduler/scheduler_config.json"), **model.scheduler_overrides}
    loaded["scheduler"] = import_model_class(*index["scheduler"]).from_config(settings)
    return _build_pipeline(family.facts.pipeline_class, index, loaded)


def _load_component(
    family: "Family",
    model: DetectedModel,
    read: ConfigReader,
    component_class: Any,
    component: str,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Any:
    """One part from where it is."""
    separate = model.component_sources.get(component)
    if separate is not None and separate.source_type != "file":
        return load_pretrained_component(component_class, separate.path_or_id, separate.subfolder, dtype, device)
    if separate is None and model.bundled_config is None:
        return load_pretrained_component(component_class, model.path_or_id, component, dtype, device)
    if component.startswith("tokenizer"):
        if model.source_type == "random":
            return build_byte_tokenizer(component_class, read_required(read, f"{component}/tokenizer_config.json"))
        settings = read_required(read, f"{component}/tokenizer_config.json")
        return load_cached_tokenizer(
            component_class, settings, family.tokenizer_repo_ids[component], family.model_config.tokenizer_cache_dir
        )
    config = read_required(read, f"{component}/config.json")
    if separate is None and model.source_type == "random":
        return build_random_component(component_class, config, component, dtype, device)
    place = model.path_or_id if separate is None else separate.path_or_id
    return load_single_file_component(
        component_class, place, config, family.facts.single_file_prefixes.get(component, ()), dtype, device
    )


def import_model_class(library: str, name: str) -> Any:
    """What model_index.json names."""
    if library not in ("diffusers", "transformers"):
        raise ValueError(f"model_index.json names {name} of {library}, and only diffusers and transformers are used")
    return getattr(importlib.import_module(library), name)


def _build_pipeline(name: str, index: JsonDict, loaded: dict[str, Any]) -> Any:
    """The pipeline around what is loaded; everything else in it is None."""
    cls = import_model_class("diffusers", name)
    modules, settings = cls._get_signature_keys(cls)
    wanted = {key: value for key, value in index.items() if key in settings and not isinstance(value, list)}
    if "requires_safety_checker" in settings:
        wanted["requires_safety_checker"] = False
    return cls(**{**dict.fromkeys(modules), **loaded, **wanted})


def _merge_into_pipeline(pipe: Any, loaded_pipe: Any, device: torch.device | None) -> Any:
    """``into`` with the parts of ``fresh`` beside its own."""
    if device is not None:
        loaded_pipe.to(device)
    if pipe is None:
        return loaded_pipe
    own = {name: part for name, part in pipe.components.items() if part is not None}
    _, settings = type(pipe)._get_signature_keys(pipe)
    settings = {key: pipe.config[key] for key in settings if key in pipe.config}
    # Made anew around its parts: a pipeline measures them when it is made.
    type(pipe).__init__(pipe, **{**loaded_pipe.components, **own, **settings})
    return pipe


@contextmanager
def _raise_config_error(model: DetectedModel, component: str) -> Iterator[None]:
    """What damaged or missing files raise becomes the user's to mend."""
    try:
        yield
    except torch.OutOfMemoryError:  # of which nothing in these files is at fault
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        place = (
            model.component_sources[component].path_or_id if component in model.component_sources else model.path_or_id
        )
        raise ConfigError(
            [f"pretrained_model_name_or_path: {place}: its {component} cannot be loaded: {_summarize_error(error)}"]
        ) from error


@contextmanager
def _disable_progress_bars() -> Iterator[None]:
    """No progress bars of other libraries for as long as this lasts: every process would draw its own."""
    shown = [each for each in (diffusers_logging, transformers_logging) if each.is_progress_bar_enabled()]
    for each in shown:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in shown:
            each.enable_progress_bar()


def _summarize_error(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if "use_safetensors" in text:  # transformers' way out, which is none here
        return "it has no .safetensors weights; pickles (.bin) can run code when they are opened and are never read"
    return text


def load_components_on_meta(model: DetectedModel, components: Sequence[str]) -> Any:
    """What has these parts as attributes, as the pipeline will have them, on the meta device."""
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    found = {}
    for part in components:
        settings = dict(read_required(read, f"{part}/config.json"))
        if "pos_embed_max_size" in settings:
            settings["pos_embed_max_size"] = 8  # a large grid of places is computed from it, which no name depends on
        found[part] = build_empty_model(import_model_class(*index[part]), settings)
    return SimpleNamespace(**found)
