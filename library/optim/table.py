"""Every optimizer that has a name: sd-scripts' names and a few more, and the classes behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerInfo:
    """Where an optimizer comes from, and how its arguments are called there."""

    import_path: str
    pip_package: str | None = None  # the package, where it is not one that is always there
    default_args: Mapping[str, Any] = field(default_factory=dict)  # arguments that sd-scripts gives it
    arg_aliases: Mapping[str, str] = field(default_factory=dict)  # sd-scripts' name of an argument -> the one here
    is_lr_free: bool = False  # the learning rate is a factor, usually 1, on what it finds by itself


_PYTORCH_OPTIMIZER = "pytorch_optimizer"
_BITSANDBYTES = "bitsandbytes"
_DADAPT_ARG_ALIASES = {"decouple": "weight_decouple", "use_bias_correction": "bias_correction"}


def _define_pytorch_optimizer(name: str, *, is_lr_free: bool = False, **arg_aliases: str) -> OptimizerInfo:
    return OptimizerInfo(f"{_PYTORCH_OPTIMIZER}.{name}", _PYTORCH_OPTIMIZER, {}, arg_aliases, is_lr_free)


def _define_bitsandbytes(name: str, **default_args: Any) -> OptimizerInfo:
    return OptimizerInfo(f"{_BITSANDBYTES}.optim.{name}", _BITSANDBYTES, default_args)


_NESTEROV_ARGS = {"momentum": 0.9, "nesterov": True}

OPTIMIZERS: Mapping[str, OptimizerInfo] = {
    "AdamW": OptimizerInfo("torch.optim.AdamW"),
    "Adam": OptimizerInfo("torch.optim.Adam"),
    "SGD": OptimizerInfo("torch.optim.SGD"),
    "SGDNesterov": OptimizerInfo("torch.optim.SGD", default_args=_NESTEROV_ARGS),
    "Muon": OptimizerInfo("torch.optim.Muon"),
    "Adafactor": OptimizerInfo("transformers.optimization.Adafactor"),
    "Adam8bit": _define_bitsandbytes("Adam8bit"),
    "AdamW8bit": _define_bitsandbytes("AdamW8bit"),
    "PagedAdamW": _define_bitsandbytes("PagedAdamW"),
    "PagedAdamW8bit": _define_bitsandbytes("PagedAdamW8bit"),
    "PagedAdamW32bit": _define_bitsandbytes("PagedAdamW32bit"),
    "Lion8bit": _define_bitsandbytes("Lion8bit"),
    "PagedLion8bit": _define_bitsandbytes("PagedLion8bit"),
    "SGDNesterov8bit": _define_bitsandbytes("SGD8bit", **_NESTEROV_ARGS),
    "Lion": _define_pytorch_optimizer("Lion", decoupled_weight_decay="weight_decouple"),
    "CAME": _define_pytorch_optimizer("CAME"),
    "Prodigy": _define_pytorch_optimizer("Prodigy", is_lr_free=True, **_DADAPT_ARG_ALIASES),
    "DAdaptAdam": _define_pytorch_optimizer("DAdaptAdam", is_lr_free=True, **_DADAPT_ARG_ALIASES),
    "DAdaptAdaGrad": _define_pytorch_optimizer("DAdaptAdaGrad", is_lr_free=True),
    "DAdaptAdan": _define_pytorch_optimizer("DAdaptAdan", is_lr_free=True),
    "DAdaptLion": _define_pytorch_optimizer("DAdaptLion", is_lr_free=True),
    "DAdaptSGD": _define_pytorch_optimizer("DAdaptSGD", is_lr_free=True),
    "DAdaptation": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation", is_lr_free=True),
    "DAdaptAdamPreprint": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation",
                                        is_lr_free=True),
    "DAdaptAdanIP": OptimizerInfo("dadaptation.experimental.DAdaptAdanIP", "dadaptation", is_lr_free=True),
    "AdamWScheduleFree": _define_pytorch_optimizer("ScheduleFreeAdamW"),
    "RAdamScheduleFree": _define_pytorch_optimizer("ScheduleFreeRAdam"),
    "SGDScheduleFree": _define_pytorch_optimizer("ScheduleFreeSGD"),
}  # fmt: skip
