"""Which previews a model cannot draw, told before it is loaded; no torch."""

from collections.abc import Iterator, Sequence

from ..data.prompts import Prompt
from .detect import DetectedModel, get_family_facts


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
                yield (f"{prompt.locate_key(key)}: {side} is no multiple of {model.size_multiple}, as {title} needs it; write "
                       f"{below + model.size_multiple}" + (f" or {below}" if below else ""))  # fmt: skip
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
