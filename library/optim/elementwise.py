"""Which optimizers treat each number for itself, so that tensors may be cut in pieces between processes."""

from ..config.schema import OptimConfig
from .optimizers import resolve_optimizer

ELEMENTWISE_OPTIMIZERS = frozenset(
    [*(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta")),
     "pytorch_optimizer.Lion"]
)  # fmt: skip


def validate_elementwise_optimizer(config: OptimConfig, engine: str) -> list[str]:
    """Where the optimizer looks at tensors as a whole, which would then be different ones, or at all of them."""
    if resolve_optimizer(config.optimizer_type).import_path in ELEMENTWISE_OPTIMIZERS:
        return []
    return [f"--optimizer_type {config.optimizer_type}: looks at tensors as a whole, and {engine} gives each process"
            " pieces of them; take AdamW, Adam, SGD or Lion, or --fsdp in its place"]  # fmt: skip
