"""Near-duplicate images by perceptual hash: the signs of an image's low frequencies, which survive resizing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..dataset.image_decoding import load_rgb_image

HASH_BITS = 64
_SIDE = 32
"""Images are reduced to this many pixels a side; the lowest 8 x 8 frequencies are kept."""


@dataclass(frozen=True)
class DuplicateGroup:
    """Images that are alike, the one with the most pixels first."""

    images: tuple[Path, ...]
    sizes: tuple[tuple[int, int], ...]
    distance: int
    """The largest number of differing bits between an image and the one that linked it to the group."""


def compute_perceptual_hash(image: Path) -> tuple[int, tuple[int, int]]:
    """Return 64 bits and the size in pixels; raise ``OSError`` or ``ValueError`` if the image cannot be decoded."""
    from PIL import Image

    with_colors = load_rgb_image(image)
    gray = with_colors.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    transform = _build_cosine_transform()
    frequencies = (transform @ np.asarray(gray, np.float64) @ transform.T)[:8, :8].flatten()
    bits = frequencies > np.median(frequencies[1:])  # the first one is the mean brightness
    return int("".join("1" if bit else "0" for bit in bits), 2), with_colors.size


def _build_cosine_transform() -> NDArray[np.float64]:
    """Build the matrix of the discrete cosine transform of ``_SIDE`` values."""
    index = np.arange(_SIDE)
    matrix: NDArray[np.float64] = np.cos(np.pi / _SIDE * (index[None, :] + 0.5) * index[:, None])
    return matrix


def find_near_duplicates(images: Sequence[Path], max_distance: int) -> tuple[list[DuplicateGroup], list[str]]:
    """Group images whose hashes differ in at most ``max_distance`` bits; also return what could not be decoded."""
    hashes, sizes, problems = list[int](), dict[Path, tuple[int, int]](), list[str]()
    readable = []
    with ThreadPoolExecutor() as pool:
        for image, result in zip(images, pool.map(_try_hash, images), strict=True):
            if isinstance(result, str):
                problems.append(f"{image}: {result}")
                continue
            readable.append(image)
            hashes.append(result[0])
            sizes[image] = result[1]
    groups = []
    for members, distance in _group_hashes(hashes, max_distance):
        paths = sorted((readable[index] for index in members), key=lambda path: -sizes[path][0] * sizes[path][1])
        groups.append(DuplicateGroup(tuple(paths), tuple(sizes[path] for path in paths), distance))
    return groups, problems


def _try_hash(image: Path) -> tuple[int, tuple[int, int]] | str:
    try:
        return compute_perceptual_hash(image)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged data
        return f"cannot be decoded: {error}"


def _group_hashes(hashes: Sequence[int], max_distance: int) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of each group of linked hashes, and the largest distance of a link."""
    unique, positions = np.unique(np.array(hashes, np.uint64), return_inverse=True)
    parents, farthest = list(range(len(unique))), dict[int, int]()

    def find_root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for first, second, distance in _list_close_pairs(unique, max_distance):
        roots = sorted((find_root(first), find_root(second)))
        if roots[0] != roots[1]:
            parents[roots[1]] = roots[0]
            farthest[roots[0]] = max(farthest.get(roots[0], 0), farthest.get(roots[1], 0), distance)
    groups = defaultdict(list)
    for index, position in enumerate(positions.tolist()):
        groups[find_root(position)].append(index)
    return ((members, farthest.get(root, 0)) for root, members in groups.items() if len(members) > 1)


def _list_close_pairs(hashes: NDArray[np.uint64], max_distance: int) -> Iterator[tuple[int, int, int]]:
    """Yield pairs of hashes and their distance.

    Two hashes that differ in at most ``max_distance`` bits are equal in one of ``max_distance + 1`` bands of bits, so
    only hashes that share a band are compared.
    """
    bands = max_distance + 1
    for band in range(bands):
        start, end = HASH_BITS * band // bands, HASH_BITS * (band + 1) // bands
        keys = hashes & np.uint64((1 << end) - (1 << start))
        order = np.argsort(keys, kind="stable")
        limits = np.flatnonzero(np.diff(keys[order])) + 1
        for members in np.split(order, limits):
            for row, index in enumerate(members[:-1]):
                distances = np.bitwise_count(hashes[members[row + 1 :]] ^ hashes[index])
                for offset in np.flatnonzero(distances <= max_distance):
                    yield int(index), int(members[row + 1 + offset]), int(distances[offset])
