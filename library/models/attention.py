"""Ways to compute attention: which of them a family has, and switching a denoiser to one of them."""

from typing import Any

from .detect import DetectedModel, get_family_facts

TORCH_ATTENTION_MODES = ("sdpa", "torch")
"""torch's own ``scaled_dot_product_attention``, which every denoiser uses unless it is told otherwise."""


DIFFUSERS_ATTENTION_BACKENDS = {
    "math": "_native_math",
    "efficient": "_native_efficient",
    "cudnn": "_native_cudnn",
    "flash": "flash",
    "flash3": "_flash_3",
    "xformers": "xformers",
}
"""Our names to those of diffusers."""


def validate_attention_mode(mode: str, model: DetectedModel) -> str | None:
    """What to say when this family cannot be told to compute attention so."""
    facts = get_family_facts(model.family)
    if mode in TORCH_ATTENTION_MODES or mode in facts.attention_modes:
        return None
    others = ", ".join(("sdpa", *facts.attention_modes))
    return f"{mode} cannot be chosen for {facts.title}; it has {others}; sdpa picks the fastest kernel that fits"


def set_attention_mode(denoiser: Any, mode: str) -> None:
    """Through diffusers' backends, or where a model does not use those, through its older switch for xformers."""
    from diffusers import attention_backend

    if mode in TORCH_ATTENTION_MODES:
        return
    if not any(hasattr(getattr(module, "processor", None), "_attention_backend") for module in denoiser.modules()):
        denoiser.enable_xformers_memory_efficient_attention()
        return
    with attention_backend("native"):  # type: ignore[no-untyped-call]  # diffusers also makes it the choice of everything else; that ends here
        denoiser.set_attention_backend(DIFFUSERS_ATTENTION_BACKENDS[mode])
