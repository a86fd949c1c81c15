"""The ``ParallelPlan``: how a denoiser can be split, by its blocks, linear layers and tokens.

Pipeline and context parallelism split only the blocks.  Everything before and after them (embeddings, final norm) is
small and runs on every rank, in the model's own ``forward``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ..models.base import Family
from ..registry import copy_class_name

TEXT_LAYER_PATTERN = re.compile(r"\.(add_[qkv]_proj|to_add_out|ff_context|norm1_context|txt_)")
COLWISE_PATTERN = re.compile(
    r"\.(to_[qkv]|to_(query|key|value)|add_[qkv]_proj|proj_mlp|w1|w3|net\.0\.proj|feed_forward\.in_layer)$"
)
ROWWISE_PATTERN = re.compile(r"\.(to_out\.0|to_add_out|w2|net\.2|feed_forward\.out_layer)$|att(entio)?n\.out_layer$")
QUERY_PATTERN = re.compile(r"\.(to_q|to_query|img_attn_qkv)$")
"""The layers of an attention's queries: one in each attention whose heads are split."""

GATED_ACTIVATIONS = {"GEGLU", "SwiGLU"}
"""diffusers' activations whose projection holds the gate as well."""

Activations = tuple[Tensor, ...]
"""The arguments that a block passes to the next, in the order in which it returns them."""

BlockForward = Callable[..., Any]
BlockHook = Callable[[BlockForward, Any, Any], Any]
"""A function of the wrapped forward, args and kwargs that returns the output that the model sees."""


