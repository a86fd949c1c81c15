"""How processes are arranged when several of them work on one picture."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RunConfig
from .world import World


@dataclass(frozen=True)
class Layout:
    """``data`` groups with pictures of their own; in each ``stages`` of the blocks, in each of them ``contexts`` that
    share the tokens of a picture, and ``parts`` of each layer.

    Processes that share layers exchange the most, so they are neighbours; those of other pictures are the farthest.
    """

    data: int = 1
    stages: int = 1
    parts: int = 1
    contexts: int = 1

    @property
    def together(self) -> int:
        """Processes that work on the same picture."""
        return self.stages * self.contexts * self.parts

    def data_rank(self, rank: int) -> int:
        """Which group of pictures a process works on."""
        return rank // self.together

    def stage(self, rank: int) -> int:
        """Which of the blocks a process has."""
        return rank % self.together // self._in_a_stage

    def part(self, rank: int) -> int:
        """Which part of each layer a process has."""
        return rank % self.parts

    def stage_group(self, rank: int) -> list[int]:
        """The processes that make up the pipeline of this one, in the order of stages."""
        first = self.data_rank(rank) * self.together + rank % self._in_a_stage
        return [first + stage * self._in_a_stage for stage in range(self.stages)]

    def tellers(self) -> list[int]:
        """Of each group of pictures, a process that knows the losses: one of the last stage."""
        return [number * self.together + (self.stages - 1) * self._in_a_stage
                for number in range(self.data)]  # fmt: skip

    @property
    def _in_a_stage(self) -> int:
        return self.contexts * self.parts


def layout_of(args: RunConfig, world: World) -> Layout:
    """The layout that was asked for."""
    asked = args.parallel
    return Layout(max(1, world.size // asked.together), asked.pp_size, asked.tp_size, asked.cp_size)


def layout_problems(args: RunConfig, world: World) -> Iterator[str]:
    """Why a run cannot be laid out so, and what can be had instead."""
    stages, together = args.parallel.pp_size, args.parallel.together
    if together == 1:
        return
    said = " ".join(f"--{name} {size}" for name, size in args.parallel.sizes.items() if size > 1)
    if world.size % together:
        yield (f"{said}: {world.size} processes cannot be dealt out in groups of {together}; start"
               f" {-(-world.size // together) * together}, or make it smaller")  # fmt: skip
    if args.train.on_oom == "ladder":
        yield (f"--on_oom ladder: with {said} every forward is an exchange, so no process can try a step by itself; use"
               " --on_oom fail")  # fmt: skip
    is_sharded = args.sharding.fsdp or "FSDP" in world.engines
    if stages > 1 and is_sharded:
        yield (f"{said}: a stage fetches its blocks for each micro-batch anew under FSDP, which is slower than either;"
               " leave FSDP out, or use --tp_size with it")  # fmt: skip
