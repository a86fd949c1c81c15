"""The blocks of a UNet as a chain: what its first blocks hand on to its last ones goes along from block to block."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

from torch import nn

from .chain import BlockSequence, Activations


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

    def run_block(self, index: int, block_forward: Callable[..., Any], bound_arguments: BoundArguments, activations: Activations) -> Activations:
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
        return activations[0], activations[:1] * (len(_get_submodules(block, "resnets")) + len(_get_submodules(block, "downsamplers")))


def _get_submodules(block: nn.Module, name: str) -> Any:
    return getattr(block, name, None) or ()
