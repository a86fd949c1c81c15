"""Sweeps: the file, the queue of runs, when one is hopeless, and the result."""
