"""Measure the rounding errors of norms, LoRA layers and steps in bf16 against float64, under CUDA's autocast rules.

``peft's layers`` are what ``--no-fused_layers`` computes.  There autocast writes norms in float32, and each reader of a
norm casts its output.  ``shared casts`` keeps these norms and casts once for all readers; ``norms alone`` writes half
precision; ``fused layers`` are these norms with fused LoRA layers.  Products of matrices are rounded to bf16 here, also
those that a GPU writes in float32.
"""

import copy
import dataclasses
import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from library.estimate.meta_memory_meter import HALF_OPS, RMS_NORM_OPERATOR, AutocastEmulation
from library.models.half_precision_norms import HalfPrecisionNorm
from library.models.recomputed_activations import RecomputedActivation, RecomputedFeedForward, RecomputedHalves
from library.parallel.lora_linear import FusedLoraForward

from .report import Measurement
from .step import BareLoop
from .synthetic_run import build_run, write_dataset

if TYPE_CHECKING:
    from library.training.state import TrainingRun

PEFT, SHARED_CASTS, NORMS, LORA, FUSED = (
    "peft's layers",
    "shared casts",
    "norms alone",
    "fused LoRA alone",
    "fused layers",
)
HALF_PRECISION = HalfPrecisionNorm, RecomputedActivation, RecomputedFeedForward, RecomputedHalves
REPLACED: Mapping[str, tuple[type, ...]] = {
    PEFT: (),
    SHARED_CASTS: (),
    NORMS: HALF_PRECISION,
    LORA: (FusedLoraForward,),
    FUSED: (*HALF_PRECISION, FusedLoraForward),
}
"""The ``forward`` of which modules is replaced."""
FAMILIES = ("sd1", "sdxl", "sd3", "flux", "qwen_image", "z_image")
MAX_RATIO = {"norm": 1.7, "linear": 1.05, "step": 1.25}
"""Error of fused layers over that of peft's; gradients of the readers of a norm are added in half precision."""
LORA_B_STD = 0.02
"""lora_B is zero at first, which makes the gradient of lora_A zero."""
WIDTH, RANK, TOKENS, SEEDS = 64, 16, 128, 8
HALF_NORMS: Any = {torch.layer_norm, torch.group_norm, RMS_NORM_OPERATOR}
"""What norms that write half precision call."""
Forwards = Sequence[tuple[nn.Module, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(FAMILIES), help="families whose tiny models run a step")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Compare norms, then LoRA layers, then a step of each model."""
    yield from measure_norms()
    yield from measure_linear_layers()
    for family in options.models:
        folder = directory / family
        folder.mkdir()
        model = ["--pretrained_model_name_or_path", f"random:{family}:tiny", "--resolution", "64"]
        flags = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", str(options.repetitions)]
        argv = write_dataset([*model, *flags, *training_options], folder, 1)
        with build_run(argv, folder) as job:
            yield from measure_step(job, family)


class SharedCasts(AutocastEmulation):
    """Autocast that casts a tensor once for all operations that read it."""

    def __init__(self, dtype: torch.dtype | None, *, fused_attention: bool = True):
        super().__init__(dtype, fused_attention=fused_attention)
        self._casts: dict[int, tuple[Any, int, Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._dtype is not None and function in HALF_OPS:
            args, kwargs = tree_map(self._cast_once, (tuple(args), kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def _cast_once(self, item: Any) -> Any:
        is_activation = isinstance(item, Tensor) and item.dtype == torch.float32 and not item.is_leaf
        if not is_activation:
            return item
        reference, version, cast = self._casts.get(id(item), (None, 0, item))
        if reference is None or reference() is not item or version != item._version:
            cast = item.to(self._dtype)
            self._casts[id(item)] = weakref.ref(item, partial(self._forget, id(item))), item._version, cast
        return cast

    def _forget(self, key: int, _: Any) -> None:
        self._casts.pop(key, None)


class NormsOfCuda(AutocastEmulation):
    """Norms in half precision as CUDA computes them: a CPU's keep their statistics in half precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in HALF_NORMS or args[0].dtype != self._dtype:
            return super().__torch_function__(function, types, args, kwargs)
        args = tree_map(lambda item: item.float() if isinstance(item, Tensor) else item, tuple(args))
        return function(*args, **(kwargs or {})).to(self._dtype)


def emulate(name: str) -> AutocastEmulation:
    kind = SharedCasts if name == SHARED_CASTS else NormsOfCuda
    return kind(torch.bfloat16, fused_attention=False)


class Readers(nn.Module):
    """A norm whose output three projections read, after the modulation of a transformer if it has one."""

    def __init__(self, norm: nn.Module, *, is_modulated: bool):
        super().__init__()
        self.norm, self.is_modulated = norm, is_modulated
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.readers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, states: Tensor) -> Tensor:
        states = self.norm(states)
        if self.is_modulated:
            states = states * (1 + self.scale) + self.scale
        elif states.dim() == 4:
            states = nn.functional.silu(states).flatten(2).mT
        return torch.stack([reader(states) for reader in self.readers])


