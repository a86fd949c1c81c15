"""Benchmark training beside other trainers on the same model, images and settings, taking turns.

sd-scripts' ``train_network.py`` trains Stable Diffusion 1; diffusers' ``train_dreambooth_lora_sdxl.py`` and
``train_dreambooth_lora_flux.py`` their models.  All get images of one size and the flags below; each is run for two
steps, which is its start, and for some more, whose difference is the time of a step.  Times are of processors, which
other programs disturb less, and by the clock.  The others need environments with their own requirements
(``--sd_scripts_python``, ``--diffusers_python``).
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config import RunConfig
from library.errors import UserError

from .processes import ROOT, TAIL, TRAIN
from .report import Measurement, add_count_option, compute_ratios
from .synthetic_run import load_training_options, write_dataset

START_STEPS = 2
MAX_STEP_RATIO, MAX_START_RATIO = 1.0, 1.1
MAX_COMPILED_STEP_RATIO = 0.77
"""1.3 times as fast, on a GPU and by the clock."""
DEFAULT_MODEL = ("--pretrained_model_name_or_path", "random:sd1")
"""sd-scripts knows no other sizes."""
TOKENIZER_FOLDER = "openai_clip-vit-large-patch14"
"""The name under which sd-scripts looks for the tokenizer in its ``--tokenizer_cache_dir``."""
SD_SCRIPTS_FLAGS = (
    "--optimizer_type AdamW --learning_rate 1e-4 --sdpa --no_half_vae --max_data_loader_n_workers 1 --cache_latents"
).split()
DIFFUSERS_SCRIPTS = {"sdxl": "train_dreambooth_lora_sdxl.py", "flux": "train_dreambooth_lora_flux.py"}
"""By family; in ``examples/dreambooth`` of a checkout."""
PROMPT = "an image"
ATTENTION_ONLY = ("--network_args", "exclude_patterns=['.*']", r"include_patterns=['.*\.to_(q|k|v|out\.0)$']")
"""The layers that the script for SDXL adapts."""
ATTENTION_LAYERS = "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Usage:
    """What one run of a program took."""

    cpu_seconds: float
    seconds: float
    memory: float
    """Peak, of the largest process."""
    device_memory: float = 0.0
    """Peak of the whole GPU, or 0 without one."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--sd_scripts", type=Path, help="folder with train_network.py, for Stable Diffusion 1")
    parser.add_argument("--sd_scripts_python", default=sys.executable, help="its Python interpreter")
    parser.add_argument("--diffusers", type=Path, help="checkout of diffusers with examples, for SDXL and FLUX.1")
    parser.add_argument("--diffusers_python", default=sys.executable, help="its Python interpreter")
    add_count_option(parser, "--bench_steps", 8, "steps of each measurement, besides those of the start")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Run both in turn; ratios are of runs next to each other."""
    commands = prepare_commands(options, [*DEFAULT_MODEL, *training_options], directory)
    for name, command in commands.items():  # which fills caches of files and compiled modules
        measure_usage(name, command, START_STEPS, directory)
    starts: dict[str, list[Usage]] = {name: [] for name in commands}
    longs: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(options.repetitions):
        for steps, usages in ((START_STEPS, starts), (START_STEPS + options.bench_steps, longs)):
            for name, command in commands.items():
                usages[name].append(measure_usage(name, command, steps, directory))
    is_compiled = "--torch_compile" in commands["ours"]
    return _summarize(starts, longs, options.bench_steps, is_compiled)


def prepare_commands(
    options: Namespace, training_options: Sequence[str], directory: Path
) -> Mapping[str, Sequence[str]]:
    """Write model and dataset to disk; return the commands of both programs without the number of steps."""
    from library.models.detect import detect_model

    config, _ = load_training_options(training_options)
    family = detect_model(config.model).family
    if family == "sd1" and options.sd_scripts:
        prepare = prepare_sd_scripts
    elif family in DIFFUSERS_SCRIPTS and options.diffusers:
        prepare = prepare_diffusers
    else:
        raise UserError(
            "this benchmark runs Stable Diffusion 1 beside sd-scripts (--sd_scripts), "
            f"SDXL and FLUX.1 beside diffusers (--diffusers); --pretrained_model_name_or_path is {family}"
        )
    return prepare(options, config, family, training_options, directory)


def prepare_sd_scripts(
    options: Namespace, config: RunConfig, family: str, training_options: Sequence[str], directory: Path
) -> Mapping[str, Sequence[str]]:
    script = _find_script(options.sd_scripts, "train_network.py", "--sd_scripts")
    argv = write_dataset(training_options, directory, START_STEPS)
    model = save_model(config, directory / "model")
    same = [
        *("--pretrained_model_name_or_path", str(model), "--dataset_config", argv[argv.index("--dataset_config") + 1]),
        *("--network_module", "networks.lora", "--network_dim", str(config.adapter.network_dim)),
        *("--network_train_unet_only", *SD_SCRIPTS_FLAGS, *_build_shared_flags(config, directory / "output")),
        *("--output_name", "lora", "--save_model_as", "safetensors"),
    ]
    return {
        "ours": [sys.executable, *TRAIN, *same, "--overwrite", *_build_compile_flags(config)],
        "sd-scripts": [
            *(options.sd_scripts_python, str(script), *same),
            *("--tokenizer_cache_dir", str(model / "tokenizers")),
        ],
    }


def prepare_diffusers(
    options: Namespace, config: RunConfig, family: str, training_options: Sequence[str], directory: Path
) -> Mapping[str, Sequence[str]]:
    """Adapt the same layers, from one prompt that is encoded once; the script for SDXL encodes images in each step."""
    script = _find_script(options.diffusers / "examples" / "dreambooth", DIFFUSERS_SCRIPTS[family], "--diffusers")
    argv = write_dataset(training_options, directory, START_STEPS, caption=PROMPT)
    dataset = argv[argv.index("--dataset_config") + 1]
    model = save_model(config, directory / "model")
    assert config.data.resolution is not None
    (images,) = directory.glob("images_*")
    pictures = directory / "pictures"  # the script reads every file of its folder
    pictures.mkdir()
    for path in images.glob("*.jpg"):
        shutil.copy(path, pictures)
    dim = str(config.adapter.network_dim)
    cached = [] if family == "sdxl" else ["--cache_latents"]
    same = ["--pretrained_model_name_or_path", str(model), "--learning_rate", "1e-4", *cached]
    ours = ["--dataset_config", dataset, "--network_dim", dim, "--network_alpha", dim, *ATTENTION_ONLY]
    ours += ["--optimizer_type", "AdamW", "--network_train_unet_only", "--cache_text_encoder_outputs", "--overwrite"]
    ours += _build_compile_flags(config)
    theirs = ["--instance_data_dir", str(pictures), "--instance_prompt", PROMPT, "--rank", dim]
    theirs += ["--resolution", str(config.data.resolution.width), "--lr_warmup_steps", "0"]
    if family == "flux":
        theirs += ["--lora_layers", ATTENTION_LAYERS, "--lora_alpha", dim]
    return {
        "ours": [sys.executable, *TRAIN, *same, *ours, *_build_shared_flags(config, directory / "ours")],
        "diffusers": [
            *(options.diffusers_python, str(script), *same, *theirs),
            *_build_shared_flags(config, directory / "diffusers"),
        ],
    }


def _build_shared_flags(config: RunConfig, output: Path) -> list[str]:
    flags = ["--train_batch_size", str(config.data.train_batch_size), "--seed", str(config.train.seed)]
    flags += ["--mixed_precision", config.distributed.mixed_precision or "no", "--output_dir", str(output)]
    return [*flags, "--gradient_checkpointing"] if config.train.gradient_checkpointing else flags


def _build_compile_flags(config: RunConfig) -> list[str]:
    """Only ours compiles by an option of its own."""
    return ["--torch_compile"] if config.distributed.torch_compile else []


def _find_script(folder: Path, name: str, option: str) -> Path:
    if not (folder / name).is_file():
        raise UserError(f"{option}: {folder} has no {name}; give the folder of a checkout")
    return folder / name


def save_model(config: RunConfig, folder: Path) -> Path:
    """Save the model as a diffusers folder, with the tokenizer where sd-scripts looks for it."""
    import torch

    from library.models.detect import detect_model
    from library.models.families import FAMILIES

    detected = detect_model(config.model)
    dtype = torch.bfloat16 if detected.family == "flux" else torch.float32  # as they are published
    pipe = FAMILIES.get(detected.family)(config.model).load(detected, dtype)
    pipe.save_pretrained(folder)
    save_clip_tokenizer(pipe.tokenizer, folder / "tokenizers" / TOKENIZER_FOLDER)
    del pipe
    gc.collect()  # its reference cycles hold the model, and both programs need the memory
    return folder


def save_clip_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer with vocab.json and merges.txt, which transformers 4 reads and transformers 5 does not write."""
    tokenizer.save_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    merges = (each if isinstance(each, str) else " ".join(each) for each in model["merges"])
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")


