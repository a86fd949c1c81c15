"""Batches that are the same at every evaluation and on any number of processes: all pictures once, in a fixed order."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..randomness import derive_seed
from .batch import PixelBatch
from .batches import Bucket, MicroBatch
from .buckets import BucketAssignment
from .manifest import Manifest

PREFETCH_BATCHES = 2
ReadBatch = Callable[[int], PixelBatch]
"""From the number of a batch to the batch."""


@dataclass(frozen=True)
class ValidationBatches:
    """What is read is what stands here, whole: it is shared over processes batch by batch."""

    buckets: tuple[Bucket, ...]
    micro_batches: tuple[MicroBatch, ...]
    dp_size: int = 1
    accumulation_steps: int = 1

    def get_micro_batch(self, position: int) -> MicroBatch:
        """The batch with this number."""
        return self.micro_batches[position]

    @property
    def dataset_numbers(self) -> dict[int, int]:
        """The dataset of each sample."""
        return {sample: self.buckets[batch.bucket_index].dataset_number for batch in self.micro_batches for sample in batch.sample_indices}

    def count_real_samples(self, step: int) -> int:
        """The pictures in it; none only fills up."""
        return len(self.micro_batches[step].sample_indices)


def build_validation_batches(manifest: Manifest, assignments: Sequence[BucketAssignment], first_index: int, max_batches: int | None) -> ValidationBatches:
    """All samples, bucket by bucket in batches of their datasets' size; they are counted from ``first`` on.

    Of more than ``most`` batches those are taken that a hash of their first picture chooses.  The place of a sample,
    from which its random numbers follow, comes from its picture alone.
    """
    members: defaultdict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for index in range(len(manifest.samples)):
        members[manifest.samples[index].dataset_index, assignments[index].bucket_resolution].append(index)
    buckets, batches = [], []
    for number, ((dataset, size), samples) in enumerate(sorted(members.items())):
        at_once = manifest.datasets[dataset].batch_size
        buckets.append(Bucket(size, samples, [1.0] * len(samples), at_once, dataset))
        batches += [_build_micro_batch(manifest, number, samples[start : start + at_once], first_index)
                    for start in range(0, len(samples), at_once)]  # fmt: skip
    chosen = sorted(range(len(batches)), key=lambda number: derive_seed(0, "measured", batches[number].global_positions[0]))[:max_batches]
    return ValidationBatches(tuple(buckets), tuple(batches[number] for number in sorted(chosen)))


def prefetch_batches(read_batch: ReadBatch, batch_indices: Sequence[int]) -> Iterator[PixelBatch]:
    """The batches with these numbers, read by a thread while those before are worked on."""
    with ThreadPoolExecutor(1, "validation") as pool:
        waiting: list[Future[PixelBatch]] = []
        for number in batch_indices:
            waiting.append(pool.submit(read_batch, number))
            if len(waiting) > PREFETCH_BATCHES:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _build_micro_batch(manifest: Manifest, bucket_index: int, sample_indices: Sequence[int], first_index: int) -> MicroBatch:
    places = tuple(derive_seed(0, f"place/{manifest.samples[index].content_hash}") for index in sample_indices)
    count = len(sample_indices)
    return MicroBatch(bucket_index, 0, tuple(first_index + index for index in sample_indices), (0,) * count, (True,) * count, places)
