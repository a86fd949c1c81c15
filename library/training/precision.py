"""In which precision frozen models compute, by the name of the precision that the accelerator has."""

import torch

MIXED_PRECISION_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Precision of the frozen model; the adapters in it are always float32."""
