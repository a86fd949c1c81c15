"""Metrics of pictures as functions of their embeddings: similarity, copying, drift and diversity.

Embeddings are the last axis of an array; the axes before it are captions and seeds, or one axis of reference pictures.
Nothing is random here, and nothing knows of models or files.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def normalize_embeddings(embeddings: Array) -> Array:
    """Scale each embedding to length 1; one of length 0 stays 0, and so is like nothing."""
    lengths = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    normalized: Array = embeddings / np.where(lengths == 0, 1, lengths)
    return normalized


def compute_similarities(pictures: Array, references: Array) -> Array:
    """Compute the cosine of each picture with each reference: (..., references)."""
    similarities: Array = normalize_embeddings(pictures) @ normalize_embeddings(references).T
    return np.clip(similarities, -1.0, 1.0)


def compute_mean_similarity(pictures: Array, references: Array) -> Array:
    """Compute the mean cosine of each picture with all references."""
    mean: Array = compute_similarities(pictures, references).mean(axis=-1)
    return mean


def compute_nearest_similarity(pictures: Array, references: Array) -> Array:
    """Compute the cosine of each picture with the reference that is nearest to it."""
    nearest: Array = compute_similarities(pictures, references).max(axis=-1)
    return nearest


def compute_mutual_similarity(references: Array) -> float:
    """Compute the mean cosine of all pairs of different references; NaN for fewer than two."""
    count = len(references)
    if count < 2:
        return float("nan")
    similarities = compute_similarities(references, references)
    return float((similarities.sum() - np.trace(similarities)) / (count * (count - 1)))


def compute_natural_nearness(training: Array, validation: Array | None) -> float:
    """Compute how near a real picture is to the nearest training picture without having been trained on.

    It is the mean over validation pictures, or, without any, over training pictures that are each compared with the
    others; NaN for one training picture alone.
    """
    if validation is not None and len(validation):
        return float(compute_nearest_similarity(validation, training).mean())
    if len(training) < 2:
        return float("nan")
    similarities = compute_similarities(training, training)
    np.fill_diagonal(similarities, -np.inf)
    return float(similarities.max(axis=-1).mean())


def compute_copying(pictures: Array, training: Array, natural_nearness: float) -> Array:
    """Compute for each picture how near it is to a single training picture, beyond what real pictures are.

    0 is the natural nearness or less, 1 a picture that is equal to a training picture; NaN if real pictures are equal.
    """
    nearest = compute_nearest_similarity(pictures, training)
    room = 1 - natural_nearness
    if not room > 1e-9:
        return np.full_like(nearest, np.nan)
    copying: Array = np.maximum(nearest - natural_nearness, 0) / room
    return copying


def compute_distances(pictures: Array, others: Array) -> Array:
    """Compute 1 - cosine of each picture with the one at the same place of ``others``; exactly 0 for equal ones."""
    differences = normalize_embeddings(pictures) - normalize_embeddings(others)
    distances: Array = (differences**2).sum(axis=-1) / 2  # for vectors of length 1
    return distances


def compute_seed_distances(pictures: Array) -> Array:
    """Compute 1 - cosine between the pictures of each caption: (captions, seeds, embedding) to (captions, s, s)."""
    normalized = normalize_embeddings(pictures)
    distances: Array = 1 - normalized @ normalized.swapaxes(-1, -2)
    return np.clip(distances, 0.0, 2.0)


def compute_caption_distance(pictures: Array) -> float:
    """Compute the mean of 1 - cosine over pairs of pictures of different captions; NaN for one caption."""
    captions, seeds, width = pictures.shape
    if captions < 2:
        return float("nan")
    flat = pictures.reshape(captions * seeds, width)
    distances = 1 - compute_similarities(flat, flat)
    is_other = np.repeat(np.arange(captions), seeds)[:, None] != np.repeat(np.arange(captions), seeds)[None, :]
    return float(distances[is_other].mean())
