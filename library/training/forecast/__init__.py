"""How much memory a run needs on each device, and which way of sharing is fastest, without loading a model."""
