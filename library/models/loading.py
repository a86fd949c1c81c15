"""Load the components of a diffusers pipeline: from folders, the hub, single files, or with random weights."""

import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging as transformers_logging

from ..errors import FileError
from ..problems import Problem
from ..registry import copy_class_name
from .checkpoint_inspection import ComponentSource
from .detect import DetectedModel, detect_model, get_config_reader
from .families import FAMILIES
from .families.glm_image import build_prior_tokenizer_class
from .families.wan_i2v import REFERENCE_TRANSFORMER
from .model_configs import (
    GUIDERS,
    QUANTIZATION,
    ConfigReader,
    JsonDict,
    ModelError,
    build_folder_reader,
    build_hub_reader,
    get_config_name,
    is_component,
    is_hub_reachable,
    is_tokenizer,
    read_required,
)
from .single_file import KeyConversion, build_component, build_key_conversion, load_single_file_component
from .stored_weights import read_file_weights
from .tokenizers import (
    PILLOW_PROCESSORS,
    build_byte_tokenizer,
    build_pillow_processor_class,
    choose_image_processor_class,
    load_cached_tokenizer,
    load_pretrained_tokenizer,
)
from .weights import build_empty_model, build_random_component, cast_persistent_buffers

if TYPE_CHECKING:
    from .base import Family


def load_pretrained_component(
    component_class: Any,
    path_or_id: str,
    subfolder: str,
    dtype: torch.dtype,
    device: torch.device | None,
    local_files_only: bool,
) -> Any:
    """Load the component in ``subfolder`` of a folder or hub repository."""
    if not issubclass(component_class, nn.Module):
        return load_pretrained_tokenizer(component_class, path_or_id, subfolder, local_files_only=local_files_only)
    options: dict[str, Any] = {"dtype": dtype, **({} if device is None else {"device_map": {"": device}})}
    # Safetensors only: unpickling can run code from the file.
    options |= {"subfolder": subfolder, "use_safetensors": True, "local_files_only": local_files_only}
    if Path(path_or_id).is_dir():
        variant = _detect_variant(Path(path_or_id, subfolder))
        return component_class.from_pretrained(path_or_id, variant=variant, **options).eval()
    try:
        return component_class.from_pretrained(path_or_id, **options).eval()
    except OSError as error:
        try:  # some hub models have fp16 weights only
            return component_class.from_pretrained(path_or_id, variant="fp16", **options).eval()
        except OSError:
            raise error from None


def _detect_variant(directory: Path) -> str | None:
    """``fp16`` where a folder has ``model.fp16.safetensors``, in one file or several, and no ``model.safetensors``."""
    variants = {split_variant(path.name) for path in directory.glob("*.safetensors")}
    return None if "" in variants else min(variants, default=None)


def split_variant(name: str) -> str:
    """``fp16`` of ``model.fp16.safetensors`` and ``model.fp16-00001-of-00002.safetensors``; else an empty text."""
    parts = re.sub(r"-\d+-of-\d+(?=\.safetensors$)", "", name).split(".")
    return parts[1] if len(parts) == 3 else ""


def _require_downloaded_files(folder: Path, files: Sequence[Path]) -> None:
    """Raise if the local copy of a hub repository has none of the weights, or not all: hubs' configs come first."""
    listed = set[str]()
    for index in folder.glob("*.safetensors.index.json"):
        listed |= {*json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()}
    found = {path.name for path in files}
    if not found or any(split_variant(name) == split_variant(files[0].name) for name in listed - found):
        raise LocalEntryNotFoundError("its weights are not downloaded yet, or not all, and the hub is not asked")


def _load_quantized_component(
    component_class: Any,
    path_or_id: str,
    subfolder: str,
    dtype: torch.dtype,
    device: torch.device | None,
    local_files_only: bool,
    keeps_stored: bool = False,
) -> Any:
    """Load a component that a folder or hub repository stores quantized, without the library that quantized it."""
    root = Path(path_or_id)
    if not root.is_dir():
        patterns = [f"{subfolder}/*{end}".removeprefix("/") for end in (".json", ".safetensors")]
        root = Path(snapshot_download(path_or_id, allow_patterns=patterns, local_files_only=local_files_only))
    folder = root / subfolder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    variant = _detect_variant(folder) or ""
    files = sorted(path for path in folder.glob("*.safetensors") if split_variant(path.name) == variant)
    if local_files_only and not Path(path_or_id).is_dir():
        _require_downloaded_files(folder, files)
    if not files:
        raise ValueError("it has no .safetensors weights; pickles (.bin) can run code and are never read")
    config = {key: value for key, value in config.items() if key != QUANTIZATION}
    weights = read_file_weights(files, device=device)
    return build_component(
        component_class,
        config,
        weights,
        prefix="",
        dtype=dtype,
        device=device,
        conversion=KeyConversion(),
        keeps_stored=keeps_stored,
    )


