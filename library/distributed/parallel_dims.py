"""``ParallelDims``: how many ranks work on one model (tensor, context, pipeline parallelism) and on different images.

The device mesh of these dimensions is made in ``parallel/device_mesh_strategy.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RunConfig
from ..config.schema_distributed import ParallelConfig
from ..problems import Problem
from .world import World


@dataclass(frozen=True)
class ParallelDims:
    """The size of each dimension, as in torchtitan; ``dp`` counts groups of ranks that work on different images.

    Tensor-parallel ranks communicate the most, so they are neighbors; data-parallel ranks are the farthest apart.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that work on the same images."""
        return self.pp * self.cp * self.tp

    def get_data_parallel_rank(self, rank: int) -> int:
        return rank // self.model_parallel_size

    def get_pipeline_stage(self, rank: int) -> int:
        return rank % self.model_parallel_size // self._ranks_per_stage

    def get_tensor_parallel_rank(self, rank: int) -> int:
        return rank % self.tp

    def get_pipeline_ranks(self, rank: int) -> list[int]:
        """Return the ranks of this rank's pipeline, by stage."""
        first = self.get_data_parallel_rank(rank) * self.model_parallel_size + rank % self._ranks_per_stage
        return [first + stage * self._ranks_per_stage for stage in range(self.pp)]

    def get_loss_ranks(self) -> list[int]:
        """Return one rank of each data-parallel group that computes the loss: the first of the last stage."""
        return [group * self.model_parallel_size + (self.pp - 1) * self._ranks_per_stage for group in range(self.dp)]

    @property
    def _ranks_per_stage(self) -> int:
        return self.cp * self.tp


def build_parallel_dims(parallel: ParallelConfig, world_size: int) -> ParallelDims:
    """Distribute the ranks that model parallelism leaves over data parallelism."""
    dp = max(1, world_size // parallel.model_parallel_size)
    return ParallelDims(dp, parallel.pp_size, parallel.tp_size, parallel.cp_size)


def validate_parallel_dims(config: RunConfig, world: World) -> Iterator[Problem]:
    """Check --pp_size, --tp_size and --cp_size."""
    parallel, size = config.parallel, config.parallel.model_parallel_size
    if size == 1:
        return
    sizes = {name: size for name, size in parallel.model_parallel_sizes.items() if size > 1}
    first, *others = sizes
    flags, value = " ".join(f"--{name} {size}" for name, size in sizes.items()), str(sizes[first])
    together = f"with {' and '.join(f'{name} {sizes[name]}' for name in others)}, " if others else ""
    if world.world_size % size:
        suggestion = -(-world.world_size // size) * size
        yield Problem(
            first,
            f"{together}the world size {world.world_size} is not a multiple of {size}",
            f"start {suggestion} processes, or use smaller sizes",
            value=value,
            others=tuple(others),
        )
    if config.train.on_oom != "fail":
        yield Problem(
            "on_oom",
            f"with {flags} every forward is a collective, so no rank can retry a step alone",
            "use --on_oom fail",
            value=config.train.on_oom,
            others=tuple(sizes),
        )
    has_fsdp = config.sharding.fsdp or "FSDP" in world.engines
    if parallel.pp_size > 1 and has_fsdp:
        yield Problem(
            "pp_size",
            "a pipeline stage under FSDP gathers its blocks for each micro-batch, slower than either alone",
            "turn FSDP off, or use it with --tp_size",
            value=str(parallel.pp_size),
            others=("fsdp",),
        )
