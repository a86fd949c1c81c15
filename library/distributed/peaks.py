"""How much devices can compute at most, by the name they give themselves."""

from collections.abc import Mapping

import torch

from .devices import device_title

TERAFLOPS: Mapping[str, float] = {
    "B200": 2250, "GB200": 2500, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "GH200": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "RTX PRO 6000": 504, "RTX 6000 Ada": 364, "RTX A6000": 154.8,
    "RTX A5000": 111, "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 3090": 71,
    "RTX 3080": 59.5, "MI355X": 2500, "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5, "MI250": 181,
}  # fmt: skip
"""In bf16 with sums in float32, without sparsity, as their makers' data sheets say; of a part of a name the longest."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Of the device in a second; nothing for devices that are not in the table, and in other than half precision."""
    name = device_title(device).lower()
    known = [title for title in TERAFLOPS if title.lower() in name]
    if not known or precision not in ("bf16", "fp16"):
        return None
    return TERAFLOPS[max(known, key=len)] * 1e12
