"""The pictures of a run, looked at once on each machine, and the same on every process."""

from collections.abc import Sequence

from ..config import RunConfig
from ..data.prepare import Prepared, prepare
from ..distributed.strategy import DataParallel
from ..errors import UserError


def same_pictures(config: RunConfig, strategy: DataParallel, pixel_step: int) -> Prepared:
    """One process of each machine looks at the pictures; the others read what it found out, beside the pictures."""
    prepared = strategy.first_on_each_machine(lambda: prepare(config.data, pixel_step, config.cache.cache_dir))
    seen = strategy.gather((prepared.manifest.fingerprint(), len(prepared.manifest.samples)))
    if others := unlike_the_first(seen):
        error = UserError(others)
        error.is_told = not strategy.is_main
        raise error
    return prepared


def unlike_the_first(seen: Sequence[tuple[str, int]]) -> str | None:
    """What to say when processes see other pictures than rank 0; by rank, fingerprint and number of pictures."""
    others = [rank for rank, (fingerprint, _) in enumerate(seen) if fingerprint != seen[0][0]]
    if not others:
        return None
    rank = others[0]
    ranks = f"rank {rank}" if len(others) == 1 else f"{len(others)} processes, the first of them rank {rank},"
    return (f"{ranks} found other pictures, captions or dataset settings than rank 0 ({seen[rank][1]} and {seen[0][1]}"
            " pictures): give every machine the same files, by a shared folder or exact copies")  # fmt: skip
