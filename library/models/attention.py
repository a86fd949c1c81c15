"""The attention backend of the denoiser (``--attn_mode``, ``--xformers``), and cuDNN's made safe for training.

torch builds a graph for cuDNN's backward for each shape and layout of query, key and value (2.11; later versions also
look at the gradient) and uses it for every gradient of the output, whatever its layout.  In FLUX.1 the gradient of a
single block is a slice of a wider tensor, and that of a double block is not: what was built for one reads past the end
of the other, which gives NaN or an invalid memory access.  So ``scaled_dot_product_attention`` never chooses cuDNN by
itself here, although torch prefers it on Hopper and Blackwell (``devices.disable_cudnn_attention``), and
``--attn_mode cudnn`` gives all gradients one layout.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .facts import TORCH_ATTENTION_MODES

DIFFUSERS_ATTENTION_BACKENDS = {
    "math": "_native_math",
    "efficient": "_native_efficient",
    "cudnn": "_native_cudnn",
    "flash": "flash",
    "flash3": "_flash_3",
    "xformers": "xformers",
}
"""The name in diffusers of the attention backend of each ``attn_mode``."""


def set_attention_mode(denoiser: Any, mode: str) -> None:
    """Set diffusers' attention backend; models without backends only have the older switch for xformers."""
    from diffusers import attention_backend

    _replace_diffusers_backend()  # DIFFUSERS_ATTN_BACKEND can choose it as well
    if mode in TORCH_ATTENTION_MODES:
        return
    processors = [getattr(module, "processor", None) for module in denoiser.modules()]
    if mode == "xformers" and not any(hasattr(processor, "_attention_backend") for processor in processors):
        denoiser.enable_xformers_memory_efficient_attention()
        return
    # diffusers also makes the backend the global default; the context restores the one before.
    with attention_backend("native"):  # type: ignore[no-untyped-call]
        denoiser.set_attention_backend(DIFFUSERS_ATTENTION_BACKENDS[mode])


def _replace_diffusers_backend() -> None:
    """Replace diffusers' function for cuDNN, which also copies query, key and value into another layout."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    registry: Any = _AttentionBackendRegistry
    registry._backends[AttentionBackendName._NATIVE_CUDNN] = attend_with_cudnn


def attend_with_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: SDPBackend = SDPBackend.CUDNN_ATTENTION,
    **unused: Any,
) -> Tensor:
    """Attention of tensors (B, tokens, heads, size), as diffusers passes them; its arguments are diffusers'."""
    if unused.get("return_lse") or unused.get("_parallel_config") is not None:
        raise AssertionError("only diffusers' own context parallelism asks for it")
    with sdpa_kernel(kernel):
        output: Tensor = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return make_gradient_contiguous(output.transpose(1, 2))


def make_gradient_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor; its gradient is copied unless it is contiguous."""
    result: Tensor = _ContiguousGradient.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
