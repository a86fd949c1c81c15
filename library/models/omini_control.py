"""OminiControl on FLUX.1: condition images are further tokens of the same transformer, with LoRA on them alone.

Text and image tokens pass through the base weights at their timestep.  Condition tokens pass through the same layers
with LoRA, at timestep 0 and guidance 1, and never pass to the output: they act through the keys and values that image
and text attend to.  diffusers' transformer has one modulation and one set of weights for all tokens of a block, so its
blocks get forwards of their own here; without condition tokens they are diffusers'.  The classes have diffusers' names,
by which FSDP, block swap and regional compilation know them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn

from ..adapters.injection import bypass_lora

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values (B, tokens, heads, channels) of some tokens."""

KeysAndValues = dict[nn.Module, tuple[Tensor, Tensor]]
"""Keys and values of all condition tokens, by attention module."""


@dataclass(frozen=True)
class Conditions:
    """The way the condition tokens of a forward pass attend; their tensors are arguments of the blocks."""

    lengths: tuple[int, ...]
    """Number of tokens of each condition image."""
    scale: float = 1.0
    """Factor of the attention weights between condition tokens and the others; 0: they do not see each other."""
    is_independent: bool = False
    """Whether condition tokens attend to themselves alone, so that their keys and values stay the same."""
    stored: KeysAndValues | None = None
    """The cache in which keys and values are stored, if it is empty, or from which they are taken."""


@dataclass
class ConditionCache:
    """Keys and values of independent conditions during the sampling of one image, for each text."""

    entries: list[tuple[Tensor, KeysAndValues]] = field(default_factory=list)

    def find(self, pooled: Tensor) -> KeysAndValues:
        """Return the entry of this pooled text, which is part of the modulation; an empty one if it is new."""
        for known, stored in self.entries:
            if known.shape == pooled.shape and torch.equal(known, pooled):
                return stored
        self.entries.append((pooled, {}))
        return self.entries[-1][1]


def add_condition_branch(transformer: Any) -> None:
    """Let the transformer and its blocks take condition tokens; their names and weights stay as they are."""
    transformer.__class__ = FluxTransformer2DModel
    for block in transformer.transformer_blocks:
        block.__class__ = FluxTransformerBlock
    for block in transformer.single_transformer_blocks:
        block.__class__ = FluxSingleTransformerBlock


def _project(attn: Any, tokens: Tensor, rotary: Any, prefix: str = "to_") -> Heads:
    """Project tokens to queries, keys and values, with the positions ``rotary``; ``add_`` is the text's projection."""
    names = ("to_q", "to_k", "to_v") if prefix == "to_" else ("add_q_proj", "add_k_proj", "add_v_proj")
    query, key, value = (getattr(attn, name)(tokens).unflatten(-1, (-1, attn.head_dim)) for name in names)
    norms = (attn.norm_q, attn.norm_k) if prefix == "to_" else (attn.norm_added_q, attn.norm_added_k)
    rotate: Any = apply_rotary_emb
    query, key = (rotate(norm(part), rotary, sequence_dim=1) for norm, part in zip(norms, (query, key), strict=True))
    return query, key, value


def _attend(attn: Any, query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], biases: Sequence[float]) -> Tensor:
    """Attend to the keys and values of several groups of tokens, the weights of each multiplied by exp(bias)."""
    key, value = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    mask = None
    if any(biases):
        rows = [query.new_full((keys.shape[1],), bias) for (keys, _), bias in zip(parts, biases, strict=True)]
        mask = torch.cat(rows)[None, None, None, :].expand(1, 1, query.shape[1], -1)
    result = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=attn.processor._attention_backend)
    return result.flatten(2, 3).to(query.dtype)


