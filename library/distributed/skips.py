"""The blocks of a UNet as a chain: what its first blocks hand on to its last ones goes along from block to block."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

from torch import nn

from .chain import Chain, Flow


@dataclass(frozen=True)
class SkipChain(Chain):
    """A flow is what the next block gets, and behind it all that blocks to come still wait for, the latest last."""

    downs: int = 0
    """So many blocks at the beginning hand something on; behind the one that follows them, all take it."""

    @classmethod
    def of_unet(cls, unet: Any) -> "SkipChain":
        """From a UNet as diffusers builds it."""
        return cls((*unet.down_blocks, unet.mid_block, *unet.up_blocks), downs=len(unet.down_blocks))

    def enters(self, place: int, bound: BoundArguments, before: Flow) -> Flow:
        """The model gathers what is handed on by itself, and here it has not all of it."""
        given = bound.arguments["hidden_states"]
        return before if place else (given, given)

    def runs(self, place: int, run: Callable[..., Any], bound: BoundArguments, flow: Flow) -> Flow:
        """The block gets its own in the place of what the model has for it."""
        given, waiting = flow[0], flow[1:]
        bound.arguments["hidden_states"] = given
        if place > self.downs:
            count = len(_list(self.blocks[place], "resnets"))
            waiting, bound.arguments["res_hidden_states_tuple"] = waiting[:-count], waiting[-count:]
            if waiting and bound.arguments.get("upsample_size") is not None:
                bound.arguments["upsample_size"] = waiting[-1].shape[2:]
        made = run(*bound.args, **bound.kwargs)
        if place >= self.downs:
            return (made, *waiting)
        return (made[0], *waiting, *made[1])

    def says(self, place: int, flow: Flow) -> Any:
        """As many as the model expects, though it will not see them used."""
        if place >= self.downs:
            return flow[0]
        block = self.blocks[place]
        return flow[0], flow[:1] * (len(_list(block, "resnets")) + len(_list(block, "downsamplers")))


def _list(block: nn.Module, name: str) -> Any:
    return getattr(block, name, None) or ()
