"""``python -m library cache build|verify|repair|prune|info``: maintain cached latents and captions without training."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..config import ParsedConfig
from ..config.schema import AdapterConfig, ModelConfig
from ..config.schema_data import CacheConfig
from ..config.schema_optim import OptimConfig
from ..errors import ConfigError
from ..models.detect import detect_model
from ..models.own_families import get_family_facts
from ..models.trained_components import caches_only_t5
from ..training.preflight import load_settings
from .validate_arguments import check_cache_arguments, check_cache_command

USAGE = "usage: python -m library cache build|verify|repair|prune|info --dataset_config FILE [--option value ...]"
COMMANDS = {
    "build": "encode what is missing or damaged; any number of processes may do so at once",
    "verify": "read every entry and list the damaged ones",
    "repair": "verify, and encode damaged entries again",
    "prune": "list entries that this dataset and model do not need; with --yes, delete them",
    "info": "size of the cache, and how much of this dataset it covers",
}
CONFIRM_FLAG = "--yes"


def run_cache(argv: Sequence[str]) -> tuple[str, int]:
    """Run one command; every training option is accepted."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    command, *training_argv = argv
    check_cache_command(command, COMMANDS)
    loaded = load_cached_run([word for word in training_argv if word != CONFIRM_FLAG])
    config = replace(loaded.config, cache=_enable_disk_cache(loaded.config.cache))
    if config.cache.caches_text_outputs and not _caches_only_t5(
        config.model, config.adapter, config.optim
    ):  # nothing is trained here
        config = replace(config, adapter=replace(config.adapter, network_train_unet_only=True))
    check_cache_arguments(command, CONFIRM_FLAG, replace(loaded, config=config), training_argv)
    is_confirmed = CONFIRM_FLAG in training_argv
    from ..log import configure_logging

    log, rank = config.log, int(os.environ.get("RANK", "0"))
    configure_logging(level=log.console_log_level, file=log.console_log_file, simple=True, quiet=log.quiet, rank=rank)
    loaded.log_notices()
    from ..cache import maintenance  # after logging is configured, as its imports may log

    commands: Mapping[str, Callable[[maintenance.RunCaches], tuple[str, int]]] = {
        "build": maintenance.build_caches,
        "verify": maintenance.verify_caches,
        "repair": maintenance.repair_caches,
        "prune": lambda caches: maintenance.prune_caches(caches, is_confirmed=is_confirmed),
        "info": maintenance.summarize_caches,
    }
    with maintenance.open_run_caches(config) as caches:
        text, code = commands[command](caches)
        return (text if caches.comm.is_main else ""), code


def load_cached_run(argv: Sequence[str]) -> ParsedConfig:
    """Load the settings of a run that caches latents unless captions alone are cached, so that their options count."""
    loaded = load_settings(argv)
    cache = loaded.config.cache
    if cache.caches_latents or cache.caches_text_outputs:
        return loaded
    return load_settings(["--cache_latents_to_disk", *argv])


def _enable_disk_cache(cache: CacheConfig) -> CacheConfig:
    """Select captions, latents or both by the options that cache them in training; latents by default."""
    texts = cache.caches_text_outputs
    latents = cache.caches_latents or not texts
    return replace(cache, cache_latents_to_disk=latents, cache_text_encoder_outputs_to_disk=texts)


def _caches_only_t5(model: ModelConfig, adapter: AdapterConfig, optim: OptimConfig) -> bool:
    """Whether a run with these settings caches the outputs of T5 alone, because it trains CLIP."""
    try:
        facts = get_family_facts(detect_model(model).family)
    except ConfigError:  # reported with the other problems
        return False
    return caches_only_t5(adapter, optim, facts)


def _format_help() -> str:
    lines = [
        USAGE,
        "",
        *(f"  {name:<8} {description}" for name, description in COMMANDS.items()),
        "",
        "Takes every training option. --cache_text_encoder_outputs selects captions, --cache_latents selects",
        "latents; latents are the default. For where the files are, see docs/memory.md.",
    ]
    return "\n".join(lines)