def _attend_all(
    attn: Any, main: Heads, condition: Heads | None, conditions: Conditions, is_last: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention of text and image tokens, and of condition tokens unless nothing reads it."""
    stored, bias = conditions.stored, math.log(conditions.scale) if conditions.scale else -math.inf
    if condition is not None and stored is not None:
        stored[attn] = condition[1:]
    keys_and_values = condition[1:] if condition is not None else (stored or {})[attn]
    output = _attend(attn, main[0], [main[1:], keys_and_values], [0.0, bias])
    if condition is None or is_last:
        return output, None
    outputs = []
    for query, key, value in zip(*(torch.split(part, [*conditions.lengths], dim=1) for part in condition), strict=True):
        others = [] if conditions.is_independent else [main[1:]]
        outputs.append(_attend(attn, query, [*others, (key, value)], [bias] * len(others) + [0.0]))
    return output, torch.cat(outputs, dim=1)


class FluxTransformerBlock(transformer_flux.FluxTransformerBlock):
    """A double-stream block with a third stream of condition tokens, through the layers of the image stream."""

    attn: Any
    ff: Any
    ff_context: Any
    norm1: Any
    norm1_context: Any
    norm2: Any
    norm2_context: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        condition_states: Tensor | None = None,
        condition_temb: Tensor | None = None,
        condition_rotary_emb: Any = None,
        conditions: Conditions | None = None,
        is_last: bool = False,
    ) -> Any:
        """Return text, image and condition tokens; the last are None where their keys and values were stored."""
        if conditions is None:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn, num_text = self.attn, encoder_hidden_states.shape[1]
        text_rotary, rotary = ([part[rows] for part in image_rotary_emb] for rows in _split_rows(num_text))
        condition, gates, condition_heads = None, (), None
        if condition_states is not None:
            condition, *gates = self.norm1(condition_states, emb=condition_temb)
            condition_heads = _project(attn, condition, condition_rotary_emb)
        with bypass_lora(self.norm1.linear, attn.to_q, attn.to_k, attn.to_v):
            image, *image_gates = self.norm1(hidden_states, emb=temb)
            image_heads = _project(attn, image, rotary)
        text, *text_gates = self.norm1_context(encoder_hidden_states, emb=temb)
        text_heads = _project(attn, text, text_rotary, "add_")
        joined = tuple(torch.cat(parts, dim=1) for parts in zip(text_heads, image_heads, strict=True))
        output, condition_output = _attend_all(attn, joined, condition_heads, conditions)  # type: ignore[arg-type]
        text_output, image_output = output[:, :num_text], output[:, num_text:]
        encoder_hidden_states = encoder_hidden_states + text_gates[0].unsqueeze(1) * attn.to_add_out(text_output)
        encoder_hidden_states = _add_mlp(encoder_hidden_states, text_gates, self.norm2_context, self.ff_context)
        with bypass_lora(attn.to_out[0], self.ff.net[0].proj, self.ff.net[2]):
            hidden_states = self._add_outputs(hidden_states, image_output, image_gates)
        if condition_states is not None and condition_output is not None:
            condition_states = self._add_outputs(condition_states, condition_output, gates)
        return encoder_hidden_states, hidden_states, condition_states

    def _add_outputs(self, states: Tensor, attention_output: Tensor, gates: Sequence[Tensor]) -> Tensor:
        projected = self.attn.to_out[1](self.attn.to_out[0](attention_output))
        return _add_mlp(states + gates[0].unsqueeze(1) * projected, gates, self.norm2, self.ff)


def _split_rows(count: int) -> tuple[slice, slice]:
    return slice(None, count), slice(count, None)


def _add_mlp(states: Tensor, gates: Sequence[Tensor], norm: nn.Module, mlp: nn.Module) -> Tensor:
    _, shift, scale, gate = gates
    result: Tensor = states + gate.unsqueeze(1) * mlp(norm(states) * (1 + scale[:, None]) + shift[:, None])
    return _clip_half(result)


def _clip_half(states: Tensor) -> Tensor:
    return states.clip(-65504, 65504) if states.dtype == torch.float16 else states


class FluxSingleTransformerBlock(transformer_flux.FluxSingleTransformerBlock):
    """A single-stream block in which condition tokens have LoRA and a modulation of their own."""

    attn: Any
    norm: Any
    proj_mlp: Any
    act_mlp: Any
    proj_out: Any

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        condition_states: Tensor | None = None,
        condition_temb: Tensor | None = None,
        condition_rotary_emb: Any = None,
        conditions: Conditions | None = None,
        is_last: bool = False,
    ) -> Any:
        """Return text, image and condition tokens; nothing reads the condition tokens of the last block."""
        if conditions is None:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn, num_text = self.attn, encoder_hidden_states.shape[1]
        condition, gate, heads = None, None, None
        if condition_states is not None:
            condition, gate = self.norm(condition_states, emb=condition_temb)
            heads = _project(attn, condition, condition_rotary_emb)
        states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        with bypass_lora(self.norm.linear, self.proj_mlp, self.proj_out, attn.to_q, attn.to_k, attn.to_v):
            normed, main_gate = self.norm(states, emb=temb)
            main = _project(attn, normed, image_rotary_emb)
            output, condition_output = _attend_all(attn, main, heads, conditions, is_last)
            states = self._add_outputs(states, normed, output, main_gate)
        if condition_states is not None and condition_output is not None:
            condition_states = self._add_outputs(condition_states, condition, condition_output, gate)
        return states[:, :num_text], states[:, num_text:], condition_states

    def _add_outputs(self, states: Tensor, normed: Any, attention_output: Any, gate: Any) -> Tensor:
        joined = torch.cat([attention_output, self.act_mlp(self.proj_mlp(normed))], dim=2)
        return _clip_half(states + gate.unsqueeze(1) * self.proj_out(joined))


class FluxTransformer2DModel(transformer_flux.FluxTransformer2DModel):
    """FLUX.1 with condition tokens, which come as ``control`` in ``joint_attention_kwargs``, also from pipelines."""

    x_embedder: Any
    context_embedder: Any
    time_text_embed: Any
    pos_embed: Any
    transformer_blocks: Any
    single_transformer_blocks: Any
    norm_out: Any
    proj_out: Any
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run diffusers' forward, or the same with condition tokens."""
        attention_kwargs = dict(kwargs.pop("joint_attention_kwargs", None) or {})
        control = attention_kwargs.pop("control", None)
        if control is None:  # LoRA is for condition tokens
            with bypass_lora(*self.modules()):
                forward: Any = super().forward
                return forward(hidden_states, *args, joint_attention_kwargs=attention_kwargs or None, **kwargs)
        return self._forward_conditioned(hidden_states, control, **kwargs)

    def _forward_conditioned(
        self,
        hidden_states: Tensor,
        control: Mapping[str, Any],
        timestep: Tensor,
        pooled_projections: Tensor,
        encoder_hidden_states: Tensor,
        txt_ids: Tensor,
        img_ids: Tensor,
        guidance: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        stored = control["cache"].find(pooled_projections) if "cache" in control else None
        conditions = Conditions(control["lengths"], control["scale"], control["is_independent"], stored)
        with bypass_lora(self.x_embedder):
            hidden_states = self.x_embedder(hidden_states)
        dtype = hidden_states.dtype
        temb = self._embed_time(timestep.to(dtype) * 1000, guidance, pooled_projections)
        rotary = self.pos_embed(torch.cat((txt_ids, img_ids), dim=0))
        states, condition_temb, condition_rotary = None, None, None
        if not stored:
            states = self.x_embedder(control["tokens"].to(dtype))
            one = None if guidance is None else torch.ones_like(guidance)
            condition_temb = self._embed_time(torch.zeros_like(timestep), one, pooled_projections)
            condition_rotary = self.pos_embed(control["ids"])
        text = self.context_embedder(encoder_hidden_states)
        last = self.single_transformer_blocks[-1]
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            condition = (states, condition_temb, condition_rotary, conditions, block is last)
            arguments = (hidden_states, text, temb, rotary, None, *condition)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                text, hidden_states, states = self._gradient_checkpointing_func(block, *arguments)
            else:
                text, hidden_states, states = block(*arguments)
        output = self.proj_out(self.norm_out(hidden_states, temb))
        return (output,)

    def _embed_time(self, timestep: Tensor, guidance: Tensor | None, pooled: Tensor) -> Tensor:
        given = () if guidance is None else (guidance.to(timestep.dtype) * 1000,)
        result: Tensor = self.time_text_embed(timestep, *given, pooled)
        return result
