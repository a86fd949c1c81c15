"""Options of the optimizer and the learning rate schedule."""

from dataclasses import dataclass
from typing import Literal

from .option_needs import AnyOf, Has, HasValue, IsSet, IsUnset, Trait
from .options import ALWAYS, Alias, define_option
from .types import StepsOrRatio

SCHEDULERS_WITH_ARGS = ("piecewise_constant", "cosine", "polynomial", "warmup_stable_decay", "rex")
"""The values of ``lr_scheduler`` that take ``lr_scheduler_args``."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning rate schedule."""

    optimizer_type: str = define_option(
        "AdamW",
        "AdamW, AdamW8bit, Lion, Adafactor, Prodigy, AdamWScheduleFree ..., or package.module.Class",
        needs=ALWAYS,
        is_public=True,
        is_basic=True,
        aliases=(Alias("use_8bit_adam", "AdamW8bit"), Alias("use_lion_optimizer", "Lion")),
    )
    optimizer_args: tuple[str, ...] = define_option(
        (), "optimizer arguments as name=value, such as weight_decay=0.01", needs=ALWAYS, is_public=True
    )
    learning_rate: float = define_option(
        1e-4,
        "peak learning rate",
        minimum=0,
        needs=(
            Has(Trait.RATE),
            AnyOf(  # the first two compare it with rates that they name in numbers
                (IsSet("lr_scheduler_type"), HasValue("lr_scheduler", ("polynomial",)), Has(Trait.SHARED_RATE)),
            ),
        ),
        is_basic=True,
        kohya_default="2e-6",
        default_text="1e-4",
        musubi_default=2e-6,
        metadata_key="ss_learning_rate",
    )
    unet_lr: float | None = define_option(
        None,
        "peak learning rate of the denoiser (U-Net or transformer); default: learning_rate",
        minimum=0,
        needs=(Has(Trait.RATE), Has(Trait.TRAINED_DENOISER)),
        metadata_key="ss_unet_lr",
    )
    text_encoder_lr: tuple[float, ...] = define_option(
        (),
        "peak learning rate of the text encoders, one for all or one for each; default: learning_rate",
        minimum=0,
        needs=(Has(Trait.RATE), Has(Trait.TRAINED_TEXT), Has(Trait.TEXT_ENCODERS)),
    )
    max_grad_norm: float = define_option(
        1.0,
        "maximum gradient norm for gradient clipping; 0: no clipping",
        minimum=0,
        needs=ALWAYS,
        metadata_key="ss_max_grad_norm",
    )
    lr_scheduler: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "rex",
        "inverse_sqrt",
        "warmup_stable_decay",
        "piecewise_constant",
        "adafactor",
    ] = define_option(
        "constant",
        "learning rate schedule",
        needs=(
            AnyOf((HasValue("lr_scheduler", ("constant", "adafactor")), Has(Trait.RATE))),
            AnyOf((HasValue("lr_scheduler", ("constant", "constant_with_warmup")), Has(Trait.SCHEDULE))),
            IsUnset("lr_scheduler_type"),
        ),
        is_basic=True,
        value_aliases=(("REX", "rex"), ("Rex", "rex")),
        metadata_key="ss_lr_scheduler",
    )
    lr_warmup_steps: StepsOrRatio = define_option(
        StepsOrRatio(0, False),
        "warmup steps: a number, a ratio of the run below 1, or N%",
        needs=ALWAYS,
        is_basic=True,
        metadata_key="ss_lr_warmup_steps",
    )
    lr_decay_steps: StepsOrRatio = define_option(
        StepsOrRatio(0, False),
        "warmup_stable_decay: decay steps at the end: a number, a ratio of the run, or N%",
        needs=(HasValue("lr_scheduler", ("warmup_stable_decay",)), IsUnset("lr_scheduler_type")),
    )
    lr_scheduler_num_cycles: int = define_option(
        1,
        "cosine_with_restarts: number of cycles; cosine_with_min_lr, warmup_stable_decay: of half cycles",
        minimum=0,
        needs=(
            HasValue("lr_scheduler", ("cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay")),
            IsUnset("lr_scheduler_type"),
        ),
        aliases=(Alias("lr_restart_cycles"),),
    )
    lr_scheduler_power: float = define_option(
        1.0,
        "polynomial: power",
        minimum=0,
        needs=(HasValue("lr_scheduler", ("polynomial",)), IsUnset("lr_scheduler_type")),
    )
    lr_scheduler_timescale: int | None = define_option(
        None,
        "inverse_sqrt: time scale in steps, larger decays slower; default: lr_warmup_steps",
        minimum=1,
        needs=(HasValue("lr_scheduler", ("inverse_sqrt",)), IsUnset("lr_scheduler_type")),
    )
    lr_scheduler_min_lr_ratio: float | None = define_option(
        None,
        "cosine_with_min_lr, warmup_stable_decay, rex: minimum learning rate as a ratio of the peak",
        minimum=0,
        maximum=1,
        needs=(
            HasValue(
                "lr_scheduler",
                (
                    "cosine_with_min_lr",
                    "warmup_stable_decay",
                    "rex",
                ),
            ),
            IsUnset("lr_scheduler_type"),
        ),
    )
    lr_scheduler_type: str = define_option(
        "",
        "scheduler class to use instead of lr_scheduler: of torch.optim.lr_scheduler, or package.module.Class",
        needs=(Has(Trait.RATE), Has(Trait.SCHEDULE)),
    )
    lr_scheduler_args: tuple[str, ...] = define_option(
        (),
        "arguments of the scheduler as name=value, such as gamma=0.99, rex_alpha=0.1 or decay_type=linear",
        needs=(
            AnyOf(
                (IsSet("lr_scheduler_type"), HasValue("lr_scheduler", SCHEDULERS_WITH_ARGS)),
                f"only with lr_scheduler_type, or lr_scheduler {', '.join(SCHEDULERS_WITH_ARGS)}",
            ),
        ),
    )
    ema_decay: float | None = define_option(
        None,
        "decay of an exponential moving average of the adapter, such as 0.999; it is saved next to the adapter",
        minimum=0,
        maximum=1,
        needs=ALWAYS,
    )
