"""Cache keys: a hash of everything that decides the latents of an image or the text-encoder output of a caption.

An entry is found by what it was made from, so none can be stale: a changed image, crop, VAE or precision has another
key.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..dataloader.augment import Augmenter, SampleView
from ..dataloader.batch_plan import MicroBatchSchedule
from ..dataloader.buckets import BucketAssignment, list_control_facts
from ..dataloader.images import CropParams, load_text_images
from ..dataloader.manifest import Sample
from ..dataloader.sample_prompts import Prompt
from ..dataset.clip_windows import TextImages
from ..dataset.schema import DATASET_KEYS, SubsetConfig

if TYPE_CHECKING:
    from PIL.Image import Image

KeyArray = NDArray[np.bytes_]
KEY_BYTES = 16


def stack_keys(keys: Iterable[bytes]) -> KeyArray:
    """Stack keys to one array."""
    return np.array(list(keys), f"S{KEY_BYTES}")


def get_key_bytes(key: np.bytes_) -> bytes:
    """Restore the trailing zero bytes of a key, which numpy strips."""
    return bytes(key).ljust(KEY_BYTES, b"\0")


@dataclass(frozen=True)
class EncodedText:
    """A caption as the text encoder gets it."""

    caption: str
    control_key: str = ""  # of the images that the text encoder reads with it
    is_negative: bool = False  # encoded as a negative prompt, in a family that encodes these in another way


@dataclass(frozen=True)
class TextSource:
    """A caption with the images that are read with it, and where it was found first."""

    sample_index: int = 0  # decides about the directory
    is_flipped: bool = False
    prompt: Prompt | None = None  # the prompt of a preview, instead of a sample

    def count_text_images(self, augmenter: Augmenter, kind: TextImages) -> int:
        """Count the images that the text encoder reads with the caption."""
        if kind != "controls":
            return int(kind == "first frame")
        owner = augmenter.manifest.samples[self.sample_index].controls
        return len(owner if self.prompt is None else self.prompt.control_images)


def collect_run_captions(
    augmenter: Augmenter,
    batch_plan: MicroBatchSchedule,
    total_steps: int,
    prompts: Iterable[Prompt] = (),
    *,
    text_images: TextImages = "none",
    has_negative_encoding: bool = False,
    list_more_texts: Callable[[str], Sequence[str]] = lambda _: (),
    slider_texts: Iterable[str] = (),
) -> dict[EncodedText, TextSource]:
    """Collect every caption of ``total_steps`` steps on any rank, the empty one included, each with a sample using it.

    Captions are drawn by a stateless generator, so the batch plan tells them before training.  Only samples whose
    captions vary need a walk through the plan.  ``text_images``: the images that the text encoder reads as well.
    ``has_negative_encoding``: negative prompts are encoded in another way than captions.  ``list_more_texts``: texts
    that are encoded with the control images of a caption besides it.  ``slider_texts``: those of a run without images,
    which are negative prompts of its denoising as well.
    """
    texts = {EncodedText(""): TextSource()} if text_images == "none" else {}
    for prompt in prompts:
        key = hash_controls(load_text_images(prompt, text_images))
        negative = EncodedText(prompt.negative_prompt, key, has_negative_encoding)
        for text in (EncodedText(prompt.text, key), negative):
            texts.setdefault(text, TextSource(prompt=prompt))

    for caption in slider_texts:
        for is_negative in (False, has_negative_encoding):
            texts.setdefault(EncodedText(caption, "", is_negative), TextSource())

    def add_view(view: SampleView, *, is_flipped: bool) -> None:
        key = augmenter.get_text_image_key(view.sample_index, text_images, is_flipped=is_flipped)
        drawn = augmenter.draw_caption(view)
        for text in (drawn, *list_more_texts(drawn)):
            texts.setdefault(EncodedText(text, key), TextSource(view.sample_index, is_flipped))

    samples = range(len(augmenter.manifest.samples))
    varying = {index for index in samples if find_varying_caption_keys(augmenter.get_subset(index))}
    for index in samples:
        if index not in varying:
            may_flip = text_images != "none" and augmenter.get_subset(index).flip_aug
            for is_flipped in (False, True) if may_flip else (False,):
                add_view(SampleView(0, 0, index, 0), is_flipped=is_flipped)
    for position in range(total_steps * batch_plan.accumulation_steps if varying else 0):
        step = position // batch_plan.accumulation_steps
        for view in augmenter.list_views(batch_plan.get_micro_batch(position), step):
            if view.sample_index in varying:
                add_view(view, is_flipped=augmenter.is_flipped(view))
    return texts


def hash_controls(images: Sequence["Image"]) -> str:
    """Identify control images that are given themselves, as those of previews; empty without any."""
    if not images:
        return ""
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.mode} {image.size}".encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


def find_varying_caption_keys(subset: SubsetConfig) -> tuple[str, ...]:
    """Return the keys that make captions of this subset vary from view to view."""
    keys = (name for name, key in DATASET_KEYS.items() if key.option.varies == "caption")
    return tuple(key for key in keys if getattr(subset, key))


LATENT_KEY_VERSION = 1
"""A part of each key, incremented when the same image, crop and VAE would give other latents than before."""

TEXT_KEY_VERSION = 1
"""A part of each key, incremented when the same caption and text encoder would give other outputs than before."""


def compute_latent_key(
    sample: Sample,
    assignment: BucketAssignment,
    crop_params: CropParams,
    *,
    encoder_fingerprint: str,
    controls: Sequence[BucketAssignment] = (),
) -> bytes:
    """Hash one crop of an image, or window of a clip, with its mask and control images, given the assignments of these.

    The fingerprint stands for the VAE and ``--cache_precision``.
    """
    mask = () if sample.mask is None else ("alpha" if sample.mask.is_alpha else "mask", sample.mask.content_hash)
    window = () if sample.window is None else sample.window.list_facts()
    return _hash_facts(
        "latents",
        LATENT_KEY_VERSION,
        sample.content_hash,
        *assignment.resized_size,
        *crop_params.left_top,
        *assignment.bucket_resolution,
        crop_params.interpolation or "",
        "mirrored" if crop_params.is_flipped else "",
        encoder_fingerprint,
        *mask,
        *list_control_facts(sample, controls),
        *window,
    )


def compute_text_key(text: EncodedText, encoder_fingerprint: str) -> bytes:
    """Hash one caption as the text encoder gets it."""
    controls = (text.control_key,) if text.control_key else ()
    kind = "negative text" if text.is_negative else "text"
    return _hash_facts(kind, TEXT_KEY_VERSION, encoder_fingerprint, text.caption, *controls)


def compute_encoder_fingerprint(*facts: str) -> str:
    """Hash several facts to one short text, unambiguous about where each of them ends."""
    return _hash_facts(*facts).hex()


def _hash_facts(*facts: str | int) -> bytes:
    text = "".join(f"{len(str(fact))}:{fact}" for fact in facts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class LatentKeys:
    """Cached latents: one entry for each sample, and another one if it may be flipped."""

    sample_indices: NDArray[np.int64]
    flipped: NDArray[np.bool_]
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class TextKeys:
    """Cached text-encoder outputs: one entry for each caption, or for each with its control images."""

    texts: tuple[EncodedText, ...]
    sources: tuple[TextSource, ...]
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


def build_latent_keys(augmenter: Augmenter, encoder_fingerprint: str) -> LatentKeys:
    """Build the keys of all samples in order, then those of the flipped ones of subsets with ``flip_aug``."""
    samples = range(len(augmenter.manifest.samples))
    views = [(index, False) for index in samples]
    views += [(index, True) for index in samples if augmenter.get_subset(index).flip_aug]
    keys = [
        compute_latent_key(
            augmenter.manifest.samples[index],
            augmenter.assignments[index],
            get_cached_crop(augmenter, index, is_flipped=is_flipped),
            encoder_fingerprint=encoder_fingerprint,
            controls=augmenter.assign_controls(index),
        )
        for index, is_flipped in views
    ]
    sample_indices = np.array([index for index, _ in views], np.int64)
    return LatentKeys(sample_indices, np.array([is_flipped for _, is_flipped in views], np.bool_), stack_keys(keys))


def get_cached_crop(augmenter: Augmenter, sample_index: int, *, is_flipped: bool) -> CropParams:
    """Return the crop of cached latents: always the one of the bucket assignment."""
    return CropParams(
        augmenter.assignments[sample_index].crop_left_top,
        is_flipped,
        augmenter.get_subset(sample_index).resize_interpolation,
    )


def build_text_keys(texts: dict[EncodedText, TextSource], encoder_fingerprint: str) -> TextKeys:
    """Build the keys of captions, each given with its source."""
    keys = stack_keys(compute_text_key(text, encoder_fingerprint) for text in texts)
    return TextKeys(tuple(texts), tuple(texts.values()), keys)
