"""Whether the settings of a run fit its model, as far as small files and headers tell; no torch."""

from collections.abc import Mapping
from pathlib import Path

from ..config import RunConfig, adapter_rules, objective_rules
from ..data.prompts import Prompt, read_prompts
from ..errors import ConfigError
from .attention import attention_misfit
from .detect import Detected, detect, facts_of
from .drawable import undrawable


def problems_with_model(config: RunConfig, places: Mapping[str, str]) -> list[str]:
    """What is wrong with the model's files, the options for this model, and the file of prompts; ``places`` tells
    where options were set."""
    problems: list[str] = []
    found: Detected | None = None
    try:
        found = detect(config.model)
        facts = facts_of(found.family)
        misfits = [*objective_rules.misfits(config, facts.title, found.prediction),
                   *adapter_rules.misfits(config, facts.name, facts.title, facts.text_encoders, facts.t5)]  # fmt: skip
        if problem := attention_misfit(config.distributed.attn_mode, found):
            misfits.append((("attn_mode",), problem))
        problems += [f"{places.get(names[0], f'--{names[0]}')}: {problem}" for names, problem in misfits]
    except ConfigError as error:
        problems += error.problems
    asked, unreadable = _prompts(config.preview.sample_prompts)
    problems += unreadable
    return [*problems, *undrawable(asked, config.preview.sample_sampler, found)] if found else problems


def _prompts(path: str | None) -> tuple[list[Prompt], list[str]]:
    """That the file is there is looked at elsewhere."""
    try:
        return (read_prompts(Path(path)) if path and Path(path).is_file() else []), []
    except ConfigError as error:
        return [], error.problems
