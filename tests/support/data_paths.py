"""Shared by tests: data paths."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


DATA = ["--dataset_config", str(ROOT / "pyproject.toml")]
"""Any file that is there: what a dataset file holds is read elsewhere."""
