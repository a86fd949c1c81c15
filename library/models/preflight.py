"""Which previews a model cannot draw, told before it is loaded; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config import RunConfig, validate_adapter, validate_objective
from ..data.prompts import Prompt, load_prompts
from ..errors import ConfigError
from .attention import validate_attention_mode
from .detect import DetectedModel, detect_model, get_family_facts


def validate_prompts(prompts: Sequence[Prompt], sampler: str | None, model: DetectedModel) -> list[str]:
    """Everything in the prompts, and in the sampler for all, that this model has not."""
    problems = [problem for prompt in prompts for problem in _validate_prompt(prompt, model)]
    if (problem := _validate_sampler(sampler, model)) is not None:
        problems.append(f"sample_sampler: {problem}")
    return problems


def _validate_prompt(prompt: Prompt, model: DetectedModel) -> Iterator[str]:
    title = get_family_facts(model.family).title
    if model.prediction_type == "flow":
        for key, side in (("width", prompt.width), ("height", prompt.height)):
            if side is not None and side % model.size_multiple:
                below = side - side % model.size_multiple
                yield (
                    f"{prompt.locate_key(key)}: {side} is no multiple of {model.size_multiple}, as {title} needs it; write "
                    f"{below + model.size_multiple}" + (f" or {below}" if below else "")
                )
    elif prompt.flow_shift is not None:
        yield f"{prompt.locate_key('flow_shift')}: only flow-matching models have it, and {title} is none; leave it out"
    if prompt.embedded_guidance is not None and not model.has_guidance_embeds:
        yield f"{prompt.locate_key('guidance_scale')}: only FLUX.1 dev is told a guidance; use --l for this model"
    if (problem := _validate_sampler(prompt.sampler, model)) is not None:
        yield f"{prompt.locate_key('sample_sampler')}: {problem}"


def _validate_sampler(sampler: str | None, model: DetectedModel) -> str | None:
    if sampler in (None, "euler") or model.prediction_type != "flow":
        return None
    return f"{sampler} is not for flow matching, by which {get_family_facts(model.family).title} works; use euler"


def validate_model_options(config: RunConfig, locations: Mapping[str, str]) -> list[str]:
    """What is wrong with the model's files, the options for this model, and the file of prompts; ``places`` tells
    where options were set."""
    problems: list[str] = []
    found: DetectedModel | None = None
    try:
        found = detect_model(config.model)
        facts = get_family_facts(found.family)
        misfits = [
            *validate_objective.validate_objective_for_model(
                config.noise, config.loss, facts.title, found.prediction_type
            ),
            *validate_adapter.validate_adapter_for_model(
                config.adapter, config.optim, facts.name, facts.title, facts.text_encoders, facts.t5_encoder
            ),
        ]
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
