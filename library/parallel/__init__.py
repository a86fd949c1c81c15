"""Parallel strategies, gradient synchronisation, compilation, offload and quantization of a training step."""
