"""Whether the settings of a run fit its model, as far as small files and headers tell; no torch."""

from collections.abc import Mapping
from pathlib import Path

from ..config import RunConfig, adapter_rules, objective_rules
from ..data.prompts import Prompt, load_prompts
from ..errors import ConfigError
from .attention import validate_attention_mode
from .detect import DetectedModel, detect_model, get_family_facts
from .drawable import validate_prompts


def validate_model_options(config: RunConfig, locations: Mapping[str, str]) -> list[str]:
    """What is wrong with the model's files, the options for this model, and the file of prompts; ``places`` tells
    where options were set."""
    problems: list[str] = []
    found: DetectedModel | None = None
    try:
        found = detect_model(config.model)
        facts = get_family_facts(found.family)
        misfits = [*objective_rules.validate_objective_for_model(config, facts.title, found.prediction_type),
                   *adapter_rules.validate_adapter_for_model(config, facts.name, facts.title, facts.text_encoders, facts.t5_encoder)]  # fmt: skip
        if problem := validate_attention_mode(config.distributed.attn_mode, found):
            misfits.append((("attn_mode",), problem))
        problems += [f"{locations.get(names[0], f'--{names[0]}')}: {problem}" for names, problem in misfits]
    except ConfigError as error:
        problems += error.problems
    asked, unreadable = _read_prompts_if_present(config.preview.sample_prompts)
    problems += unreadable
    return [*problems, *validate_prompts(asked, config.preview.sample_sampler, found)] if found else problems


def _read_prompts_if_present(path: str | None) -> tuple[list[Prompt], list[str]]:
    """That the file is there is looked at elsewhere."""
    try:
        return (load_prompts(Path(path)) if path and Path(path).is_file() else []), []
    except ConfigError as error:
        return [], error.problems
