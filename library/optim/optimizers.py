"""Which optimizers treat each number for itself, so that tensors may be cut in pieces between processes."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config.schema import OptimConfig
from ..errors import ConfigError
from ..registry import suggest_name
from .arguments import find_unknown_args, import_class, parse_keyword_args

ELEMENTWISE_OPTIMIZERS = frozenset(
    [
        *(
            f"torch.optim.{name}"
            for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta")
        ),
        "pytorch_optimizer.Lion",
    ]
)


def validate_elementwise_optimizer(config: OptimConfig, engine: str) -> list[str]:
    """Where the optimizer looks at tensors as a whole, which would then be different ones, or at all of them."""
    if resolve_optimizer(config.optimizer_type).import_path in ELEMENTWISE_OPTIMIZERS:
        return []
    return [
        f"--optimizer_type {config.optimizer_type}: looks at tensors as a whole, and {engine} gives each process"
        " pieces of them; take AdamW, Adam, SGD or Lion, or --fsdp in its place"
    ]


MIN_USUAL_LR_FACTOR = 0.1
"""Optimizers that find their rate take a factor near 1; below this somebody has most likely written a rate."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a peak learning rate, under the name that figures give it."""

    name: str
    parameters: Sequence[torch.nn.Parameter]
    lr: float


