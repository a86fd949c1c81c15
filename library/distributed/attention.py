"""Which ways to compute attention this machine has; asked before any model is loaded, and without importing them."""

from importlib.util import find_spec

from .world import World

ATTENTION_PACKAGES = {"flash": ("flash_attn", "flash-attn"), "flash3": ("flash_attn_interface", "flash-attn-3"),
            "xformers": ("xformers", "xformers")}  # fmt: skip
"""Way -> the module it needs, and the package to install."""
HALF_PRECISION_ATTENTION = ("flash", "flash3", "cudnn")


def validate_attention_support(mode: str, world: World, precision: str | None) -> list[str]:
    """Everything that keeps ``mode`` from working here; torch's own choice (sdpa) works everywhere."""
    if mode in ("sdpa", "torch", "math"):
        return []
    problems = []
    if mode in ATTENTION_PACKAGES and find_spec(ATTENTION_PACKAGES[mode][0]) is None:
        problems.append(f"--attn_mode {mode}: it is not installed; pip install {ATTENTION_PACKAGES[mode][1]}, or use sdpa")
    if world.device_type != "cuda":
        problems.append(f"--attn_mode {mode}: needs a CUDA device, and this is {world.device_type}; use sdpa")
    if mode in HALF_PRECISION_ATTENTION and precision not in ("bf16", "fp16"):
        problems.append(f"--attn_mode {mode}: computes in half precision only; set mixed_precision bf16, or use sdpa")
    return problems
