"""Benchmark the same job under each parallel strategy, on the same images in each step."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from library.config import RunConfig
from library.errors import ConfigError
from library.problems import Problem

from .report import Measurement, add_count_option
from .synthetic_run import load_training_options, write_dataset
from .variants import compare_variants


@dataclass(frozen=True)
class Layout:
    """How the job is distributed; ``WORLD_SIZE`` stands for the number of processes."""

    flags: tuple[str, ...] = ()
    scaled_option: str = ""
    """Where all ranks work on the same images: the option that is multiplied, so that a step has as many images."""


LAYOUTS: Mapping[str, Layout] = {
    "DDP": Layout(),
    "FSDP": Layout(("--fsdp",)),
    "ZeRO1": Layout(("--deepspeed", "--zero_stage", "1")),
    "ZeRO2": Layout(("--deepspeed", "--zero_stage", "2")),
    "ZeRO3": Layout(("--deepspeed", "--zero_stage", "3")),
    "PP": Layout(("--pp_size", "WORLD_SIZE"), "gradient_accumulation_steps"),
    "TP": Layout(("--tp_size", "WORLD_SIZE"), "train_batch_size"),
    "CP": Layout(("--cp_size", "WORLD_SIZE"), "train_batch_size"),
}


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--world_size", 2, "processes")
    add_count_option(parser, "--bench_steps", 5, "steps, after as many of warmup")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="what to compare (all)")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Compare step time, throughput, bytes on the wire and peak memory; layouts that cannot run are reported."""
    config, explicit = load_training_options(training_options)
    flags = {word for layout in LAYOUTS.values() for word in layout.flags if word.startswith("--")}
    if rejected := sorted(explicit & {flag.removeprefix("--") for flag in flags}):
        raise ConfigError([Problem(name, "set by the benchmark", "choose with --layouts") for name in rejected])
    job = write_dataset(training_options, directory, 2 * options.bench_steps, world_size=options.world_size)
    variants = {name: [*job, *resolve_layout(LAYOUTS[name], options.world_size, config)] for name in options.layouts}
    return compare_variants(
        variants, world_size=options.world_size, steps=options.bench_steps, repetitions=options.repetitions
    )


def resolve_layout(layout: Layout, world_size: int, config: RunConfig) -> list[str]:
    """Return the options that distribute a job over the processes, with as many images in each step as under DDP."""
    flags = [str(world_size) if word == "WORLD_SIZE" else word for word in layout.flags]
    if layout.scaled_option:
        batch = {
            "train_batch_size": config.data.train_batch_size,
            "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        }
        flags += [f"--{layout.scaled_option}", str(batch[layout.scaled_option] * world_size)]
    return flags
