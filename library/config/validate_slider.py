"""Training on texts alone (``--slider_prompts``): what it implies and refuses, and which options mean nothing to it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..problems import Problem
from .network_args import get_adapter_type, parse_network_args, validate_network_module
from .options import iter_group_options
from .schema import AdapterConfig, RunConfig
from .schema_data import CacheConfig, DataConfig, ValidateConfig

SCALABLE_TYPES = ("lora", "loha", "lokr")
"""The adapter types whose update is proportional to their strength."""

_SOURCES = ("dataset_config", "train_data_dir", "reg_data_dir", "in_json")


def resolve_slider_run(config: RunConfig) -> RunConfig:
    """Train the denoiser alone, and encode each text once: what a run on texts alone does anyway.

    No image is encoded either, so that latents count as cached.
    """
    if config.data.slider_prompts is None:
        return config
    to_disk = config.cache.cache_text_encoder_outputs_to_disk
    cache = replace(config.cache, cache_latents=True, cache_text_encoder_outputs=not to_disk)
    if config.adapter.is_full or config.adapter.network_train_text_encoder_only:  # reported by validate_slider_run
        return replace(config, cache=cache)
    return replace(config, cache=cache, adapter=replace(config.adapter, network_train_unet_only=True))


def find_image_options(config: RunConfig) -> dict[str, str]:
    """Find the options of images, which mean nothing to texts alone, and why; those of noise need images as well."""
    if config.data.slider_prompts is None:
        return {}
    options = (option for group in (DataConfig, CacheConfig, ValidateConfig) for option in iter_group_options(group))
    return {option.name: "slider_prompts trains without images" for option in options if not option.is_for_texts}


def validate_slider_run(config: RunConfig) -> Iterator[Problem]:
    """Refuse what training on texts alone does not support, all at once."""
    name = config.data.slider_prompts
    if name is None:
        return
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        yield Problem("slider_prompts", f"{name}: {what} (looked in {path.resolve().parent})")
    for source in _SOURCES:
        if getattr(config.data, source):
            text = "cannot be combined with slider_prompts, which trains without images"
            yield Problem(source, text, "remove one of them", others=("slider_prompts",))
    adapter = config.adapter
    if adapter.is_full:
        yield _refuse("train", "full has no adapter to switch off", "use train lora")
    elif adapter.network_train_text_encoder_only:
        yield _refuse("network_train_text_encoder_only", "the denoiser is trained, as in sd-scripts", "remove it")
    if config.model.control != "none":
        yield _refuse("control", "there are no condition images", "remove it")
    if option := config.preservation.active_option:
        yield _refuse(option, "there are no captions", "list texts to keep in preserve, in the file")
    yield from _validate_engines(config)


def _validate_engines(config: RunConfig) -> Iterator[Problem]:
    """Refuse engines whose compiled or overlapping forwards cannot switch the adapter off in between."""
    if config.parallel.pp_size > 1:
        yield _refuse("pp_size", "micro-batches with other strengths of the LoRA would overlap", "use fsdp or tp_size")
    if config.distributed.torch_compile:
        yield _refuse("torch_compile", "compiled blocks have the adapter switched on", "remove it")
    if config.distributed.cuda_graphs:
        yield _refuse("cuda_graphs", "a graph has one strength of the LoRA", "remove it")
    if config.train.gpu_memory is not None:
        yield _refuse("gpu_memory", "it chooses among caches of images as well", "set the options themselves")


def _refuse(option: str, reason: str, fix: str) -> Problem:
    return Problem(option, f"cannot be combined with slider_prompts: {reason}", fix, others=("slider_prompts",))


def explain_unscalable(adapter: AdapterConfig) -> str | None:
    """Say why an adapter cannot be trained at another strength than 1; None if it can."""
    if adapter.is_full:
        return "train full has no LoRA"
    if validate_network_module(adapter.network_module) or parse_network_args(adapter.network_args)[1]:
        return None  # reported by validate_adapter_options
    kind = get_adapter_type(adapter)
    return None if kind in SCALABLE_TYPES else f"the update of {kind} is not proportional to its strength"
