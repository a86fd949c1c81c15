"""Fused layers beside peft's in one process: step, memory, loss and gradients; and the whole step as a CUDA graph."""

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from library.distributed.device_memory import get_peak_memory, has_device_memory
from library.distributed.devices import synchronize

from ..accuracy import (
    FUSED,
    PEFT,
    Forwards,
    compute_error,
    fill_lora_b,
    find_fused_forwards,
    predict_in,
    take_gradients,
    use_layers,
)
from ..report import Measurement
from ..step import BareLoop
from ..synthetic_run import build_run, release_memory, reset_peak_memory, write_dataset
from .sections import NOT_MEASURED, SectionContext, format_failure
from .training_speed import CACHED

if TYPE_CHECKING:
    from library.training.state import TrainingRun

MAX_FLOAT32_PARAMETERS = 4e9
"""Of a denoiser whose gradients are computed in float32 for comparison."""


def compare_layers(context: SectionContext) -> Iterator[Measurement]:
    """Train with both kinds of layers in turn; compare what each computes for one batch."""
    from library.training.loop import train

    turn, turns = context.choose(5, 1), 2
    precision = ("--mixed_precision", "bf16") if context.is_tiny else ()
    options = [*context.training_options, *CACHED, *precision]
    argv = write_dataset(options, context.directory, 2 * turn * (turns + 1))
    with build_run(argv, context.directory) as run:
        callback = LayerSwitch(run, turn)
        run.callbacks = [callback]
        train(run)
        for name in (PEFT, FUSED):
            yield Measurement(f"{name}: step", callback.seconds[name], "s")
            if has_device_memory(context.device):
                yield Measurement(f"{name}: peak memory", callback.peaks[name], "GB")
        medians = [statistics.median(callback.seconds[name]) for name in (PEFT, FUSED)]
        yield Measurement("peft's layers / fused layers", [medians[0] / medians[1]], "x")
        yield from compare_gradients(run, callback.forwards)
    del run, callback
    release_memory(context.device)
    if context.device_type != "cuda":
        yield Measurement("step as a CUDA graph", [], note="not run: no device")
        return
    folder = context.directory / "graph"
    folder.mkdir()
    with build_run(argv, folder) as run:
        try:
            seconds, peak = measure_graph(run)
        except NOT_MEASURED as error:
            yield Measurement("step as a CUDA graph", [], note=format_failure(error))
            return
    yield Measurement("step as a CUDA graph", [seconds], "s", note=f"{medians[1] / seconds:.2f} x as fast as eager")
    yield Measurement("peak memory of the graph", [peak], "GB")


def get_denoiser(run: "TrainingRun") -> Any:
    return run.strategy.unwrap_model(run.model).denoiser


class LayerSwitch:
    """Callback that changes the kind of layers after every ``steps`` steps, and measures all turns but the first."""

    id = "layer_switch"
    is_deferrable = False

    def __init__(self, run: "TrainingRun", steps: int):
        self.steps, self.device, self.forwards = (
            steps,
            run.strategy.device,
            find_fused_forwards(get_denoiser(run)),
        )
        self.seconds: dict[str, list[float]] = {PEFT: [], FUSED: []}
        self.peaks: dict[str, list[float]] = {PEFT: [], FUSED: []}
        self._start(PEFT)

    def should_run(self, run: "TrainingRun") -> bool:
        return run.state.step % self.steps == 0

    def on_train_begin(self, run: "TrainingRun") -> None: ...

    def __call__(self, run: "TrainingRun") -> None:
        synchronize(self.device)
        if run.state.step > 2 * self.steps:
            self.seconds[self.name].append((time.perf_counter() - self.started) / self.steps)
            self.peaks[self.name].append(get_peak_memory(self.device) / 1e9)
        self._start(FUSED if self.name == PEFT else PEFT)

    def _start(self, name: str) -> None:
        use_layers(name, self.forwards)
        reset_peak_memory(self.device)
        self.name, self.started = name, time.perf_counter()


def compare_gradients(run: "TrainingRun", forwards: Forwards) -> Iterator[Measurement]:
    """Compare loss and gradients of one batch with those in float32."""
    denoiser = get_denoiser(run)
    trained = {name: each for name, each in denoiser.named_parameters() if each.requires_grad}
    fill_lora_b(trained)
    loop = BareLoop(run)
    results = {}
    for name in (PEFT, FUSED):
        use_layers(name, forwards)
        loss = float(loop.backward())
        results[name] = loss, take_gradients(trained)
        yield Measurement(f"{name}: loss", [loss])
    if sum(each.numel() for each in denoiser.parameters()) > MAX_FLOAT32_PARAMETERS:
        return
    use_layers(PEFT, forwards)
    exact_loss = compute_in_float32(denoiser, loop)
    exact = take_gradients(trained)
    for name, (loss, gradients) in results.items():
        note = f"loss {loss / exact_loss - 1:+.1e}"
        yield Measurement(
            f"{name}: error of all gradients against float32", [compute_error(gradients, exact)], note=note
        )


def compute_in_float32(denoiser: nn.Module, loop: BareLoop) -> float:
    """Compute the gradients of a batch in float32; return the loss."""
    torch.backends.cudnn.allow_tf32 = False
    denoiser.float()
    predict, target = loop.batches[0]
    loss = nn.functional.mse_loss(predict_in(torch.float32, predict).float(), target)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def measure_graph(run: "TrainingRun", repetitions: int = 15) -> tuple[float, float]:
    """Capture forward, backward, clipping and AdamW as one CUDA graph; return seconds of a replay and peak GB."""
    device = run.strategy.device
    denoiser = get_denoiser(run)
    loop = BareLoop(run)
    arguments, options = record_arguments(denoiser, loop)
    parameters = replace_adapter_parameters(denoiser)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def step() -> None:
        with loop.autocast():
            output = denoiser(*arguments, **options)
        output = output[0] if isinstance(output, tuple) else output.sample
        nn.functional.mse_loss(output.float(), torch.zeros_like(output, dtype=torch.float32)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            step()
    optimizer.zero_grad()
    synchronize(device)
    release_memory(device)
    graph = torch.cuda.CUDAGraph()
    # Threads of the loader may allocate meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    for _ in range(3):
        graph.replay()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repetitions):
        graph.replay()
    synchronize(device)
    return (time.perf_counter() - started) / repetitions, get_peak_memory(device) / 1e9


def record_arguments(denoiser: nn.Module, loop: BareLoop) -> tuple[Any, Any]:
    """Return what the family passes to the denoiser, which is in the same memory in each replay."""
    calls: list[tuple[Any, Any]] = []
    hook = denoiser.register_forward_pre_hook(lambda _, *inputs: calls.append(inputs), with_kwargs=True)
    with torch.no_grad(), loop.autocast():
        loop.batches[0][0]()
    hook.remove()
    return calls[0]


def replace_adapter_parameters(denoiser: nn.Module) -> list[nn.Parameter]:
    """Replace the trained parameters by equal ones, which autograd has not seen on another stream than the graph's."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in denoiser.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                new.setdefault(parameter, nn.Parameter(parameter.detach().clone()))
                module._parameters[name] = new[parameter]
    return list(new.values())
