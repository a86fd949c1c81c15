"""Accuracy of frozen layers that multiply in fp8 or int8 (``--quantized_matmul``): one layer, and a LoRA trained on it.

A CPU rounds as a GPU does and adds products in another order, so the errors are those of a GPU; times are not.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.errors import ConfigError
from library.parallel.quantize import FrozenLinear, QuantizedWeight, convert_frozen_layer
from library.parallel.quantized_matmul import QUANT_TYPES, QuantizedMatmulLinear
from library.problems import Problem

from .gpu.correctness import record_losses
from .report import Measurement, add_count_option
from .synthetic_run import build_run, load_training_options, write_dataset

TOKENS, INPUTS, OUTPUTS = 256, 1024, 1536
OUTLIER, OUTLIER_COLUMNS = 30.0, 8
"""Activations of transformers have a few columns that are much larger than the others, in every token."""
SET_HERE = {"quantize_base", "quantized_matmul", "mixed_precision"}
BF16 = ("--mixed_precision", "bf16")
VARIANTS: Mapping[str, Sequence[str]] = {
    "bf16": BF16,
    "float32": ("--mixed_precision", "no"),
    **{kind: (*BF16, "--quantize_base", kind) for kind in QUANT_TYPES},
    **{f"{kind} matmul": (*BF16, "--quantize_base", kind, "--quantized_matmul") for kind in QUANT_TYPES},
}
"""The first is what the others are compared with; float32 shows what the rounding of bf16 does."""


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--bench_steps", 30, "training steps of each variant")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Compare one layer with float32, and trained LoRAs with that of bf16."""
    _, explicit = load_training_options(training_options)
    if rejected := sorted(explicit & SET_HERE):
        raise ConfigError([Problem(name, "set by the benchmark", "remove it") for name in rejected])
    layers = compare_layers(torch.device("cpu"))
    return [*layers, *compare_training(training_options, directory, options.bench_steps)]


def compare_layers(device: torch.device) -> Iterator[Measurement]:
    """Compare output and gradient of a frozen layer with those in float32."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TOKENS, INPUTS, generator=generator)
    gradient = torch.randn(1, TOKENS, OUTPUTS, generator=generator)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.02
    with_outliers = states.clone()
    with_outliers[..., :OUTLIER_COLUMNS] *= OUTLIER
    for title, inputs in (("normal inputs", states), ("inputs with outliers", with_outliers)):
        exact = inputs @ weight.t(), gradient @ weight
        for kind in QUANT_TYPES:
            for name, frozen_class in ((kind, FrozenLinear), (f"{kind} matmul", QuantizedMatmulLinear)):
                layer = nn.Linear(INPUTS, OUTPUTS, bias=False).requires_grad_(False)
                convert_frozen_layer(layer, QuantizedWeight.quantize(weight, kind), frozen_class)
                results = _compute_layer(layer.to(device), inputs.to(device), gradient.to(device))
                errors = [
                    float((each.cpu().float() - own).norm() / own.norm())
                    for each, own in zip(results, exact, strict=True)
                ]
                yield Measurement(f"{title}: {name}: error of the output", errors[:1])
                yield Measurement(f"{title}: {name}: error of the gradient", errors[1:])


def _compute_layer(layer: nn.Module, inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inputs = inputs.clone().requires_grad_()
    with torch.autocast(inputs.device.type, torch.bfloat16):
        output = layer(inputs)
    output.backward(gradient.to(output.dtype))
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def compare_training(training_options: Sequence[str], directory: Path, steps: int) -> Iterator[Measurement]:
    """Train a LoRA with each variant on the same data and noise; compare losses and what the LoRAs add to weights."""
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name, options in VARIANTS.items():
        folder = directory / name.replace(" ", "_")
        folder.mkdir()
        argv = write_dataset([*training_options, *options], folder, steps)
        results[name] = train_lora(argv, folder)
    losses, updates = results[next(iter(VARIANTS))]
    for name in [*VARIANTS][1:]:
        other_losses, other_updates = results[name]
        error = float((other_updates - updates).norm() / updates.norm())
        note = f"cosine {float(torch.cosine_similarity(other_updates, updates, dim=0)):.5f}"
        yield Measurement(f"{name}: difference of the trained LoRA from bf16", [error], note=note)
        last = max(1, steps // 4)
        ratio = float(other_losses[-last:].mean() / losses[-last:].mean())
        note = f"largest difference of a step {float((other_losses / losses - 1).abs().max()):.1e}"
        yield Measurement(f"{name}: mean loss of the last {last} steps / bf16", [ratio], "x", note=note)


def train_lora(argv: Sequence[str], folder: Path) -> tuple[Tensor, Tensor]:
    """Train; return the losses, and the products of the matrices of each layer of the LoRA, one after the other."""
    with build_run(argv, folder) as run:
        losses = record_losses(run)
        model: Any = run.strategy.unwrap_model(run.model)
        weights = {name: each.detach().float().cpu() for name, each in model.named_parameters() if each.requires_grad}
    pairs = [(weights[name.replace("lora_A", "lora_B")], down) for name, down in weights.items() if "lora_A" in name]
    return torch.tensor(losses), torch.cat([(up.flatten(1) @ down.flatten(1)).flatten() for up, down in pairs])
