"""The optimizers by name: where each is imported from, and whether its package is installed; imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ..name_suggestions import suggest_name
from ..problems import Problem


@dataclass(frozen=True)
class OptimizerInfo:
    """The import path of an optimizer, and the arguments that differ from sd-scripts'."""

    import_path: str
    pip_package: str | None = None  # named in the message when an optional package is missing
    default_args: Mapping[str, Any] = field(default_factory=dict)  # arguments that sd-scripts sets
    arg_aliases: Mapping[str, str] = field(default_factory=dict)  # name of an argument in sd-scripts -> name here
    is_lr_free: bool = False  # learning_rate is a factor, usually 1, on the rate that it estimates


_DADAPT_ARG_ALIASES = {"decouple": "weight_decouple", "use_bias_correction": "bias_correction"}
_NESTEROV_ARGS = {"momentum": 0.9, "nesterov": True}


def _define_pytorch_optimizer(name: str, *, is_lr_free: bool = False, **arg_aliases: str) -> OptimizerInfo:
    return OptimizerInfo(f"pytorch_optimizer.{name}", "pytorch_optimizer", {}, arg_aliases, is_lr_free)


def _define_bitsandbytes(name: str, **default_args: Any) -> OptimizerInfo:
    return OptimizerInfo(f"bitsandbytes.optim.{name}", "bitsandbytes", default_args)


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
    "DAdaptAdamPreprint": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation", is_lr_free=True),
    "DAdaptAdanIP": OptimizerInfo("dadaptation.experimental.DAdaptAdanIP", "dadaptation", is_lr_free=True),
    "AdamWScheduleFree": _define_pytorch_optimizer("ScheduleFreeAdamW"),
    "RAdamScheduleFree": _define_pytorch_optimizer("ScheduleFreeRAdam"),
    "SGDScheduleFree": _define_pytorch_optimizer("ScheduleFreeSGD"),
}


PIP_PACKAGES = {
    "prodigyplus": "prodigy-plus-schedule-free",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion-pytorch",
    "came_pytorch": "came-pytorch",
    "schedulefree": "schedulefree",
    "dadaptation": "dadaptation",
}
"""Packages of optimizers that are often named with their module in sd-scripts."""


def validate_optimizer_name(optimizer_type: str) -> Iterator[Problem]:
    """Check that the name is one of ours, of torch.optim, or a class with its package."""
    name = optimizer_type or "AdamW"
    if _find_optimizer(name) is not None or "." in name or ":" in name:
        return
    import torch  # only for a name that is none of ours

    if not isinstance(getattr(torch.optim, name, None), type):
        hint = suggest_name(name, OPTIMIZERS) or f"; known are {', '.join(OPTIMIZERS)} and any package.module.Class"
        yield Problem("optimizer_type", f"no optimizer {name!r}{hint}")


def find_missing_package(optimizer_type: str) -> str:
    """Return the optimizer's package if it is not installed, and how to install it; empty if nothing is missing."""
    name = optimizer_type or "AdamW"
    info = _find_optimizer(name)
    if info is None and "." not in name and ":" not in name:
        return ""  # of torch.optim
    package = str(info.import_path if info else name).replace(":", ".").partition(".")[0]
    if find_spec(package) is not None:
        return ""
    pip_package = info.pip_package if info else PIP_PACKAGES.get(package)
    install = f"; pip install {pip_package}" if pip_package else ""
    other = "AdamW" if package == "bitsandbytes" else ""
    if info is None:
        class_name = name.replace(":", ".").rpartition(".")[2].lower()
        other = next((known for known in OPTIMIZERS if known.lower() == class_name), "")
    hint = f"{', or' if install else ';'} use --optimizer_type {other}" if other else ""
    return f"{name} needs the package {package}, which is not installed{install}{hint}"


def _find_optimizer(name: str) -> Any:
    return {entry.lower(): info for entry, info in OPTIMIZERS.items()}.get(name.lower())
