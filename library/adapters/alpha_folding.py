"""LoRA alpha in files: fold alpha / rank into the tensors for diffusers, which stores no alphas; unfold it exactly.

The alpha of each layer is chosen in ``targets_rank_alpha``; an alpha that a file lacks is read in
``kohya_diffusers_comfyui_keys``; peft applies the scale.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import UserError
from .module_adapter import UP, ModuleAdapter

ALPHAS_KEY = "lorikeet.alphas"
"""Metadata key: the alphas that were folded, by module; ``*`` is the default."""

UPCAST_FROM_DTYPE_KEY = "lorikeet.widened"
"""Metadata key: the original dtype of tensors that are float32 in the file, where folding would lose precision."""

ALPHA_DTYPE_KEY = "lorikeet.alpha_dtype"
"""Metadata key: the dtype of the alphas."""

ALPHA_METADATA_KEYS = (ALPHAS_KEY, UPCAST_FROM_DTYPE_KEY, ALPHA_DTYPE_KEY)
_SCALED_TENSORS = (UP, "lokr_w1", "lokr_w1_a", "hada_w1_a")
"""The tensor that alpha / rank is folded into."""


def fold_alpha(adapter: ModuleAdapter, alpha: float | None = None) -> ModuleAdapter:
    """Return the same adapter with this alpha, by default its rank; ``unfold_alphas`` restores the old one."""
    name, target = _find_scaled_tensor(adapter), float(adapter.rank) if alpha is None else alpha
    if name is None or adapter.alpha == target:  # without such a tensor alpha is no factor
        return adapter
    product = _scale_tensor(adapter.tensors[name], adapter.alpha / target)
    return ModuleAdapter({**adapter.tensors, name: product}, target)


def change_alpha(adapter: ModuleAdapter, alpha: float) -> ModuleAdapter:
    """Return the same adapter with another alpha; adapter types without alpha are unchanged."""
    name = _find_scaled_tensor(adapter)
    if name is None or alpha == adapter.alpha:
        return adapter
    return ModuleAdapter({**adapter.tensors, name: adapter.tensors[name] * (adapter.alpha / alpha)}, alpha)


def is_fold_exact(adapter: ModuleAdapter) -> bool:
    """Whether ``unfold_alphas`` restores every bit of the adapter."""
    name, folded = _find_scaled_tensor(adapter), fold_alpha(adapter)
    if name is None:
        return True
    tensor = adapter.tensors[name]
    return torch.equal(_unscale_tensor(folded.tensors[name], adapter.scale, tensor.dtype), tensor)


def build_alpha_metadata(
    adapters: Mapping[str, ModuleAdapter],
    written: Mapping[str, ModuleAdapter],
    has_alphas: bool,
    alpha_dtype: torch.dtype = torch.float32,
) -> dict[str, str]:
    """Build the metadata that ``unfold_alphas`` and ``read_alpha_dtype`` need.

    ``written`` are the adapters with the alphas of the file, ``has_alphas`` tells whether these are stored in it.
    """
    metadata = {}
    if alpha_dtype != torch.float32 and not has_alphas:
        metadata[ALPHA_DTYPE_KEY] = _format_dtype(alpha_dtype)
    if any(
        adapter.alpha != written[module].alpha for module, adapter in adapters.items() if _find_scaled_tensor(adapter)
    ):
        default, _ = Counter(adapter.alpha for adapter in adapters.values()).most_common(1)[0]
        others = {module: adapter.alpha for module, adapter in adapters.items() if adapter.alpha != default}
        metadata[ALPHAS_KEY] = json.dumps({"*": default, **others})
        half = {tensor.dtype for adapter in adapters.values() for tensor in adapter.tensors.values()} - {torch.float32}
        if len(half) == 1:
            metadata[UPCAST_FROM_DTYPE_KEY] = _format_dtype(half.pop())
    return metadata


def read_alpha_dtype(metadata: Mapping[str, str]) -> torch.dtype:
    """The dtype that the alphas had before folding."""
    dtype = getattr(torch, metadata.get(ALPHA_DTYPE_KEY, "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unfold_alphas(adapters: Mapping[str, ModuleAdapter], metadata: Mapping[str, str]) -> dict[str, ModuleAdapter]:
    """Restore the alphas from the metadata; the effect of the adapters does not change, whatever it contains."""
    if ALPHAS_KEY not in metadata:
        return dict(adapters)
    try:
        alphas = {str(module): float(alpha) for module, alpha in json.loads(metadata[ALPHAS_KEY]).items()}
        narrow = getattr(torch, metadata.get(UPCAST_FROM_DTYPE_KEY, "float32"))
        if not isinstance(narrow, torch.dtype) or not all(map(math.isfinite, alphas.values())):
            raise ValueError("no dtype, or an infinite alpha")
    except (ValueError, AttributeError, TypeError):
        raise UserError(f"invalid metadata {ALPHAS_KEY}: {metadata[ALPHAS_KEY][:60]}") from None
    return {
        module: _unfold_alpha(adapter, alphas.get(module, alphas.get("*")), narrow)
        for module, adapter in adapters.items()
    }


def _unfold_alpha(adapter: ModuleAdapter, alpha: float | None, narrow_dtype: torch.dtype) -> ModuleAdapter:
    name = _find_scaled_tensor(adapter)
    if not alpha or name is None or alpha == adapter.alpha:
        return adapter
    tensor = adapter.tensors[name]
    dtype = narrow_dtype if tensor.dtype == torch.float32 else tensor.dtype
    return ModuleAdapter({**adapter.tensors, name: _unscale_tensor(tensor, alpha / adapter.alpha, dtype)}, alpha)


def _find_scaled_tensor(adapter: ModuleAdapter) -> str | None:
    return next((name for name in _SCALED_TENSORS if name in adapter.tensors), None)


def _scale_tensor(tensor: Tensor, scale: float) -> Tensor:
    """Scale in the tensor's dtype if that can be undone exactly, otherwise in float32."""
    product = tensor.double() * scale
    narrow = product.to(tensor.dtype)
    return narrow if torch.equal(_unscale_tensor(narrow, scale, tensor.dtype), tensor) else product.float()


def _unscale_tensor(product: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (product.double() / scale).to(dtype)
