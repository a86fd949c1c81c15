"""``python -m library cache build|verify|repair|prune|info``: what is kept on disk, without training."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..config import RunConfig, load_options
from ..data.prepare import check
from ..errors import ConfigError
from ..registry import did_you_mean

USAGE = "usage: python -m library cache build|verify|repair|prune|info --dataset_config FILE [--option value ...]"
COMMANDS = {
    "build": "encode what is missing or damaged; as many processes as you like may do it at once",
    "verify": "read everything that is kept and name what is damaged",
    "repair": "the same, and make damaged entries anew",
    "prune": "list what these pictures and this model do not need; with --yes, remove it",
    "info": "what is kept, and how much of what is wanted is there",
}
YES = "--yes"


def run(argv: Sequence[str]) -> tuple[str, int]:
    """Takes every option of training; without one that says otherwise, it is about latents."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _help(), 0
    command, *words = argv
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
        raise ConfigError([f"cache: no command {command!r}{hint}"])
    loaded = load_options([word for word in words if word != YES])
    problems = list(loaded.problems)
    if YES in words and command != "prune":
        problems.append(f"{YES}: belongs to prune")
    from ..families.fitting import problems_with_model

    config = _on_disk(loaded.config)
    problems += [
        *check(config.data, config.cache, config.validate, config.train, loaded.wrong),
        *problems_with_model(config, loaded.places),
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    from ..log import set_up

    log, rank = config.log, int(os.environ.get("RANK", "0"))
    set_up(level=log.console_log_level, file=log.console_log_file, simple=True, quiet=log.quiet, rank=rank)
    from ..training import cache_care  # what is imported with it may have something to say

    works: Mapping[str, Callable[[cache_care.Care], tuple[str, int]]] = {
        "build": cache_care.build,
        "verify": cache_care.verify,
        "repair": cache_care.repair,
        "prune": lambda care: cache_care.prune(care, is_sure=YES in words),
        "info": cache_care.info,
    }
    with cache_care.opened(config) as care:
        said, code = works[command](care)
        return (said if care.strategy.is_main else ""), code


def _on_disk(config: RunConfig) -> RunConfig:
    """What is named is meant on disk; when nothing is named, latents are meant."""
    cache = config.cache
    texts = cache.texts
    latents = cache.latents or not texts
    cache = replace(cache, cache_latents_to_disk=latents, cache_text_encoder_outputs_to_disk=texts)
    return replace(config, cache=cache)


def _help() -> str:
    lines = [USAGE, "", *(f"  {name:<8} {what}" for name, what in COMMANDS.items()), "",
             "Every option of training is understood; --cache_text_encoder_outputs means captions, --cache_latents",
             "latents, which are meant when neither is given. Where the files are, docs/caching.md says."]  # fmt: skip
    return "\n".join(lines)
