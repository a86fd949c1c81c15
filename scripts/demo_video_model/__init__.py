"""Trains the built-in video model from scratch: ``python -m scripts.demo_video_model``."""
