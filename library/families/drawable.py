"""Which previews a model cannot draw, told before it is loaded; no torch."""

from collections.abc import Iterator, Sequence

from ..data.prompts import Prompt
from .detect import Detected, facts_of


def undrawable(prompts: Sequence[Prompt], sampler: str | None, model: Detected) -> list[str]:
    """Everything in the prompts, and in the sampler for all, that this model has not."""
    problems = [problem for prompt in prompts for problem in _of_one(prompt, model)]
    if (problem := _of_sampler(sampler, model)) is not None:
        problems.append(f"sample_sampler: {problem}")
    return problems


def _of_one(prompt: Prompt, model: Detected) -> Iterator[str]:
    title = facts_of(model.family).title
    if model.prediction == "flow":
        for key, side in (("width", prompt.width), ("height", prompt.height)):
            if side is not None and side % model.pixel_step:
                below = side - side % model.pixel_step
                yield (f"{prompt.where(key)}: {side} is no multiple of {model.pixel_step}, as {title} needs it; write "
                       f"{below + model.pixel_step}" + (f" or {below}" if below else ""))  # fmt: skip
    elif prompt.flow_shift is not None:
        yield f"{prompt.where('flow_shift')}: only flow-matching models have it, and {title} is none; leave it out"
    if prompt.guidance is not None and not model.is_guided:
        yield f"{prompt.where('guidance_scale')}: only FLUX.1 dev is told a guidance; use --l for this model"
    if (problem := _of_sampler(prompt.sampler, model)) is not None:
        yield f"{prompt.where('sample_sampler')}: {problem}"


def _of_sampler(sampler: str | None, model: Detected) -> str | None:
    if sampler in (None, "euler") or model.prediction != "flow":
        return None
    return f"{sampler} is not for flow matching, by which {facts_of(model.family).title} works; use euler"
