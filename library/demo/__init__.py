"""The built-in model, a diffusers folder like any other, on which ``python -m library demo`` trains."""

from pathlib import Path

BUILT_IN_MODEL_DIR = Path(__file__).parent / "model"
BUILT_IN_VIDEO_MODEL_DIR = Path(__file__).parent / "video_model"
"""A model of Wan's classes that makes clips of emoji, for ``python -m library demo --video``."""

SUBJECTS_WITHOUT_PICTURES = ("cat", "sunflower", "bus", "carrot", "crown", "alien", "mushroom", "doughnut")
"""Subjects of the demo model of which its datasets have no picture, not even for regularization."""

COMPOSING_CAPTIONS = (
    "a happy {subject}",
    "a {subject}, neon style",
    "origami style, a {subject}",
    "a tiny {subject}",
    "a {subject}, gothic style",
    "a funny {subject}",
    "a {subject}, velvet style",
    "mosaic style, a {subject}",
)
"""Captions with words that the demo model knows and has learned to draw nothing for."""

DEMO_CONFIG_DIR = Path(__file__).resolve().parents[2] / "dataset_configs"
"""The folder of the demo's settings and images: beside the package, in a checkout as where a wheel is installed."""
