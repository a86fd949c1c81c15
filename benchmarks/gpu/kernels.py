"""Kernels for the frozen base: unpacking nf4, and fp8 matmul with what it does to the loss."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.parallel import quantize
from library.parallel.quantize import FP8_DTYPE, QuantizedWeight

from ..report import Measurement
from ..synthetic_run import build_run, release_memory, write_dataset
from .correctness import measure_device_seconds, record_losses
from .sections import NOT_MEASURED, SMALL, SectionContext, format_failure

if TYPE_CHECKING:
    from library.training.state import TrainingRun

GRADIENT_DTYPE = torch.float8_e5m2
MULTIPLE = 16
"""Of both sides of a matrix, for ``torch._scaled_mm``."""


def measure_kernels(context: SectionContext) -> Iterator[Measurement]:
    yield from unpack_nf4(context)
    try:
        yield from multiply_fp8(context)
        release_memory(context.device)
        yield from train_with_fp8_matmul(context)
    except NOT_MEASURED as error:
        yield Measurement("fp8 matmul", [], note=format_failure(error))


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


def multiply_fp8(context: SectionContext) -> Iterator[Measurement]:
    """Compare the matmul of a frozen layer in bf16 and in fp8, with casting its input, forward and backward."""
    tokens, width, inner = context.choose(4096, 64), context.choose(3072, 64), context.choose(12288, 128)
    layer = nn.Linear(width, inner, bias=False, device=context.device, dtype=torch.bfloat16).requires_grad_(False)
    states = torch.randn(tokens, width, device=context.device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(tokens, inner, device=context.device, dtype=torch.bfloat16)

    def run(function: Any) -> None:
        function(states).backward(gradient)
        states.grad = None

    bf16 = measure_device_seconds(lambda: run(layer), context.device)
    fp8_layer = Fp8Linear(layer)
    fp8 = measure_device_seconds(lambda: run(fp8_layer), context.device)
    yield Measurement("bf16 layer, forward and backward", [1e3 * bf16], "ms", note=f"{tokens} x {width} x {inner}")
    yield Measurement("fp8 layer / bf16 layer", [fp8 / bf16], "x", note="with casting of inputs and gradients")


def train_with_fp8_matmul(context: SectionContext) -> Iterator[Measurement]:
    """Train with bf16 and with fp8 matmuls in the frozen layers; compare the losses."""
    steps = context.choose(200, 2)
    model = ["--pretrained_model_name_or_path", "random:sd1:tiny", *SMALL]
    if not context.is_tiny:
        model = ["--pretrained_model_name_or_path", "random:sd1", "--resolution", "512"]
    losses: dict[str, Tensor] = {}
    for name in ("bf16", "fp8"):
        folder = context.directory / name
        folder.mkdir()
        argv = write_dataset([*model, "--mixed_precision", "bf16", "--learning_rate", "1e-4"], folder, steps)
        with build_run(argv, folder) as run:
            count = replace_frozen_layers(run) if name == "fp8" else 0
            losses[name] = torch.tensor(record_losses(run))
    last = max(1, steps // 4)
    difference = (losses["fp8"] / losses["bf16"] - 1).abs()
    note = f"{count} layers in fp8; largest of a step {float(difference.max()):.1e}"
    means = [float(losses[name][-last:].mean()) for name in ("fp8", "bf16")]
    title = f"mean loss of the last {last} of {steps} steps, fp8 / bf16"
    yield Measurement(title, [means[0] / means[1]], "x", note=note)


def replace_frozen_layers(run: "TrainingRun") -> int:
    """Let the frozen linear layers of the denoiser compute in fp8; return their number."""
    denoiser: Any = run.strategy.unwrap_model(run.model).denoiser
    count = 0
    for module in denoiser.modules():
        is_frozen = type(module) is nn.Linear and not module.weight.requires_grad
        if is_frozen and not any(side % MULTIPLE for side in module.weight.shape):
            module.forward = Fp8Linear(module)
            count += 1
    return count


class Fp8Linear:
    """A frozen linear layer with weights in fp8 and one scale, and with its input cast in each call."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.scale = cast_to_fp8(layer.weight.detach(), FP8_DTYPE)
        self.transposed = self.weight.t().contiguous()  # both products take their second matrix by columns
        self.bias = layer.bias

    def __call__(self, states: Tensor) -> Tensor:
        flat = states.flatten(0, -2)
        padding = -len(flat) % MULTIPLE
        flat = nn.functional.pad(flat, (0, 0, 0, padding)) if padding else flat
        output: Tensor = _Fp8Matmul.apply(flat.bfloat16(), self)  # type: ignore[no-untyped-call]
        output = output[: len(flat) - padding].reshape(*states.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: Fp8Linear) -> Tensor:
        ctx.layer = layer
        values, scale = cast_to_fp8(states, FP8_DTYPE)
        return multiply(values, layer.weight.t(), scale, layer.scale, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, scale = cast_to_fp8(gradients[0].contiguous(), GRADIENT_DTYPE)
        return multiply(values, ctx.layer.transposed.t(), scale, ctx.layer.scale, is_fast=False), None


def cast_to_fp8(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tensor in fp8 and the scale that gives it back, without waiting for the device."""
    scale = tensor.abs().amax().float().clamp_min(1e-12) / torch.finfo(dtype).max
    scale = scale.to(tensor.dtype)  # once, so that dividing and multiplying are by the same
    return (tensor / scale).to(dtype), scale.float()


def multiply(first: Tensor, second: Tensor, first_scale: Tensor, second_scale: Tensor, *, is_fast: bool) -> Tensor:
    """Multiply two matrices and their scales; a fast sum is less exact, which gradients need more than outputs."""
    result: Tensor = torch._scaled_mm(
        first, second, first_scale, second_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )
    return result
