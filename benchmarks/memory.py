"""Benchmark each memory-saving option: time and peak memory of a step, or with ``--count`` FLOPs and bytes."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from library.config import RunConfig, parse_config
from library.errors import ConfigError
from library.problems import Problem

from .report import Measurement, add_count_option
from .synthetic_run import CAPTION, load_training_options, write_dataset
from .variants import compare_variants

CHECKPOINTING = ("--gradient_checkpointing",)
OFFLOADED = (*CHECKPOINTING, "--cpu_offload_checkpointing")
SWITCHES: Mapping[str, Sequence[str]] = {
    "baseline": (),
    "checkpointing": CHECKPOINTING,
    "checkpointing_every_2": (*CHECKPOINTING, "--gradient_checkpointing_every", "2"),
    "budget_0.25": (*CHECKPOINTING, "--activation_memory_budget", "0.25"),
    "budget_0.5": (*CHECKPOINTING, "--activation_memory_budget", "0.5"),
    "budget_1": (*CHECKPOINTING, "--activation_memory_budget", "1"),
    "cpu_offload": OFFLOADED,
    "swap_half": ("--blocks_to_swap", "HALF"),
    "swap_all": ("--blocks_to_swap", "ALL"),
    "fp8": ("--quantize_base", "fp8"),
    "int8": ("--quantize_base", "int8"),
    "nf4": ("--quantize_base", "nf4"),
    "all_combined": (*OFFLOADED, "--blocks_to_swap", "ALL", "--quantize_base", "nf4"),
}
"""``HALF`` and ``ALL`` stand for numbers of blocks of the model."""
SEVERAL_DEVICES = {"fsdp", "deepspeed", "pp_size", "tp_size", "cp_size", "device_map"}


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--bench_steps", 3, "steps, after as many of warmup")
    parser.add_argument("--switches", nargs="+", choices=SWITCHES, default=list(SWITCHES), help="what to compare (all)")
    parser.add_argument("--count", action="store_true", help="count FLOPs and bytes on a model without weights instead")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Measure, or count, each switch; the baseline is always among them."""
    config, explicit = load_training_options(training_options)
    flags = {word for switch in SWITCHES.values() for word in switch if word.startswith("--")}
    if rejected := sorted(explicit & {flag.removeprefix("--") for flag in flags}):
        raise ConfigError([Problem(name, "set by the benchmark", "choose with --switches") for name in rejected])
    if rejected := sorted(explicit & SEVERAL_DEVICES):
        raise ConfigError([Problem(name, "this benchmark runs on one device", "remove it") for name in rejected])
    blocks = count_blocks(config)
    numbers = {"HALF": str(blocks // 2), "ALL": str(blocks)}
    switches = {
        name: [numbers.get(word, word) for word in SWITCHES[name]]
        for name in dict.fromkeys(["baseline", *options.switches])
    }
    job = write_dataset(training_options, directory, 2 * options.bench_steps)
    variants = {name: [*job, *switch] for name, switch in switches.items()}
    if options.count:
        return list(count_variants(variants))
    return compare_variants(variants, world_size=1, steps=options.bench_steps, repetitions=options.repetitions)


def count_blocks(config: RunConfig) -> int:
    """Count the blocks of the denoiser that can be swapped."""
    from library.models.detect import detect_model
    from library.models.families import FAMILIES
    from library.models.loading import load_components_on_meta
    from library.parallel.frozen_base import find_innermost_blocks

    detected = detect_model(config.model)
    denoiser = FAMILIES.get(detected.family).facts.denoiser_name
    return len(find_innermost_blocks(getattr(load_components_on_meta(detected, (denoiser,)), denoiser)))


def count_variants(variants: Mapping[str, Sequence[str]]) -> Iterator[Measurement]:
    """Count what a step of each variant computes and allocates, compared to the first; the same on every machine."""
    baseline: Sequence[float] = ()
    for name, training_options in variants.items():
        counts = _count_step(parse_config(training_options).require_valid())
        baseline = baseline or counts
        yield Measurement(f"{name}: FLOPs", counts[:1], "TFLOP", note=f"{counts[0] / baseline[0]:.3f} x baseline")
        for title, count, base in zip(("frozen weights", "activations", "peak"), counts[1:], baseline[1:], strict=True):
            yield Measurement(f"{name}: {title}", [count], "GB", note=f"{base - count:+.3f} GB saved")


def _count_step(config: RunConfig) -> tuple[float, float, float, float]:
    """Count TFLOP of forward and backward; GB of frozen weights, of activations saved for backward, and at the peak."""
    from library.estimate.meta_run import LargestBatch, MetaRun
    from library.models.detect import detect_model

    size = config.data.resolution
    assert size is not None
    captions = tuple(CAPTION.format(number) for number in range(config.data.train_batch_size))
    run = MetaRun(config, detect_model(config.model), LargestBatch((size.width, size.height), captions))
    step, frozen = run.step.total, run.frozen_bytes
    return step.flops / 1e12, frozen / 1e9, step.saved / 1e9, (frozen + step.peak) / 1e9
