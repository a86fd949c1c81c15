"""``bench memory --count``: bytes and operations of a step with each switch that saves memory, counted on a model
without numbers; so it is the same on every machine, and tells of devices that are not there.
"""

from collections.abc import Iterator, Mapping, Sequence

from ..config import RunConfig
from ..config.checks import conflicts
from ..config.options import options_of
from ..errors import ConfigError
from .bench_figure import Figure
from .bench_run import caption, settings

SHARING = ("parallel", "sharding", "deepspeed")
"""Groups of options for several devices."""


def ways(switches: Mapping[str, Sequence[str]], config: RunConfig) -> dict[str, Sequence[str]]:
    """More than can be measured in a reasonable time."""
    budget = ("--gradient_checkpointing", "--gradient_checkpointing_budget", "0.25")
    is_half = config.distributed.mixed_precision in ("bf16", "fp16")
    other = "no" if is_half else "bf16"
    return {**switches, "checkpointing, a quarter of the budget": budget,
            f"mixed_precision {other}": ("--mixed_precision", other)}  # fmt: skip


def refuse_sharing(given: frozenset[str]) -> None:
    """What would change nothing in what is counted."""
    shares = {option.name for option in options_of(RunConfig) if option.group in SHARING} & given
    if problems := [f"--{name}: one device is counted; take it out. plan --gpu_memory foresees several"
                    for name in sorted(shares)]:  # fmt: skip
        raise ConfigError(problems)


def counted(ways: Mapping[str, Sequence[str]], root: type[RunConfig]) -> Iterator[Figure]:
    """Of each way, the first of which is beside the others; ``ways`` are all words of a command."""
    plain: tuple[float, ...] = ()
    for name, words in ways.items():
        config, given = settings(words, root)
        if problems := [f"--{names[0]}: {message}" for names, message in conflicts(config, given)
                        if names[0] != "dataset_config"]:  # fmt: skip
            raise ConfigError(problems)
        found = _of_step(config)
        plain = plain or found
        times, saved = found[0] / plain[0], [one - other for one, other in zip(plain, found, strict=True)]
        units = ("TFLOP", "GB", "GB", "GB")
        titles = (f"{name}: operations", "  frozen weights", "  kept for backward", "  worst moment, with all of it")
        for title, unit, value, less in zip(titles, units, found, saved, strict=True):
            beside = f"{times:.3f} times" if unit == "TFLOP" else f"{less:+.3f} GB saved"
            yield Figure(title, (value,), unit, remark="" if found is plain else beside)


def _of_step(config: RunConfig) -> tuple[float, float, float, float]:
    """Operations; and bytes on the device: frozen weights, what waits for the backward pass, and the most of all."""
    from ..estimate.meta_run import LargestBatch, MetaRun
    from ..families.detect import detect

    size = config.data.resolution
    assert size is not None
    captions = tuple(caption(number) for number in range(config.data.train_batch_size))
    run = MetaRun(config, detect(config.model), LargestBatch((size.width, size.height), captions))
    step, frozen = run.step.total, run.frozen_bytes
    return step.flops / 1e12, frozen / 1e9, step.saved / 1e9, (frozen + step.peak) / 1e9
