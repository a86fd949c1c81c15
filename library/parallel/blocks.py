"""The blocks of a denoiser as a chain that can be cut: each process runs some of them and passes the others by.

The model's own forward runs on every process, with embeddings before the chain and what comes behind it, which is
little.  Only blocks are kept apart: one that is not here hands on what came in, or what another process made of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from typing import Any

from torch import Tensor, nn

Activations = tuple[Tensor, ...]
"""What goes from block to block, in the order in which a block returns it."""


BlockForward = Callable[..., Any]


BlockHook = Callable[[BlockForward, Any, Any], Any]
"""Called with what the block does, its arguments, and its named arguments."""


class BlockHooks:
    """Those of one model."""

    def __init__(self) -> None:
        self._classes: dict[type, type] = {}
        self._forwards: dict[nn.Module, BlockForward] = {}

    def wrap(self, block: nn.Module, hook: BlockHook) -> None:
        """``keeper`` comes before others that keep this block already."""
        if block not in self._forwards:
            own = type(block)
            self._forwards[block] = partial(own.__call__, block)
            if own not in self._classes:
                self._classes[own] = self._make_hooked_class(own)
            block.__class__ = self._classes[own]
        run = self._forwards[block]  # always the same, for whoever counts blocks
        self._forwards[block] = lambda *args, **named: hook(run, args, named)

    def _make_hooked_class(self, block_class: type) -> type:
        def call_hooked(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._forwards[block](*args, **kwargs)

        return type(
            block_class.__name__,
            (block_class,),
            {"__call__": call_hooked, "__module__": block_class.__module__, "__qualname__": block_class.__qualname__},
        )


@dataclass(frozen=True)
class BlockSequence:
    """Blocks in the order in which they run, and the names of the arguments that they hand on."""

    blocks: tuple[nn.Module, ...] = ()
    activation_args: tuple[str, ...] = ()
    hooks: BlockHooks = field(default_factory=BlockHooks, compare=False)

    @classmethod
    def from_lists(
        cls, model: nn.Module, block_lists: Sequence[str], activation_args: Sequence[str]
    ) -> "BlockSequence":
        """From the names of the lists that hold the blocks."""
        blocks = [block for name in block_lists for block in model.get_submodule(name).children()]
        return cls(tuple(blocks), tuple(activation_args))

    def count_block_parameters(self) -> list[int]:
        """How large each block is."""
        return [sum(item.numel() for item in block.parameters()) for block in self.blocks]

    def collect_inputs(self, index: int, bound_arguments: BoundArguments, previous: Activations) -> Activations:
        """What comes to a block, which the model calls with ``bound``; ``before`` left the one before it."""
        return tuple(bound_arguments.arguments[name] for name in self.activation_args)

    def run_block(
        self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations
    ) -> Activations:
        """What leaves a block that is here."""
        made = block_forward(*bound_arguments.args, **bound_arguments.kwargs)
        made = made if isinstance(made, tuple) else (made,)
        # The last block of a model may make nothing of the text, which nobody asks for any more.
        return tuple(old if new is None else new for new, old in zip(made, activations, strict=True))

    def build_output(self, index: int, activations: Activations) -> Any:
        """What the model gets as the block's result."""
        return activations if len(activations) > 1 else activations[0]


@dataclass(frozen=True)
class UNetBlockSequence(BlockSequence):
    """A flow is what the next block gets, and behind it all that blocks to come still wait for, the latest last."""

    num_down_blocks: int = 0
    """So many blocks at the beginning hand something on; behind the one that follows them, all take it."""

    @classmethod
    def from_unet(cls, unet: Any) -> "UNetBlockSequence":
        """From a UNet as diffusers builds it."""
        return cls((*unet.down_blocks, unet.mid_block, *unet.up_blocks), num_down_blocks=len(unet.down_blocks))

    def collect_inputs(self, index: int, bound_arguments: BoundArguments, previous: Activations) -> Activations:
        """The model gathers what is handed on by itself, and here it has not all of it."""
        given = bound_arguments.arguments["hidden_states"]
        return previous if index else (given, given)

    def run_block(
        self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations
    ) -> Activations:
        """The block gets its own in the place of what the model has for it."""
        given, waiting = activations[0], activations[1:]
        bound_arguments.arguments["hidden_states"] = given
        if index > self.num_down_blocks:
            count = len(_get_submodules(self.blocks[index], "resnets"))
            waiting, bound_arguments.arguments["res_hidden_states_tuple"] = waiting[:-count], waiting[-count:]
            if waiting and bound_arguments.arguments.get("upsample_size") is not None:
                bound_arguments.arguments["upsample_size"] = waiting[-1].shape[2:]
        made = block_forward(*bound_arguments.args, **bound_arguments.kwargs)
        if index >= self.num_down_blocks:
            return (made, *waiting)
        return (made[0], *waiting, *made[1])

    def build_output(self, index: int, activations: Activations) -> Any:
        """As many as the model expects, though it will not see them used."""
        if index >= self.num_down_blocks:
            return activations[0]
        block = self.blocks[index]
        return activations[0], activations[:1] * (
            len(_get_submodules(block, "resnets")) + len(_get_submodules(block, "downsamplers"))
        )


def _get_submodules(block: nn.Module, name: str) -> Any:
    return getattr(block, name, None) or ()


TensorParallelPlan = Mapping[str, tuple[str, tuple[int, ...]]]
"""Layer -> ``rows`` or ``columns``, and the sizes of pieces that are cut each for itself."""


TokenAxes = Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]
"""Argument of a block -> for each tensor in it, which axis has tokens, and those of which streams, one behind the
other; streams are called as what goes from block to block."""


@dataclass(frozen=True)
class ParallelPlan:
    """Its blocks where they simply follow each other, how its layers can be cut, and where tokens are."""

    block_sequence: BlockSequence = field(default_factory=BlockSequence)
    tensor_parallel: TensorParallelPlan = field(default_factory=dict)
    block_token_args: TokenAxes = field(default_factory=dict)
    """Beside the flow of the chain, of which everything has tokens along axis 1."""
    layer_token_streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer -> the streams whose tokens go through it."""
