"""Making what a cache keeps: pictures through the VAE, captions through the text encoders, some at a time."""

import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..config.schema import CacheConfig
from ..data.batch import as_model_input
from ..data.cache.latents import MASK, MOMENTS
from ..data.cache.texts import rows_of
from ..data.cache.wanted import WantedPictures, WantedTexts, way_kept
from ..data.cutting import BadSample, cut
from ..data.images import Pixels
from ..data.masks import MaskPixels
from ..data.showing import Showing
from ..diffusion.masking import in_latents
from ..distributed.strategy import DataParallel
from ..errors import UserError
from ..families.base import Family
from ..families.detect import Detected
from .keeping import Entry
from .precision import DTYPES

logger = logging.getLogger(__name__)

PRECISIONS = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_LETTERS = 80
"""Of a caption, in messages."""
READ_AHEAD = 2
"""Pictures for each thread."""

T = TypeVar("T")


@dataclass(frozen=True)
class Kitchen:
    """Where encoders come from and where they work."""

    strategy: DataParallel
    family: Family
    model: Detected
    config: CacheConfig

    def load(self, parts: Sequence[str], dtype: torch.dtype) -> Any:
        """A pipeline with these parts, frozen and on the device."""
        pipe = self.family.load(self.model, dtype, parts, device=self.strategy.device)
        for part in parts:
            module = getattr(pipe, part)
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False).to(self.strategy.device)
        return pipe


@dataclass
class PictureMaker:
    """Latents of pictures, straight and mirrored; the VAE is in memory from the first to the last of them."""

    kitchen: Kitchen
    showing: Showing
    wanted: WantedPictures
    threads: int
    bad: dict[int, str] = field(default_factory=dict)

    def groups(self, numbers: Sequence[int]) -> list[list[int]]:
        """Pictures of one size, as many as the VAE takes at once."""
        by_size: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number in numbers:
            by_size[self.showing.placements[int(self.wanted.samples[number])].bucket].append(number)
        return [group for size in sorted(by_size) for group in _cut(by_size[size], self.kitchen.config.vae_batch_size)]

    def made(self, groups: Iterator[list[int]]) -> Iterator[tuple[int, list[Entry]]]:
        """Pictures are read ahead by threads: Pillow decodes outside of Python's lock."""
        pipe: Any = None
        for group, found in _ahead(groups, self._read, max(1, min(self.threads, os.cpu_count() or 1))):
            if pipe is None:
                pipe = self.kitchen.load(("vae",), torch.float32)
            pictures = {}
            for number, picture in zip(group, found, strict=True):
                if isinstance(picture, BadSample):
                    self.bad[number] = f"{picture.name}: {picture.problem}"
                else:
                    pictures[number] = picture
            yield len(group), self._entries(pipe, pictures) if pictures else []
        del pipe
        self.kitchen.strategy.free_memory()

    def _read(self, number: int) -> tuple[Pixels, MaskPixels | None] | BadSample:
        index = int(self.wanted.samples[number])
        way = way_kept(self.showing, index, is_mirrored=bool(self.wanted.mirrored[number]))
        return cut(self.showing.manifest.samples[index], self.showing.placements[index], way)

    def _entries(self, pipe: Any, pictures: Mapping[int, tuple[Pixels, MaskPixels | None]]) -> list[Entry]:
        pixels = torch.from_numpy(np.stack([picture.transpose(2, 0, 1) for picture, _ in pictures.values()]))
        moments = self._moments(pipe, pixels)
        sound = moments.isfinite().flatten(1).all(1).tolist()
        entries = []
        for row, (number, (_, mask)) in enumerate(pictures.items()):
            sample = self.showing.manifest.samples[int(self.wanted.samples[number])]
            value = moments[row] if sound[row] else self._again(pipe, pixels[row], sample.key)
            if value is None:
                self.bad[number] = f"{sample.image}: the VAE makes no finite latents of it"
                continue
            tensors = {MOMENTS: value.to(PRECISIONS[self.kitchen.config.cache_precision]).cpu()}
            if mask is not None:
                tensors[MASK] = self._mask(mask, (value.shape[-2], value.shape[-1]))
            entries.append(Entry(number, tensors, sample.key))
        return entries

    def _moments(self, pipe: Any, pixels: Tensor) -> Tensor:
        values = as_model_input(pixels.to(self.kitchen.strategy.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return self.kitchen.family.encode_moments(pipe, values).both

    def _mask(self, mask: MaskPixels, size: tuple[int, int]) -> Tensor:
        """As training would shrink it."""
        return in_latents(torch.from_numpy(mask)[None, None].to(self.kitchen.strategy.device), size)[0].cpu()

    def _again(self, pipe: Any, pixels: Tensor, name: str) -> Tensor | None:
        """Alone and in full precision, where the VAE overflowed; nothing when that does not help."""
        logger.warning("%s: the VAE overflows in %s; the picture is encoded in float32", name, pipe.vae.dtype)
        usual = pipe.vae.dtype
        pipe.vae.to(torch.float32)
        moments = self._moments(pipe, pixels[None])[0]
        pipe.vae.to(usual)
        return moments if bool(moments.isfinite().all()) else None


@dataclass
class TextMaker:
    """Encoded captions; the text encoders are in memory from the first to the last of them."""

    kitchen: Kitchen
    wanted: WantedTexts
    bad: dict[int, str] = field(default_factory=dict)

    def groups(self, numbers: Sequence[int]) -> list[list[int]]:
        """Captions, as many as are encoded at once."""
        return _cut(list(numbers), self.kitchen.config.text_encoder_batch_size)

    def made(self, groups: Iterator[list[int]]) -> Iterator[tuple[int, list[Entry]]]:
        """In the precision and the autocast in which they would be encoded during training."""
        strategy, family, pipe = self.kitchen.strategy, self.kitchen.family, None
        for group in groups:
            if pipe is None:
                pipe = self.kitchen.load(family.text_parts, DTYPES[strategy.precision])
            captions = [self.wanted.captions[number] for number in group]
            with torch.no_grad(), strategy.accelerator.autocast():
                rows = rows_of(family.encode_prompts(pipe, captions), len(captions))
            for caption, row in zip(captions, rows, strict=True):
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise UserError(f"the text encoder makes no finite numbers of the caption {caption!r}")
            yield len(group), [Entry(number, row, caption[:MOST_LETTERS])
                               for number, caption, row in zip(group, captions, rows, strict=True)]  # fmt: skip
        del pipe
        strategy.free_memory()


def _cut(numbers: Sequence[int], size: int) -> list[list[int]]:
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


def _ahead(groups: Iterable[list[int]], read: Callable[[int], T], threads: int) -> Iterator[tuple[list[int], list[T]]]:
    """Each group with what ``read`` gives for its members, read by threads while the groups before are worked on."""
    waiting: deque[tuple[list[int], list[Future[T]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for group in groups:
            waiting.append((group, [pool.submit(read, number) for number in group]))
            while sum(len(members) for members, _ in waiting) > READ_AHEAD * threads and len(waiting) > 1:
                yield _done(waiting)
        while waiting:
            yield _done(waiting)


def _done(waiting: deque[tuple[list[int], list[Future[T]]]]) -> tuple[list[int], list[T]]:
    group, results = waiting.popleft()
    return group, [result.result() for result in results]
