"""Optimizers, learning rate schedules and EMA."""
