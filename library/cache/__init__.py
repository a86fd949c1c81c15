"""Caches of latents and text encoder outputs on disk or in memory, keyed by the content they are computed from."""
