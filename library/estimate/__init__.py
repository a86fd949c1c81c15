"""Memory estimates and parallel layouts: peak memory per GPU, computed without loading a model."""
