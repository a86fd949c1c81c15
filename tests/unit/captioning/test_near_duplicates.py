"""Perceptual hashes: copies of an image in other sizes and formats are alike, other images are not."""

import random

import numpy as np
import pytest
from PIL import Image

from library.captioning.near_duplicates import _group_hashes, find_near_duplicates
from library.tools.tags import run_tags


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
        image = coarse.resize((320, 240), Image.Resampling.BICUBIC)
        image.save(tmp_path / f"{name}.png")
        if name != "owl":
            image.resize((170, 128)).save(tmp_path / f"{name}_small.jpg", quality=60)
    image.point(lambda value: min(255, value + 12)).save(tmp_path / "owl_bright.webp")
    return tmp_path


def test_copies_are_found_and_other_images_are_not(folder):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    groups, problems = find_near_duplicates(sorted(folder.iterdir()), 8)
    assert sorted(sorted(path.name for path in group.images) for group in groups) == [
        ["cat.png", "cat_small.jpg"],
        ["dog.png", "dog_small.jpg"],
        ["owl.png", "owl_bright.webp"],
    ]
    assert [group.images[0].name for group in groups if len(set(group.sizes)) > 1] == ["cat.png", "dog.png"]
    assert len(problems) == 1 and problems[0].startswith(f"{folder}/broken.png: cannot be decoded")
    lines = list(run_tags(["duplicates", str(folder)]))
    assert lines[-1] == "6 of 7 images are alike, in 3 groups" and "  320x240  " in "".join(lines)


@pytest.mark.parametrize("max_distance", [0, 3, 6, 16])
def test_bands_find_the_groups_that_comparing_all_pairs_finds(max_distance):
    rng = random.Random(max_distance)
    hashes = [rng.getrandbits(64) for _ in range(150)]
    hashes += [value ^ sum(1 << bit for bit in rng.sample(range(64), rng.randint(0, 9))) for value in hashes]
    links = {index: {index} for index in range(len(hashes))}
    for first in links:
        for second in range(first):
            if (hashes[first] ^ hashes[second]).bit_count() <= max_distance and links[first] is not links[second]:
                links[first] |= links[second]
                for member in links[second]:
                    links[member] = links[first]
    expected = {frozenset(group) for group in links.values() if len(group) > 1}
    assert expected and {frozenset(members) for members, _ in _group_hashes(hashes, max_distance)} == expected
