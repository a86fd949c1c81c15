"""How good LoRA files are: pictures, metrics of their embeddings with confidence intervals, and the best step."""