def build_optimizer(config: OptimConfig, param_groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name; every mistake in its name or arguments is a ``ConfigError``."""
    info = resolve_optimizer(config.optimizer_type)
    optimizer_class = _import_optimizer_class(info, config.optimizer_type)
    arguments = _build_optimizer_args(config, info, optimizer_class)
    tables = [{"params": list(group.parameters), "lr": group.lr} for group in param_groups]
    # A group without a rate of its own is how Adafactor is told to find one; it refuses any other.
    if uses_relative_step(config):
        tables, rate = [{"params": list(group.parameters)} for group in param_groups], None
    else:
        rate = config.learning_rate
    try:
        return _instantiate_optimizer(optimizer_class, tables, {"lr": rate, **arguments})
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        named = config.optimizer_type or "AdamW"
        raise ConfigError([f"--optimizer_args: {named} does not take them: {error}"]) from None


def _instantiate_optimizer(
    optimizer_class: type[torch.optim.Optimizer], param_groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Torch's own in its fused form, wherever it has one for the device, unless the settings speak of it."""
    is_torchs = (
        optimizer_class is getattr(torch.optim, optimizer_class.__name__, None)
        and "fused" in inspect.signature(optimizer_class).parameters
    )
    # In half precision torch's fused SGD changes nothing on processors, without a word.
    is_whole = all(weight.dtype == torch.float32 for group in param_groups for weight in group["params"])
    if is_torchs and is_whole and not {"fused", "foreach", "capturable", "differentiable"} & set(arguments):
        try:
            return optimizer_class([dict(group) for group in param_groups], **{**arguments, "fused": True})
        except RuntimeError:  # how torch says that this device has none
            pass
    return optimizer_class(param_groups, **arguments)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its name, and how it goes through the weights where torch has several ways."""
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    if "foreach" not in group:
        return name
    if group.get("fused"):
        return f"{name}, fused: all that is done with a weight at once"
    is_forbidden = group["foreach"] is False
    return f"{name}, one weight after the other" if is_forbidden else f"{name}, many weights at once where torch can"


@dataclass(frozen=True)
class OptimizerInfo:
    """Where an optimizer comes from, and how its arguments are called there."""

    import_path: str
    pip_package: str | None = None  # the package, where it is not one that is always there
    default_args: Mapping[str, Any] = field(default_factory=dict)  # arguments that sd-scripts gives it
    arg_aliases: Mapping[str, str] = field(default_factory=dict)  # sd-scripts' name of an argument -> the one here
    is_lr_free: bool = False  # the learning rate is a factor, usually 1, on what it finds by itself


def resolve_optimizer(name: str) -> OptimizerInfo:
    """What ``--optimizer_type`` means: a name of the table, of ``torch.optim``, or the path of a class."""
    name = name or "AdamW"  # as in sd-scripts, where the default is written as nothing
    known = {entry.lower(): info for entry, info in OPTIMIZERS.items()}
    if name.lower() in known:
        return known[name.lower()]
    if "." in name or ":" in name:
        return OptimizerInfo(name)
    if isinstance(getattr(torch.optim, name, None), type):
        return OptimizerInfo(f"torch.optim.{name}")
    hint = suggest_name(name, OPTIMIZERS) or f"; known are {', '.join(OPTIMIZERS)} and any package.module.Class"
    raise ConfigError([f"--optimizer_type: no optimizer {name!r}{hint}"])


def _import_optimizer_class(info: OptimizerInfo, name: str) -> type[torch.optim.Optimizer]:
    found = import_class(info.import_path, "optimizer_type", name, info.pip_package)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError([f"--optimizer_type: {name} is no optimizer"])
    return found


def _build_optimizer_args(config: OptimConfig, info: OptimizerInfo, optimizer_class: type) -> dict[str, Any]:
    written = parse_keyword_args(config.optimizer_args, "optimizer_args")
    arguments = {**info.default_args, **{info.arg_aliases.get(name, name): value for name, value in written.items()}}
    unknown = find_unknown_args(optimizer_class, [info.arg_aliases.get(name, name) for name in written])
    if unknown or "lr" in written:
        named = ", ".join(map(repr, unknown)) or "'lr', which is --learning_rate"
        raise ConfigError([f"--optimizer_args: {config.optimizer_type or 'AdamW'} does not take {named}"])
    return arguments


def uses_relative_step(config: OptimConfig) -> bool:
    """Adafactor without ``relative_step=False`` goes by a rate of its own and takes none."""
    if resolve_optimizer(config.optimizer_type) is not OPTIMIZERS["Adafactor"]:
        return False
    return bool(parse_keyword_args(config.optimizer_args, "optimizer_args").get("relative_step", True))


def find_learning_rate_warnings(config: OptimConfig, param_groups: Sequence[ParamGroup]) -> list[str]:
    """What is allowed and most likely not meant."""
    if not resolve_optimizer(config.optimizer_type).is_lr_free:
        return []
    rates = sorted({group.lr for group in param_groups})
    found = []
    if rates[0] < MIN_USUAL_LR_FACTOR:
        found.append(
            f"{config.optimizer_type} finds its learning rate by itself and multiplies it by learning_rate;"
            f" {rates[0]:g} is very small for that, 1 is usual"
        )
    if len(rates) > 1:
        found.append(
            f"{config.optimizer_type} finds one learning rate for all; here it is multiplied by different"
            f" factors: {', '.join(f'{rate:g}' for rate in rates)}"
        )
    return found


def set_learning_rates(optimizer: torch.optim.Optimizer, peak_lrs: Sequence[float], factor: float) -> None:
    """Give every group its peak times ``factor``; in place where it is a tensor, so that compiled steps keep it."""
    for group, peak in zip(optimizer.param_groups, peak_lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(peak * factor)
        elif group["lr"] is not None:
            group["lr"] = peak * factor


def get_learning_rates(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Mapping[str, Any]:
    """The rate each group really has, what the optimizer found by itself included; none where it does not tell."""
    return {
        name: group["lr"] * group.get("d", 1.0)
        for name, group in zip(names, optimizer.param_groups, strict=True)
        if group["lr"] is not None
    }


@contextmanager
def use_eval_weights(optimizer: Any) -> Iterator[None]:
    """Schedule-free optimizers train other weights than those that are to be used; inside, these are in place.

    Their own way back is exact but for rounding; so that looking changes nothing, the weights are copied back.
    """
    if not callable(getattr(optimizer, "eval", None)):
        yield
        return
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in trained]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(trained, kept, strict=True):
                parameter.copy_(value)


def load_optimizer_state(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer the memory that its ``state_dict`` once told.

    torch takes tensors over as they are where it can, and gives the others the parameter's own precision.  Here the
    memory stays apart from what is made of it, and optimizers that keep more than that precision get it back.
    """
    state_dict = copy.deepcopy(dict(state_dict))
    optimizer.load_state_dict(state_dict)
    for group, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], theirs["params"], strict=True):
            now = optimizer.state.get(parameter, {})
            for key, value in state_dict["state"].get(number, {}).items():
                found = now.get(key)
                if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != value.dtype:
                    now[key] = value.to(found.device)


def validate_optimizer(config: OptimConfig) -> None:
    """Build the optimizer for nothing, so that a mistake in its settings shows before a model is loaded."""
    made = build_optimizer(config, [ParamGroup("nothing", [torch.nn.Parameter(torch.zeros(2, 2))], 1.0)])
    wanted = [
        name
        for name, each in inspect.signature(made.step).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if wanted:
        raise ConfigError(
            [
                f"--optimizer_type {config.optimizer_type}: its step wants {', '.join(wanted)}, since it"
                " computes the loss several times in a step; take another"
            ]
        )


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
    "DAdaptAdamPreprint": OptimizerInfo("dadaptation.experimental.DAdaptAdamPreprint", "dadaptation", is_lr_free=True),
    "DAdaptAdanIP": OptimizerInfo("dadaptation.experimental.DAdaptAdanIP", "dadaptation", is_lr_free=True),
    "AdamWScheduleFree": _define_pytorch_optimizer("ScheduleFreeAdamW"),
    "RAdamScheduleFree": _define_pytorch_optimizer("ScheduleFreeRAdam"),
    "SGDScheduleFree": _define_pytorch_optimizer("ScheduleFreeSGD"),
}
