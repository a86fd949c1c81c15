"""The built-in model, a diffusers folder like any other, on which ``python -m library demo`` trains."""

from pathlib import Path

BUILT_IN_MODEL_DIR = Path(__file__).parent / "model"
DEMO_CONFIG_DIR = Path(__file__).resolve().parents[2] / "dataset_configs"
"""The folder of the demo's settings and images: beside the package, in a checkout as where a wheel is installed."""
