"""Programs beside training, each started as ``python -m library NAME``."""