def measure_norms() -> Iterator[Measurement]:
    """Measure outputs and gradients of the input of norms that three projections read."""
    from diffusers.models.normalization import RMSNorm

    from library.models.half_precision_norms import write_norms_in_half_precision

    norms: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "LayerNorm": (lambda: nn.LayerNorm(WIDTH), False),
        "GroupNorm and SiLU": (lambda: nn.GroupNorm(8, WIDTH), False),
        "RMSNorm": (lambda: RMSNorm(WIDTH, eps=1e-6), False),
        "LayerNorm, modulated": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), True),
        "RMSNorm, modulated": (lambda: RMSNorm(WIDTH, eps=1e-6), True),
    }
    for title, (build, is_modulated) in norms.items():
        torch.manual_seed(0)
        model = Readers(build(), is_modulated=is_modulated).to(torch.bfloat16).requires_grad_(False)
        shape = (2, WIDTH, 12, 12) if "Group" in title else (2, TOKENS, WIDTH)
        models = {PEFT: model, SHARED_CASTS: model, NORMS: copy.deepcopy(model)}
        write_norms_in_half_precision(models[NORMS], torch.bfloat16)
        yield from compare(f"{title} and three readers", models, shape, MAX_RATIO["norm"])


class Projections(nn.Module):
    """Layers that read one input, and one that reads their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.to_out(torch.tanh(self.to_q(states) * self.to_k(states)) + self.to_v(states))
        return output


def measure_linear_layers() -> Iterator[Measurement]:
    """Measure outputs, gradients of the input and of both matrices of LoRA layers."""
    from library.adapters.injection import inject_into_model
    from library.adapters.precision import leave_input_casts_to_autocast
    from library.config.schema import AdapterConfig
    from library.parallel.fuse_lora import fuse_lora_layers

    torch.manual_seed(0)
    model = Projections().to(torch.bfloat16)
    names = ("to_q", "to_k", "to_v", "to_out")
    inject_into_model(model, AdapterConfig(network_dim=RANK, network_alpha=RANK / 2), names, seed=0)
    fill_lora_b(dict(model.named_parameters()), std=0.1)
    leave_input_casts_to_autocast(model)
    models: dict[str, nn.Module] = {PEFT: model, FUSED: copy.deepcopy(model)}
    fuse_lora_layers(models[FUSED], torch.bfloat16)
    yield from compare("LoRA on q, k, v and out", models, (2, TOKENS, WIDTH), MAX_RATIO["linear"])


def compare(title: str, models: Mapping[str, nn.Module], shape: Sequence[int], most: float) -> Iterator[Measurement]:
    """Measure the errors of models that differ in their layers; the last one has a limit of its ratio to the first."""
    exact_model = copy.deepcopy(models[PEFT]).double()
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for seed in range(SEEDS):
        states = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        exact = compute(exact_model, states.double(), None)
        for name, model in models.items():
            for part, value in compute(model, states, name).items():
                errors[name].setdefault(part, []).append(compute_error({"": value}, {"": exact[part]}))
    for part in exact:
        yield from report_errors(f"{title}: {part}", {name: errors[name][part] for name in models}, most)


def compute(model: nn.Module, states: Tensor, name: str | None) -> dict[str, Tensor]:
    """Compute output and gradients, which are those of all ``lora_A`` and of all ``lora_B`` together."""
    model.zero_grad()
    states = states.clone().requires_grad_()
    emulation = nullcontext() if name is None else emulate(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=name is not None), emulation:
        output = model(states)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(99))
    output.backward(weights.to(output.dtype))
    assert states.grad is not None
    results = {"output": output.detach(), "gradient of the input": states.grad}
    for half in ("lora_A", "lora_B"):
        grads = [each.grad.flatten() for key, each in model.named_parameters() if half in key and each.grad is not None]
        if grads:
            results[f"gradients of {half}"] = torch.cat(grads)
    return results


def report_errors(title: str, errors: Mapping[str, Sequence[float]], most: float) -> Iterator[Measurement]:
    """Report mean errors in percent; the last kind of layers has a limit."""
    first = sum(errors[PEFT])
    for number, (name, values) in enumerate(errors.items()):
        percent = [100 * sum(values) / len(values)]
        ratio = sum(values) / first
        limit = percent[0] * most / ratio if number == len(errors) - 1 else None
        note = "" if name == PEFT else f"{ratio:.2f} x {PEFT}"
        yield Measurement(f"{title}, {name}", percent, "%", at_most=limit, note=note)


def measure_step(job: "TrainingRun", family: str) -> Iterator[Measurement]:
    """Measure prediction and LoRA gradients of one batch after another, with each kind of layers."""
    denoiser: Any = job.strategy.unwrap_model(job.model).denoiser
    trained = {name: each for name, each in denoiser.named_parameters() if each.requires_grad}
    fill_lora_b(trained)
    loop, forwards = BareLoop(job), find_fused_forwards(denoiser)
    results: list[dict[str, dict[str, Tensor]]] = []
    for predict, target in loop.batches:
        found = {}
        for name in REPLACED:
            use_layers(name, forwards)
            with loop.autocast(), emulate(name):
                prediction = predict()
            found[name] = {"": prediction.detach(), **differentiate(prediction, target, trained)}
        results.append(found)
    use_layers(PEFT, forwards)
    denoiser.double()
    errors: dict[str, dict[str, list[float]]] = {}
    for found, batch in zip(results, loop.batches, strict=True):
        prediction = predict_in(torch.float64, batch[0])
        exact = {"": prediction.detach(), **differentiate(prediction, batch[1], trained)}
        for part, key in (("prediction", ""), ("gradients of lora_A", "lora_A"), ("gradients of lora_B", "lora_B")):
            keys = [each for each in exact if (key in each if key else not each)]
            for name, values in found.items():
                error = compute_error(values, {each: exact[each] for each in keys})
                errors.setdefault(part, {}).setdefault(name, []).append(error)
    for part, by_name in errors.items():
        yield from report_errors(f"tiny {family}, a step: {part}", by_name, MAX_RATIO["step"])


def differentiate(prediction: Tensor, target: Tensor, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    dtype = torch.float64 if prediction.dtype == torch.float64 else torch.float32
    nn.functional.mse_loss(prediction.to(dtype), target.to(dtype)).backward()  # type: ignore[no-untyped-call]
    return take_gradients(trained)


def predict_in(dtype: torch.dtype, predict: Any) -> Tensor:
    """Predict without autocast, with all inputs in a dtype."""
    from library.dataloader.batch import map_cond_tensors

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    *arguments, batch = predict.args
    batch = dataclasses.replace(batch, cond=map_cond_tensors(batch.cond, cast))
    prediction: Tensor = predict.func(*map(cast, arguments), batch)
    return prediction


def fill_lora_b(trained: Mapping[str, nn.Parameter], std: float = LORA_B_STD) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def find_fused_forwards(denoiser: nn.Module) -> Forwards:
    modules = [(module, vars(module).get("forward")) for module in denoiser.modules()]
    return [(module, each) for module, each in modules if isinstance(each, REPLACED[FUSED])]


def use_layers(name: str, forwards: Forwards) -> None:
    """Let the fused modules compute as ``name`` says, and the others as peft and diffusers do."""
    for module, forward in forwards:
        if isinstance(forward, REPLACED[name]):
            module.forward = forward  # type: ignore[assignment]
        else:
            vars(module).pop("forward", None)


def take_gradients(trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    gradients = {name: each.grad for name, each in trained.items() if each.grad is not None}
    for each in trained.values():
        each.grad = None
    return gradients


def compute_error(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Compute the norm of the differences of all tensors, relative to the norm of the exact ones."""
    squares = [(values[name].double() - value.double()).square().sum() for name, value in exact.items()]
    return float((sum(squares) / sum(each.double().square().sum() for each in exact.values())) ** 0.5)
