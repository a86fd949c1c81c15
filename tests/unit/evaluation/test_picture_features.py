"""The small embedding tells subjects apart, wherever they are in the picture."""

import numpy as np
from data_paths import ROOT
from PIL import Image

from library.evaluation.embedding_metrics import compute_mutual_similarity, compute_similarities
from library.evaluation.picture_features import FeatureEmbedder

PICTURES = ROOT / "dataset_configs"


def embed(*names: str) -> np.ndarray:
    return FeatureEmbedder().embed_pictures([Image.open(PICTURES / name) for name in names])


def test_one_bird_in_different_places_and_shapes_of_pictures_is_more_alike_than_other_subjects():
    birds = embed("demo/lorikeet_00.png", "demo/lorikeet_08.png", "demo/lorikeet_13.png", "demo/lorikeet_15.png")
    others = embed(*(f"demo_regularisation/{name}.png" for name in ("fox", "frog", "pine_tree", "banana", "star")))

    assert compute_similarities(birds, others).max() < 0.8 < compute_similarities(birds, birds).min()
    assert compute_mutual_similarity(others) < 0.6


def test_where_a_subject_is_makes_some_difference():
    first, moved = embed("demo/lorikeet_12.png", "demo/lorikeet_13.png")

    assert 0.8 < compute_similarities(first[None], moved[None])[0, 0] < 0.999


def test_a_picture_of_one_color_has_features():
    found = FeatureEmbedder().embed_pictures([Image.new("RGB", (64, 96), "white"), Image.new("RGB", (64, 96), "red")])

    assert np.isfinite(found).all()
