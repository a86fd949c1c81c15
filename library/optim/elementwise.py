"""Which optimizers treat each number for itself, so that tensors may be cut in pieces between processes."""

from ..config.schema import OptimConfig
from ..errors import ConfigError
from .optimizers import find

ELEMENTWISE = frozenset(
    [*(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta")),
     "pytorch_optimizer.Lion"]
)  # fmt: skip


def refuse_whole_tensors(config: OptimConfig, engine: str, way_out: str) -> None:
    """Stop where the optimizer looks at tensors as a whole, which would then be different ones, or at all of them."""
    if find(config.optimizer_type).path not in ELEMENTWISE:
        raise ConfigError([
            f"--optimizer_type {config.optimizer_type}: looks at tensors as a whole, and {engine} gives each process"
            f" pieces of them; take AdamW, Adam, SGD or Lion, {way_out}"
        ])  # fmt: skip
