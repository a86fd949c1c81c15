"""Metrics of embeddings have the values that angles between vectors give."""

import numpy as np
import pytest

from library.evaluation.embedding_metrics import (
    compute_caption_distance,
    compute_copying,
    compute_distances,
    compute_mean_similarity,
    compute_mutual_similarity,
    compute_natural_nearness,
    compute_nearest_similarity,
    compute_seed_distances,
    compute_similarities,
)


def vectors(*degrees: float) -> np.ndarray:
    """Vectors of different lengths at these angles."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1) * (1 + np.arange(len(degrees)))[:, None]


def test_similarity_is_the_cosine_of_the_angle_whatever_the_length():
    found = compute_similarities(vectors(0, 90), vectors(0, 60, 180))

    assert found == pytest.approx(np.array([[1, 0.5, -1], [0, 3**0.5 / 2, 0]]), abs=1e-12)


def test_mean_and_nearest_similarity_of_a_picture():
    references = vectors(0, 60, 120)

    assert compute_mean_similarity(vectors(0), references) == pytest.approx((1 + 0.5 - 0.5) / 3)
    assert compute_nearest_similarity(vectors(90), references) == pytest.approx(3**0.5 / 2)


def test_an_embedding_without_length_is_like_nothing():
    assert compute_similarities(np.zeros((1, 2)), vectors(0, 90)).tolist() == [[0, 0]]


def test_mutual_similarity_leaves_out_each_picture_with_itself():
    assert compute_mutual_similarity(vectors(0, 60)) == pytest.approx(0.5)
    assert compute_mutual_similarity(vectors(0, 60, 120)) == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert np.isnan(compute_mutual_similarity(vectors(0)))


def test_real_pictures_are_as_near_to_training_pictures_as_held_out_ones_or_as_each_other():
    training = vectors(0, 60, 180)

    assert compute_natural_nearness(training, vectors(30, 120)) == pytest.approx((3**0.5 / 2 + 0.5) / 2)
    assert compute_natural_nearness(training, None) == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert np.isnan(compute_natural_nearness(training[:1], None))


def test_copying_is_0_at_natural_nearness_and_1_for_a_training_picture():
    training, natural = vectors(0, 90), 0.5

    found = compute_copying(vectors(0, -60, -90, 45)[:, None], training, natural)

    assert found[:, 0] == pytest.approx([1, 0, 0, (2**-0.5 - 0.5) / 0.5], abs=1e-12)
    assert np.isnan(compute_copying(vectors(0), training, 1.0)).all()


def test_distances_are_of_pictures_at_the_same_place():
    assert compute_distances(vectors(0, 10), vectors(60, 100)) == pytest.approx([0.5, 1])
    assert compute_distances(vectors(0, 10), vectors(0, 10)).tolist() == [0, 0]


def test_seed_and_caption_distances_separate_pairs_of_one_caption_from_those_of_two():
    pictures = np.stack([vectors(0, 60), vectors(90, 90)])

    assert compute_seed_distances(pictures)[0] == pytest.approx(np.array([[0, 0.5], [0.5, 0]]), abs=1e-12)
    assert compute_seed_distances(pictures)[1] == pytest.approx(np.zeros((2, 2)), abs=1e-12)
    assert compute_caption_distance(pictures) == pytest.approx((1 + 1 - 3**0.5 / 2) / 2)
    assert np.isnan(compute_caption_distance(pictures[:1]))