@contextmanager
def record_device_memory() -> Iterator[list[float]]:
    """Ask the driver for the memory of the GPU that is used, again and again; nothing is recorded without it."""
    readings, ended = list[float](), threading.Event()
    program = shutil.which("nvidia-smi")

    def poll() -> None:
        while program and not ended.wait(POLL_SECONDS):
            command = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            text = subprocess.run(command, check=False, capture_output=True, encoding="utf-8").stdout
            readings.extend(float(line) * 2**20 for line in text.split() if line.isdigit())

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def measure_usage(name: str, command: Sequence[str], steps: int, directory: Path) -> Usage:
    """Run a program to its end, and measure its time and its largest memory."""
    if sys.platform == "win32":
        raise UserError("peers: Windows does not tell the memory of a process that has ended; run it on Linux or macOS")
    import resource  # Windows has no such module

    log = directory / "log.txt"
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    if name == "ours":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment["PYTHONPATH"]]))
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("wb") as output, record_device_memory() as device_memory:
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
    return Usage(cpu_seconds, seconds, usage.ru_maxrss * unit, max(device_memory, default=0.0))


def _summarize(
    starts: Mapping[str, Sequence[Usage]], longs: Mapping[str, Sequence[Usage]], steps: int, is_compiled: bool
) -> list[Measurement]:
    import torch

    has_device = torch.accelerator.is_available()
    step_limit = MAX_COMPILED_STEP_RATIO if is_compiled and has_device else MAX_STEP_RATIO
    measurements = []
    (peer,) = (name for name in starts if name != "ours")
    for kind, unit in (("cpu_seconds", "processor s"), ("seconds", "s")):
        step, start = dict[str, list[float]](), dict[str, list[float]]()
        for name in starts:
            start[name] = [getattr(usage, kind) for usage in starts[name]]
            long = [getattr(usage, kind) for usage in longs[name]]
            step[name] = [(all_steps - first) / steps for all_steps, first in zip(long, start[name], strict=True)]
            measurements.append(Measurement(f"{name}: step", step[name], unit))
            measurements.append(Measurement(f"{name}: start and {START_STEPS} steps", start[name], unit))
        is_target = kind == ("seconds" if has_device else "cpu_seconds")
        start_limit = None if is_compiled else MAX_START_RATIO
        for what, values, limit in (("step", step, step_limit), ("start", start, start_limit)):
            ratios = compute_ratios(values["ours"], values[peer])
            measurements.append(
                Measurement(f"{what}, ours / {peer}, {unit}", ratios, "x", at_most=limit if is_target else None)
            )
    for name, usages in longs.items():
        measurements.append(Measurement(f"{name}: peak memory", [usage.memory / 1e9 for usage in usages], "GB"))
        if any(usage.device_memory for usage in usages):
            peaks = [usage.device_memory / 1e9 for usage in usages]
            measurements.append(Measurement(f"{name}: peak memory of the GPU", peaks, "GB"))
    return measurements