logger = logging.getLogger(__name__)


def describe_dequantized(model: DetectedModel, dtype: torch.dtype, reason: str) -> str:
    """Describe in one line what becomes of a denoiser whose files store weights quantized, and why."""
    formats, dtype_name = ", ".join(model.stored_formats), str(dtype).removeprefix("torch.")
    return f"base model: its weights are stored in {formats} and dequantized to {dtype_name}, {reason}"


def load_pipeline(
    family: "Family",
    model: DetectedModel | str | None,
    dtype: torch.dtype,
    components: Sequence[str],
    pipe: Any,
    device: torch.device | None,
    keeps_stored: bool = False,
) -> Any:
    """Load a pipeline with these components and the scheduler, or add them to ``pipe``; see ``Family.load``."""
    if not isinstance(model, DetectedModel):
        model = detect_model(model)
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    loaded: dict[str, Any] = {}
    local_files_only = _uses_hub(model) and not is_hub_reachable()
    if components:  # some models have no VAE
        logger.info("loading %s of %s", ", ".join(components), model.path_or_id)
    for name in components:
        with _raise_config_error(model, name), disable_progress_bars():
            # Older VAEs overflow in half precision; they are small and run once per image.
            precision = torch.float32 if name in family.facts.image_encoders else dtype
            component_class = import_model_class(*index[name])
            loaded[name] = _load_component(
                family,
                model,
                read,
                component_class=component_class,
                component=name,
                dtype=precision,
                device=device,
                local_files_only=local_files_only,
                keeps_stored=keeps_stored and name in family.facts.pipeline.denoisers,
            )
            if name == family.facts.denoiser_name:
                prepare_denoiser(family, loaded[name])
    with _raise_config_error(model, "scheduler"):
        loaded["scheduler"] = _load_scheduler(model, read, index)
    with _raise_config_error(model, "guider"):
        loaded |= _load_guiders(read, index)
    merged = _merge_into_pipeline(pipe, _build_pipeline(family.get_pipeline_class(), index, loaded))
    family.configure_pipeline(merged, read)
    return merged


def load_pipeline_on_meta(
    family: "Family",
    model: DetectedModel,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    keeps_stored: bool = False,
    known: Mapping[str, Any] | None = None,
) -> Any:
    """Build the whole pipeline on the meta device: shapes and dtypes without weights.

    ``dtypes`` are those of components that have another one than ``dtype``, and ``known`` are components of another
    such pipeline, which this one has as they are; ``keeps_stored``: see ``Family.load``.
    """
    read = get_config_reader(model)
    index = read_required(read, "model_index.json")
    loaded: dict[str, Any] = {"scheduler": _load_scheduler(model, read, index)}
    local_files_only = _uses_hub(model) and not is_hub_reachable()
    for name in family.facts.components:
        if known and name in known:
            loaded[name] = known[name]
            continue
        component_class = import_model_class(*index[name])
        with _raise_config_error(model, name), disable_progress_bars():
            if is_tokenizer(name):
                loaded[name] = _load_component(
                    family,
                    model,
                    read,
                    component_class=component_class,
                    component=name,
                    dtype=dtype,
                    device=None,
                    local_files_only=local_files_only,
                )
                continue
            component = None
            if keeps_stored and model.stored_formats and name in family.facts.pipeline.denoisers:
                loaded_as = (dtypes or {}).get(name, dtype)
                component = _load_stored_on_meta(family, model, read, component_class, component=name, dtype=loaded_as)
            if component is None:
                component = build_empty_model(component_class, read_required(read, f"{name}/config.json"))
        if name == family.facts.denoiser_name:
            prepare_denoiser(family, component)
        loaded_dtype = torch.float32 if name in family.facts.image_encoders else (dtypes or {}).get(name, dtype)
        for parameter in component.parameters():
            parameter.data = parameter.data.to(loaded_dtype)
        cast_persistent_buffers(component, loaded_dtype)
        loaded[name] = component.to("meta")
    pipe = _build_pipeline(family.get_pipeline_class(), index, loaded)
    family.configure_pipeline(pipe, read)
    return pipe


