"""The captions of an evaluation: those of training and validation pictures, the subject with new things, and others."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..dataloader.augment import Augmenter
from ..dataloader.caption_processing import process_caption
from ..dataloader.manifest import Sample
from ..dataloader.prepare import PreparedData
from ..dataloader.sample_prompts import IMAGE_SIZE_MULTIPLE, Prompt
from ..dataloader.validation_split import settle_caption_settings
from ..demo import COMPOSING_CAPTIONS as DEMO_COMPOSING_CAPTIONS
from ..demo import SUBJECTS_WITHOUT_PICTURES
from ..errors import UserError
from ..problems import Problem
from ..randomness import Purpose, derive_rng

TRAINING, VALIDATION, COMPOSING, UNRELATED = "training", "validation", "composing", "unrelated"
SUBJECT_PLACE = "{subject}"

COMPOSING_CAPTIONS = (
    "{subject} on a sandy beach",
    "{subject} wearing a red hat",
    "an oil painting of {subject}",
    "{subject} on a street at night",
    "{subject} in deep snow",
    "a pencil drawing of {subject}",
    "{subject} next to a blue car",
    "{subject} under water",
)
UNRELATED_CAPTIONS = (
    "a photo of a mountain lake",
    "a portrait of an old man",
    "a bowl of fruit on a wooden table",
    "a city street in the rain",
    "a cat asleep on a chair",
    "an oil painting of ships at sea",
    "a field of sunflowers",
    "a red sports car",
)
_FILLERS = frozenset(
    "a an and at by close-up for from in image is of on one photo photograph picture portrait the this to with".split()
)
"""Words with which a subject neither begins nor ends."""


DEMO_STEPS, DEMO_SCALE = 12, 3.0
"""Sampling of the demo model, which needs fewer steps and less guidance than others."""


@dataclass(frozen=True)
class CaptionSet:
    """Captions of one kind, as prompts with the size of their pictures."""

    group: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class CaptionChoice:
    """How the captions of an evaluation are chosen."""

    num_captions: int
    subject: str | None = None
    composing: tuple[Prompt, ...] = ()
    """The user's own; without any, they are made of the subject."""
    unrelated: tuple[Prompt, ...] = ()
    """The user's own; without any, general ones."""
    is_demo: bool = False


def build_caption_sets(prepared: PreparedData, choice: CaptionChoice, size_multiple: int) -> list[CaptionSet]:
    """Choose the captions of each kind; a kind without captions is left out."""
    if any(sample.controls for sample in prepared.manifest.samples):
        text = "its pictures are made of control images, and only captions are evaluated"
        raise UserError(Problem("dataset_config", text, "evaluate LoRAs of captions alone"))
    size = _choose_size(prepared, size_multiple)
    subject = choice.subject or find_subject(list_training_captions(prepared))
    composing = choice.composing or _build_prompts(_compose(subject, choice), size)
    unrelated = choice.unrelated or _build_prompts(_list_unrelated(subject, choice), size)
    validation = prepared.validation
    sets = [
        CaptionSet(TRAINING, _choose_picture_captions(prepared, choice.num_captions)),
        CaptionSet(VALIDATION, () if validation is None else _choose_picture_captions(validation, choice.num_captions)),
        CaptionSet(COMPOSING, tuple(composing[: choice.num_captions] if not choice.composing else composing)),
        CaptionSet(UNRELATED, tuple(unrelated[: choice.num_captions] if not choice.unrelated else unrelated)),
    ]
    return [each for each in sets if each.prompts]


def set_sampling(captions: CaptionSet, steps: int | None, scale: float | None, *, is_demo: bool) -> CaptionSet:
    """Give sampling steps and guidance to the captions that have none of their own; None: those of the family."""
    if is_demo:
        steps, scale = steps or DEMO_STEPS, DEMO_SCALE if scale is None else scale
    prompts = (
        replace(
            prompt,
            num_inference_steps=prompt.num_inference_steps or steps,
            cfg_scale=scale if prompt.cfg_scale is None else prompt.cfg_scale,
        )
        for prompt in captions.prompts
    )
    return CaptionSet(captions.group, tuple(prompts))


