"""Optimizers, learning rate schedulers and EMA."""
