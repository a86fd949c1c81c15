"""Memory on the device: each memory-saving option against the estimate, and models within small cards as advised."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import torch

from library.distributed.device_memory import has_device_memory
from library.estimate.advice import MARGIN

from ..advice import ONE_DEVICE, start_search
from ..memory import SWITCHES, count_blocks
from ..report import Measurement
from ..synthetic_run import CAPTION, load_training_options, release_memory, write_dataset
from .sections import NOT_MEASURED, SectionContext, format_failure
from .training_speed import CACHED, measure_run

MEASURED = ("baseline", "checkpointing", "swap_half", "checkpointing_every_2", "budget_0.5", "cpu_offload", "swap_all",
            "fp8", "int8", "nf4", "all_combined")  # fmt: skip
AGAIN = "baseline_again"
MAX_SWAP_RATIO = 1.2
"""Step time with half of the blocks swapped."""
RING_SIZES = (1, 0, 12)
"""Buffers of swapped blocks to compare; 0 is the default."""
CARDS = (24, 12, 16)
"""Memory of cards in GB.  The largest is first, as text encoders run then; the middle one tells least."""
CONTEXT_GB = 0.6
"""Of the card, for CUDA's context, which the limit does not count."""


def lower_priority() -> None:
    """Leave the processors to all other processes."""
    psutil.Process().nice(psutil.IDLE_PRIORITY_CLASS if sys.platform == "win32" else 19)


