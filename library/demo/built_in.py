"""Location of the built-in demo model, a diffusers folder."""

from pathlib import Path

FOLDER = Path(__file__).parent / "model"
