"""Batches that are the same at every evaluation and on any number of processes: all pictures once, in a fixed order."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..randomness import seed_for
from .batch import PixelBatch
from .batches import BucketSamples, MicroBatch
from .buckets import Placement
from .manifest import Manifest

READ_AHEAD = 2
Read = Callable[[int], PixelBatch]
"""From the number of a batch to the batch."""


@dataclass(frozen=True)
class FixedBatches:
    """What is read is what stands here, whole: it is shared over processes batch by batch."""

    buckets: tuple[BucketSamples, ...]
    batches: tuple[MicroBatch, ...]
    ranks: int = 1
    accumulation: int = 1

    def micro_batch(self, position: int) -> MicroBatch:
        """The batch with this number."""
        return self.batches[position]

    @property
    def datasets(self) -> dict[int, int]:
        """The dataset of each sample."""
        return {sample: self.buckets[batch.bucket].dataset for batch in self.batches for sample in batch.samples}

    def real_samples(self, step: int) -> int:
        """The pictures in it; none only fills up."""
        return len(self.batches[step].samples)


def fixed_batches(manifest: Manifest, placements: Sequence[Placement], first: int, most: int | None) -> FixedBatches:
    """All samples, bucket by bucket in batches of their datasets' size; they are counted from ``first`` on.

    Of more than ``most`` batches those are taken that a hash of their first picture chooses.  The place of a sample,
    from which its random numbers follow, comes from its picture alone.
    """
    members: defaultdict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for index in range(len(manifest.samples)):
        members[manifest.samples[index].dataset, placements[index].bucket].append(index)
    buckets, batches = [], []
    for number, ((dataset, size), samples) in enumerate(sorted(members.items())):
        at_once = manifest.datasets[dataset].batch_size
        buckets.append(BucketSamples(size, samples, [1.0] * len(samples), at_once, dataset))
        batches += [_batch(manifest, number, samples[start : start + at_once], first)
                    for start in range(0, len(samples), at_once)]  # fmt: skip
    chosen = sorted(range(len(batches)), key=lambda number: seed_for(0, "measured", batches[number].places[0]))[:most]
    return FixedBatches(tuple(buckets), tuple(batches[number] for number in sorted(chosen)))


def ahead(read: Read, numbers: Sequence[int]) -> Iterator[PixelBatch]:
    """The batches with these numbers, read by a thread while those before are worked on."""
    with ThreadPoolExecutor(1, "validation") as pool:
        waiting: list[Future[PixelBatch]] = []
        for number in numbers:
            waiting.append(pool.submit(read, number))
            if len(waiting) > READ_AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _batch(manifest: Manifest, bucket: int, samples: Sequence[int], first: int) -> MicroBatch:
    places = tuple(seed_for(0, f"place/{manifest.samples[index].content}") for index in samples)
    count = len(samples)
    return MicroBatch(bucket, 0, tuple(first + index for index in samples), (0,) * count, (True,) * count, places)
