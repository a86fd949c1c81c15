"""LoRA dropout: of activations, of ranks, and of whole modules.

It is stateless: each random number is a hash of the sample's key, the module and the element, so it is the same
on every device, for any partition of the batch, and however far texts are padded (``token_layout``).  torch's dropout
draws from a global generator per batch.
"""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from .token_layout import PLAIN_LAYOUT, ShardedTokens, TokenLayout

_UINT32_MASK = 0xFFFFFFFF
SEQUENCE_NDIM = 3
"""Dimensions of activations with a token axis."""


class LoraDropout:
    """Dropout, rank dropout and module dropout on the outputs of lora_A, while the model is in training mode."""

    def __init__(
        self,
        dropout: float,
        rank_dropout: float,
        module_dropout: float,
        get_sharded_tokens: Callable[[nn.Module], ShardedTokens | None] | None = None,
    ):
        self.dropout, self.rank_dropout, self.module_dropout = dropout, rank_dropout, module_dropout
        self.sample_keys: Tensor | None = None
        """One number per sample of the batch; None disables dropout."""
        self.get_sharded_tokens = get_sharded_tokens or (lambda lora_a: None)
        """Which tokens of the sequence a layer sees, where context parallelism shards it."""
        self.text_lengths: dict[str, Tensor] = {}
        """The padded lengths of the texts in the latest forward of the denoiser, by argument."""

    def attach(self, down_layers: Iterable[nn.Module], layouts: Iterable[TokenLayout] = ()) -> None:
        """Register the forward hooks; a lora_A that modules share gets one hook.

        ``layouts`` are those of the layers' activations; without them all are (batch, tokens, width).
        """
        pairs: Any = zip_longest(down_layers, layouts, fillvalue=PLAIN_LAYOUT)
        unique: dict[int, tuple[Any, TokenLayout]] = {id(down): (down, layout) for down, layout in pairs}
        for index, (down, layout) in enumerate(unique.values()):
            down.register_forward_hook(self._make_hook(torch.tensor(index), layout))

    def record_text_lengths(self, denoiser: nn.Module, arguments: Sequence[str]) -> None:
        """Record at each forward of the denoiser to how many tokens these texts (batch, tokens, ...) are padded."""
        forward_signature = signature(denoiser.forward)

        def record(_: nn.Module, args: Any, kwargs: Any) -> None:
            texts = forward_signature.bind(*args, **kwargs).arguments
            self.text_lengths = {
                name: torch.full((), texts[name].shape[1], device=texts[name].device) for name in arguments
            }

        denoiser.register_forward_pre_hook(record, with_kwargs=True)

    def _make_hook(self, layer_index: Tensor, layout: TokenLayout) -> Any:
        # A tensor: torch.compile would specialize on an int and compile every module anew.
        def apply_dropout(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if not module.training or self.sample_keys is None:
                return output
            if isinstance(module, nn.Conv2d):
                return self.apply(output, layer_index, axis=1)
            if output.dim() != SEQUENCE_NDIM:
                return self.apply(output, layer_index, axis=-1)
            output = output.transpose(0, layout.batch_axis)
            tokens = self._number_tokens(layout, output, self.get_sharded_tokens(module))
            return self.apply(output, layer_index, axis=-1, tokens=tokens).transpose(0, layout.batch_axis)

        return apply_dropout

    def _number_tokens(self, layout: TokenLayout, output: Tensor, shard: ShardedTokens | None) -> Tensor | None:
        """Number the tokens of activations (batch, tokens, rank); ``None``: by their positions."""
        if shard is not None:
            return layout.number_tokens(shard.positions.to(output.device), shard.num_tokens, self.text_lengths)
        if not layout.text_arguments:
            return None
        positions = torch.arange(output.shape[1], device=output.device)
        return layout.number_tokens(positions, output.shape[1], self.text_lengths)

    def apply(self, activations: Tensor, layer_index: int | Tensor, axis: int, tokens: Tensor | None = None) -> Tensor:
        """Apply dropout to activations (B, ..., rank), or (B, rank, height, width), whose rank axis is ``axis``.

        ``tokens`` are the numbers of the tokens of activations (B, tokens, rank), unless they count from 0.
        """
        if self.sample_keys is None:
            raise AssertionError("the samples have no keys")
        chunks, remainder = divmod(len(activations), len(self.sample_keys))  # long captions are encoded in chunks
        if remainder:
            raise AssertionError(f"{len(activations)} rows of {len(self.sample_keys)} samples")
        device, keys = activations.device, self.sample_keys.to(activations.device).repeat_interleave(chunks)
        if self.dropout:
            columns = torch.arange(activations[0].numel(), device=device)
            if tokens is not None:
                width = activations.shape[-1]
                columns = (tokens[:, None] * width + columns[:width]).flatten()
            mask = hash_to_uniform(keys, 3 * layer_index, columns).view(activations.shape) >= self.dropout
            activations = activations * mask / (1 - self.dropout)
        shape = [len(keys)] + [1] * (activations.dim() - 1)
        if self.module_dropout:  # not rescaled, as in sd-scripts
            uniform = hash_to_uniform(keys, 3 * layer_index + 1, torch.zeros_like(keys[:1])).view(shape)
            activations = activations * (uniform >= self.module_dropout)
        if self.rank_dropout:
            shape[axis] = activations.shape[axis]
            columns = torch.arange(activations.shape[axis], device=device)
            mask = hash_to_uniform(keys, 3 * layer_index + 2, columns).view(shape) >= self.rank_dropout
            activations = activations * mask / (1 - self.rank_dropout)
        return activations


def hash_to_uniform(keys: Tensor, stream: int | Tensor, columns: Tensor) -> Tensor:
    """Uniform numbers (B, columns) in [0, 1), each a function of the row's key, the stream and the column."""
    rows = _mix_bits(_mix_bits(keys & _UINT32_MASK) + (keys >> 32 & _UINT32_MASK) + stream * 0x9E3779B1)
    return _mix_bits(rows[:, None] + columns * 0x85EBCA6B).float().div(2**32).clamp_max(1 - 2**-24)


def _mix_bits(values: Tensor) -> Tensor:
    """A 32-bit integer hash; int64 products may overflow, but their low 32 bits are right."""
    values = values & _UINT32_MASK
    values = (values ^ values >> 16) * 0x7FEB352D & _UINT32_MASK
    values = (values ^ values >> 15) * 0x846CA68B & _UINT32_MASK
    return values ^ values >> 16
