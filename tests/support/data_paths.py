"""The repository root, and a dataset option for tests that parse options without reading a dataset."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


DATA = ["--dataset_config", str(ROOT / "pyproject.toml")]
"""An existing file; parsing the options does not read its content."""
