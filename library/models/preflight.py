"""Checks of the settings that depend on the model: its files, its options, attention and previews; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config import RunConfig, validate_adapter, validate_objective
from ..data.prompts import Prompt, load_prompts
from ..errors import ConfigError
from .detect import DetectedModel, detect_model, get_family_facts
from .facts import TORCH_ATTENTION_MODES


def validate_model_options(config: RunConfig, locations: Mapping[str, str]) -> Iterator[str]:
    """Check the model's files, the options for this model, and the prompts; ``locations`` is where options were set."""
    try:
        detected = detect_model(config.model)
        facts = get_family_facts(detected.family)
    except ConfigError as error:
        yield from error.problems
        detected = None
    if detected is not None:
        conflicts = [
            *validate_objective.validate_objective_for_model(
                config.noise, config.loss, facts.title, detected.prediction_type
            ),
            *validate_adapter.validate_adapter_for_model(
                config.adapter, config.optim, facts.name, facts.title, facts.text_encoders, facts.t5_encoder
            ),
            *((("attn_mode",), line) for line in validate_attention_mode(config.distributed.attn_mode, detected)),
        ]
        yield from (f"{locations.get(names[0], f'--{names[0]}')}: {problem}" for names, problem in conflicts)
    path = config.preview.sample_prompts
    try:
        prompts = load_prompts(Path(path)) if path and Path(path).is_file() else []  # a missing file is found earlier
    except ConfigError as error:
        yield from error.problems
        prompts = []
    if detected is not None:
        yield from validate_prompts(prompts, config.preview.sample_sampler, detected)


def validate_attention_mode(mode: str, model: DetectedModel) -> Iterator[str]:
    """Check that the family's denoiser supports this ``attn_mode``."""
    facts = get_family_facts(model.family)
    if mode not in (*TORCH_ATTENTION_MODES, *facts.attention_modes):
        modes = ", ".join(("sdpa", *facts.attention_modes))
        yield f"{mode} is not supported for {facts.title}, only {modes}; sdpa chooses the fastest kernel itself"


def validate_prompts(prompts: Sequence[Prompt], sampler: str | None, model: DetectedModel) -> Iterator[str]:
    """Check that the model supports all settings of the previews."""
    for prompt in prompts:
        yield from _validate_prompt(prompt, model)
    yield from (f"sample_sampler: {problem}" for problem in _validate_sampler(sampler, model))


def _validate_prompt(prompt: Prompt, model: DetectedModel) -> Iterator[str]:
    title = get_family_facts(model.family).title
    if model.prediction_type == "flow":
        step = model.size_multiple
        for key, side in (("width", prompt.width), ("height", prompt.height)):
            if side is not None and side % step:
                below = side - side % step
                sizes = f"{below + step}" + (f" or {below}" if below else "")
                yield f"{prompt.locate_key(key)}: {side} is not a multiple of {step} ({title}); use {sizes}"
    elif prompt.flow_shift is not None:
        yield f"{prompt.locate_key('flow_shift')}: for flow-matching models only, not for {title}; leave it out"
    if prompt.embedded_guidance is not None and not model.has_guidance_embeds:
        yield f"{prompt.locate_key('guidance_scale')}: only FLUX.1 dev has a guidance embedding; use --l for this model"
    yield from (
        f"{prompt.locate_key('sample_sampler')}: {problem}" for problem in _validate_sampler(prompt.sampler, model)
    )


def _validate_sampler(sampler: str | None, model: DetectedModel) -> Iterator[str]:
    if sampler not in (None, "euler") and model.prediction_type == "flow":
        yield f"{sampler} is not for flow-matching models such as {get_family_facts(model.family).title}; use euler"
