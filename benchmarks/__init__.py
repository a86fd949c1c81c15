"""Benchmarks of the trainer, run from the repository root with ``python -m benchmarks NAME``."""
