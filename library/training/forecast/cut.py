"""The model as the processes of a layout have it: cut by the code that cuts it in training."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config import RunConfig
from ...distributed.chain import cuts
from ...distributed.context_cut import ContextCut
from ...distributed.device_map import assigned, places_of
from ...distributed.layout import Layout
from ...distributed.tensor_cut import TensorCut
from ...families.detect import Detected
from ..parallel_fit import structure_of
from .imagined import Imagined, around
from .weightless import Footprint, Heaviest, Weightless, resting


@dataclass(frozen=True)
class Stage:
    """What the processes of one stage of a pipeline have, or one device of a map, or all where there is neither."""

    frozen: int
    """Bytes of weights that do not learn, before they are spread or divided."""
    chunks: tuple[Footprint, ...]
    """Of each of its parts of the model."""
    arriving: int
    """Bytes that come from other stages for a micro-batch."""
    waiting: int
    """So many chunks wait for their backward at once."""
    share: float = 1.0
    """Of all that learns."""

    def activations(self, encoding: int) -> int:
        """In the worst moment of a step, which may be while pictures are encoded for the next micro-batch."""
        each = sum(chunk.kept for chunk in self.chunks) // len(self.chunks)
        computing = max(chunk.peak - chunk.kept for chunk in self.chunks)
        return max(self.waiting * each + computing, (self.waiting - 1) * each + encoding)

    @property
    def departing(self) -> int:
        return sum(chunk.flow for chunk in self.chunks)

    @property
    def flops(self) -> int:
        return sum(chunk.flops for chunk in self.chunks)


class Cut:
    """One for all layouts that cut the model alike; how it is spread or divided besides changes nothing in it."""

    def __init__(self, config: RunConfig, model: Detected, heaviest: Heaviest, layout: Layout,
                 rooms: Sequence[int] = ()):  # fmt: skip
        """``rooms``: bytes that weights may take on each device of a map."""
        self.sent = 0.0
        """Bytes that leave a device in a micro-batch for those with which it shares its layers, tokens or blocks."""
        self.run = run = Weightless(config, model, heaviest)
        structure, dealing = structure_of(run.family, run.denoiser), None
        if layout.parts > 1:
            TensorCut(0, layout.parts, self._add(layout.parts)).cut(run.denoiser, structure.cuts)
        if layout.contexts > 1:
            dealing = _Dealing(Imagined(layout.contexts, self._send), run.half)
            dealing.enter(run.denoiser, structure)
        if layout.stages > 1:
            self.stages = self._pipeline(layout, config, dealing)
        elif config.parallel.device_map is not None:
            self.stages = self._dealt(places_of(run.denoiser, config.parallel.device_map, rooms), len(rooms))
        else:
            if dealing is not None:
                dealing.enclose()
            self.stages = [Stage(frozen_bytes(run), (run.step(),), 0, 1)]
            self.sent /= run.rounds
        work = [stage.flops for stage in self.stages]
        self.busy = sum(work) if config.parallel.device_map is not None else max(work)
        """Operations of a micro-batch in which no other device is of any help."""

    def _send(self, count: float) -> None:
        self.sent += count

    def _add(self, parts: int) -> Callable[[Tensor], None]:
        return lambda tensor: self._send(around(parts) * tensor.nbytes)

    def _pipeline(self, layout: Layout, config: RunConfig, dealing: ContextCut | None) -> list[Stage]:
        each = 2 if config.parallel.pp_schedule == "interleaved" else 1
        blocks, total = self.run.chain.blocks, each * layout.stages
        passage = self.run.passage()
        if dealing is not None:
            dealing.enclose()
        loads: Sequence[float] = self.run.chain.weights()
        if config.parallel.pp_cut == "time":
            loads = [each.flops for each in self.run.stages(passage, range(len(blocks) + 1))]
        ends, self.sent = cuts(loads, total), 0.0
        chunks = self.run.stages(passage, ends)
        self.sent /= layout.stages * self.run.rounds
        found = []
        for stage in range(layout.stages):
            mine = range(stage, total, layout.stages)
            here = {place for part in mine for place in range(ends[part], ends[part + 1])}
            others = tuple(block for place, block in enumerate(blocks) if place not in here)
            arriving = sum(chunks[part - 1].flow for part in mine if part)
            found.append(Stage(frozen_bytes(self.run, others), tuple(chunks[part] for part in mine), arriving,
                               waiting(config.parallel.pp_schedule, layout.stages, stage,
                                       config.train.gradient_accumulation_steps)))  # fmt: skip
        return found

    def _dealt(self, places: Mapping[str, int], devices: int) -> list[Stage]:
        """What each device of a map has; each run of blocks on one of them is measured for itself."""
        run, chain, passage = self.run, self.run.chain.blocks, self.run.passage()
        tensors = list(assigned(run.denoiser, places))
        homes = {tensor: number for _, tensor, number in tensors}
        where = [homes[next(block.parameters())] for block in chain]
        ends = [0, *(place for place in range(1, len(where)) if where[place] != where[place - 1]), len(where)]
        before, *chunks = run.stages(passage, [0, *ends])
        self.sent = 2.0 * sum(chunk.flow for chunk in chunks)
        denoiser = sum(tensor.nbytes for _, tensor, _ in tensors if not tensor.requires_grad)
        learnt, found = sum(each.nbytes for each in run.learnt), []
        for device in range(devices):
            mine = [chunk for chunk, first in zip(chunks, ends, strict=False) if where[first] == device]
            here = [tensor for tensor, number in homes.items() if number == device]
            weights = sum(each.nbytes for each in here if not each.requires_grad)
            learns = sum(each.nbytes for each in here if each.requires_grad)
            if device == 0:  # which has all that is no block, too
                weights += frozen_bytes(run) - denoiser
                learns += learnt - sum(tensor.nbytes for tensor in homes if tensor.requires_grad)
            around_blocks = before.kept + chunks[-1].behind if device == 0 else 0
            work = _together(before, mine, around_blocks)
            found.append(Stage(weights, (work,), 0, 1, learns / learnt))
        return found


def _together(before: Footprint, chunks: Sequence[Footprint], around_blocks: int) -> Footprint:
    """Of chunks that all wait for backward on one device; ``before``, all that goes before blocks, is in each."""
    kept, flops = around_blocks, before.flops * bool(around_blocks)
    kept += sum(chunk.kept - before.kept - chunk.behind for chunk in chunks)
    flops += sum(chunk.flops - before.flops for chunk in chunks)
    return Footprint(kept, kept + max((chunk.peak - chunk.kept for chunk in chunks), default=0), flops)


class _Dealing(ContextCut):
    """Of tokens, where no device tells the precision of its autocast, and attention is a pretence."""

    def __init__(self, others: Imagined, half: torch.dtype | None):
        super().__init__(others)
        self._half = half

    def precision(self, given: Tensor) -> torch.dtype:
        return self._half or given.dtype

    def of_all(self, *given: Any, **more: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*given, **more)


def waiting(schedule: str, stages: int, stage: int, micro_batches: int) -> int:
    """How many chunks have gone forward and not yet backward at most, in torch's schedules."""
    if schedule == "interleaved":
        rounds = max(1, micro_batches // stages)
        if micro_batches % rounds:
            return 2 * micro_batches  # another schedule, with all forwards first
        return min(2 * micro_batches, micro_batches // rounds + 2 * (stages - 1 - stage) + 1)
    return min(micro_batches, stages - stage) if schedule == "1f1b" and micro_batches >= stages else micro_batches


def frozen_bytes(run: Weightless, without: Iterable[nn.Module] = ()) -> int:
    """Of weights that do not learn, as they rest on the device, and of buffers."""
    gone = {id(tensor) for module in without for tensor in (*module.parameters(), *module.buffers())}
    models = [run.trained, *run.bystanders]
    tensors = {id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    here = sum(tensor.nbytes for key, tensor in tensors.items() if not tensor.requires_grad and key not in gone)
    return here + sum(packed.nbytes for packed in resting(run.trained))
