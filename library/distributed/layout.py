"""How processes are arranged when several of them work on one picture."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RunConfig
from .world import World


@dataclass(frozen=True)
class Layout:
    """``data`` groups with their own pictures; in each of them a process for each of ``stages``."""

    data: int = 1
    stages: int = 1

    @property
    def together(self) -> int:
        """Processes that work on the same picture."""
        return self.stages

    def data_rank(self, rank: int) -> int:
        """Which group of pictures a process works on."""
        return rank // self.together

    def stage(self, rank: int) -> int:
        """Which part of the blocks a process has."""
        return rank % self.stages

    def stage_group(self, rank: int) -> list[int]:
        """The processes that make up the pipeline of this one, in the order of stages."""
        first = self.data_rank(rank) * self.together
        return list(range(first, first + self.stages))

    def tellers(self) -> list[int]:
        """Of each group of pictures, the process that knows the losses: the last stage."""
        return [number * self.together + self.stages - 1 for number in range(self.data)]


def layout_of(args: RunConfig, world: World) -> Layout:
    """The layout that was asked for."""
    stages = args.parallel.pp_size
    return Layout(max(1, world.size // stages), stages)


def layout_problems(args: RunConfig, world: World) -> Iterator[str]:
    """Why a run cannot be laid out so, and what can be had instead."""
    stages = args.parallel.pp_size
    if stages == 1:
        return
    if world.size % stages:
        fits = [number for number in range(2, world.size + 1) if not world.size % number]
        instead = f"; {' or '.join(map(str, fits))} would do" if fits else ", start more processes"
        yield f"--pp_size {stages}: {world.size} processes cannot be cut into pipelines of {stages}{instead}"
    if args.train.on_oom == "ladder":
        yield (f"--on_oom ladder: with --pp_size {stages} every forward is an exchange, so no process can try a step"
               " by itself; use --on_oom fail")  # fmt: skip
    if args.sharding.fsdp or "FSDP" in world.engines:
        yield f"--pp_size {stages}: together with FSDP it is not there; take the larger pp_size alone"
