"""The tokens of a picture and of its text dealt out to several processes while they go through the blocks.

Everything in a block but attention looks at one token at a time.  For attention each process gives its tokens away
for all tokens of some of the heads, and gets them back afterwards (Ulysses).  What comes before and behind the blocks
is computed on all processes.  What a process finds as a gradient is what its own tokens say, as many times as there
are processes: the mean over them is the gradient.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from .chain import gate
from .structure import Structure
from .token_exchange import Others, whole, with_all_heads, with_all_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shares:
    """Which tokens of each stream, such as a text or a picture, are whose."""

    lengths: Mapping[str, int]
    rank: int
    size: int

    def bounds(self, stream: str, rank: int) -> tuple[int, int]:
        """Where the part of a process begins, and where it ends."""
        length = self.lengths[stream]
        return length * rank // self.size, length * (rank + 1) // self.size

    def counts(self, streams: Sequence[str]) -> list[int]:
        """How many tokens of streams that stand one behind the other each process has."""
        ends = ([self.bounds(stream, rank) for stream in streams] for rank in range(self.size))
        return [sum(end - start for start, end in each) for each in ends]

    def places(self, streams: Sequence[str]) -> list[int]:
        """Where in the whole of these streams the tokens of this process stand."""
        found: list[int] = []
        before = 0
        for stream in streams:
            start, end = self.bounds(stream, self.rank)
            found += range(before + start, before + end)
            before += self.lengths[stream]
        return found

    def of(self, given: Tensor, axis: int, streams: Sequence[str]) -> Tensor:
        """The part of this process in something that has a row for each token."""
        found, before = [], 0
        for stream in streams:
            start, end = self.bounds(stream, self.rank)
            found.append(given.narrow(axis, before + start, end - start))
            before += self.lengths[stream]
        return torch.cat(found, dim=axis)


class ContextCut:
    """This process's part of the tokens."""

    def __init__(self, others: Others, *, compiles: bool):
        self.others, self.rank, self.size = others, others.rank, others.size
        # Processes wait for each other in there, which no compiler is to put into another order.
        uncompiled: Any = torch.compiler.disable
        self.attention: Callable[..., Tensor] = uncompiled(self._attention) if compiles else self._attention
        self._shares: Shares | None = None
        """Of the latest forward; what is computed twice is computed again before another one."""
        self._streams: dict[nn.Module, tuple[str, ...]] = {}
        self._places: dict[tuple[str, ...], Tensor] = {}

    def enter(self, model: nn.Module, structure: Structure) -> None:
        """From now on the blocks of ``model`` are to be given a part of the tokens."""
        self.structure = structure
        for block in structure.chain.blocks:
            gate(block, partial(self._inside, inspect.signature(block.forward)))
        for name, streams in structure.layer_tokens.items():
            for down in getattr(model.get_submodule(name), "lora_A", {}).values():
                self._streams[down] = streams

    def enclose(self) -> None:
        """From now on the first block deals the tokens out, and behind the last all have all of them.

        Around whatever else was done to blocks: stages of a pipeline that do not run them go by here all the same.
        """
        first, last = self.structure.chain.blocks[0], self.structure.chain.blocks[-1]
        gate(first, partial(self._deal, inspect.signature(first.forward)))
        gate(last, self._collect)
        logger.info("context parallel: %d processes share the tokens of a picture, this is number %d", self.size,
                    self.rank + 1)  # fmt: skip

    def places(self, down: nn.Module) -> Tensor | None:
        """Which tokens a layer sees on this process, by the matrix that its adapter begins with."""
        streams = self._streams.get(down)
        if streams is None:
            return None
        if streams not in self._places:
            device = next(down.parameters()).device
            self._places[streams] = torch.tensor(self.shares.places(streams), device=device)
        return self._places[streams]

    @property
    def shares(self) -> Shares:
        """Of what is computed now."""
        if self._shares is None:
            raise AssertionError("no block has run")
        return self._shares

    def _deal(self, signature: inspect.Signature, run: Callable[..., Any], args: Any, named: Any) -> Any:
        bound = signature.bind(*args, **named)
        given, flow = bound.arguments, self.structure.chain.flow
        shares = Shares({name: given[name].shape[1] for name in flow}, self.rank, self.size)
        if shares != self._shares:
            self._shares, self._places = shares, {}
        for name in flow:
            given[name] = self.shares.of(given[name], 1, (name,))
        return run(*bound.args, **bound.kwargs)

    def _collect(self, run: Callable[..., Any], args: Any, named: Any) -> Any:
        made = run(*args, **named)
        flow = made if isinstance(made, tuple) else (made,)
        found = tuple(None if each is None else whole(each, 1, self.shares.counts([name]), self.others)
                      for name, each in zip(self.structure.chain.flow, flow, strict=True))  # fmt: skip
        return found if isinstance(made, tuple) else found[0]

    def _inside(self, signature: inspect.Signature, run: Callable[..., Any], args: Any, named: Any) -> Any:
        bound = signature.bind(*args, **named)
        given = bound.arguments
        for name, kinds in self.structure.block_tokens.items():
            if given.get(name) is not None:
                given[name] = self._part(given[name], kinds)
        with _Attention(self.attention) as attention:
            made = run(*bound.args, **bound.kwargs)
        if not attention.calls:
            raise UserError(f"--cp_size {self.size}: a block computed its attention in a way that cannot be shared; is"
                            " DIFFUSERS_ATTN_BACKEND set? unset it")  # fmt: skip
        return made

    def _part(self, given: Any, kinds: Sequence[tuple[int, Sequence[str]]]) -> Any:
        if isinstance(given, Tensor):
            ((axis, streams),) = kinds
            return self.shares.of(given, axis, streams)
        return tuple(self.shares.of(each, axis, streams) for each, (axis, streams) in zip(given, kinds, strict=True))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                   **more: Any) -> Tensor:  # fmt: skip
        """That of all tokens, in some of the heads, and from there in all heads of this process's tokens."""
        # Autocast would do it a moment later, after more had travelled.
        query, key, value = (each.to(self.precision(each)) for each in (query, key, value))
        counts = self._counts(query.shape[-2])
        if attn_mask is not None:
            attn_mask = whole(attn_mask, attn_mask.dim() - 1, counts, self.others)
        every = with_all_tokens(torch.stack((query, key, value)), counts, self.others)
        query, key, value = every.unbind()
        said = functional.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        return with_all_heads(said, counts, self.others)

    def precision(self, given: Tensor) -> torch.dtype:
        """In which attention is computed."""
        kind = given.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype

    def _counts(self, own: int) -> list[int]:
        """Of all streams together, or of the picture, which may look at itself alone."""
        flow = self.structure.chain.flow
        for streams in (flow, flow[-1:]):
            counts = self.shares.counts(streams)
            if counts[self.rank] == own:
                return counts
        raise AssertionError(f"attention over {own} tokens, of {self.shares}")


class _Attention(TorchFunctionMode):
    """Inside, torch's attention is another one, however a model comes to call it."""

    def __init__(self, other: Callable[..., Tensor]):
        super().__init__()
        self._other, self.calls = other, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            self.calls += 1
            return self._other(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
