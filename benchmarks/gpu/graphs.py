"""Training with CUDA graphs (``--cuda_graphs``) beside the same training without: losses, step, memory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from library.distributed.device_memory import get_peak_memory

from ..report import Measurement
from ..synthetic_run import build_run, release_memory, write_dataset
from ..variants import StepTimer
from .correctness import record_losses
from .sections import NOT_MEASURED, SectionContext, format_failure
from .training_speed import CACHED

GRAPHS = ("--cuda_graphs",)
COMPILED = ("--torch_compile",)
VARIANTS: Mapping[str, Sequence[str]] = {
    "eager": (),
    "graphs": GRAPHS,
    "compiled": COMPILED,
    "eager again": (),
    "graphs, checkpointed": (*GRAPHS, "--gradient_checkpointing"),
    "compiled, graphs": (*COMPILED, *GRAPHS),
}
FEW = 3
"""How many of the variants say how fast a step is."""
BUCKETS = ((1024, 1024), (1216, 832), (832, 1216))
MIN_SPEEDUP = 2.0
"""Of graphs over eager: a graph of a bare loop was 4.6 times as fast with a batch size of 1."""


def compare_graphs(context: SectionContext) -> Iterator[Measurement]:
    """Train with one bucket, and with three that share a memory pool; compare with the losses of eager steps."""
    turn = context.choose(6, 1)
    yield from compare_variants(context, [*VARIANTS], turn)
    yield from compare_buckets(context, turn)


def compare_modes(context: SectionContext) -> Iterator[Measurement]:
    """Train eagerly, with graphs, and compiled."""
    yield from compare_variants(context, [*VARIANTS][:FEW], context.choose(6, 1))


def compare_variants(context: SectionContext, names: Sequence[str], turn: int) -> Iterator[Measurement]:
    """Train with one bucket in each way; compare with the first."""
    expected: torch.Tensor | None = None
    baseline = 0.0
    for name in names:
        release_memory(context.device)
        try:
            losses, seconds, peak = train_variant(context, name, VARIANTS[name], turn)
        except NOT_MEASURED as error:
            yield Measurement(f"{name}: step", [], note=format_failure(error))
            continue
        expected, baseline = (losses if expected is None else expected), baseline or seconds
        yield Measurement(f"{name}: step", [seconds], "s", note=f"{baseline / seconds:.2f} x as fast as eager")
        yield Measurement(f"{name}: peak memory", [peak], "GB")
        if name != "eager":
            difference = float((losses / expected - 1).abs().max())
            yield Measurement(f"{name}: largest relative difference of a loss from eager", [difference])
        if name == "graphs":
            limit = None if context.is_tiny else MIN_SPEEDUP
            yield Measurement("speedup of graphs", [baseline / seconds], "x", at_least=limit)


def compare_buckets(context: SectionContext, turn: int) -> Iterator[Measurement]:
    """Train three buckets, whose graphs share memory."""
    sizes = ((64, 64), (96, 64), (64, 96)) if context.is_tiny else BUCKETS
    results: dict[str, torch.Tensor] = {}
    for name, options in {"eager": (), "graphs": GRAPHS}.items():
        release_memory(context.device)
        title = f"three buckets, {name}"
        try:
            results[name], seconds, peak = train_variant(context, title, options, 3 * turn, sizes=sizes)
        except NOT_MEASURED as error:
            yield Measurement(f"{title}: step", [], note=format_failure(error))
            continue
        yield Measurement(f"{title}: step", [seconds], "s")
        yield Measurement(f"{title}: peak memory", [peak], "GB")
    if len(results) > 1:
        difference = float((results["graphs"] / results["eager"] - 1).abs().max())
        yield Measurement("three buckets: largest relative difference of a loss from eager", [difference])


def train_variant(
    context: SectionContext, name: str, options: Sequence[str], turn: int, sizes: Sequence[tuple[int, int]] = ()
) -> tuple[torch.Tensor, float, float]:
    """Train three turns; return the losses, the seconds of a step in the last two, and the peak in GB of them all."""
    folder: Path = context.directory / name.replace(" ", "_").replace(",", "")
    folder.mkdir()
    if context.is_tiny and "--torch_compile" in options:
        options = [*options, "--dynamo_backend", "aot_eager"]
    flags = [*context.training_options, *CACHED, "--network_train_unet_only", *options]
    with build_run(write_dataset(flags, folder, 3 * turn, sizes=sizes), folder) as run:
        timer = StepTimer(turn)
        run.callbacks = [timer]
        losses = torch.tensor(record_losses(run))
        device = run.strategy.device
    first, *_, last = timer.marks
    peak = max((mark[3] for mark in timer.marks), default=get_peak_memory(device))
    return losses, (last[0] - first[0]) / (turn * (len(timer.marks) - 1)), peak / 1e9
