"""Dequantize the blocks of GGUF weights: llama.cpp's formats of 32 or 256 values, in PyTorch.

Every function takes blocks as rows of bytes (N, bytes of a block) and returns their values (N, values of a block) in
float32.  The formats are those of ``ggml-quants.c``: scales are float16, and of the formats with a K also the scales
are quantized, to 4 or 6 bits.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .gguf_file import BLOCK_TYPES

BLOCK_SIZES: Mapping[str, tuple[int, int]] = {name: (values, size) for name, values, size in BLOCK_TYPES.values()}
"""Values and bytes of a block of each type."""

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize_rows(rows: Tensor, type_name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize rows of bytes, which consist of whole blocks, in float32, rounded once to ``dtype``."""
    _, block_bytes = BLOCK_SIZES[type_name]
    blocks = rows.reshape(-1, block_bytes)
    if type_name == "Q8_0":
        return multiply_rounded(blocks.view(torch.int8)[:, 2:], _read_half(blocks[:, :2]), dtype).reshape(len(rows), -1)
    return _DEQUANTIZE[type_name](blocks).to(dtype).reshape(len(rows), -1)


def multiply_rounded(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply stored values with float32 scales in float32, and round once, as one kernel does without a copy."""
    if values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = values.to(torch.float32 if dtype is torch.float32 else torch.bfloat16)  # both have all of its values
    if dtype is torch.float32:
        return values * scale
    product = torch.empty(values.shape, dtype=dtype, device=values.device)
    return torch.mul(values, scale, out=product)


def _read_half(data: Tensor) -> Tensor:
    """Two bytes of each block as a float16 number."""
    return data.contiguous().view(torch.float16).float()


def _split_nibbles(data: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _unpack_bits(data: Tensor) -> Tensor:
    """The bits of 4 bytes, the lowest first, as (N, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _dequantize_q4_0(blocks: Tensor) -> Tensor:
    return _read_half(blocks[:, :2]) * (_split_nibbles(blocks[:, 2:]).float() - 8)


def _dequantize_q4_1(blocks: Tensor) -> Tensor:
    scale, minimum = _read_half(blocks[:, :2]), _read_half(blocks[:, 2:4])
    return scale * _split_nibbles(blocks[:, 4:]).float() + minimum


def _dequantize_q5_0(blocks: Tensor) -> Tensor:
    values = _split_nibbles(blocks[:, 6:]) | _unpack_bits(blocks[:, 2:6]) << 4
    return _read_half(blocks[:, :2]) * (values.float() - 16)


def _dequantize_q5_1(blocks: Tensor) -> Tensor:
    scale, minimum = _read_half(blocks[:, :2]), _read_half(blocks[:, 2:4])
    values = _split_nibbles(blocks[:, 8:]) | _unpack_bits(blocks[:, 4:8]) << 4
    return scale * values.float() + minimum


def _dequantize_iq4_nl(blocks: Tensor) -> Tensor:
    return _read_half(blocks[:, :2]) * _look_up(_split_nibbles(blocks[:, 2:]))


def _look_up(indices: Tensor) -> Tensor:
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=indices.device)
    return levels[indices.long()]


def _dequantize_iq4_xs(blocks: Tensor) -> Tensor:
    high, low = blocks[:, 2:4].contiguous().view(torch.int16).int(), blocks[:, 4:8]
    scales = []
    for index in range(8):
        bits = (low[:, index // 2] >> 4 * (index % 2)).int() & 15
        scales.append(bits | ((high[:, 0] >> 2 * index) & 3) << 4)
    scale = _read_half(blocks[:, :2]) * (torch.stack(scales, dim=1).float() - 32)
    values = _look_up(_split_nibbles(blocks[:, 8:].reshape(-1, 8, 16)))
    return (scale.unsqueeze(2) * values).flatten(1)


def _unpack_k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=1)
    return scales.float(), minima.float()


def _dequantize_q4_k(blocks: Tensor) -> Tensor:
    values = _split_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _apply_k_scales(blocks, values)


def _dequantize_q5_k(blocks: Tensor) -> Tensor:
    values = _split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _apply_k_scales(blocks, values | high << 4)


def _apply_k_scales(blocks: Tensor, values: Tensor) -> Tensor:
    scales, minima = _unpack_k_scales(blocks[:, 4:16])
    scale, minimum = _read_half(blocks[:, :2]) * scales, _read_half(blocks[:, 2:4]) * minima
    return (scale.unsqueeze(2) * values.float() - minimum.unsqueeze(2)).flatten(1)


def _dequantize_q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    upper = (high.unsqueeze(2) >> shifts) & 3  # (N, 2, 4, 32)
    values = (_split_nibbles(low).view(-1, 2, 4, 32) | upper << 4).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _read_half(blocks[:, 208:210])
    return (values.reshape(-1, 16, 16) * scales.unsqueeze(2)).flatten(1)


def _unpack_pairs(data: Tensor) -> Tensor:
    """The 2-bit values of 64 bytes as (N, 16, 16): 32 bytes have four rows of 32 values."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device).view(1, 1, 4, 1)
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)


def _dequantize_q3_k(blocks: Tensor) -> Tensor:
    mask, packed = blocks[:, :32], blocks[:, 96:108]
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    is_high = ((mask.unsqueeze(1) >> shifts) & 1).reshape(-1, 16, 16)
    values = _unpack_pairs(blocks[:, 32:96]).float() - 4 * (1 - is_high.float())
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    high = torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = _read_half(blocks[:, 108:110]) * ((low | high << 4).float() - 32)
    return (values * scales.unsqueeze(2)).flatten(1)


def _dequantize_q2_k(blocks: Tensor) -> Tensor:
    packed, values = blocks[:, :16], _unpack_pairs(blocks[:, 16:80]).float()
    scales = _read_half(blocks[:, 80:82]) * (packed & 15).float()
    minima = _read_half(blocks[:, 82:84]) * (packed >> 4).float()
    return (values * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


_DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _dequantize_q4_0,
    "Q4_1": _dequantize_q4_1,
    "Q5_0": _dequantize_q5_0,
    "Q5_1": _dequantize_q5_1,
    "Q2_K": _dequantize_q2_k,
    "Q3_K": _dequantize_q3_k,
    "Q4_K": _dequantize_q4_k,
    "Q5_K": _dequantize_q5_k,
    "Q6_K": _dequantize_q6_k,
    "IQ4_NL": _dequantize_iq4_nl,
    "IQ4_XS": _dequantize_iq4_xs,
}