def _load_stored_on_meta(
    family: "Family", model: DetectedModel, read: ConfigReader, component_class: Any, component: str, dtype: torch.dtype
) -> Any:
    """Load a denoiser as its files store it, without values; None if they are on the hub alone."""
    try:
        return _load_component(
            family,
            model,
            read,
            component_class=component_class,
            component=component,
            dtype=dtype,
            device=torch.device("meta"),
            local_files_only=True,
            keeps_stored=True,
        )
    except LocalEntryNotFoundError:
        logger.info("%s is not downloaded yet, so its %s counts as dequantized", model.path_or_id, component)
        return None


def load_components_on_meta(model: DetectedModel, components: Sequence[str]) -> Any:
    """Build these components on the meta device, as attributes of a namespace."""
    family, read = FAMILIES.get(model.family), get_config_reader(model)
    index = read_required(read, "model_index.json")
    loaded = {}
    for name in components:
        config = dict(read_required(read, f"{name}/config.json"))
        if "pos_embed_max_size" in config:
            config["pos_embed_max_size"] = 8  # avoids computing a large position table, which affects no module
        loaded[name] = build_empty_model(import_model_class(*index[name]), config)
    if family.facts.denoiser_name in loaded:
        prepare_denoiser(family, loaded[family.facts.denoiser_name])
    return SimpleNamespace(**loaded)


def prepare_denoiser(family: "Family | type[Family]", denoiser: Any) -> None:
    """Change a denoiser as its family needs it, and name its block classes where diffusers' class does not.

    FSDP, compilation and offloading find the blocks by these names.
    """
    family.prepare_denoiser(denoiser)
    if not (getattr(denoiser, "_no_split_modules", None) or getattr(denoiser, "_repeated_blocks", None)):
        blocks = (block for name in family.facts.blocks.lists for block in denoiser.get_submodule(name).children())
        denoiser._repeated_blocks = list(dict.fromkeys(type(block).__name__ for block in blocks))


def _uses_hub(model: DetectedModel) -> bool:
    """Whether the hub may be asked: single files contain no tokenizer."""
    sources = model.component_sources.values()
    return model.source_type in ("hub", "file") or any(source.source_type == "hub" for source in sources)


def _load_scheduler(model: DetectedModel, read: ConfigReader, index: JsonDict) -> Any:
    config = {**read_required(read, "scheduler/scheduler_config.json"), **model.scheduler_overrides}
    return import_model_class(*index["scheduler"]).from_config(config)


def _load_guiders(read: ConfigReader, index: JsonDict) -> dict[str, Any]:
    """The guidance of previews, where the pipeline has it as components."""
    logging.getLogger("diffusers.guiders").setLevel(logging.ERROR)  # each guider says that it is experimental
    classes = {name: import_model_class(*index[name]) for name in GUIDERS if any(index.get(name) or ())}
    return {name: each.from_config(read_required(read, f"{name}/guider_config.json")) for name, each in classes.items()}


def _load_component(
    family: "Family",
    model: DetectedModel,
    read: ConfigReader,
    component_class: Any,
    component: str,
    dtype: torch.dtype,
    device: torch.device | None,
    local_files_only: bool,
    keeps_stored: bool = False,
) -> Any:
    """Load one component from its own source, the model's single file, the model's folder, or at random."""
    if family.facts.text_images != "none":
        component_class = choose_image_processor_class(component_class)
    separate = model.component_sources.get(component)
    if (separate is not None and separate.source_type != "file") or (separate is None and model.bundled_config is None):
        place = (model.path_or_id, component) if separate is None else (separate.path_or_id, separate.subfolder)
        config = None if is_tokenizer(component) else _read_component_config(separate, component, read)
        if config is not None and QUANTIZATION in config:
            return _load_quantized_component(
                component_class,
                *place,
                dtype=dtype,
                device=device,
                local_files_only=local_files_only,
                keeps_stored=keeps_stored,
            )
        return load_pretrained_component(
            component_class, *place, dtype=dtype, device=device, local_files_only=local_files_only
        )
    if is_tokenizer(component):
        if model.source_type == "random":
            return build_byte_tokenizer(
                component_class, read_required(read, f"{component}/{get_config_name(component)}")
            )
        settings, cache_dir = (
            read_required(read, f"{component}/{get_config_name(component)}"),
            family.model_config.tokenizer_cache_dir,
        )
        return load_cached_tokenizer(
            component_class, settings, family.facts.text.tokenizer_repo_ids[component], cache_dir, local_files_only
        )
    config = read_required(read, f"{component}/config.json")
    if separate is None and model.source_type == "random":
        return build_random_component(component_class, config, component, dtype, device)
    path = model.path_or_id if separate is None else separate.path_or_id
    prefixes = family.facts.single_files.prefixes.get(component, ())
    conversion = build_key_conversion(family.facts, component, config)
    return load_single_file_component(
        component_class,
        path,
        config,
        prefixes=prefixes,
        dtype=dtype,
        device=device,
        conversion=conversion,
        keeps_stored=keeps_stored,
    )


