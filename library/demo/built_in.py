"""Where the built-in model lies: a diffusers folder like any other."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
