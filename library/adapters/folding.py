"""Alpha multiplied into an update, for files that hold none, and taken out of it again."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from .updates import UP, Update

TOLD = "lorikeet.alphas"
"""Metadata of a file without alphas: what they were, by module; ``*`` stands for all others."""
WIDENED = "lorikeet.widened"
"""Metadata: the precision of tensors that are float32 in the file because alpha / rank cannot be undone otherwise."""

ALPHA_DTYPE = "lorikeet.alpha_dtype"
"""Metadata: the precision that the alphas had."""
ALL_TOLD = (TOLD, WIDENED, ALPHA_DTYPE)

_FACTORS = (UP, "lokr_w1", "lokr_w1_a", "hada_w1_a")
"""What alpha / rank is multiplied into."""


def folded(update: Update) -> Update:
    """The same update with alpha equal to its rank."""
    name = _factor(update)
    if name is None or update.scale == 1:
        return replace(update, alpha=float(update.rank))
    product = _times(update.tensors[name], update.scale)
    return Update({**update.tensors, name: product}, float(update.rank))


def of_alpha(update: Update, alpha: float) -> Update:
    """The same update for another alpha; kinds that have none stay as they are."""
    name = _factor(update)
    if name is None or alpha == update.alpha:
        return update
    return Update({**update.tensors, name: update.tensors[name] * (update.alpha / alpha)}, alpha)


def is_exact(update: Update) -> bool:
    """Whether ``unfolded`` finds every bit of the update again."""
    name, after = _factor(update), folded(update)
    if name is None:
        return True
    tensor = update.tensors[name]
    return torch.equal(_over(after.tensors[name], update.scale, tensor.dtype), tensor)


def told(updates: Mapping[str, Update], alpha_dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The metadata that ``unfolded`` and ``alpha_dtype_told`` need."""
    found = {}
    if alpha_dtype != torch.float32:
        found[ALPHA_DTYPE] = _name(alpha_dtype)
    if any(update.scale != 1 and _factor(update) is not None for update in updates.values()):
        usual, _ = Counter(update.alpha for update in updates.values()).most_common(1)[0]
        alphas = {"*": usual, **{module: update.alpha for module, update in updates.items() if update.alpha != usual}}
        found[TOLD] = json.dumps(alphas)
        half = {tensor.dtype for update in updates.values() for tensor in update.tensors.values()} - {torch.float32}
        if len(half) == 1:
            found[WIDENED] = _name(half.pop())
    return found


def alpha_dtype_told(metadata: Mapping[str, str]) -> torch.dtype:
    """The precision in which the alphas were written before."""
    dtype = getattr(torch, metadata.get(ALPHA_DTYPE, "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unfolded(updates: Mapping[str, Update], metadata: Mapping[str, str]) -> dict[str, Update]:
    """The updates with the alphas that the metadata tells; what they do stays the same whatever it tells."""
    if TOLD not in metadata:
        return dict(updates)
    try:
        alphas = {str(module): float(alpha) for module, alpha in json.loads(metadata[TOLD]).items()}
        narrow = getattr(torch, metadata.get(WIDENED, "float32"))
    except (ValueError, AttributeError, TypeError):
        raise UserError(f"its metadata {TOLD} cannot be read: {metadata[TOLD][:60]}") from None
    return {module: _unfolded(update, alphas.get(module, alphas.get("*")), narrow)
            for module, update in updates.items()}  # fmt: skip


def _unfolded(update: Update, alpha: float | None, narrow: torch.dtype) -> Update:
    name = _factor(update)
    if not alpha or name is None or alpha == update.alpha:
        return update
    tensor = update.tensors[name]
    dtype = narrow if tensor.dtype == torch.float32 else tensor.dtype
    return Update({**update.tensors, name: _over(tensor, alpha / update.rank, dtype)}, alpha)


def _factor(update: Update) -> str | None:
    return next((name for name in _FACTORS if name in update.tensors), None)


def _times(tensor: Tensor, scale: float) -> Tensor:
    """In the tensor's own precision where nothing is lost by it, otherwise in float32."""
    product = tensor.double() * scale
    same = product.to(tensor.dtype)
    return same if torch.equal(_over(same, scale, tensor.dtype), tensor) else product.float()


def _over(product: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (product.double() / scale).to(dtype)