def _read_component_config(separate: ComponentSource | None, component: str, read: ConfigReader) -> JsonDict | None:
    if separate is None:
        return read(f"{component}/config.json")
    path = Path(separate.path_or_id)
    own = build_folder_reader(path) if path.is_dir() else build_hub_reader(separate.path_or_id)
    return own(f"{separate.subfolder}/config.json".removeprefix("/"))


def import_model_class(library: str, name: str) -> Any:
    """Import a class listed in model_index.json; only diffusers, its pipelines and transformers are trusted."""
    if name == "T5GemmaEncoder":
        return _build_t5gemma_encoder_class()
    if name == "GlmImageForConditionalGeneration":
        return build_prior_tokenizer_class()
    if name == REFERENCE_TRANSFORMER:
        from .wan_reference_transformer import WanReferenceTransformer3DModel

        return WanReferenceTransformer3DModel
    if name in PILLOW_PROCESSORS:
        return build_pillow_processor_class(name)
    if library in ("diffusers", "transformers"):
        return getattr(importlib.import_module(library), name)
    pipelines = importlib.import_module("diffusers.pipelines")
    if not library.isidentifier() or not hasattr(pipelines, library):
        raise ValueError(f"model_index.json lists {name} of {library}; only diffusers and transformers are supported")
    return getattr(getattr(pipelines, library), name)


def _build_t5gemma_encoder_class() -> Any:
    """The encoder of T5Gemma with a configuration of its own, which may be inside of that of the whole model.

    transformers' (as of 5.23) reads only the latter, and diffusers' (0.42) only from a folder without others beside it.
    """
    from transformers import T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder as Original

    class EncoderConfig(T5GemmaModuleConfig):  # type: ignore[misc]
        base_config_key = "encoder"

    class T5GemmaEncoder(Original):  # type: ignore[misc]
        config_class = EncoderConfig

    copy_class_name(EncoderConfig, T5GemmaModuleConfig)
    return copy_class_name(T5GemmaEncoder, Original)


def _build_pipeline(pipeline_class: Any, index: JsonDict, loaded: dict[str, Any]) -> Any:
    """Build a pipeline with the loaded components; all others are None."""
    modules, setting_names = pipeline_class._get_signature_keys(pipeline_class)
    settings = {key: value for key, value in index.items() if key in setting_names and not is_component(value)}
    if "requires_safety_checker" in setting_names:
        settings["requires_safety_checker"] = False
    return pipeline_class(**{**dict.fromkeys(modules), **loaded, **settings})


def _merge_into_pipeline(pipe: Any, loaded_pipe: Any) -> Any:
    """Add the components of ``loaded_pipe`` to ``pipe``."""
    if pipe is None:
        return loaded_pipe
    own = {name: component for name, component in pipe.components.items() if component is not None}
    _, setting_names = type(pipe)._get_signature_keys(pipe)
    settings = {key: pipe.config[key] for key in setting_names if key in pipe.config}
    # Run __init__ again: it derives values such as vae_scale_factor from the components.
    for name in setting_names:  # diffusers takes an attribute that is set twice to a tuple for a component
        vars(pipe).pop(name, None)
    type(pipe).__init__(pipe, **{**loaded_pipe.components, **own, **settings})
    return pipe


@contextmanager
def _raise_config_error(model: DetectedModel, component: str) -> Iterator[None]:
    """Report damaged or missing files as one line."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError that is not the files' fault
        raise
    except (
        *(OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError),
        ModelError,
    ) as error:
        path = (
            model.component_sources[component].path_or_id if component in model.component_sources else model.path_or_id
        )
        cause = f"its {component} cannot be loaded: {_summarize_error(error)}"
        raise FileError([Problem("pretrained_model_name_or_path", f"{path}: {cause}")]) from error


@contextmanager
def disable_progress_bars() -> Iterator[None]:
    """Disable the progress bars of diffusers and transformers, which every process would draw."""
    enabled = [each for each in (diffusers_logging, transformers_logging) if each.is_progress_bar_enabled()]
    for each in enabled:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in enabled:
            each.enable_progress_bar()


def _summarize_error(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if "use_safetensors" in text:  # transformers suggests use_safetensors=False
        return "it has no .safetensors weights; pickles (.bin) can run code when they are loaded and are never read"
    return text