def measure_switches(context: SectionContext) -> Iterator[Measurement]:
    """Measure peak and step time of each option, while other processes estimate the peaks."""
    turn = context.choose(3, 1)
    argv = write_dataset([*context.training_options, *CACHED], context.directory, 3 * turn)
    blocks = count_blocks(load_training_options(context.training_options)[0])
    numbers = {"HALF": str(blocks // 2), "ALL": str(blocks)}
    names = ("baseline", "swap_half", "nf4") if context.is_tiny else MEASURED
    switches = {name: [numbers.get(word, word) for word in SWITCHES[name]] for name in names}
    seconds: dict[str, float] = {}
    # Estimating is left to idle processors, or it slows down what is measured; the baseline is measured again last.
    workers = context.choose(4, 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=lower_priority) as pool:
        options = context.training_options
        estimates = {name: pool.submit(estimate_peak, [*options, *switch]) for name, switch in switches.items()}
        for name, switch in {**switches, AGAIN: switches["baseline"]}.items():
            folder = context.directory / name
            folder.mkdir()
            release_memory(context.device)
            try:
                seconds[name], peak = measure_run([*argv, *switch], folder, turn)
            except NOT_MEASURED as error:
                yield Measurement(f"{name}: step", [], note=format_failure(error))
                continue
            yield Measurement(f"{name}: step", [seconds[name]], "s")
            if name == AGAIN:
                continue
            if has_device_memory(context.device):
                yield Measurement(f"{name}: peak memory", [peak], "GB")
                ratio = estimates[name].result() / 1e9 / peak
                low, high = (None, None) if context.is_tiny else (0.95, 1.05)  # tiny: CUDA's own workspace is larger
                yield Measurement(f"{name}: estimate / peak", [ratio], "x", at_least=low, at_most=high)
            else:
                note = f"estimated {estimates[name].result() / 1e6:.1f} MB; its peak was not measured: no device"
                yield Measurement(f"{name}: estimate / peak", [], note=note)
    baselines = [seconds[name] for name in ("baseline", AGAIN) if name in seconds]
    for name in [name for name in seconds if name not in ("baseline", AGAIN) and baselines]:
        limit = MAX_SWAP_RATIO if name == "swap_half" and not context.is_tiny else None
        yield Measurement(f"{name}: step / baseline", [seconds[name] / min(baselines)], "x", at_most=limit)


def compare_ring_sizes(context: SectionContext) -> Iterator[Measurement]:
    """Swap half of the blocks with rings of several sizes; the baseline is measured first and last."""
    turn = context.choose(3, 1)
    argv = write_dataset([*context.training_options, *CACHED], context.directory, 3 * turn)
    half = str(count_blocks(load_training_options(context.training_options)[0]) // 2)
    variants: dict[str, Sequence[str]] = {"baseline": ()}
    for size in RING_SIZES[:2] if context.is_tiny else RING_SIZES:
        title = f"half swapped, {f'ring of {size}' if size else 'ring by default'}"
        variants[title] = ("--blocks_to_swap", half, "--block_swap_ring_size", str(size))
    seconds: dict[str, float] = {}
    for name, options in {**variants, AGAIN: ()}.items():
        folder = context.directory / name.replace(" ", "_")
        folder.mkdir()
        release_memory(context.device)
        try:
            seconds[name], peak = measure_run([*argv, *options], folder, turn)
        except NOT_MEASURED as error:
            yield Measurement(f"{name}: step", [], note=format_failure(error))
            continue
        yield Measurement(f"{name}: step", [seconds[name]], "s")
        if has_device_memory(context.device):
            yield Measurement(f"{name}: peak memory", [peak], "GB")
    baselines = [seconds[name] for name in ("baseline", AGAIN) if name in seconds]
    for name in [name for name in seconds if name not in ("baseline", AGAIN) and baselines]:
        limit = MAX_SWAP_RATIO if "default" in name and not context.is_tiny else None
        yield Measurement(f"{name}: step / baseline", [seconds[name] / min(baselines)], "x", at_most=limit)


def estimate_peak(training_options: Sequence[str]) -> int:
    """Estimate the peak of a run on one device in bytes, without what the allocator does not count."""
    from library.estimate.layout_search import estimate_layouts
    from library.estimate.meta_run import LargestBatch
    from library.estimate.parallel_layouts import LayoutFinder
    from library.estimate.step_time import Devices
    from library.models.detect import detect_model

    config, explicit = load_training_options(training_options)
    model, size = detect_model(config.model), config.data.resolution
    assert size is not None
    batch = LargestBatch((size.width, size.height), (CAPTION.format(1),) * config.data.train_batch_size)
    layouts, _ = LayoutFinder(config, explicit, model, 1).find_layouts()
    memory = estimate_layouts(layouts[:1], model, batch, Devices(1, 2**40))[0].memory
    return memory.total - memory.reserved


def fit_into_cards(context: SectionContext) -> Iterator[Measurement]:
    """Train as ``--gpu_memory`` chooses for smaller cards, by a limit of torch's allocator."""
    turn = context.choose(2, 1)
    argv = write_dataset([*context.training_options, *CACHED], context.directory, 3 * turn)
    search = start_search(context.training_options)
    for card in CARDS[:1] if context.is_tiny else CARDS:
        advice = search.advise((1 - MARGIN) * card * 2**30)
        chosen = next((each for each in advice if each.layout.name == ONE_DEVICE), None)
        if chosen is None:
            yield Measurement(f"{card} GB: step", [], note="no options of one device fit")
            continue
        title = f"{card} GB, {chosen.flags or 'no options'}"
        folder = context.directory / str(card)
        folder.mkdir()
        release_memory(context.device)
        _limit_memory(context.device, card)
        try:
            seconds, peak = measure_run([*argv, *chosen.flags.split()], folder, turn)
        except NOT_MEASURED as error:
            yield Measurement(f"{title}: step", [], note=format_failure(error))
            continue
        yield Measurement(f"{title}: step", [seconds], "s", note=chosen.precision)
        if has_device_memory(context.device):
            reserved = torch.get_device_module(context.device).max_memory_reserved() / 1e9
            note = f"reserved at most {reserved:.1f} GB"
            yield Measurement(f"{title}: peak memory", [peak], "GB", at_most=card * 2**30 / 1e9 - CONTEXT_GB, note=note)
            estimated = (chosen.memory.total - chosen.memory.reserved) / 1e9
            yield Measurement(f"{title}: estimate / peak", [estimated / peak], "x", at_least=0.95, at_most=1.05)


def _limit_memory(device: torch.device, card: int) -> None:
    """Let torch's allocator have what a card of this size leaves it."""
    if has_device_memory(device):
        module = torch.get_device_module(device)
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, (card * 2**30 - CONTEXT_GB * 1e9) / total))
