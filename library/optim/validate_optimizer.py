"""Checks of the optimizer and learning rate scheduler settings that need neither a model nor a process group."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..config.schema_optim import OptimConfig
from ..errors import UserError
from ..problems import Problem
from .arguments import parse_keyword_args
from .fused_backward import PartialStep
from .lr_schedulers import build_lr_schedule
from .optimizer_names import OPTIMIZERS
from .optimizers import ParamGroup, build_optimizer, resolve_optimizer

ELEMENTWISE_OPTIMIZERS = frozenset(
    [
        *map("torch.optim.{}".format, "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adadelta".split()),
        OPTIMIZERS["Lion"].import_path,
    ]
)
"""Optimizers that update each element on its own, so that parameters may be partitioned anywhere."""

MIN_USUAL_LR_FACTOR = 0.1
"""Learning-rate-free optimizers take a factor near 1; anything below this is probably meant as a learning rate."""


def validate_optimizer(config: OptimConfig) -> Iterator[Problem]:
    """Build the optimizer once with a dummy parameter, so that a mistake shows before a model is loaded."""
    try:
        optimizer = build_optimizer(config, [ParamGroup("dummy", [torch.nn.Parameter(torch.zeros(2, 2))], 1.0)])
    except UserError as error:
        yield from error.problems
        return
    required = [
        name
        for name, each in inspect.signature(optimizer.step).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if required:
        yield Problem(
            "optimizer_type",
            f"its step() requires {', '.join(required)}: it evaluates the loss several times per step,"
            " which is not supported",
            "use another optimizer",
            value=config.optimizer_type,
        )


def validate_lr_schedule(config: OptimConfig) -> Iterator[Problem]:
    """Build the schedule once for two steps, so that a mistake shows before a model is loaded."""
    try:
        build_lr_schedule(config, 2)
    except UserError as error:
        yield from error.problems


WHOLE_TENSOR_REASONS = {
    "transformers.optimization.Adafactor": "averages over the rows and columns of each matrix",
    "pytorch_optimizer.CAME": "averages over the rows and columns of each matrix",
    "torch.optim.Muon": "orthogonalizes whole matrices",
    "bitsandbytes.": "quantizes its state in blocks of whole tensors",
    "torchao.": "quantizes its state in blocks of what each process holds",
    "pytorch_optimizer.ScheduleFree": "switches between two sets of whole weights",
}
"""Why an optimizer, by the start of its import path, does not update each element on its own."""


def validate_elementwise_optimizer(config: OptimConfig, engine: str) -> Iterator[Problem]:
    """An engine that shards parameters gives wrong results with optimizers that need whole tensors."""
    info = resolve_optimizer(config.optimizer_type)
    arguments = parse_keyword_args(config.optimizer_args, "optimizer_args")
    if engine == "FSDP" and info.import_path == "torch.optim.SGD" and arguments.get("fused"):
        yield Problem("optimizer_args", "torch has no fused SGD for weights that FSDP shards", "remove fused=True")
    if info.import_path in ELEMENTWISE_OPTIMIZERS:
        return
    known = (reason for start, reason in WHOLE_TENSOR_REASONS.items() if info.import_path.startswith(start))
    reason = "computes its step size from all weights" if info.is_lr_free else next(known, "")
    yield Problem(
        "optimizer_type",
        f"needs whole tensors{f' (it {reason})' if reason else ''}, but {engine} shards them over processes",
        f"use AdamW, Adam, SGD or Lion{', or --fsdp instead' if engine == 'DeepSpeed' else ', or train lora'}",
        value=config.optimizer_type,
    )


def is_divisible(config: OptimConfig) -> bool:
    """Whether an optimizer updates each weight on its own, so that a step may take some weights after the others."""
    info = resolve_optimizer(config.optimizer_type)
    if info.is_lr_free:
        return False
    return info.import_path.startswith("bitsandbytes.") or not _find_dependence_on_other_weights(config)


def validate_fused_optimizer(config: OptimConfig) -> Iterator[Problem]:
    """The fused backward pass updates some weights before the gradients of the others are known.

    Optimizers that set one step size from all weights are known by name, others are tried: for each weight on its own
    and for all at once, with results that have to be equal to the bit.  Those of bitsandbytes need a GPU for that;
    they update each weight on its own.
    """
    info, reason = resolve_optimizer(config.optimizer_type), ""
    if info.is_lr_free:
        reason = "it computes its step size from all weights"
    elif not info.import_path.startswith("bitsandbytes."):
        reason = _find_dependence_on_other_weights(config)
    if reason:
        fix = "use AdamW, Adafactor, Lion or AdamW8bit, or remove fused_backward_pass"
        text = f"with fused_backward_pass each weight is updated when its gradient is known, and {reason}"
        yield Problem("optimizer_type", text, fix, value=config.optimizer_type, others=("fused_backward_pass",))


def _find_dependence_on_other_weights(config: OptimConfig) -> str:
    """Take a few steps for two weights together and one after the other; say how the results differ."""
    results = []
    for is_partial in (False, True):
        weights = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in ((8, 4), (4,))]
        groups = [ParamGroup(str(index), [weight], 1e-2) for index, weight in enumerate(weights)]
        try:
            optimizer: Any = build_optimizer(config, groups)
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()
            _take_trial_steps(optimizer, weights, is_partial=is_partial)
        except UserError:
            return ""  # validate_optimizer says what is wrong
        except Exception as error:
            return f"a trial of it failed ({str(error).strip().partition(chr(10))[0]})"
        results.append(torch.cat([weight.detach().reshape(-1) for weight in weights]))
    return "" if torch.equal(*results) else "its update of a weight depends on the other weights"


def _take_trial_steps(
    optimizer: torch.optim.Optimizer, weights: Sequence[torch.nn.Parameter], *, is_partial: bool
) -> None:
    """Take steps with gradients of very different size, either for all weights or for each on its own."""
    partial_step = PartialStep(optimizer)
    for step in range(4):
        for index, weight in enumerate(weights):
            slope = torch.linspace(1, 2 + step, weight.numel()).reshape(weight.shape)
            weight.grad = slope * 10.0 ** (index * 3)
        if not is_partial:
            optimizer.step()
            continue
        gradients = [weight.grad for weight in weights]
        optimizer.zero_grad()
        partial_step.start(step)
        for weight, gradient in reversed(list(zip(weights, gradients, strict=True))):
            weight.grad = gradient
            partial_step.update([weight])
            weight.grad = None
        partial_step.finish()


def find_learning_rate_warnings(config: OptimConfig, param_groups: Sequence[ParamGroup]) -> list[str]:
    """Learning rates that are allowed, but unusual for a learning-rate-free optimizer (Prodigy, D-Adaptation)."""
    if not resolve_optimizer(config.optimizer_type).is_lr_free:
        return []
    name, rates = config.optimizer_type, sorted({group.lr for group in param_groups})
    warnings = []
    if rates[0] < MIN_USUAL_LR_FACTOR:
        warnings.append(
            f"{name} estimates the learning rate itself and multiplies it by learning_rate; {rates[0]:g} is very "
            "small for that, 1 is usual"
        )
    if len(rates) > 1:
        factors = ", ".join(f"{rate:g}" for rate in rates)
        warnings.append(f"{name} estimates one learning rate for all parameters; it is multiplied by {factors} here")
    return warnings