def list_training_captions(prepared: PreparedData) -> list[str]:
    """List the captions of all pictures that are trained on, without regularization images."""
    augmenter = prepared.build_static_augmenter()
    found = (_settle_caption(augmenter, index) for index in _list_subject_samples(prepared))
    return [caption for caption in found if caption]


def find_subject(captions: Sequence[str]) -> str:
    """Find the longest run of words that all captions have, without words such as "a photo of"; empty if none."""
    texts = [re.findall(r"[^\s,.;:!?()\"]+", caption) for caption in captions]
    if not texts:
        return ""
    shortest = min(texts, key=len)
    folded = [f" {' '.join(words).casefold()} " for words in texts]
    for length in range(len(shortest), 0, -1):
        for start in range(len(shortest) - length + 1):
            words = shortest[start : start + length]
            if words[0].casefold() in _FILLERS or words[-1].casefold() in _FILLERS:
                continue
            run = f" {' '.join(words).casefold()} "
            if all(run in text for text in folded):
                return " ".join(words)
    return ""


def contains_subject(text: str, subject: str) -> bool:
    """Whether a caption names the subject, as whole words."""
    return bool(subject) and bool(re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", text, re.IGNORECASE))


def choose_spread_samples(samples: Sequence[Sample], count: int) -> list[int]:
    """Choose positions by content hash, which adding pictures does not change for most."""
    order = sorted(range(len(samples)), key=lambda index: (samples[index].content_hash, index))
    return sorted(order[:count])


def _choose_picture_captions(prepared: PreparedData, count: int) -> tuple[Prompt, ...]:
    """Choose different captions of pictures, first those of different texts, each in the size of its picture."""
    augmenter, chosen = prepared.build_static_augmenter(), dict[tuple[str, tuple[int, int]], None]()
    order = sorted(_list_subject_samples(prepared), key=lambda index: prepared.manifest.samples[index].content_hash)
    found = [(_settle_caption(augmenter, index), prepared.assignments[index].bucket_resolution) for index in order]
    texts: Mapping[str, tuple[int, int]] = {caption: size for caption, size in reversed(found) if caption}
    for pair in [*sorted(texts.items(), key=found.index), *found]:
        if pair[0] and len(chosen) < count:
            chosen[pair] = None
    return tuple(Prompt(text, width=width, height=height) for text, (width, height) in chosen)


def _list_subject_samples(prepared: PreparedData) -> list[int]:
    return [index for index, sample in enumerate(prepared.manifest.samples) if not sample.is_reg]


def _settle_caption(augmenter: Augmenter, index: int) -> str:
    """Return the caption of a sample without shuffling and dropout."""
    sample, subset = augmenter.manifest.samples[index], settle_caption_settings(augmenter.get_subset(index))
    draw = derive_rng(0, f"{Purpose.EVALUATION_CAPTION}/{sample.identity}")
    return process_caption(sample.caption, subset, draw, epoch=0, step=0, total_steps=0)


def _choose_size(prepared: PreparedData, multiple: int) -> tuple[int, int]:
    """Choose the size of pictures that belong to no training picture: the resolution of the dataset."""
    step = max(multiple, IMAGE_SIZE_MULTIPLE)
    width, height = (max(step, side - side % step) for side in prepared.resolution)
    return width, height


def _compose(subject: str, choice: CaptionChoice) -> list[str]:
    templates = DEMO_COMPOSING_CAPTIONS if choice.is_demo else COMPOSING_CAPTIONS
    return [text.replace(SUBJECT_PLACE, subject) for text in templates] if subject else []


def _list_unrelated(subject: str, choice: CaptionChoice) -> list[str]:
    """List captions without the subject, first that of its class, which is the last of several words."""
    if choice.is_demo:
        captions = [f"a {name}" for name in SUBJECTS_WITHOUT_PICTURES]
    else:
        words = subject.split()
        captions = [*([f"a photo of a {words[-1]}"] if len(words) > 1 else []), *UNRELATED_CAPTIONS]
    return [caption for caption in captions if not contains_subject(caption, subject)]


def _build_prompts(captions: Sequence[str], size: tuple[int, int]) -> tuple[Prompt, ...]:
    return tuple(Prompt(caption, width=size[0], height=size[1]) for caption in captions)
