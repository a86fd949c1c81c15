"""Context parallelism: the tokens of an image and its prompt sharded over ranks while they pass through the blocks.

All of a block but attention works on single tokens.  Attention exchanges tokens for heads and back (``ulysses``).
What comes before and after the blocks is computed on every rank.  A rank's gradient is that of its own tokens, times
the size of the group: the mean over the group is the gradient.

Tokens are sharded around the model's own forward, so one implementation serves every family and attention backend.
diffusers' engine has no plan for SD3 and Z-Image, and no backward for uneven numbers of tokens.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from ..problems import Problem
from .parallel_plan import ParallelPlan
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
    """The positions of the tokens of concatenated streams; tensors, whose lengths a compiler can treat as dynamic."""

    positions: Tensor
    """Positions of this rank's tokens in the concatenation."""
    owner_ranks: Tensor
    """CPU tensor with the owning rank of each token, in the order in which ranks send them."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the concatenation, on all ranks together."""
        return self.owner_ranks.shape[0]


@dataclass(frozen=True)
class SequenceShards:
    """The division of the tokens of each stream (text, image) among the ranks."""

    lengths: Mapping[str, int]
    rank: int
    size: int

    def compute_bounds(self, stream: str, rank: int) -> tuple[int, int]:
        """Return start and end of a rank's tokens."""
        length = self.lengths[stream]
        return length * rank // self.size, length * (rank + 1) // self.size

    def count_tokens_per_rank(self, streams: Sequence[str]) -> list[int]:
        bounds = ([self.compute_bounds(stream, rank) for stream in streams] for rank in range(self.size))
        return [sum(end - start for start, end in rank_bounds) for rank_bounds in bounds]

    def build_token_map(self, streams: Sequence[str], device: torch.device) -> "TokenMap":
        counts = torch.tensor(self.count_tokens_per_rank(streams))
        owner_ranks = torch.arange(self.size, dtype=torch.uint8).repeat_interleave(counts)
        return TokenMap(self.compute_token_positions(streams, device), owner_ranks)

    def compute_token_positions(self, streams: Sequence[str], device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens, created on the device: the host would wait for a copy."""
        positions, offset = [], 0
        for stream in streams:
            start, end = self.compute_bounds(stream, self.rank)
            positions.append(torch.arange(offset + start, offset + end, device=device))
            offset += self.lengths[stream]
        return torch.cat(positions)

    def slice_shard(self, tensor: Tensor, dim: int, streams: Sequence[str]) -> Tensor:
        """Slice this rank's tokens along ``dim``; a tensor that has not one entry for each is returned as it is."""
        if tensor.shape[dim] != sum(self.lengths[stream] for stream in streams):
            return tensor
        slices, offset = [], 0
        for stream in streams:
            start, end = self.compute_bounds(stream, self.rank)
            slices.append(tensor.narrow(dim, offset + start, end - start))
            offset += self.lengths[stream]
        return torch.cat(slices, dim=dim)


class ContextParallel:
    """Shards the tokens before the first block, exchanges them in attention, and gathers them after the last block."""

    def __init__(self, group: AllToAllGroup, mark_dynamic: Callable[[Tensor], object] = lambda tensor: None):
        """``mark_dynamic`` tells a compiler that the length of a tensor changes."""
        self.group, self.rank, self.size = group, group.rank, group.size
        self._mark_dynamic = mark_dynamic
        self._shards: SequenceShards | None = None
        """The shards of the latest forward, since activation checkpointing recomputes before the next forward."""
        self._token_maps: dict[tuple[str, ...], TokenMap] = {}

    def wrap_blocks(self, model: nn.Module, parallel_plan: ParallelPlan) -> None:
        """Wrap every block so that it runs on a shard of the tokens."""
        self.parallel_plan = parallel_plan
        sequence = parallel_plan.block_sequence
        single_streams = ((name,) for name in parallel_plan.token_streams)
        layer_streams = parallel_plan.layer_token_streams
        self._stream_groups = {*single_streams, *layer_streams.values(), *self._list_attended_streams()}
        for _, block in sequence.iter_places():
            sequence.hooks.wrap(block, partial(self._run_block, inspect.signature(block.forward)))
        for name, streams in layer_streams.items():
            for lora_a in getattr(model.get_submodule(name), "lora_A", {}).values():
                lora_a.token_streams = streams  # an attribute: compiled code cannot look a module up by identity

    def wrap_sequence_ends(self) -> None:
        """Shard the tokens at the first block and gather them at the last.

        Call it after all other wrapping of blocks: these hooks also run on pipeline stages without these blocks.
        """
        sequence = self.parallel_plan.block_sequence
        for blocks in (sequence.blocks, *sequence.other_experts):
            signature = inspect.signature(blocks[0].forward)
            sequence.hooks.wrap(blocks[0], partial(self._scatter_tokens, signature))
            sequence.hooks.wrap(blocks[-1], self._gather_tokens)
        logger.info(
            "context parallel: rank %d of %d, each with its part of the tokens of an image", self.rank, self.size
        )

    def get_sharded_tokens(self, lora_a: nn.Module) -> TokenMap | None:
        """Return which tokens an adapter's down matrix sees here; ``None``: all of them."""
        streams: tuple[str, ...] | None = getattr(lora_a, "token_streams", None)
        return None if streams is None else self._token_maps[streams]

    @property
    def shards(self) -> SequenceShards:
        """The shards of the current forward."""
        if self._shards is None:
            raise AssertionError("no block has run")
        return self._shards

    def _scatter_tokens(
        self, signature: inspect.Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments, streams = bound.arguments, self.parallel_plan.token_streams
        shards = SequenceShards({name: arguments[name].shape[1] for name in streams}, self.rank, self.size)
        if shards != self._shards:
            device = arguments[streams[0]].device
            self._shards = shards
            self._token_maps = {group: shards.build_token_map(group, device) for group in self._stream_groups}
        for token_map in self._token_maps.values():
            self._mark_dynamic(token_map.positions)
            self._mark_dynamic(token_map.owner_ranks)
        for name in streams:
            arguments[name] = self.shards.slice_shard(arguments[name], 1, (name,))
        return block_forward(*bound.args, **bound.kwargs)

    def _gather_tokens(self, block_forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = block_forward(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        streams, names = self.parallel_plan.token_streams, self.parallel_plan.block_sequence.activation_args
        gathered = tuple(
            tensor
            if tensor is None or name not in streams
            else all_gather_tokens_with_grad(tensor, 1, self._token_maps[name,].owner_ranks, self.group)
            for name, tensor in zip(names, outputs, strict=True)
        )
        return gathered if isinstance(output, tuple) else gathered[0]

    def _run_block(
        self, signature: inspect.Signature, block_forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        plan = self.parallel_plan
        for name, token_axes in plan.block_token_args.items():
            value, num_axes = arguments.get(name), plan.token_arg_dims.get(name)
            if value is not None and num_axes in (None, getattr(value, "ndim", None)):
                arguments[name] = self._slice_argument(value, token_axes)
        skipped = {
            call for name, calls in plan.skipped_attention_calls.items() if arguments.get(name) for call in calls
        }
        calls = (renumber_calls(each, skipped) for each in (plan.text_attention_calls, plan.gathered_attention_calls))
        with _AttentionOverride(self, *calls) as attention:
            output = block_forward(*bound.args, **bound.kwargs)
        if not attention.calls:
            raise UserError(
                Problem(
                    "cp_size",
                    "attention did not go through scaled_dot_product_attention, so its tokens cannot be sharded",
                    "unset DIFFUSERS_ATTN_BACKEND if it is set",
                    value=str(self.size),
                )
            )
        return output

    def _slice_argument(self, argument: Any, token_axes: Sequence[tuple[int, Sequence[str]]]) -> Any:
        if isinstance(argument, Tensor):
            ((axis, streams),) = token_axes
            return self.shards.slice_shard(argument, axis, streams)
        return tuple(
            self.shards.slice_shard(tensor, axis, streams)
            for tensor, (axis, streams) in zip(argument, token_axes, strict=True)
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
        """Attention over all tokens with this rank's heads; return all heads of this rank's tokens."""
        # Cast before the exchange to send less: autocast would do it right afterwards.
        query, key, value = (tensor.to(self.get_attention_dtype(tensor)) for tensor in (query, key, value))
        dependency = create_dependency(query) if dependency is None else dependency
        local_tokens = query.shape[-2]
        owner_ranks = self._find_token_map(local_tokens).owner_ranks
        if attn_mask is not None:
            attn_mask, dependency = all_gather_tokens(attn_mask, -1, dependency, owner_ranks, self.group)
        qkv = torch.stack((query, key, value))
        qkv, dependency = scatter_heads_gather_tokens(qkv, dependency, owner_ranks, self.group)
        query, key, value = qkv.unbind()
        output = self.compute_full_attention(query, key, value, attn_mask, **kwargs)
        return scatter_tokens_gather_heads(output, local_tokens, dependency, owner_ranks, self.group)

    def compute_gathered_attention(
        self,
        dependency: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> TensorAndDependency:
        """Attention of queries that every rank has, to all tokens; every rank computes all of it.

        A rank's gradient is that of what it goes on with, so those of the tokens are summed over the ranks.
        """
        query, key, value = (tensor.to(self.get_attention_dtype(tensor)) for tensor in (query, key, value))
        dependency = create_dependency(query) if dependency is None else dependency
        owner_ranks = self._find_token_map(key.shape[-2]).owner_ranks
        gathered, dependency = all_gather_tokens(torch.stack((key, value)), -2, dependency, owner_ranks, self.group)
        key, value = gathered.unbind()
        return self.compute_full_attention(query, key, value, attn_mask, **kwargs), dependency

    def compute_full_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call torch's attention by its aten name, which the override does not catch again in a compiled block."""
        output: Tensor = torch.ops.aten.scaled_dot_product_attention(*args, **kwargs)
        return output

    def get_attention_dtype(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which attention is computed under autocast."""
        device = tensor.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype

    def _list_attended_streams(self) -> tuple[tuple[str, ...], ...]:
        """Attention is over all streams together, or over the image alone (SD3's dual attention)."""
        streams = self.parallel_plan.token_streams
        return streams, streams[-1:]

    def _find_token_map(self, local_tokens: int) -> TokenMap:
        for streams in self._list_attended_streams():
            token_map = self._token_maps[streams]
            if token_map.positions.shape[0] == local_tokens:
                return token_map
        raise AssertionError(f"attention over {local_tokens} tokens, of {self._shards}")


def renumber_calls(calls: Sequence[int], skipped: Collection[int]) -> tuple[int, ...]:
    """Return the indices that calls have where the ``skipped`` ones are left out."""
    return tuple(call - sum(each < call for each in skipped) for call in calls if call not in skipped)


class _AttentionOverride(TorchFunctionMode):
    """Replaces ``scaled_dot_product_attention``, however a model comes to call it."""

    def __init__(self, context_parallel: ContextParallel, text_calls: Sequence[int], gathered_calls: Sequence[int]):
        super().__init__()
        self._attention = context_parallel.compute_sharded_attention
        self._gathered_attention = context_parallel.compute_gathered_attention
        self._text_calls, self._gathered_calls, self.calls = text_calls, gathered_calls, 0
        self._dependency: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            self.calls += 1
            if self.calls - 1 in self._text_calls:  # every rank has the whole text, and its own tokens of the image
                return function(*args, **(kwargs or {}))
            attention = self._gathered_attention if self.calls - 1 in self._gathered_calls else self._attention
            output, self._dependency = attention(self._dependency, *args, **(kwargs or {}))
            return output
        if function is Tensor.unflatten:  # which dynamo supports as a method only
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))
