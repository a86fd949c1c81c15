"""``python -m library cache build|verify|repair|prune|info``: what is kept on disk, without training."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..config import RunConfig, parse_config
from ..dataset.validate import validate_dataset_config
from ..errors import ConfigError
from ..registry import suggest_name

USAGE = "usage: python -m library cache build|verify|repair|prune|info --dataset_config FILE [--option value ...]"


COMMANDS = {
    "build": "encode what is missing or damaged; as many processes as you like may do it at once",
    "verify": "read everything that is kept and name what is damaged",
    "repair": "the same, and make damaged entries anew",
    "prune": "list what these pictures and this model do not need; with --yes, remove it",
    "info": "what is kept, and how much of what is wanted is there",
}


CONFIRM_FLAG = "--yes"


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Takes every option of training; without one that says otherwise, it is about latents."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    command, *words = argv
    if command not in COMMANDS:
        hint = suggest_name(command, COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
        raise ConfigError([f"cache: no command {command!r}{hint}"])
    loaded = parse_config([word for word in words if word != CONFIRM_FLAG])
    problems = list(loaded.problems)
    if CONFIRM_FLAG in words and command != "prune":
        problems.append(f"{CONFIRM_FLAG}: belongs to prune")
    from ..models.preflight import validate_model_options

    config = _enable_disk_cache(loaded.config)
    problems += [
        *validate_dataset_config(config.data, config.cache, config.validate, config.train, loaded.invalid_options),
        *validate_model_options(config, loaded.locations),
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    from ..log import configure_logging

    log, rank = config.log, int(os.environ.get("RANK", "0"))
    configure_logging(level=log.console_log_level, file=log.console_log_file, simple=True, quiet=log.quiet, rank=rank)
    loaded.log_notices()
    from ..cache import maintenance  # what is imported with it may have something to say

    works: Mapping[str, Callable[[maintenance.RunCaches], tuple[str, int]]] = {
        "build": maintenance.build_caches,
        "verify": maintenance.verify_caches,
        "repair": maintenance.repair_caches,
        "prune": lambda care: maintenance.prune_caches(care, is_confirmed=CONFIRM_FLAG in words),
        "info": maintenance.summarize_caches,
    }
    with maintenance.open_run_caches(config) as care:
        said, code = works[command](care)
        return (said if care.comm.is_main else ""), code


def _enable_disk_cache(config: RunConfig) -> RunConfig:
    """What is named is meant on disk; when nothing is named, latents are meant."""
    cache = config.cache
    texts = cache.caches_text_outputs
    latents = cache.caches_latents or not texts
    cache = replace(cache, cache_latents_to_disk=latents, cache_text_encoder_outputs_to_disk=texts)
    return replace(config, cache=cache)


def _format_help() -> str:
    lines = [
        USAGE,
        "",
        *(f"  {name:<8} {what}" for name, what in COMMANDS.items()),
        "",
        "Every option of training is understood; --cache_text_encoder_outputs means captions, --cache_latents",
        "latents, which are meant when neither is given. Where the files are, docs/caching.md says.",
    ]
    return "\n".join(lines)
