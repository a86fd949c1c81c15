"""How processes are arranged when several of them work on one picture."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RunConfig
from .world import World


@dataclass(frozen=True)
class ParallelDims:
    """``data`` groups with pictures of their own; in each ``stages`` of the blocks, in each of them ``contexts`` that
    share the tokens of a picture, and ``parts`` of each layer.

    Processes that share layers exchange the most, so they are neighbours; those of other pictures are the farthest.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Processes that work on the same picture."""
        return self.pp * self.cp * self.tp

    def get_data_parallel_rank(self, rank: int) -> int:
        """Which group of pictures a process works on."""
        return rank // self.model_parallel_size

    def get_pipeline_stage(self, rank: int) -> int:
        """Which of the blocks a process has."""
        return rank % self.model_parallel_size // self._ranks_per_stage

    def get_tensor_parallel_rank(self, rank: int) -> int:
        """Which part of each layer a process has."""
        return rank % self.tp

    def get_pipeline_ranks(self, rank: int) -> list[int]:
        """The processes that make up the pipeline of this one, in the order of stages."""
        first = self.get_data_parallel_rank(rank) * self.model_parallel_size + rank % self._ranks_per_stage
        return [first + stage * self._ranks_per_stage for stage in range(self.pp)]

    def get_loss_ranks(self) -> list[int]:
        """Of each group of pictures, a process that knows the losses: one of the last stage."""
        return [number * self.model_parallel_size + (self.pp - 1) * self._ranks_per_stage for number in range(self.dp)]

    @property
    def _ranks_per_stage(self) -> int:
        return self.cp * self.tp


def build_parallel_dims(config: RunConfig, world: World) -> ParallelDims:
    """The layout that was asked for."""
    asked = config.parallel
    return ParallelDims(
        max(1, world.world_size // asked.model_parallel_size), asked.pp_size, asked.tp_size, asked.cp_size
    )


def validate_parallel_dims(config: RunConfig, world: World) -> Iterator[str]:
    """Why a run cannot be laid out so, and what can be had instead."""
    stages, together = config.parallel.pp_size, config.parallel.model_parallel_size
    if together == 1:
        return
    said = " ".join(f"--{name} {size}" for name, size in config.parallel.model_parallel_sizes.items() if size > 1)
    if world.world_size % together:
        yield (
            f"{said}: {world.world_size} processes cannot be dealt out in groups of {together}; start"
            f" {-(-world.world_size // together) * together}, or make it smaller"
        )
    if config.train.on_oom == "recover":
        yield (
            f"--on_oom recover: with {said} every forward is an exchange, so no process can try a step by itself; use"
            " --on_oom fail"
        )
    is_sharded = config.sharding.fsdp or "FSDP" in world.engines
    if stages > 1 and is_sharded:
        yield (
            f"{said}: a stage fetches its blocks for each micro-batch anew under FSDP, which is slower than either;"
            " leave FSDP out, or use --tp_size with it"
        )
