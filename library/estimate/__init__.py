"""Memory estimates and parallel layouts: what a run needs on each device, found without loading a model."""
