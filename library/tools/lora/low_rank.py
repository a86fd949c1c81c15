"""Updates as products of two small factors, and their singular values, norms and inner products.

A product ``up @ down`` is never multiplied out: QR of both factors leaves a matrix of rank x rank, whose SVD is that of
the product.  Factors are float64, so that what is lost is lost in the file's dtype only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...adapters.merge import compute_delta_weight
from ...adapters.module_adapter import DOWN, UP, ModuleAdapter

BASE_DEPENDENT_TYPES = ("dora", "input-dora", "glora", "diag-oft", "oft", "boft")
"""Adapter types whose effect on the weights depends on the weights themselves."""

_PROBE_COLUMNS = 16
_LOW_RANK_RESIDUAL = {torch.float32: 1e-6, torch.float64: 1e-13}
"""The part of a matrix of low rank that rounding leaves outside of its rank, as a share of its norm."""


@dataclass(frozen=True)
class LowRank:
    """A matrix (outputs, weights per output) as ``up @ down``."""

    up: Tensor
    down: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.up), self.down.shape[1]

    @property
    def rank(self) -> int:
        return int(self.up.shape[1])

    def scale(self, factor: float) -> "LowRank":
        return LowRank(self.up * factor, self.down)

    def multiply_out(self) -> Tensor:
        return self.up @ self.down


Update = LowRank | Tensor
"""The update of one layer: two factors, or a matrix of two dimensions where factors would be no smaller."""


@dataclass(frozen=True)
class Svd:
    """Singular vectors and values of an update, largest first."""

    left: Tensor
    values: Tensor
    right: Tensor


def factor_update(adapter: ModuleAdapter, dtype: torch.dtype = torch.float64) -> Update:
    """The update of an adapter at full strength, of a type that does not depend on the base weights."""
    tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    if DOWN in adapter.tensors:
        return _shrink(LowRank(tensors[UP].flatten(1) * adapter.scale, tensors[DOWN].flatten(1)))
    if adapter.adapter_type == "loha" and not adapter.is_tucker:
        first, second = ((tensors[f"hada_w{n}_a"], tensors[f"hada_w{n}_b"].flatten(1)) for n in (1, 2))
        rank = first[0].shape[1] * second[0].shape[1]
        if rank < min(len(first[0]), first[1].shape[1]):
            up = torch.einsum("mi,mj->mij", first[0], second[0]).reshape(-1, rank)
            down = torch.einsum("in,jn->ijn", first[1], second[1]).reshape(rank, -1)
            return LowRank(up * adapter.scale, down)
    if adapter.adapter_type == "lokr" and not adapter.is_tucker:
        first, second = (_factor_kronecker_part(tensors, f"lokr_w{n}") for n in (1, 2))
        rank = first[0].shape[1] * second[0].shape[1]
        if rank < min(len(first[0]) * len(second[0]), first[1].shape[1] * second[1].shape[1]):
            return LowRank(torch.kron(first[0], second[0]) * adapter.scale, torch.kron(first[1], second[1]))
    update: Tensor = compute_delta_weight(adapter, dtype).flatten(1) * adapter.scale
    return update


def _factor_kronecker_part(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """A decomposed factor, or a full one and the identity."""
    if name not in tensors:
        return tensors[f"{name}_a"], tensors[f"{name}_b"].flatten(1)
    full = tensors[name].flatten(1)
    if len(full) <= full.shape[1]:
        return torch.eye(len(full), dtype=full.dtype), full
    return full, torch.eye(full.shape[1], dtype=full.dtype)


def _shrink(update: LowRank) -> Update:
    return update if update.rank < min(update.shape) else update.multiply_out()


def add_updates(updates: Sequence[Update]) -> Update:
    """The sum of updates of one layer."""
    if len(updates) == 1:
        return updates[0]
    if all(isinstance(each, LowRank) for each in updates):
        factors: list[LowRank] = [each for each in updates if isinstance(each, LowRank)]
        return _shrink(LowRank(torch.cat([each.up for each in factors], 1), torch.cat([each.down for each in factors])))
    total = multiply_out(updates[0]).clone()
    for each in updates[1:]:
        total += multiply_out(each)
    return total


def scale_update(update: Update, factor: float) -> Update:
    """A multiple of an update."""
    return update.scale(factor) if isinstance(update, LowRank) else update * factor


def multiply_out(update: Update) -> Tensor:
    """The update as one matrix."""
    return update.multiply_out() if isinstance(update, LowRank) else update


def compute_norm(update: Update) -> float:
    """The Frobenius norm; exact for small differences, too, since nothing is subtracted."""
    if not isinstance(update, LowRank):
        return float(torch.linalg.matrix_norm(update.double()))
    _, left = torch.linalg.qr(update.up, mode="r")
    _, right = torch.linalg.qr(update.down.T, mode="r")
    return float(torch.linalg.matrix_norm(left @ right.T))


def compute_inner_product(one: Update, other: Update) -> float:
    """The sum of the products of all elements of two updates."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        return float(((one.up.T @ other.up) * (one.down @ other.down.T)).sum())
    if isinstance(one, LowRank):
        return compute_inner_product(other, one)
    if isinstance(other, LowRank):
        return float(((other.up.T @ one) * other.down).sum())
    return float((one * other).sum())


