"""Hypothesis strategies for lists of buckets, batch layouts and seeds."""

from hypothesis import strategies as st

from library.dataloader.batch_plan import Bucket


@st.composite
def bucket_lists(draw, same_batch: int | None = None) -> list[Bucket]:
    buckets, first = [], 0
    for index in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 12))
        repeats = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
        samples = [100 + 3 * (first + number) for number in range(count)]
        first += count
        size = (64 * (index + 1), 128)
        buckets.append(Bucket(size, samples, repeats, same_batch or draw(st.integers(1, 8)), index % 2))
    return buckets


layouts = st.tuples(st.integers(1, 16), st.integers(1, 4))


seeds = st.integers(0, 2**63)
