"""Parallelism and memory of a training step: strategies, gradient synchronisation, compilation, offload, quantization."""
