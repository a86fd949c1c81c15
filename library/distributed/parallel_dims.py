"""The parallel dimensions of a run and the ranks in each of them: data, pipeline, context and tensor parallel."""

from dataclasses import dataclass

from ..config.schema_distributed import ParallelConfig


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
