"""Benchmark training beside sd-scripts on the same Stable Diffusion 1 model, images and settings, taking turns.

Both get one dataset file with one bucket, cached latents, and the flags below; each is run for two steps, which is its
start, and for some more, whose difference is the time of a step.  Times are of processors, which other programs disturb
less, and by the clock.  sd-scripts needs an environment with its own requirements (``--sd_scripts_python``).
"""

import os
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from library.config import RunConfig
from library.errors import UserError

from .processes import ROOT, TAIL, TRAIN
from .report import Measurement, add_count_option, compute_ratios
from .synthetic_run import load_training_options, write_dataset

START_STEPS = 2
MAX_STEP_RATIO, MAX_START_RATIO = 1.0, 1.1
DEFAULT_MODEL = ("--pretrained_model_name_or_path", "random:sd1")
"""sd-scripts knows no other sizes."""
TOKENIZER_FOLDER = "openai_clip-vit-large-patch14"
"""The name under which sd-scripts looks for the tokenizer in its ``--tokenizer_cache_dir``."""
SAME_FLAGS = "--optimizer_type AdamW --learning_rate 1e-4 --sdpa --no_half_vae --max_data_loader_n_workers 1".split()


@dataclass(frozen=True)
class Usage:
    """What one run of a program took."""

    cpu_seconds: float
    seconds: float
    memory: float
    """Peak, of the largest process."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--sd_scripts", type=Path, required=True, help="folder with train_network.py")
    parser.add_argument("--sd_scripts_python", default=sys.executable, help="its Python interpreter")
    add_count_option(parser, "--bench_steps", 8, "steps of each measurement, besides those of the start")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Run both in turn; ratios are of runs next to each other."""
    if not (options.sd_scripts / "train_network.py").is_file():
        raise UserError(f"--sd_scripts {options.sd_scripts}: has no train_network.py; give the folder of a checkout")
    commands = prepare_commands(options, [*DEFAULT_MODEL, *training_options], directory)
    for name, command in commands.items():  # which fills caches of files and compiled modules
        measure_usage(name, command, START_STEPS, directory)
    starts: dict[str, list[Usage]] = {name: [] for name in commands}
    longs: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(options.repetitions):
        for steps, usages in ((START_STEPS, starts), (START_STEPS + options.bench_steps, longs)):
            for name, command in commands.items():
                usages[name].append(measure_usage(name, command, steps, directory))
    return list(_summarize(starts, longs, options.bench_steps))


def prepare_commands(
    options: Namespace, training_options: Sequence[str], directory: Path
) -> Mapping[str, Sequence[str]]:
    """Write model and dataset to disk; return the commands of both programs without the number of steps."""
    argv = write_dataset(training_options, directory, START_STEPS)
    config, _ = load_training_options(training_options)
    model = save_model(config, directory / "model")
    save = ["--output_dir", str(directory / "output"), "--output_name", "lora", "--save_model_as", "safetensors"]
    same = [
        *("--pretrained_model_name_or_path", str(model), "--dataset_config", argv[argv.index("--dataset_config") + 1]),
        *("--network_module", "networks.lora", "--network_dim", str(config.adapter.network_dim)),
        *("--train_batch_size", str(config.data.train_batch_size), "--seed", str(config.train.seed)),
        *("--mixed_precision", config.distributed.mixed_precision or "no", "--cache_latents"),
        *("--network_train_unet_only", *SAME_FLAGS, *save),
    ]
    if config.train.gradient_checkpointing:
        same.append("--gradient_checkpointing")
    script = options.sd_scripts / "train_network.py"
    return {
        "ours": [sys.executable, *TRAIN, *same, "--overwrite"],
        "sd-scripts": [
            *(options.sd_scripts_python, str(script), *same),
            *("--tokenizer_cache_dir", str(model / "tokenizers")),
        ],
    }


def save_model(config: RunConfig, folder: Path) -> Path:
    """Save the model as a diffusers folder, with the tokenizer where sd-scripts looks for it."""
    import torch

    from library.models.detect import detect_model
    from library.models.families import FAMILIES

    detected = detect_model(config.model)
    if detected.family != "sd1":
        raise UserError("--pretrained_model_name_or_path: this benchmark runs train_network.py of sd-scripts: use SD 1")
    pipe = FAMILIES.get(detected.family)(config.model).load(detected, torch.float32)
    pipe.save_pretrained(folder)
    pipe.tokenizer.save_pretrained(folder / "tokenizers" / TOKENIZER_FOLDER)
    return folder


def measure_usage(name: str, command: Sequence[str], steps: int, directory: Path) -> Usage:
    """Run a program to its end."""
    log = directory / "log.txt"
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    if name == "ours":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment["PYTHONPATH"]]))
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("wb") as output:
        words = [*command, "--max_train_steps", str(steps)]
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{name} failed:\n{log.read_text('utf-8', 'replace')[-TAIL:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    unit = 1 if sys.platform == "darwin" else 1024
    return Usage(cpu_seconds, seconds, usage.ru_maxrss * unit)


def _summarize(
    starts: Mapping[str, Sequence[Usage]], longs: Mapping[str, Sequence[Usage]], steps: int
) -> "list[Measurement]":
    measurements = []
    for kind, unit in (("cpu_seconds", "processor s"), ("seconds", "s")):
        step, start = dict[str, list[float]](), dict[str, list[float]]()
        for name in starts:
            start[name] = [getattr(usage, kind) for usage in starts[name]]
            long = [getattr(usage, kind) for usage in longs[name]]
            step[name] = [(all_steps - first) / steps for all_steps, first in zip(long, start[name], strict=True)]
            measurements.append(Measurement(f"{name}: step", step[name], unit))
            measurements.append(Measurement(f"{name}: start and {START_STEPS} steps", start[name], unit))
        is_target = kind == "cpu_seconds"
        for what, values, limit in (("step", step, MAX_STEP_RATIO), ("start", start, MAX_START_RATIO)):
            ratios = compute_ratios(values["ours"], values["sd-scripts"])
            measurements.append(
                Measurement(f"{what}, ours / sd-scripts, {unit}", ratios, "x", at_most=limit if is_target else None)
            )
    for name, usages in longs.items():
        measurements.append(Measurement(f"{name}: peak memory", [usage.memory / 1e9 for usage in usages], "GB"))
    return measurements
