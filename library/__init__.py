"""Fine-tuning of diffusion models; docs/architecture.md is the map of this package."""

__version__ = "0.2.0"