class BlockHooks:
    """Functions that replace the call of single blocks of one model, with the original forward as an argument."""

    def __init__(self) -> None:
        self._classes: dict[type, type] = {}
        self._forwards: dict[nn.Module, BlockForward] = {}

    def wrap(self, block: nn.Module, hook: BlockHook) -> None:
        """Call ``hook`` in place of the block; the hook added last is the outermost."""
        if block not in self._forwards:
            block_class = type(block)
            self._forwards[block] = partial(block_class.__call__, block)
            if block_class not in self._classes:
                self._classes[block_class] = self._make_hooked_class(block_class)
            block.__class__ = self._classes[block_class]
        forward = self._forwards[block]  # one object per block: activation checkpointing counts blocks by it
        self._forwards[block] = lambda *args, **kwargs: hook(forward, args, kwargs)

    def _make_hooked_class(self, block_class: type) -> type:
        # A subclass, not a replaced ``forward``: forward hooks of the block have to stay inside of the wrapped call.
        def call_hooked(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._forwards[block](*args, **kwargs)

        return copy_class_name(type("HookedBlock", (block_class,), {"__call__": call_hooked}), block_class)


@dataclass(frozen=True)
class BlockSequence:
    """Blocks in execution order, and the names of the arguments that each block returns for the next."""

    blocks: tuple[nn.Module, ...] = ()
    activation_args: tuple[str, ...] = ()
    hooks: BlockHooks = field(default_factory=BlockHooks, compare=False)
    other_experts: tuple[tuple[nn.Module, ...], ...] = ()
    """The blocks of the other experts of a model of several, as many as ``blocks``: a forward runs those of one."""

    @classmethod
    def from_lists(
        cls, model: nn.Module, block_lists: Sequence[str], activation_args: Sequence[str]
    ) -> "BlockSequence":
        """Build it from the names of the ``ModuleList`` attributes of the model, or of each of its experts."""
        first, *others = (
            tuple(block for name in block_lists for block in expert.get_submodule(name).children())
            for expert in name_experts(model).values()
        )
        return cls(first, tuple(activation_args), other_experts=tuple(others))

    def iter_places(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield all blocks with their places; a block of each expert has the same place."""
        for blocks in (self.blocks, *self.other_experts):
            yield from enumerate(blocks)

    def count_block_parameters(self) -> list[int]:
        """Count the parameters at each place."""
        counts = [0] * len(self.blocks)
        for index, block in self.iter_places():
            counts[index] += sum(parameter.numel() for parameter in block.parameters())
        return counts

    def collect_inputs(self, index: int, bound_arguments: BoundArguments, previous: Activations) -> Activations:
        """Return the input activations of a block; ``previous`` is the output of the block before it.

        Some blocks take fewer than others, as the single blocks of Bria FIBO, which get text and image as one.
        """
        return tuple(
            bound_arguments.arguments[name] for name in self.activation_args if name in bound_arguments.arguments
        )

    def run_block(
        self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations
    ) -> Activations:
        """Run a block of this stage on its bound arguments and return its output activations."""
        output = block_forward(*bound_arguments.args, **bound_arguments.kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        # The last block of a model may return None for the text stream, which nothing reads any more.
        passed = zip(outputs[: len(activations)], activations, strict=True)
        # Blocks for a control return more than they get: what other blocks add to their states.
        return (*(old if new is None else new for new, old in passed), *outputs[len(activations) :])

    def build_output(self, index: int, activations: Activations) -> Any:
        """Return the activations in the form in which the model expects a block's output."""
        return activations if len(activations) > 1 else activations[0]


@dataclass(frozen=True)
class UNetBlockSequence(BlockSequence):
    """The blocks of a UNet: activations are the next block's input, then the skip connections still to be consumed.

    The latest skip connection is last.
    """

    num_down_blocks: int = 0
    """The first blocks, which add skip connections; those after the mid block consume them."""

    @classmethod
    def from_unet(cls, unet: Any) -> "UNetBlockSequence":
        """Build it from a diffusers UNet."""
        return cls((*unet.down_blocks, unet.mid_block, *unet.up_blocks), num_down_blocks=len(unet.down_blocks))

    def collect_inputs(self, index: int, bound_arguments: BoundArguments, previous: Activations) -> Activations:
        # The model's own list of skip connections is incomplete on a pipeline stage, so ``previous`` carries them.
        hidden_states = bound_arguments.arguments["hidden_states"]
        return previous if index else (hidden_states, hidden_states)

    def run_block(
        self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations
    ) -> Activations:
        """Run a block on these activations instead of those that the model passed."""
        hidden_states, skips = activations[0], activations[1:]
        arguments = bound_arguments.arguments
        arguments["hidden_states"] = hidden_states
        if index > self.num_down_blocks:
            count = len(_get_submodules(self.blocks[index], "resnets"))
            skips, arguments["res_hidden_states_tuple"] = skips[:-count], skips[-count:]
            if skips and arguments.get("upsample_size") is not None:
                arguments["upsample_size"] = skips[-1].shape[2:]
        output = block_forward(*bound_arguments.args, **bound_arguments.kwargs)
        if index >= self.num_down_blocks:
            return (output, *skips)
        return (output[0], *skips, *output[1])

    def build_output(self, index: int, activations: Activations) -> Any:
        """Return as many skip connections as the model expects; it collects them, and no block reads them."""
        if index >= self.num_down_blocks:
            return activations[0]
        block = self.blocks[index]
        count = len(_get_submodules(block, "resnets")) + len(_get_submodules(block, "downsamplers"))
        return activations[0], activations[:1] * count


def _get_submodules(block: nn.Module, name: str) -> Any:
    return getattr(block, name, None) or ()


TensorParallelPlan = Mapping[str, tuple[str, tuple[int, ...]]]
"""The sharding of each layer, by name: ``colwise`` or ``rowwise``, and the sizes of fused parts, each sharded alone."""

TokenAxes = Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]
"""The token axis of each tensor in a block argument, and the streams (by activation name) concatenated there."""


@dataclass(frozen=True)
class ParallelPlan:
    """The parts by which a denoiser can be sharded: its blocks, its linear layers, and the places of tokens."""

    block_sequence: BlockSequence = field(default_factory=BlockSequence)
    tensor_parallel: TensorParallelPlan = field(default_factory=dict)
    unsharded_args: tuple[str, ...] = ()
    """The activations whose tokens every rank has whole."""
    sound_args: tuple[str, ...] = ()
    """The activations that have no part in the result of a batch without sound."""
    block_token_args: TokenAxes = field(default_factory=dict)
    """Block arguments with tokens besides the activations, which all have them along axis 1."""
    layer_token_streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The streams whose tokens pass through a layer, by layer name; other layers of blocks see the whole text."""
    token_arg_dims: Mapping[str, int] = field(default_factory=dict)
    """The axes of those ``block_token_args`` which have tokens only if they have as many axes."""
    text_attention_calls: tuple[int, ...] = ()
    """Indices of the attention calls in a block that attend to a text that is not an activation."""
    gathered_attention_calls: tuple[int, ...] = ()
    """Indices of the attention calls in which an activation with unsharded tokens attends to sharded ones."""
    skipped_attention_calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices of the attention calls that a block leaves out if this argument of it is true."""
    head_args: Mapping[str, int] = field(default_factory=dict)
    """The axis of the heads in the tensors of an argument of attention layers."""
    denoiser: nn.Module | None = None
    """The module to shard, of those that are trained; ``None``: all of them."""

    @property
    def token_streams(self) -> tuple[str, ...]:
        """The activations whose tokens are sharded."""
        return tuple(name for name in self.block_sequence.activation_args if name not in self.unsharded_args)


def name_experts(denoiser: nn.Module) -> dict[str, nn.Module]:
    """Map the prefix of its modules' names to each expert of a denoiser; most have a single one."""
    if not getattr(denoiser, "is_partly_idle", False):
        return {"": denoiser}
    return {f"{name}.": expert for name, expert in denoiser.named_children()}


def build_block_sequence(family: Family, denoiser: Any) -> BlockSequence:
    """Return the denoiser's blocks in the order in which they run."""
    facts = family.facts.blocks
    if facts.has_skip_connections:
        return UNetBlockSequence.from_unet(denoiser)
    return BlockSequence.from_lists(denoiser, facts.lists, facts.activation_args)


def list_split_attentions(names: Iterable[str]) -> set[str]:
    """List the attention modules whose heads are split, given the names of layers: those that have queries."""
    return {name.rpartition(".")[0] for name in names if QUERY_PATTERN.search(name)}


def build_parallel_plan(family: Family, denoiser: nn.Module) -> ParallelPlan:
    """Describe how the denoiser can be split over processes."""
    facts = family.facts.blocks
    return ParallelPlan(
        block_sequence=build_block_sequence(family, denoiser),
        unsharded_args=facts.unsharded_args,
        sound_args=facts.sound_args,
        tensor_parallel=build_tensor_parallel_plan(denoiser, facts.fused_layers),
        block_token_args=facts.token_args,
        token_arg_dims=facts.token_arg_dims,
        layer_token_streams=map_layer_token_streams(
            denoiser,
            facts.lists,
            [name for name in facts.activation_args if name not in facts.unsharded_args],
            facts.single_stream_lists,
            facts.text_attention_layers,
        ),
        text_attention_calls=facts.text_attention_calls,
        gathered_attention_calls=facts.gathered_attention_calls,
        skipped_attention_calls=facts.skipped_attention_calls,
        head_args=facts.head_args,
        denoiser=denoiser,
    )


def map_layer_token_streams(
    denoiser: nn.Module,
    block_lists: Sequence[str],
    stream_args: Sequence[str],
    single_stream_block_lists: Sequence[str] = (),
    text_layers: Sequence[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Map each layer to the block arguments whose tokens it processes."""
    streams = {}
    texts = [name for name in stream_args if name.startswith("encoder_")]
    text, image = (texts or stream_args)[0], [name for name in stream_args if name not in texts][-1]
    for prefix, expert in name_experts(denoiser).items():
        for blocks in block_lists:
            for name, _ in expert.get_submodule(blocks).named_modules(prefix=f"{prefix}{blocks}"):
                if name.endswith(tuple(text_layers)):
                    continue
                if blocks in single_stream_block_lists:
                    streams[name] = tuple(stream_args)
                else:
                    streams[name] = (text if TEXT_LAYER_PATTERN.search(name) else image,)
    return streams


def build_tensor_parallel_plan(
    denoiser: nn.Module, fused_layers: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({})
) -> TensorParallelPlan:
    """Choose ``colwise`` or ``rowwise`` for each layer, and the sizes of the sections that are sharded separately."""
    plan: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, layer in denoiser.named_modules():
        base: Any = getattr(layer, "base_layer", layer)
        if not isinstance(base, nn.Linear):
            continue
        fused = next((value for pattern, value in fused_layers.items() if re.search(pattern, name)), None)
        if fused is not None:
            kind, ratios = fused
            features = base.out_features if kind == "colwise" else base.in_features
            plan[name] = kind, tuple(features * ratio // sum(ratios) for ratio in ratios)
        elif COLWISE_PATTERN.search(name):
            parts = 2 if type(denoiser.get_submodule(name.rpartition(".")[0])).__name__ in GATED_ACTIVATIONS else 1
            plan[name] = "colwise", (base.out_features // parts,) * parts
        elif ROWWISE_PATTERN.search(name):
            plan[name] = "rowwise", (base.in_features,)
    return plan
