"""Trains the built-in demo model from scratch: ``python -m scripts.demo_model``."""
