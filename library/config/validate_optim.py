"""Checks of the optimizer and learning-rate schedule options against each other."""

from collections.abc import Iterator

from ..problems import Problem
from .network_args import list_arg_names
from .schema import AdapterConfig
from .schema_optim import OptimConfig
from .types import split_keyword_args
from .unused_options import is_self_tuning_adafactor

BLOCK_RATE_ARGS = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
"""network_args with the learning rates of blocks; a block whose rate is 0 is not trained, whatever the optimizer."""


def validate_optimizer_arguments(optim: OptimConfig) -> Iterator[Problem]:
    """Each argument of the optimizer and of the scheduler is ``name=value``."""
    for option in ("optimizer_args", "lr_scheduler_args"):
        for argument in getattr(optim, option):
            name, value = split_keyword_args([argument])[0]
            if not (name and value):
                yield Problem(option, "expected name=value, such as weight_decay=0.01", value=repr(argument))


def validate_lr_scheduler(optim: OptimConfig) -> Iterator[Problem]:
    scheduler, warmup = optim.lr_scheduler, optim.lr_warmup_steps
    if optim.lr_scheduler_type:
        if warmup.value:
            yield Problem(
                "lr_warmup_steps",
                "no effect with lr_scheduler_type",
                "remove one of them",
                others=("lr_scheduler_type",),
            )
    elif scheduler in ("constant", "adafactor") and warmup.value > 0:
        yield Problem(
            "lr_warmup_steps",
            f"lr_scheduler {scheduler} has no warmup",
            "use lr_scheduler constant_with_warmup",
            others=("lr_scheduler",),
        )
    if scheduler == "cosine_with_restarts" and not optim.lr_scheduler_num_cycles and not optim.lr_scheduler_type:
        yield Problem(
            "lr_scheduler_num_cycles",
            "0 cycles keep the learning rate constant",
            "write 1 or more, or use lr_scheduler constant",
            others=("lr_scheduler",),
        )
    if scheduler == "cosine_with_min_lr" and optim.lr_scheduler_min_lr_ratio is None:
        yield Problem(
            "lr_scheduler",
            "cosine_with_min_lr needs lr_scheduler_min_lr_ratio, such as 0.1",
            others=("lr_scheduler_min_lr_ratio",),
        )


def find_schedule_overflow(optim: OptimConfig, total_steps: int) -> str | None:
    """Describe a warmup or decay that does not fit into the run; the schedule is cut off, as in sd-scripts."""
    if optim.lr_scheduler_type:
        return None
    warmup, decay = optim.lr_warmup_steps, optim.lr_decay_steps
    if warmup.to_steps(total_steps) >= total_steps:
        return f"lr_warmup_steps {warmup}: the run has {total_steps} steps, so the learning rate never reaches its peak"
    if warmup.to_steps(total_steps) + decay.to_steps(total_steps) > total_steps:
        return f"lr_decay_steps {decay}: begins before the warmup ({warmup}) ends, as the run has {total_steps} steps"
    return None


def validate_self_tuning_optimizers(optim: OptimConfig, adapter: AdapterConfig) -> Iterator[Problem]:
    """Adafactor with relative_step sets one learning rate for all modules; lr_scheduler adafactor reports it."""
    if not is_self_tuning_adafactor(optim):
        if optim.lr_scheduler == "adafactor":
            yield Problem(
                "lr_scheduler",
                "adafactor is for optimizer_type Adafactor with relative_step",
                "use lr_scheduler constant",
                others=("optimizer_type",),
            )
    elif weights := [name for name in list_arg_names(adapter.network_args) if name in BLOCK_RATE_ARGS]:
        yield Problem(
            "network_args",
            f"{weights[0]}: Adafactor sets one learning rate for all blocks",
            "remove it, or add relative_step=False to optimizer_args",
            others=("optimizer_args",),
        )


def validate_learning_rates(optim: OptimConfig, adapter: AdapterConfig) -> Iterator[Problem]:
    """A run in which nothing learns is refused at the start."""
    if is_self_tuning_adafactor(optim):
        return
    unet_lr = optim.learning_rate if optim.unet_lr is None else optim.unet_lr
    text_rates = optim.text_encoder_lr or (optim.learning_rate,)
    vectors_lr = optim.learning_rate if adapter.embedding_lr is None else adapter.embedding_lr
    if (adapter.trains_embedding and vectors_lr) or (adapter.train == "embedding" and adapter.token_string is None):
        return  # without a word the run is refused anyway
    if not (adapter.trains_denoiser and unet_lr) and not (adapter.trains_text_encoders and any(text_rates)):
        name = "unet_lr" if optim.unet_lr == 0 and adapter.trains_denoiser else "learning_rate"
        yield Problem(name, "0 trains nothing", "set a learning rate such as 1e-4")
