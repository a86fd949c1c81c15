"""One step on all ranks: parallel strategies, gradients, compilation, offload and quantization."""
