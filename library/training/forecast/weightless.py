"""A run as it would be assembled, on torch's meta device: sizes are right, and nothing takes room or time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.switching import in_dtype
from ...config import RunConfig
from ...data.batch import Cond, Moments, PixelBatch
from ...distributed.chain import Departed, Flow, Passage
from ...distributed.copies import Copies
from ...distributed.frozen import FrozenConv2d, FrozenLinear
from ...distributed.packing import Packed
from ...families import FAMILIES
from ...families.base import Family
from ...families.detect import Detected
from ...families.loading import load_without_weights
from ...optim.optimizers import Group
from ..groups import groups_of
from ..objective import objective_of
from ..parallel_fit import chain_of
from ..precision import DTYPES
from ..resting import is_wanted, let_weights_rest
from ..starting import read_starts
from ..task import Task
from ..trained import put_adapters, trainable, trained_text_parts
from .meter import Meter
from .pretence import Pretence, backward

META = torch.device("meta")


@dataclass(frozen=True)
class Heaviest:
    """The micro-batch that needs most memory: pictures of the largest bucket, with the longest captions."""

    size: tuple[int, int]  # width and height in pixels
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Footprint:
    """Of forward and backward of one micro-batch, beside all that is there before it."""

    kept: int
    """Bytes that wait for the backward pass."""
    peak: int
    """Bytes in the worst moment."""
    flops: int
    flow: int = 0
    """Bytes that go from one stage of a pipeline to the next."""
    behind: int = 0
    """Of what is kept, what the model computes behind its last block."""


class Weightless:
    """What the loop would work on; a part of it may be cut as strategies cut it."""

    def __init__(self, config: RunConfig, model: Detected, heaviest: Heaviest):
        precision = config.distributed.mixed_precision or "no"
        self.config, self.half = config, None if precision == "no" else DTYPES[precision]
        self.family: Family = FAMILIES.get(model.family)(config.model)
        self.pipe = load_without_weights(self.family, model, DTYPES[precision])
        for part in self.pipe.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False)
        sizes = read_starts(config, self.family, model).sizes
        self.trained, self.adapter = put_adapters(config, self.family, self.pipe, sizes)
        if config.distributed.full_bf16:
            in_dtype(self.trained, torch.bfloat16)
        self.swapped = 0
        """Bytes of frozen weights that rest in host memory."""
        if is_wanted(config):
            self.swapped = let_weights_rest(config, self.denoiser, META)
            self._cast_for_resting()
        self.task = Task(self.family, self.pipe, self.trained, objective_of(config, self.family, self.pipe),
                         config.train.seed, Copies(META), trains_texts=config.adapter.trains_texts,
                         evens_texts=config.parallel.pp_size > 1)  # fmt: skip
        self.chain = chain_of(self.family, self.denoiser)
        self.encoding = 0
        """Bytes in the worst moment of encoding pictures and captions, as far as a step does it."""
        self.batch = self._batch(heaviest)

    @property
    def denoiser(self) -> Any:
        return self.trained.denoiser

    @property
    def learnt(self) -> list[nn.Parameter]:
        return trainable(self.trained)

    @property
    def bystanders(self) -> list[nn.Module]:
        """Models that are on the device and learn nothing: what encodes, unless that is done beforehand."""
        cache, trained = self.config.cache, trained_text_parts(self.config, self.family.facts)
        texts = [] if cache.texts else [part for part in self.family.text_parts if part not in trained]
        names = [*texts, *([] if cache.latents else ["vae"])]
        return [part for name in names if isinstance(part := getattr(self.pipe, name), nn.Module)]

    def groups(self) -> list[Group]:
        """What learns, as the optimizer gets it."""
        return groups_of(self.trained, self.adapter, self.config, self.family.facts)

    def step(self) -> Footprint:
        """Forward and backward, by one device that has all blocks."""
        return [self._one_step() for _ in range(self.rounds)][-1]

    def passage(self) -> Passage:
        """From now on blocks can be kept apart."""
        passage = Passage(self.chain)
        if getattr(self.denoiser, "gradient_checkpointing", False):  # UNets do it inside of their blocks
            self.denoiser.gradient_checkpointing = False
            passage.checkpoint = self.denoiser._gradient_checkpointing_func
        return passage

    def stages(self, passage: Passage, ends: Sequence[int]) -> list[Footprint]:
        """The same of each stage of a pipeline; a stage has the blocks from one of ``ends`` to the next."""
        found, arrived = list[Footprint](), None
        for first, end in pairwise(ends):
            came: Flow | None = arrived if first else None  # the first block gets what the model itself gives it
            footprint, arrived = [self._one_stage(passage, first, end, came) for _ in range(self.rounds)][-1]
            found.append(footprint)
        return found

    @property
    def rounds(self) -> int:
        """From the second on, swapped weights come ahead of time, and expensive results are kept."""
        train = self.config.train
        return 2 if train.blocks_to_swap or train.gradient_checkpointing_budget else 1

    def _one_step(self) -> Footprint:
        with self._metered() as meter:
            loss = self.task(self.batch, 0).sum()
            kept = meter.alive
            backward((loss,))
        return Footprint(kept, meter.peak, meter.flops)

    def _one_stage(self, passage: Passage, first: int, end: int, shapes: Flow | None) -> tuple[Footprint, Flow | None]:
        with self._metered() as meter:
            arrived = None if shapes is None else tuple(torch.empty_like(each).requires_grad_() for each in shapes)
            passage.only(first, end, arrived)
            seen = list[int]()
            hook = self.chain.blocks[-1].register_forward_hook(lambda *_: seen.append(meter.alive))
            try:
                said: Flow = (self.task(self.batch, 0).sum(),)
                leaves = None
            except Departed as departed:
                said = tuple(each for each in departed.flow if each.requires_grad)
                leaves = tuple(each.detach() for each in departed.flow)
            hook.remove()
            kept = meter.alive
            if said:
                backward(said)
        flow = sum(each.nbytes for each in leaves or ())
        return Footprint(kept, meter.peak, meter.flops, flow, kept - seen[0] if seen else 0), leaves

    @contextmanager
    def _metered(self, *others: nn.Module) -> Iterator[Meter]:
        """Weights, buffers and gradients are there already."""
        modules = (self.trained, *others)
        known = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        for parameter in self.learnt:
            parameter.grad = torch.zeros_like(parameter)
            known.append(parameter.grad)
        known += [tensor for packed in resting(self.trained) for tensor in packed.tensors]
        meter = Meter(META, known)
        with meter, Pretence(self.half, fused=self.config.distributed.attn_mode != "math"):
            yield meter

    def _batch(self, heaviest: Heaviest) -> PixelBatch:
        width, height = heaviest.size
        count, cache = len(heaviest.captions), self.config.cache
        cond: Cond | None = self.family.outline_prompts(self.pipe, heaviest.captions)
        if self.config.adapter.trains_texts:
            cond = None
        elif not cache.texts and not self.family.texts_vary:
            few = heaviest.captions[: cache.text_encoder_batch_size]
            self._encoded(lambda: self.family.outline_prompts(self.pipe, few))
        together = cache.vae_batch_size
        pixels = torch.empty(min(count, together), 3, height, width, device=META)
        both = self.family.encode_moments(self.pipe, pixels).both
        if not cache.latents:
            self._encoded(lambda: self.family.encode_moments(self.pipe, pixels))
        names, frame = tuple(map(str, range(count))), torch.zeros(count, 6, device=META)
        return PixelBatch(None, heaviest.captions, frame, torch.ones(count, device=META), tuple(range(count)), names,
                          moments=Moments(both.new_empty(count, *both.shape[1:])), cond=cond)  # fmt: skip

    def _encoded(self, work: Callable[[], object]) -> None:
        models = [part for part in self.pipe.components.values() if isinstance(part, nn.Module)]
        with torch.no_grad(), self._metered(*models) as meter:
            work()
        self.encoding = max(self.encoding, meter.peak)

    def _cast_for_resting(self) -> None:
        """They ask the device for its autocast, and this one has none."""
        half = self.half
        if half is None:
            return

        def cast(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (given[0].to(half), *given[1:])

        for layer in self.denoiser.modules():
            if isinstance(layer, (FrozenLinear, FrozenConv2d)):
                layer.register_forward_pre_hook(cast)


def resting(model: nn.Module) -> list[Packed]:
    """Frozen weights in fewer bits that are on the device all the time."""
    owners = (getattr(getattr(layer, "fetch", None), "__self__", None) for layer in model.modules())
    return [owner for owner in owners if isinstance(owner, Packed)]
