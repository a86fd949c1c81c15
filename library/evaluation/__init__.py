"""How good LoRA files are: pictures, their embeddings, metrics with confidence intervals, and which step is the best."""
