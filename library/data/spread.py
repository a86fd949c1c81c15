"""Shuffle samples with repeats into chunks so that two copies of one sample share a chunk only where they must."""

import numpy as np
from numpy.typing import NDArray

from ..randomness import seed_for

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]


def keys(count: int, seed: int, purpose: str, *numbers: int) -> Keys:
    """``count`` random numbers; the raw output of Philox is fixed by its definition, unlike numpy's permutations."""
    return np.random.Philox(key=seed_for(seed, purpose, *numbers)).random_raw(count)


def order(count: int, seed: int, purpose: str, *numbers: int) -> Indices:
    """A permutation of ``range(count)``."""
    return np.argsort(keys(count, seed, purpose, *numbers), kind="stable")


def spread(repeats: Indices, chunk: int, seed: int, purpose: str, *numbers: int) -> Indices:
    """Entries, in which copy c of sample i is ``sum(repeats[:i]) + c``, in the order of chunks of ``chunk`` entries.

    The samples are dealt like cards: shuffled, with the copies of a sample one after the other, a card to each chunk
    in turn, in a new order of chunks each round.  A sample whose copies lie in two rounds must not meet a chunk
    twice, so the order of the second round is mended.  The last chunk is the shorter one and leaves the game early;
    samples that need even that chunk are dealt first.
    """
    chunks, rest = divmod(int(repeats.sum()), chunk)
    needs_all = repeats > chunks
    samples = np.lexsort((keys(len(repeats), seed, purpose, *numbers), ~needs_all))
    counts = repeats[samples]
    starts = (np.cumsum(repeats) - repeats)[samples]
    owners = np.repeat(np.arange(len(samples)), counts)
    entries: Indices = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts) + starts[owners]
    if len(owners) == len(repeats) or not chunks:  # no copies, or a single chunk
        if counts.max(initial=1) == 1:
            return entries
        mixed: Indices = entries[order(len(entries), seed, "mix", *numbers)]
        return mixed
    draws = keys(len(owners), seed, "deal", *numbers)
    rows, last_rows = order(chunk, seed, "rows", *numbers), order(rest, seed, "last", *numbers)
    dealt: Indices = np.empty_like(entries)
    before: Indices = np.empty(0, np.int64)
    at = 0
    for turn in range(chunk):
        width = chunks + (turn < rest)
        turns: Indices = np.argsort(draws[at : at + width], kind="stable")
        _mend(turns, before, owners, at)
        row = np.where(turns < chunks, rows[turn], last_rows[turn] if turn < rest else 0)
        dealt[turns * chunk + row] = entries[at : at + width]
        at, before = at + width, turns
    return dealt


def _mend(turns: Indices, before: Indices, owners: Indices, at: int) -> None:
    """Give the copies at the start of this round other chunks than their siblings at the end of the round before."""
    if not len(before) or owners[at] != owners[at - 1]:
        return
    first, last = np.searchsorted(owners, owners[at]), np.searchsorted(owners, owners[at], side="right")
    taken = set(before[max(len(before) - (at - int(first)), 0) :].tolist())
    here = min(int(last) - at, len(turns))
    clashing = [index for index in range(here) if int(turns[index]) in taken]
    free = [index for index in range(here, len(turns)) if int(turns[index]) not in taken]
    for mine, other in zip(clashing, free, strict=False):
        turns[mine], turns[other] = turns[other], turns[mine]
