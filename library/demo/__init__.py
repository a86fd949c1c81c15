"""The built-in model, a diffusers folder like any other, on which `make demo` trains."""

from pathlib import Path

BUILT_IN_MODEL_DIR = Path(__file__).parent / "model"
