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
from .blocks import ParallelPlan
from .ulysses import (
    AllToAllGroup,
    TensorAndDependency,
    all_gather_tokens,
    all_gather_tokens_with_grad,
    create_dependency,
    scatter_heads_gather_tokens,
    scatter_tokens_gather_heads,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenMap:
    """Of streams that stand one behind the other; as tensors, whose lengths a compiler can take for what changes."""

    positions: Tensor
    """Where in all of them the tokens of this process stand."""
    owner_ranks: Tensor
    """The number of the process that has each, on the host; in the order in which processes send them."""


@dataclass(frozen=True)
class SequenceShards:
    """Which tokens of each stream, such as a text or a picture, are whose."""

    lengths: Mapping[str, int]
    rank: int
    size: int

    def compute_bounds(self, stream: str, rank: int) -> tuple[int, int]:
        """Where the part of a process begins, and where it ends."""
        length = self.lengths[stream]
        return length * rank // self.size, length * (rank + 1) // self.size

    def count_tokens_per_rank(self, streams: Sequence[str]) -> list[int]:
        """How many tokens of streams that stand one behind the other each process has."""
        ends = ([self.compute_bounds(stream, rank) for stream in streams] for rank in range(self.size))
        return [sum(end - start for start, end in each) for each in ends]

    def build_token_map(self, streams: Sequence[str], device: torch.device) -> "TokenMap":
        """Which of these streams' tokens are here, and who has which."""
        counts = torch.tensor(self.count_tokens_per_rank(streams))
        whose = torch.arange(self.size, dtype=torch.uint8).repeat_interleave(counts)
        return TokenMap(self.compute_token_positions(streams, device), whose)

    def compute_token_positions(self, streams: Sequence[str], device: torch.device) -> Tensor:
        """Where in the whole of these streams the tokens of this process stand; made there, for a copy would wait."""
        found, before = [], 0
        for stream in streams:
            start, end = self.compute_bounds(stream, self.rank)
            found.append(torch.arange(before + start, before + end, device=device))
            before += self.lengths[stream]
        return torch.cat(found)

    def slice_shard(self, tensor: Tensor, dim: int, streams: Sequence[str]) -> Tensor:
        """The part of this process in something that has a row for each token."""
        found, before = [], 0
        for stream in streams:
            start, end = self.compute_bounds(stream, self.rank)
            found.append(tensor.narrow(dim, before + start, end - start))
            before += self.lengths[stream]
        return torch.cat(found, dim=dim)


class ContextParallel:
    """This process's part of the tokens."""

    def __init__(self, group: AllToAllGroup, mark_dynamic: Callable[[Tensor], object] = lambda tensor: None):
        """``changes`` is told of tensors that get another length from time to time."""
        self.group, self.rank, self.size = group, group.rank, group.size
        self._mark_dynamic = mark_dynamic
        self._shards: SequenceShards | None = None
        """Of the latest forward; what is computed twice is computed again before another one."""
        self._token_maps: dict[tuple[str, ...], TokenMap] = {}

    def wrap_blocks(self, model: nn.Module, parallel_plan: ParallelPlan) -> None:
        """From now on the blocks of ``model`` are to be given a part of the tokens."""
        self.parallel_plan = parallel_plan
        each = ((name,) for name in parallel_plan.block_sequence.activation_args)
        self._stream_groups = {*each, *parallel_plan.layer_token_streams.values(), *self._list_attended_streams()}
        for block in parallel_plan.block_sequence.blocks:
            parallel_plan.block_sequence.hooks.wrap(block, partial(self._run_block, inspect.signature(block.forward)))
        for name, streams in parallel_plan.layer_token_streams.items():
            for down in getattr(model.get_submodule(name), "lora_A", {}).values():
                down.token_streams = streams  # asked in compiled code, where a module is not known by who it is

    def wrap_sequence_ends(self) -> None:
        """From now on the first block deals the tokens out, and behind the last all have all of them.

        Around whatever else was done to blocks: stages of a pipeline that do not run them go by here all the same.
        """
        first, last = self.parallel_plan.block_sequence.blocks[0], self.parallel_plan.block_sequence.blocks[-1]
        gates = self.parallel_plan.block_sequence.hooks
        gates.wrap(first, partial(self._scatter_tokens, inspect.signature(first.forward)))
        gates.wrap(last, self._gather_tokens)
        logger.info(
            "context parallel: %d processes share the tokens of a picture, this is number %d", self.size, self.rank + 1
        )

    def get_token_positions(self, lora_a: nn.Module) -> Tensor | None:
        """Which tokens a layer sees on this process, by the matrix that its adapter begins with."""
        streams: tuple[str, ...] | None = getattr(lora_a, "token_streams", None)
        return None if streams is None else self._token_maps[streams].positions

    @property
    def shards(self) -> SequenceShards:
        """Of what is computed now."""
        if self._shards is None:
            raise AssertionError("no block has run")
        return self._shards

    def _scatter_tokens(
        self, signature: inspect.Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        given, flow = bound.arguments, self.parallel_plan.block_sequence.activation_args
        shares = SequenceShards({name: given[name].shape[1] for name in flow}, self.rank, self.size)
        if shares != self._shards:
            device = given[flow[0]].device
            self._shards = shares
            self._token_maps = {streams: shares.build_token_map(streams, device) for streams in self._stream_groups}
        for tokens in self._token_maps.values():
            self._mark_dynamic(tokens.positions)
            self._mark_dynamic(tokens.owner_ranks)
        for name in flow:
            given[name] = self.shards.slice_shard(given[name], 1, (name,))
        return block_forward(*bound.args, **bound.kwargs)

    def _gather_tokens(self, block_forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        made = block_forward(*args, **kwargs)
        flow = made if isinstance(made, tuple) else (made,)
        found = tuple(
            None
            if each is None
            else all_gather_tokens_with_grad(each, 1, self._token_maps[name,].owner_ranks, self.group)
            for name, each in zip(self.parallel_plan.block_sequence.activation_args, flow, strict=True)
        )
        return found if isinstance(made, tuple) else found[0]

    def _run_block(
        self, signature: inspect.Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for name, kinds in self.parallel_plan.block_token_args.items():
            if given.get(name) is not None:
                given[name] = self._slice_argument(given[name], kinds)
        with _AttentionOverride(self.compute_sharded_attention) as attention:
            made = block_forward(*bound.args, **bound.kwargs)
        if not attention.calls:
            raise UserError(
                f"--cp_size {self.size}: a block computed its attention in a way that cannot be shared; is"
                " DIFFUSERS_ATTN_BACKEND set? unset it"
            )
        return made

    def _slice_argument(self, argument: Any, token_axes: Sequence[tuple[int, Sequence[str]]]) -> Any:
        if isinstance(argument, Tensor):
            ((axis, streams),) = token_axes
            return self.shards.slice_shard(argument, axis, streams)
        return tuple(
            self.shards.slice_shard(each, axis, streams)
            for each, (axis, streams) in zip(argument, token_axes, strict=True)
        )

    def compute_sharded_attention(
        self,
        dependency: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> TensorAndDependency:
        """That of all tokens, in some of the heads, and from there in all heads of this process's tokens."""
        # Autocast would do it a moment later, after more had travelled.
        query, key, value = (each.to(self.get_attention_dtype(each)) for each in (query, key, value))
        dependency = create_dependency(query) if dependency is None else dependency
        own = query.shape[-2]
        whose = self._find_token_map(own).owner_ranks
        if attn_mask is not None:
            attn_mask, dependency = all_gather_tokens(attn_mask, -1, dependency, whose, self.group)
        every, dependency = scatter_heads_gather_tokens(torch.stack((query, key, value)), dependency, whose, self.group)
        query, key, value = every.unbind()
        said = self.compute_full_attention(query, key, value, attn_mask, **kwargs)
        return scatter_tokens_gather_heads(said, own, dependency, whose, self.group)

    def compute_full_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attention as it is; under a name by which it is not caught again where a compiled block calls it."""
        said: Tensor = torch.ops.aten.scaled_dot_product_attention(*args, **kwargs)
        return said

    def get_attention_dtype(self, tensor: Tensor) -> torch.dtype:
        """In which attention is computed."""
        kind = tensor.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype

    def _list_attended_streams(self) -> tuple[tuple[str, ...], ...]:
        """All streams together, or the picture, which may look at itself alone."""
        flow = self.parallel_plan.block_sequence.activation_args
        return flow, flow[-1:]

    def _find_token_map(self, local_tokens: int) -> TokenMap:
        for streams in self._list_attended_streams():
            tokens = self._token_maps[streams]
            if tokens.positions.shape[0] == local_tokens:
                return tokens
        raise AssertionError(f"attention over {local_tokens} tokens, of {self._shards}")


class _AttentionOverride(TorchFunctionMode):
    """Inside, torch's attention is another one, however a model comes to call it."""

    def __init__(self, attention: Callable[..., TensorAndDependency]):
        super().__init__()
        self._attention, self.calls = attention, 0
        self._dependency: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            self.calls += 1
            said, self._dependency = self._attention(self._dependency, *args, **(kwargs or {}))
            return said
        if function is Tensor.unflatten:  # which dynamo knows as a method only
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))
