"""Which ways to compute attention this machine has; asked before any model is loaded, and without importing them."""

from importlib.util import find_spec

from .world import World

PACKAGES = {"flash": ("flash_attn", "flash-attn"), "flash3": ("flash_attn_interface", "flash-attn-3"),
            "xformers": ("xformers", "xformers")}  # fmt: skip
"""Way -> the module it needs, and the package to install."""
HALF_ONLY = ("flash", "flash3", "cudnn")


def attention_problems(mode: str, world: World, precision: str | None) -> list[str]:
    """Everything that keeps ``mode`` from working here; torch's own choice (sdpa) works everywhere."""
    if mode in ("sdpa", "torch", "math"):
        return []
    problems = []
    if mode in PACKAGES and find_spec(PACKAGES[mode][0]) is None:
        problems.append(f"--attn_mode {mode}: it is not installed; pip install {PACKAGES[mode][1]}, or use sdpa")
    if world.device != "cuda":
        problems.append(f"--attn_mode {mode}: needs a CUDA device, and this is {world.device}; use sdpa")
    if mode in HALF_ONLY and precision not in ("bf16", "fp16"):
        problems.append(f"--attn_mode {mode}: computes in half precision only; set mixed_precision bf16, or use sdpa")
    return problems
