"""Checks of the optimizer and learning-rate schedule options against each other."""

from collections.abc import Iterator

from .network_args import list_arg_names
from .options import ExplicitOptions, OptionConflict
from .schema import AdapterConfig, OptimConfig, TrainConfig
from .types import StepsOrRatio, split_keyword_args

PER_MODULE_LR_ARGS = {
    *("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio", "network_reg_lrs"),
    *("down_lr_weight", "mid_lr_weight", "up_lr_weight"),
}
"""network_args that give some modules a learning rate of their own."""

_SCHEDULER_OPTIONS = (
    ("lr_scheduler_num_cycles", 1, ("cosine_with_restarts",)),
    ("lr_scheduler_power", 1, ("polynomial",)),
    ("lr_scheduler_timescale", None, ("inverse_sqrt",)),
    ("lr_scheduler_min_lr_ratio", None, ("cosine_with_min_lr", "warmup_stable_decay")),
    ("lr_decay_steps", StepsOrRatio(0, False), ("warmup_stable_decay",)),
)
"""Option, its default, and the schedulers that use it."""


def validate_lr_scheduler(
    optim: OptimConfig, train: TrainConfig, explicit: ExplicitOptions
) -> Iterator[OptionConflict]:
    scheduler, warmup = optim.lr_scheduler, optim.lr_warmup_steps
    if optim.lr_scheduler_type:
        if warmup.value:
            yield ("lr_warmup_steps", "lr_scheduler_type"), "no effect with lr_scheduler_type; remove one of them"
        if "lr_scheduler" in explicit:
            yield ("lr_scheduler", "lr_scheduler_type"), "overridden by lr_scheduler_type; remove one of them"
    elif scheduler in ("constant", "adafactor") and warmup.value > 0:
        problem = f"lr_scheduler {scheduler} has no warmup; use lr_scheduler constant_with_warmup"
        yield ("lr_warmup_steps", "lr_scheduler"), problem
    for name, default, schedulers in _SCHEDULER_OPTIONS:
        if getattr(optim, name) != default and (scheduler not in schedulers or optim.lr_scheduler_type):
            yield (name, "lr_scheduler"), f"only used by lr_scheduler {' and '.join(schedulers)}"
    if optim.lr_scheduler_args and not optim.lr_scheduler_type and scheduler != "piecewise_constant":
        yield (
            ("lr_scheduler_args", "lr_scheduler"),
            "only used by lr_scheduler_type and lr_scheduler piecewise_constant",
        )
    if scheduler == "cosine_with_min_lr" and optim.lr_scheduler_min_lr_ratio is None:
        problem = "cosine_with_min_lr needs lr_scheduler_min_lr_ratio, such as 0.1"
        yield ("lr_scheduler", "lr_scheduler_min_lr_ratio"), problem
    if train.max_train_epochs is None:
        yield from validate_schedule_length(optim, train.max_train_steps)


def validate_schedule_length(optim: OptimConfig, total_steps: int) -> Iterator[OptionConflict]:
    """Check that warmup and decay fit into the run; with max_train_epochs its steps are known after the image scan."""
    warmup, decay = optim.lr_warmup_steps, optim.lr_decay_steps
    if not warmup.is_ratio and warmup.value >= total_steps:
        problem = f"{warmup} warmup steps, but the run has {total_steps} steps"
        yield ("lr_warmup_steps", "max_train_steps"), problem
    elif warmup.to_steps(total_steps) + decay.to_steps(total_steps) > total_steps:
        problem = f"warmup ({warmup}) and decay ({decay}) are longer than the run ({total_steps} steps)"
        yield ("lr_decay_steps", "lr_warmup_steps", "max_train_steps"), problem


def validate_self_tuning_optimizers(
    optim: OptimConfig, adapter: AdapterConfig, explicit: ExplicitOptions
) -> Iterator[OptionConflict]:
    """Schedule-free optimizers take no schedule; Adafactor sets its learning rate unless relative_step is False."""
    name, scheduler = optim.optimizer_type.lower().replace(":", ".").rpartition(".")[2], optim.lr_scheduler
    if "schedulefree" in name and (optim.lr_scheduler_type or scheduler not in ("constant", "constant_with_warmup")):
        problem = f"{optim.optimizer_type} needs no schedule; use lr_scheduler constant or constant_with_warmup"
        yield ("lr_scheduler", "optimizer_type"), problem
    relative_step = [value for key, value in split_keyword_args(optim.optimizer_args) if key == "relative_step"]
    if name != "adafactor" or relative_step == ["False"]:
        if scheduler == "adafactor":
            problem = "adafactor is for optimizer_type Adafactor with relative_step; use lr_scheduler constant"
            yield ("lr_scheduler", "optimizer_type"), problem
        return
    is_used = {
        "learning_rate": "learning_rate" in explicit and not relative_step,
        "unet_lr": optim.unet_lr,
        "text_encoder_lr": optim.text_encoder_lr,
        "network_args": PER_MODULE_LR_ARGS.intersection(list_arg_names(adapter.network_args)),
        "lr_scheduler": optim.lr_scheduler_type or scheduler not in ("constant", "adafactor"),
    }
    for option in (option for option, value in is_used.items() if value):
        problem = (
            "no effect: Adafactor sets its own learning rate; to use this, add relative_step=False to optimizer_args"
        )
        yield (option, "optimizer_args"), problem
