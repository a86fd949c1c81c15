"""The model as the processes of a layout have it: cut by the code that cuts it in training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...config import RunConfig
from ...distributed.chain import cuts
from ...distributed.context_cut import ContextCut
from ...distributed.device_map import places_of
from ...distributed.layout import Layout
from ...distributed.tensor_cut import TensorCut
from ...families.detect import Detected
from ..parallel_fit import structure_of
from .dealt import dealt
from .imagined import Imagined, around
from .stage import Stage, frozen_bytes, waiting
from .weightless import Heaviest, Weightless


class Cut:
    """One for all layouts that cut the model alike; how it is spread or divided besides changes nothing in it."""

    def __init__(self, config: RunConfig, model: Detected, heaviest: Heaviest, layout: Layout,
                 rooms: Sequence[int] = ()):  # fmt: skip
        """``rooms``: bytes that weights may take on each device of a map."""
        self.sent = 0.0
        """Bytes that leave a device in a micro-batch for those with which it shares its layers, tokens or blocks."""
        self.run = run = Weightless(config, model, heaviest)
        # Its chain, so that whoever comes last is the outermost, as in training.
        structure, dealing = replace(structure_of(run.family, run.denoiser), chain=run.chain), None
        if layout.parts > 1:
            TensorCut(0, layout.parts, self._add(layout.parts)).cut(run.denoiser, structure.cuts)
        if layout.contexts > 1:
            dealing = _Dealing(Imagined(layout.contexts, self._send), run.half)
            dealing.enter(run.denoiser, structure)
        if layout.stages > 1:
            self.stages = self._pipeline(layout, config, dealing)
        elif config.parallel.device_map is not None:
            places = places_of(run.denoiser, config.parallel.device_map, rooms)
            self.stages, self.sent = dealt(run, places, len(rooms))
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


class _Dealing(ContextCut):
    """Of tokens, where no device tells the precision of its autocast, and attention is a pretence."""

    def __init__(self, others: Imagined, half: torch.dtype | None):
        super().__init__(others)
        self._half = half

    def precision(self, given: Tensor) -> torch.dtype:
        return self._half or given.dtype

    def of_all(self, *given: Any, **more: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*given, **more)