def compute_difference(one: Update, other: Update) -> float:
    """The Frobenius norm of the difference."""
    return compute_norm(add_updates([one, scale_update(other, -1.0)]))


def decompose(update: Update, tolerance: float = 0.0) -> Svd:
    """The singular value decomposition, of a product by QR of its factors.

    ``tolerance``: what may be left out of a matrix of nearly low rank, as a share of its norm.
    """
    if isinstance(update, LowRank):
        left_basis, left = torch.linalg.qr(update.up)
        right_basis, right = torch.linalg.qr(update.down.T)
        inner, values, inner_right = torch.linalg.svd(left @ right.T, full_matrices=False)
        return Svd(left_basis @ inner, values, inner_right @ right_basis.T)
    return _decompose_matrix(update, max(tolerance, _LOW_RANK_RESIDUAL.get(update.dtype, 0.0)))


def _decompose_matrix(matrix: Tensor, limit: float) -> Svd:
    """The SVD of a full matrix; of one that is of low rank but for rounding, by its range."""
    columns, norm = _PROBE_COLUMNS, torch.linalg.matrix_norm(matrix)
    while norm > 0 and columns <= min(matrix.shape) // 8:
        generator = torch.Generator(matrix.device).manual_seed(columns)
        probe = torch.randn(matrix.shape[1], columns, dtype=matrix.dtype, device=matrix.device, generator=generator)
        basis, _ = torch.linalg.qr(matrix @ probe)
        basis, _ = torch.linalg.qr(matrix @ (matrix.T @ basis))  # a step of power iteration
        inner = basis.T @ matrix
        if torch.linalg.matrix_norm(matrix - basis @ inner) <= limit * norm:
            small = torch.linalg.svd(inner, full_matrices=False)
            return Svd(basis @ small.U, small.S, small.Vh)
        columns *= 4
    full = torch.linalg.svd(matrix, full_matrices=False)
    return Svd(full.U, full.S, full.Vh)


def truncate(svd: Svd, rank: int) -> LowRank:
    """The best approximation of this rank; the singular values are in ``up``, as in sd-scripts' files."""
    return LowRank(svd.left[:, :rank] * svd.values[:rank], svd.right[:rank])


def build_lora(
    factors: LowRank, scale: float, kernel: Sequence[int], dtype: torch.dtype, *, is_scaled: bool = True
) -> ModuleAdapter:
    """The LoRA with this product: alpha is ``scale * rank``, and ``up`` is divided by the scale.

    ``is_scaled`` False: the scale is left out of the product already.
    """
    up = (factors.up / scale if is_scaled else factors.up).to(dtype)
    down, rank = factors.down.to(dtype), factors.rank
    if kernel:
        down, up = down.reshape(rank, -1, *kernel), up.reshape(len(up), rank, *[1] * len(kernel))
    return ModuleAdapter({DOWN: down.contiguous(), UP: up.contiguous()}, scale * rank)
