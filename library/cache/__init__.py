"""Disk cache of latents and text-encoder outputs, keyed by content."""
