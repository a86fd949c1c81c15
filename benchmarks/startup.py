"""Benchmark the time from the command to the first step, against a bare script on the same model, taking turns.

The model is a diffusers folder on disk, latents and captions are cached.  The bare script imports what training needs,
loads the model, adds a LoRA and does one step on inputs that are prepared for it; it reads no images, checks nothing.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .processes import TRAIN, measure_first_step
from .report import Measurement, compute_ratios
from .synthetic_run import build_run, write_dataset

if TYPE_CHECKING:
    from library.training.state import TrainingRun

MAX_OVERHEAD = 1.2
CACHE_ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
BARE_SCRIPT = """
import sys
import torch
from accelerate import Accelerator
import diffusers
from peft import LoraConfig

folder, pipeline, name, subfolder, rank, precision, *targets = sys.argv[1:]
getattr(diffusers, pipeline)  # imports its text encoders, as every training script does
accelerator = Accelerator(mixed_precision=precision)
dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
diffusers.utils.logging.disable_progress_bar()
model = getattr(diffusers, name).from_pretrained(folder, subfolder=subfolder, torch_dtype=dtype).to(accelerator.device)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=int(rank), target_modules=targets))
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
for parameter in trainable:
    parameter.data = parameter.data.float()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable, lr=1e-4))
args, kwargs = torch.load(folder + "/inputs.pt", map_location=accelerator.device)
with accelerator.autocast():
    predicted = model(*args, **kwargs)[0]
loss = torch.nn.functional.mse_loss(predicted.float(), torch.zeros_like(predicted, dtype=torch.float32))
accelerator.backward(loss)
optimizer.step()
print("training 1/1", float(loss), file=sys.stderr, flush=True)
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(repetitions=5)


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Start both programs in turn, first once for warmup, which also fills the caches."""
    commands = prepare_commands(training_options, directory)
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(options.repetitions + 1):
        for name, command in commands.items():
            seconds[name].append(measure_first_step(command, stop=True))
    ours, bare = seconds["ours"][1:], seconds["bare"][1:]
    return [
        Measurement("our first step after", ours, "s"),
        Measurement("bare first step after", bare, "s"),
        Measurement("ours / bare", compute_ratios(ours, bare), "x", at_most=MAX_OVERHEAD),
    ]


def prepare_commands(training_options: Sequence[str], directory: Path) -> Mapping[str, Sequence[str]]:
    """Write model, dataset and inputs to disk; return the arguments of both programs."""
    argv = write_dataset(training_options, directory, 1)
    model = directory / "model"
    with build_run(argv, directory) as job:
        family, config = job.task.family, job.config
        denoiser: Any = job.strategy.unwrap_model(job.model).denoiser
        model.mkdir()
        torch.save(record_inputs(job, denoiser), model / "inputs.pt")
        precision, dtype = job.strategy.mixed_precision, next(denoiser.parameters()).dtype
    family.load(config.model.pretrained_model_name_or_path, dtype).save_pretrained(model)
    names = [family.facts.pipeline.class_name, type(denoiser).__name__, family.facts.denoiser_name]
    arguments = [str(model), *names, str(config.adapter.network_dim), precision, *family.facts.lora.targets]
    return {
        "ours": [*TRAIN, *argv, "--pretrained_model_name_or_path", str(model), *CACHE_ON_DISK],
        "bare": ["-c", BARE_SCRIPT, *arguments],
    }


def record_inputs(run: "TrainingRun", denoiser: Any) -> tuple[Any, Any]:
    """Record the arguments of the denoiser in the first step."""
    calls: list[tuple[Any, Any]] = []
    hook = denoiser.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    steps: Any = run.loader.iter_steps(0)
    with torch.no_grad(), run.strategy.accelerator.autocast():
        run.task(next(steps).micro_batches[0], 0)
    steps.close()
    hook.remove()
    return calls[0]
