"""The pictures of an evaluation: generated for captions and seeds with the model as it is, and those of the dataset."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import nn

from ..dataloader.batch import Cond, map_cond_tensors
from ..dataloader.images import BadSample, CropParams, load_sample_pixels
from ..dataloader.prepare import PreparedData
from ..dataloader.sample_prompts import Prompt
from ..distributed.devices import HOST
from ..errors import FileError
from ..models.base import Family
from ..problems import Problem
from ..randomness import Purpose, derive_seed
from .caption_sets import CaptionSet, choose_spread_samples

MAX_REFERENCES = 64
"""The pictures of the dataset, of training and of validation each, with which generated ones are compared."""

PictureRows = list[list[Image.Image]]
"""The pictures of a group: a row for each caption, with a picture for each seed."""

EncodedCaption = tuple[Cond, Cond]
"""The conditioning of a caption and of its negative prompt."""


@dataclass(frozen=True)
class PictureGenerator:
    """Generates pictures with the modules of a pipeline, whatever adapters are in them."""

    family: Family
    pipe: Any
    device: torch.device
    dtype: torch.dtype
    num_seeds: int
    seed: int = 0

    def encode_set(self, captions: CaptionSet) -> list[EncodedCaption]:
        """Encode all captions of a kind, with the text encoders on the device only for that time."""
        encoders = [getattr(self.pipe, name) for name in self.family.facts.text.components]
        with self._move_all(encoders):
            return [self._encode(prompt) for prompt in captions.prompts]

    def generate_set(self, captions: CaptionSet, encoded: Sequence[EncodedCaption]) -> Iterator[list[Image.Image]]:
        """Generate the pictures of each caption, one for each seed.

        The noise is a function of kind, number of the caption and seed: so it is the same for each LoRA file.
        """
        for index, (prompt, texts) in enumerate(zip(captions.prompts, encoded, strict=True)):
            cond, negative = (map_cond_tensors(each, lambda tensor: tensor.to(self.device)) for each in texts)
            yield [
                self._generate(prompt, cond, negative, derive_picture_seed(self.seed, captions.group, index, number))
                for number in range(self.num_seeds)
            ]

    @torch.no_grad()
    def _encode(self, prompt: Prompt) -> EncodedCaption:
        """Encode caption and negative prompt; the result waits in host memory."""
        family, pipe = self.family, self.pipe
        encode_negative = family.encode_prompts
        if family.facts.text.has_negative_encoding:
            encode_negative = family.encode_negative_prompts
        with self._autocast():
            found = family.encode_prompts(pipe, [prompt.text]), encode_negative(pipe, [prompt.negative_prompt])
        cond, negative = (map_cond_tensors(each, lambda tensor: tensor.to(HOST)) for each in found)
        return cond, negative

    @torch.no_grad()
    def _generate(self, prompt: Prompt, cond: Cond, negative: Cond, seed: int) -> Image.Image:
        generator = torch.Generator().manual_seed(seed)
        with self._autocast():
            return self.family.generate_image(
                self.pipe, prompt, cond, negative_cond=negative, generator=generator, sampler=prompt.sampler
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @contextmanager
    def _move_all(self, components: Sequence[object]) -> Iterator[None]:
        modules = [each for each in components if isinstance(each, nn.Module)]
        before = [next(module.parameters()).device for module in modules]
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module, device in zip(modules, before, strict=True):
                module.to(device)


def derive_picture_seed(seed: int, group: str, caption: int, number: int) -> int:
    """Derive the seed of a picture from the kind and the number of its caption, and its own."""
    return derive_seed(seed, f"{Purpose.EVALUATION_PICTURE}/{group}", caption, number) % 2**32


def find_unsupported_reason(family: Family) -> str:
    """Say why pictures cannot be made of captions alone, with one LoRA file; empty if they can."""
    facts = family.facts
    if facts.pipeline.experts is not None:
        return "has two experts with a LoRA file each, which are not evaluated"
    if facts.control.num_images[0] or facts.sampling.frame_images:
        return "makes pictures of other pictures; only captions are evaluated"
    return ""


def load_reference_pictures(prepared: PreparedData) -> tuple[list[Image.Image], int]:
    """Load pictures of the subject as they are trained, without random crop and flip, and count all there are."""
    samples, datasets = prepared.manifest.samples, prepared.manifest.datasets
    indices = [index for index, sample in enumerate(samples) if not sample.is_reg]
    chosen = choose_spread_samples([samples[index] for index in indices], MAX_REFERENCES)
    images, problems = list[Image.Image](), list[Problem]()
    for index in (indices[position] for position in chosen):
        sample, assignment = samples[index], prepared.assignments[index]
        interpolation = datasets[sample.dataset_index].subsets[sample.subset_index].resize_interpolation
        loaded = load_sample_pixels(sample, assignment, CropParams(assignment.crop_left_top, False, interpolation))
        if isinstance(loaded, BadSample):
            problems.append(Problem("", f"{loaded.name}: {loaded.problem}"))
            continue
        pixels = loaded[0]
        images.append(Image.fromarray(pixels if pixels.ndim == 3 else pixels[0]))
    if problems:
        raise FileError(problems)
    return images, len(indices)
