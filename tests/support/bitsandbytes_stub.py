"""bitsandbytes on a CPU: the installed package, or a stand-in with the same operator where it is not installed."""

import importlib.util
import sys
from pathlib import Path

from library.parallel import quantize

STAND_IN = """
from types import SimpleNamespace
import torch
from library.parallel.quantize import NF4_LEVELS

nn = SimpleNamespace(Linear8bitLt=type("Linear8bitLt", (), {}), Linear4bit=type("Linear4bit", (), {}))  # peft asks

@torch.library.custom_op("bitsandbytes::dequantize_4bit", mutates_args=())
def dequantize_4bit(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    assert blocksize in (64, 128, 256) and absmax.dtype is torch.float32 and A.dtype is torch.uint8
    count = torch.Size(shape).numel()
    assert A.numel() == (count + 1) // 2
    indices = torch.stack([A.flatten() >> 4, A.flatten() & 15], dim=1).flatten()[:count]
    scales = absmax.repeat_interleave(blocksize)[:count]
    return (torch.tensor(NF4_LEVELS)[indices.long()] * scales).view(shape).to(dtype)

@dequantize_4bit.register_fake
def _(A, absmax, blocksize, quant_type, shape, dtype):
    return torch.empty(shape, dtype=dtype, device=A.device)
"""


def install_bitsandbytes(folder: Path, source: str = STAND_IN) -> None:
    """Make this process use bitsandbytes' kernel on the CPU; install the stand-in, or a broken one, where needed."""
    quantize.BITSANDBYTES_DEVICES = {"cpu"}
    if source == STAND_IN and importlib.util.find_spec("bitsandbytes") is not None:
        return
    for path, text in (
        ("bitsandbytes/__init__.py", source),
        ("bitsandbytes-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 9.9\n"),
    ):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    sys.path.insert(0, str(folder))
