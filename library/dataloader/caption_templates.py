"""Texts that take the place of captions in textual inversion, as sd-scripts and diffusers draw them."""

from collections.abc import Sequence
from dataclasses import replace

from ..config.schema_embedding import TrainedPartConfig
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..randomness import Purpose, derive_rng
from .manifest import Manifest, Sample
from .prepare import PreparedData

_OBJECT_PARTS = {
    "a photo of {}": (
        "a,the,my,one,a clean,a dirty,a nice,a cool,a small,the clean,the cool,the nice,the small,the weird,the large"
    ),
    "a {} of the": "cropped photo,dark photo,bright photo,good photo,close-up photo,rendition",
    "a {} of a": "cropped photo,good photo,close-up photo,rendition,rendering",
    "the {} of a": "photo",
}
_STYLE_PARTS = {
    # Two of them are there twice, and drawn as often.
    "a {} painting in the style of": (
        "cropped,cropped,close-up,close-up,clean,dirty,dark,cool,bright,good,nice,small,weird,large"
    ),
    "a {} in the style of": "painting,rendering,picture,rendition",
    "{} painting in the style of": "the",
}


def list_templates(config: TrainedPartConfig) -> list[str]:
    """List the texts with the new word that images get instead of their captions; none without the options."""
    if not (config.use_object_template or config.use_style_template):
        return []
    parts = _OBJECT_PARTS if config.use_object_template else _STYLE_PARTS
    starts = [frame.format(words) for frame, choices in parts.items() for words in choices.split(",")]
    return [f"{start} {config.token_string}" for start in starts]


def apply_templates(prepared: PreparedData, config: TrainedPartConfig) -> PreparedData:
    """Replace all captions by the templates, of which each view of an image draws one; a validation image keeps one.

    Dropout of whole captions stays; what is done to tags means nothing to these texts.
    """
    templates = list_templates(config)
    if not templates:
        return prepared
    manifest = _replace_captions(prepared.manifest, templates)
    validation = prepared.validation
    if validation is not None:
        samples = tuple(_fix_caption(sample, templates) for sample in validation.manifest.samples)
        validation = replace(validation, manifest=replace(validation.manifest, samples=samples))
    return replace(prepared, manifest=manifest, validation=validation)


def _replace_captions(manifest: Manifest, templates: Sequence[str]) -> Manifest:
    """Make the templates the lines of each caption, of which ``enable_wildcard`` draws one."""
    caption = "\n".join(templates)
    return replace(
        manifest,
        datasets=tuple(map(_draw_lines, manifest.datasets)),
        samples=tuple(replace(sample, caption=caption) for sample in manifest.samples),
        validation_samples=tuple(_fix_caption(sample, templates) for sample in manifest.validation_samples),
    )


def _draw_lines(dataset: DatasetConfig) -> DatasetConfig:
    return replace(dataset, subsets=tuple(map(_draw_line_of_captions, dataset.subsets)))


def _draw_line_of_captions(subset: SubsetConfig) -> SubsetConfig:
    return replace(
        subset,
        enable_wildcard=True,
        shuffle_caption=False,
        caption_tag_dropout_rate=0.0,
        token_warmup_step=0,
        caption_prefix=None,
        caption_suffix=None,
        secondary_separator=None,
    )


def _fix_caption(sample: Sample, templates: Sequence[str]) -> Sample:
    draw = derive_rng(0, f"{Purpose.VALIDATION_CAPTION}/{sample.identity}")
    return replace(sample, caption=draw.choice(templates))
