"""DeepSpeed ZeRO: its engine as a strategy, its optimizer as one of whole parameters, NVMe offload."""
