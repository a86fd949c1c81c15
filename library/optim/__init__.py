"""Learning: optimizers and the course of the learning rate."""
