"""Which optimizers treat each number for itself, so that tensors may be cut in pieces between processes."""

from ..config.schema import OptimConfig
from .optimizers import find

ELEMENTWISE = frozenset(
    [*(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta")),
     "pytorch_optimizer.Lion"]
)  # fmt: skip


def whole_tensor_problems(config: OptimConfig, engine: str) -> list[str]:
    """Where the optimizer looks at tensors as a whole, which would then be different ones, or at all of them."""
    if find(config.optimizer_type).path in ELEMENTWISE:
        return []
    return [f"--optimizer_type {config.optimizer_type}: looks at tensors as a whole, and {engine} gives each process"
            " pieces of them; take AdamW, Adam, SGD or Lion, or --fsdp in its place"]  # fmt: skip
