"""Shuffle samples with repeats into chunks so that two copies of one sample share a chunk only where they must."""

import numpy as np
from numpy.typing import NDArray

from ..randomness import derive_seed

IndexArray = NDArray[np.int64]
RandomKeys = NDArray[np.uint64]


def draw_random_keys(count: int, seed: int, purpose: str, *numbers: int) -> RandomKeys:
    """``count`` random numbers; the raw output of Philox is fixed by its definition, unlike numpy's permutations."""
    return np.random.Philox(key=derive_seed(seed, purpose, *numbers)).random_raw(count)


def draw_permutation(count: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """A permutation of ``range(count)``."""
    return np.argsort(draw_random_keys(count, seed, purpose, *numbers), kind="stable")


def shuffle_with_repeats(repeats: IndexArray, chunk_size: int, seed: int, purpose: str, *numbers: int) -> IndexArray:
    """Entries, in which copy c of sample i is ``sum(repeats[:i]) + c``, in the order of chunks of ``chunk`` entries.

    The samples are dealt like cards: shuffled, with the copies of a sample one after the other, a card to each chunk
    in turn, in a new order of chunks each round.  A sample whose copies lie in two rounds must not meet a chunk
    twice, so the order of the second round is mended.  The last chunk is the shorter one and leaves the game early;
    samples that need even that chunk are dealt first.
    """
    chunks, rest = divmod(int(repeats.sum()), chunk_size)
    needs_all = repeats > chunks
    samples = np.lexsort((draw_random_keys(len(repeats), seed, purpose, *numbers), ~needs_all))
    counts = repeats[samples]
    starts = (np.cumsum(repeats) - repeats)[samples]
    owners = np.repeat(np.arange(len(samples)), counts)
    entries: IndexArray = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[owners]
    if len(owners) == len(repeats) or not chunks:  # no copies, or a single chunk
        if counts.max(initial=1) == 1:
            return entries
        mixed: IndexArray = entries[draw_permutation(len(entries), seed, "mix", *numbers)]
        return mixed
    draws = draw_random_keys(len(owners), seed, "deal", *numbers)
    rows, last_rows = draw_permutation(chunk_size, seed, "rows", *numbers), draw_permutation(rest, seed, "last", *numbers)
    dealt: IndexArray = np.empty_like(entries)
    before: IndexArray = np.empty(0, np.int64)
    at = 0
    for turn in range(chunk_size):
        width = chunks + (turn < rest)
        turns: IndexArray = np.argsort(draws[at : at + width], kind="stable")
        _separate_repeats(turns, before, owners, at)
        row = np.where(turns < chunks, rows[turn], last_rows[turn] if turn < rest else 0)
        dealt[turns * chunk_size + row] = entries[at : at + width]
        at, before = at + width, turns
    return dealt


def _separate_repeats(chunk_order: IndexArray, previous_chunks: IndexArray, entry_owners: IndexArray, start: int) -> None:
    """Give the copies at the start of this round other chunks than their siblings at the end of the round before."""
    if not len(previous_chunks) or entry_owners[start] != entry_owners[start - 1]:
        return
    first, last = np.searchsorted(entry_owners, entry_owners[start]), np.searchsorted(entry_owners, entry_owners[start], side="right")
    taken = set(previous_chunks[max(len(previous_chunks) - (start - int(first)), 0) :].tolist())
    here = min(int(last) - start, len(chunk_order))
    clashing = [index for index in range(here) if int(chunk_order[index]) in taken]
    free = [index for index in range(here, len(chunk_order)) if int(chunk_order[index]) not in taken]
    for mine, other in zip(clashing, free, strict=False):
        chunk_order[mine], chunk_order[other] = chunk_order[other], chunk_order[mine]
