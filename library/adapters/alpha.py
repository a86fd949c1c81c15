"""Alpha multiplied into an update, for files that hold none, and taken out of it again."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from .state_dict import UP, ModuleUpdate

ALPHAS_KEY = "lorikeet.alphas"
"""Metadata of a file without alphas: what they were, by module; ``*`` stands for all others."""


WIDENED_DTYPE_KEY = "lorikeet.widened"
"""Metadata: the precision of tensors that are float32 in the file because alpha / rank cannot be undone otherwise."""


ALPHA_DTYPE_KEY = "lorikeet.alpha_dtype"
"""Metadata: the precision that the alphas had."""


ALPHA_METADATA_KEYS = (ALPHAS_KEY, WIDENED_DTYPE_KEY, ALPHA_DTYPE_KEY)


_SCALED_TENSORS = (UP, "lokr_w1", "lokr_w1_a", "hada_w1_a")
"""What alpha / rank is multiplied into."""


def fold_alpha(update: ModuleUpdate) -> ModuleUpdate:
    """The same update with alpha equal to its rank."""
    name = _find_scaled_tensor(update)
    if name is None or update.scale == 1:
        return replace(update, alpha=float(update.rank))
    product = _scale_tensor(update.tensors[name], update.scale)
    return ModuleUpdate({**update.tensors, name: product}, float(update.rank))


def change_alpha(update: ModuleUpdate, alpha: float) -> ModuleUpdate:
    """The same update for another alpha; kinds that have none stay as they are."""
    name = _find_scaled_tensor(update)
    if name is None or alpha == update.alpha:
        return update
    return ModuleUpdate({**update.tensors, name: update.tensors[name] * (update.alpha / alpha)}, alpha)


def is_fold_exact(update: ModuleUpdate) -> bool:
    """Whether ``unfolded`` finds every bit of the update again."""
    name, after = _find_scaled_tensor(update), fold_alpha(update)
    if name is None:
        return True
    tensor = update.tensors[name]
    return torch.equal(_unscale_tensor(after.tensors[name], update.scale, tensor.dtype), tensor)


def build_alpha_metadata(
    updates: Mapping[str, ModuleUpdate], alpha_dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """The metadata that ``unfolded`` and ``alpha_dtype_told`` need."""
    found = {}
    if alpha_dtype != torch.float32:
        found[ALPHA_DTYPE_KEY] = _format_dtype(alpha_dtype)
    if any(update.scale != 1 and _find_scaled_tensor(update) is not None for update in updates.values()):
        usual, _ = Counter(update.alpha for update in updates.values()).most_common(1)[0]
        alphas = {"*": usual, **{module: update.alpha for module, update in updates.items() if update.alpha != usual}}
        found[ALPHAS_KEY] = json.dumps(alphas)
        half = {tensor.dtype for update in updates.values() for tensor in update.tensors.values()} - {torch.float32}
        if len(half) == 1:
            found[WIDENED_DTYPE_KEY] = _format_dtype(half.pop())
    return found


def read_alpha_dtype(metadata: Mapping[str, str]) -> torch.dtype:
    """The precision in which the alphas were written before."""
    dtype = getattr(torch, metadata.get(ALPHA_DTYPE_KEY, "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unfold_alphas(updates: Mapping[str, ModuleUpdate], metadata: Mapping[str, str]) -> dict[str, ModuleUpdate]:
    """The updates with the alphas that the metadata tells; what they do stays the same whatever it tells."""
    if ALPHAS_KEY not in metadata:
        return dict(updates)
    try:
        alphas = {str(module): float(alpha) for module, alpha in json.loads(metadata[ALPHAS_KEY]).items()}
        narrow = getattr(torch, metadata.get(WIDENED_DTYPE_KEY, "float32"))
    except (ValueError, AttributeError, TypeError):
        raise UserError(f"its metadata {ALPHAS_KEY} cannot be read: {metadata[ALPHAS_KEY][:60]}") from None
    return {
        module: _unfold_alpha(update, alphas.get(module, alphas.get("*")), narrow) for module, update in updates.items()
    }


def _unfold_alpha(update: ModuleUpdate, alpha: float | None, narrow_dtype: torch.dtype) -> ModuleUpdate:
    name = _find_scaled_tensor(update)
    if not alpha or name is None or alpha == update.alpha:
        return update
    tensor = update.tensors[name]
    dtype = narrow_dtype if tensor.dtype == torch.float32 else tensor.dtype
    return ModuleUpdate({**update.tensors, name: _unscale_tensor(tensor, alpha / update.rank, dtype)}, alpha)


def _find_scaled_tensor(update: ModuleUpdate) -> str | None:
    return next((name for name in _SCALED_TENSORS if name in update.tensors), None)


def _scale_tensor(tensor: Tensor, scale: float) -> Tensor:
    """In the tensor's own precision where nothing is lost by it, otherwise in float32."""
    product = tensor.double() * scale
    same = product.to(tensor.dtype)
    return same if torch.equal(_unscale_tensor(same, scale, tensor.dtype), tensor) else product.float()


def _unscale_tensor(product: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (product.double() / scale).to(dtype)
