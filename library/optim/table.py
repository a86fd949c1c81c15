"""Every optimizer that has a name: sd-scripts' names and a few more, and the classes behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerInfo:
    """Where an optimizer comes from, and how its arguments are called there."""

    path: str
    install: str | None = None  # the package, where it is not one that is always there
    defaults: Mapping[str, Any] = field(default_factory=dict)  # arguments that sd-scripts gives it
    renamed: Mapping[str, str] = field(default_factory=dict)  # sd-scripts' name of an argument -> the one here
    finds_its_rate: bool = False  # the learning rate is a factor, usually 1, on what it finds by itself


_COLLECTION = "pytorch_optimizer"
_EIGHT_BITS = "bitsandbytes"
_D_NAMES = {"decouple": "weight_decouple", "use_bias_correction": "bias_correction"}


def _collected(name: str, *, finds_its_rate: bool = False, **renamed: str) -> OptimizerInfo:
    return OptimizerInfo(f"{_COLLECTION}.{name}", _COLLECTION, {}, renamed, finds_its_rate)


def _eight_bits(name: str, **defaults: Any) -> OptimizerInfo:
    return OptimizerInfo(f"{_EIGHT_BITS}.optim.{name}", _EIGHT_BITS, defaults)


_NESTEROV = {"momentum": 0.9, "nesterov": True}

OPTIMIZERS: Mapping[str, OptimizerInfo] = {
    "AdamW": OptimizerInfo("torch.optim.AdamW"),
    "Adam": OptimizerInfo("torch.optim.Adam"),
    "SGD": OptimizerInfo("torch.optim.SGD"),
    "SGDNesterov": OptimizerInfo("torch.optim.SGD", defaults=_NESTEROV),
    "Muon": OptimizerInfo("torch.optim.Muon"),
    "Adafactor": OptimizerInfo("transformers.optimization.Adafactor"),
    "Adam8bit": _eight_bits("Adam8bit"),
    "AdamW8bit": _eight_bits("AdamW8bit"),
    "PagedAdamW": _eight_bits("PagedAdamW"),
    "PagedAdamW8bit": _eight_bits("PagedAdamW8bit"),
    "PagedAdamW32bit": _eight_bits("PagedAdamW32bit"),
    "Lion8bit": _eight_bits("Lion8bit"),
    "PagedLion8bit": _eight_bits("PagedLion8bit"),
    "SGDNesterov8bit": _eight_bits("SGD8bit", **_NESTEROV),
    "Lion": _collected("Lion", decoupled_weight_decay="weight_decouple"),
    "CAME": _collected("CAME"),
    "Prodigy": _collected("Prodigy", finds_its_rate=True, **_D_NAMES),
    "DAdaptAdam": _collected("DAdaptAdam", finds_its_rate=True, **_D_NAMES),
    "DAdaptAdaGrad": _collected("DAdaptAdaGrad", finds_its_rate=True),
    "DAdaptAdan": _collected("DAdaptAdan", finds_its_rate=True),
    "DAdaptLion": _collected("DAdaptLion", finds_its_rate=True),
    "DAdaptSGD": _collected("DAdaptSGD", finds_its_rate=True),
    "DAdaptation": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation", finds_its_rate=True),
    "DAdaptAdamPreprint": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation",
                                        finds_its_rate=True),
    "DAdaptAdanIP": OptimizerInfo("dadaptation.experimental.DAdaptAdanIP", "dadaptation", finds_its_rate=True),
    "AdamWScheduleFree": _collected("ScheduleFreeAdamW"),
    "RAdamScheduleFree": _collected("ScheduleFreeRAdam"),
    "SGDScheduleFree": _collected("ScheduleFreeSGD"),
}  # fmt: skip
