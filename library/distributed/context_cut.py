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
from .structure import Structure
from .token_exchange import Others, Tied, first_tie, gathered, whole, with_all_heads, with_all_tokens

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

    def tokens(self, streams: Sequence[str], device: torch.device) -> "Tokens":
        """Which of these streams' tokens are here, and who has which."""
        counts = torch.tensor(self.counts(streams))
        whose = torch.arange(self.size, dtype=torch.uint8).repeat_interleave(counts)
        return Tokens(self.places(streams, device), whose)

    def places(self, streams: Sequence[str], device: torch.device) -> Tensor:
        """Where in the whole of these streams the tokens of this process stand; made there, for a copy would wait."""
        found, before = [], 0
        for stream in streams:
            start, end = self.bounds(stream, self.rank)
            found.append(torch.arange(before + start, before + end, device=device))
            before += self.lengths[stream]
        return torch.cat(found)

    def of(self, given: Tensor, axis: int, streams: Sequence[str]) -> Tensor:
        """The part of this process in something that has a row for each token."""
        found, before = [], 0
        for stream in streams:
            start, end = self.bounds(stream, self.rank)
            found.append(given.narrow(axis, before + start, end - start))
            before += self.lengths[stream]
        return torch.cat(found, dim=axis)


@dataclass(frozen=True)
class Tokens:
    """Of streams that stand one behind the other; as tensors, whose lengths a compiler can take for what changes."""

    places: Tensor
    """Where in all of them the tokens of this process stand."""
    whose: Tensor
    """The number of the process that has each, on the host; in the order in which processes send them."""


class ContextCut:
    """This process's part of the tokens."""

    def __init__(self, others: Others, changes: Callable[[Tensor], object] = lambda tensor: None):
        """``changes`` is told of tensors that get another length from time to time."""
        self.others, self.rank, self.size = others, others.rank, others.size
        self._changes = changes
        self._shares: Shares | None = None
        """Of the latest forward; what is computed twice is computed again before another one."""
        self._tokens: dict[tuple[str, ...], Tokens] = {}

    def enter(self, model: nn.Module, structure: Structure) -> None:
        """From now on the blocks of ``model`` are to be given a part of the tokens."""
        self.structure = structure
        each = ((name,) for name in structure.chain.flow)
        self._combinations = {*each, *structure.layer_tokens.values(), *self._attended()}
        for block in structure.chain.blocks:
            structure.chain.gates.shut(block, partial(self._inside, inspect.signature(block.forward)))
        for name, streams in structure.layer_tokens.items():
            for down in getattr(model.get_submodule(name), "lora_A", {}).values():
                down.token_streams = streams  # asked in compiled code, where a module is not known by who it is

    def enclose(self) -> None:
        """From now on the first block deals the tokens out, and behind the last all have all of them.

        Around whatever else was done to blocks: stages of a pipeline that do not run them go by here all the same.
        """
        first, last = self.structure.chain.blocks[0], self.structure.chain.blocks[-1]
        gates = self.structure.chain.gates
        gates.shut(first, partial(self._deal, inspect.signature(first.forward)))
        gates.shut(last, self._collect)
        logger.info("context parallel: %d processes share the tokens of a picture, this is number %d", self.size,
                    self.rank + 1)  # fmt: skip

    def places(self, down: nn.Module) -> Tensor | None:
        """Which tokens a layer sees on this process, by the matrix that its adapter begins with."""
        streams: tuple[str, ...] | None = getattr(down, "token_streams", None)
        return None if streams is None else self._tokens[streams].places

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
            device = given[flow[0]].device
            self._shares = shares
            self._tokens = {streams: shares.tokens(streams, device) for streams in self._combinations}
        for tokens in self._tokens.values():
            self._changes(tokens.places)
            self._changes(tokens.whose)
        for name in flow:
            given[name] = self.shares.of(given[name], 1, (name,))
        return run(*bound.args, **bound.kwargs)

    def _collect(self, run: Callable[..., Any], args: Any, named: Any) -> Any:
        made = run(*args, **named)
        flow = made if isinstance(made, tuple) else (made,)
        found = tuple(None if each is None else whole(each, 1, self._tokens[name,].whose, self.others)
                      for name, each in zip(self.structure.chain.flow, flow, strict=True))  # fmt: skip
        return found if isinstance(made, tuple) else found[0]

    def _inside(self, signature: inspect.Signature, run: Callable[..., Any], args: Any, named: Any) -> Any:
        bound = signature.bind(*args, **named)
        given = bound.arguments
        for name, kinds in self.structure.block_tokens.items():
            if given.get(name) is not None:
                given[name] = self._part(given[name], kinds)
        with _Attention(self.attend) as attention:
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

    def attend(self, tie: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
               attn_mask: Tensor | None = None, **more: Any) -> Tied:  # fmt: skip
        """That of all tokens, in some of the heads, and from there in all heads of this process's tokens."""
        # Autocast would do it a moment later, after more had travelled.
        query, key, value = (each.to(self.precision(each)) for each in (query, key, value))
        tie = first_tie(query) if tie is None else tie
        own = query.shape[-2]
        whose = self._of_so_many(own).whose
        if attn_mask is not None:
            attn_mask, tie = gathered(attn_mask, -1, tie, whose, self.others)
        every, tie = with_all_tokens(torch.stack((query, key, value)), tie, whose, self.others)
        query, key, value = every.unbind()
        said = self.of_all(query, key, value, attn_mask, **more)
        return with_all_heads(said, own, tie, whose, self.others)

    def of_all(self, *given: Any, **more: Any) -> Tensor:
        """Attention as it is; under a name by which it is not caught again where a compiled block calls it."""
        said: Tensor = torch.ops.aten.scaled_dot_product_attention(*given, **more)
        return said

    def precision(self, given: Tensor) -> torch.dtype:
        """In which attention is computed."""
        kind = given.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype

    def _attended(self) -> tuple[tuple[str, ...], ...]:
        """All streams together, or the picture, which may look at itself alone."""
        flow = self.structure.chain.flow
        return flow, flow[-1:]

    def _of_so_many(self, own: int) -> Tokens:
        for streams in self._attended():
            tokens = self._tokens[streams]
            if tokens.places.shape[0] == own:
                return tokens
        raise AssertionError(f"attention over {own} tokens, of {self._shares}")


class _Attention(TorchFunctionMode):
    """Inside, torch's attention is another one, however a model comes to call it."""

    def __init__(self, other: Callable[..., Tied]):
        super().__init__()
        self._other, self.calls = other, 0
        self._tie: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            self.calls += 1
            said, self._tie = self._other(self._tie, *args, **(kwargs or {}))
            return said
        if function is Tensor.unflatten:  # which dynamo knows as a method only
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))
