"""Latent caching and text-encoder caching, on disk, keyed by content."""
