"""Kernels for the frozen base: unpacking nf4, and matmul in fp8 and int8 with what it does to a trained LoRA."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from library.parallel import quantize
from library.parallel.quantize import FrozenLinear, QuantizedWeight, convert_frozen_layer
from library.parallel.quantized_matmul import QUANT_TYPES, QuantizedMatmulLinear, find_matmul_obstacle

from ..matmul import compare_training
from ..report import Measurement
from ..synthetic_run import release_memory, write_dataset
from .correctness import measure_device_seconds
from .sections import NOT_MEASURED, SMALL, SectionContext, format_failure
from .training_speed import CACHED, measure_run

QUANTIZED_STEPS: Mapping[str, Sequence[str]] = {
    "bf16": (),
    **{f"{kind} matmul": ("--quantize_base", kind, "--quantized_matmul") for kind in QUANT_TYPES},
    **{kind: ("--quantize_base", kind) for kind in QUANT_TYPES},
}


def measure_kernels(context: SectionContext) -> Iterator[Measurement]:
    yield from unpack_nf4(context)
    try:
        yield from multiply_quantized(context)
        release_memory(context.device)
        yield from train_quantized(context)
    except NOT_MEASURED as error:
        yield Measurement("quantized matmul", [], note=format_failure(error))


def unpack_nf4(context: SectionContext) -> Iterator[Measurement]:
    """Dequantize a large layer by each kernel that there is."""
    size = context.choose(8192, 512)
    weight = QuantizedWeight.quantize(torch.randn(size, size, device=context.device), "nf4")
    kernels = {"built-in": quantize.BUILT_IN_KERNEL, "bitsandbytes": quantize.select_nf4_kernel(context.device)}
    expected = None
    for name, kernel in kernels.items():
        if name != "built-in" and kernel == quantize.BUILT_IN_KERNEL:
            yield Measurement(f"nf4 to bf16, {name}", [], note="not run: bitsandbytes is not installed, or no device")
            continue
        chosen = QuantizedWeight(weight.quant_type, weight.shape, weight.dtype, weight.tensors, kernel)
        result = chosen.dequantize(torch.bfloat16)
        expected = result if expected is None else expected
        seconds = measure_device_seconds(lambda chosen=chosen: chosen.dequantize(torch.bfloat16), context.device)  # type: ignore[misc]
        note = f"largest difference {float((result - expected).abs().max()):.1e}"
        yield Measurement(f"nf4 to bf16, {name}", [size * size * 2 / seconds / 1e9], "GB/s written", note=note)


def multiply_quantized(context: SectionContext) -> Iterator[Measurement]:
    """Compare a frozen layer in bf16 with one in fp8 and int8, with dequantizing and with ``--quantized_matmul``."""
    sizes = [(context.choose(4096, 64), context.choose(3072, 64), context.choose(12288, 128))]
    if not context.is_tiny:
        sizes.append((4096, 1280, 1280))  # of SDXL
    for tokens, width, inner in sizes:
        title = f"{tokens} x {width} x {inner}"
        layer = nn.Linear(width, inner, device=context.device, dtype=torch.bfloat16).requires_grad_(False)
        weight = layer.weight.detach()
        states = torch.randn(1, tokens, width, device=context.device, dtype=torch.bfloat16).requires_grad_()
        gradient = torch.randn(1, tokens, inner, device=context.device, dtype=torch.bfloat16)

        def run(function: Any, states: Tensor = states, gradient: Tensor = gradient) -> None:
            function(states).backward(gradient)
            states.grad = None

        bf16 = measure_device_seconds(lambda run=run, layer=layer: run(layer), context.device)  # type: ignore[misc]
        yield Measurement(f"{title}: bf16, forward and backward", [1e3 * bf16], "ms")
        for kind in QUANT_TYPES:
            if obstacle := find_matmul_obstacle(kind, context.device):
                yield Measurement(f"{title}: {kind} matmul / bf16", [], note=obstacle)
                continue
            for name, frozen_class in (
                (f"{kind} dequantized", FrozenLinear),
                (f"{kind} matmul", QuantizedMatmulLinear),
            ):
                frozen = copy.deepcopy(layer)
                convert_frozen_layer(frozen, QuantizedWeight.quantize(weight, kind), frozen_class)
                seconds = measure_device_seconds(lambda run=run, layer=frozen: run(layer), context.device)  # type: ignore[misc]
                error = float((frozen(states) - layer(states)).norm() / layer(states).norm())
                yield Measurement(f"{title}: {name} / bf16", [seconds / bf16], "x", note=f"error {error:.4f}")


def train_quantized(context: SectionContext) -> Iterator[Measurement]:
    """Train LoRAs with bf16, dequantized weights, and products in fp8 and int8; compare them and their losses."""
    model = ["--pretrained_model_name_or_path", "random:sd1:tiny", *SMALL]
    if not context.is_tiny:
        model = ["--pretrained_model_name_or_path", "random:sd1", "--resolution", "512"]
    yield from compare_training([*model, "--learning_rate", "1e-4"], context.directory, context.choose(100, 2))


def measure_quantized_steps(context: SectionContext) -> Iterator[Measurement]:
    """Measure steps of a whole model with each base."""
    yield from _measure_bases(context, ())


def measure_compiled_quantized_steps(context: SectionContext) -> Iterator[Measurement]:
    """Measure the same with ``--torch_compile``."""
    yield from _measure_bases(
        context, ("--torch_compile", *(("--dynamo_backend", "aot_eager") if context.is_tiny else ()))
    )


def _measure_bases(context: SectionContext, compilation: Sequence[str]) -> Iterator[Measurement]:
    turn = context.choose(4, 1)
    precision = ("--mixed_precision", "bf16") if context.is_tiny else ()
    argv = write_dataset([*context.training_options, *precision, *CACHED], context.directory, 3 * turn)
    baseline = 0.0
    for name, options in QUANTIZED_STEPS.items():
        folder = context.directory / name.replace(" ", "_")
        folder.mkdir()
        release_memory(context.device)
        try:
            seconds, peak = measure_run([*argv, *options, *compilation], folder, turn)
        except NOT_MEASURED as error:
            yield Measurement(f"{name}: step", [], note=format_failure(error))
            continue
        baseline = baseline or seconds
        yield Measurement(f"{name}: step", [seconds], "s", note=f"{seconds / baseline:.2f} x bf16")
        yield Measurement(f"{name}: peak memory", [peak], "GB")
