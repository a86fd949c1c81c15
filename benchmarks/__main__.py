"""Command line of the benchmarks: ``python -m benchmarks NAME [--option value ...]``; without a name, list them."""

import importlib
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from library.errors import UserError
from library.log import configure_logging

from .report import add_count_option, format_json, format_text

BENCHMARKS: dict[str, tuple[str, str]] = {
    "step": ("benchmarks.step", "time of a training step compared to a bare PyTorch loop, on any model"),
    "startup": ("benchmarks.startup", "time from the command to the first step, compared to a bare script"),
    "memory": ("benchmarks.memory", "time and peak memory of a step with each memory-saving option"),
    "advice": (
        "benchmarks.advice",
        "what plan advises for each size of GPU, beside all combinations of options",
    ),
    "launches": ("benchmarks.launches", "kernel launches of a step and bytes saved for backward, by LoRA layers"),
    "accuracy": ("benchmarks.accuracy", "rounding errors of norms, LoRA layers and steps in bf16 against float64"),
    "compile": ("benchmarks.compile", "torch.compile: graphs, compile time with a cold and a warm cache, step time"),
    "strategies": ("benchmarks.strategies", "throughput, bytes on the wire and memory of each parallel strategy"),
    "data": ("benchmarks.data", "scanning a dataset, planning batches, reading cached latents"),
    "clips": ("benchmarks.clips", "planning and caching many clips, reading cached windows"),
    "saves": ("benchmarks.saves", "time that training waits for LoRA files and checkpoints"),
    "peers": ("benchmarks.peers", "start, step and memory of training beside sd-scripts, on the same model and images"),
    "lora": ("benchmarks.lora", "the LoRA tools: time, peak memory, and how exact their results are"),
    "matmul": (
        "benchmarks.matmul",
        "accuracy of frozen layers that multiply in fp8 or int8, and of LoRAs trained on them",
    ),
    "pipeline": ("benchmarks.pipeline", "bubble fraction of the pipeline schedules, compared to the formula"),
    "gpu": ("benchmarks.gpu.program", "all that only a GPU can show, in sections, within a time limit"),
    "web": ("benchmarks.web", "the web page in Chromium: a large folder, many runs, a long run"),
}
"""Name: (module, description). A module has ``add_arguments(parser)`` and ``run(options, training_options,
directory)``; ``run`` returns measurements; its files go into ``directory``, which is temporary."""
EPILOG = "All other options are those of training; for their defaults here, see benchmarks/synthetic_run.py."


def main(argv: Sequence[str]) -> int:
    """Run one benchmark and print its report; return the exit code."""
    if not argv or argv[0] in ("--help", "-h"):
        lines = [f"  {name:<11} {description}" for name, (_, description) in BENCHMARKS.items()]
        print("\n".join(["usage: python -m benchmarks NAME [--json] [--help] [--option value ...]", "", *lines]))
        return 0
    name = argv[0]
    if name not in BENCHMARKS:
        print(f"benchmarks: unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module_name, description = BENCHMARKS[name]
    module = importlib.import_module(module_name)
    parser = ArgumentParser(f"python -m benchmarks {name}", description=description, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print every single value as JSON")
    add_count_option(parser, "--repetitions", 3, "measurements of each quantity")
    module.add_arguments(parser)
    options, training_options = parser.parse_known_args(argv[1:])
    configure_logging(quiet=True, simple=True)
    try:
        with tempfile.TemporaryDirectory(prefix="lorikeet-benchmark-") as directory:
            measurements = list(module.run(options, training_options, Path(directory)))
    except UserError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        return 2
    format_report = format_json if options.json else format_text
    print(format_report(["python", "-m", "benchmarks", *argv], measurements))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
