"""How long it takes from the command to the first step, beside a bare script on the same files.

Both are started as programs of their own, in turn, on a model that was written to disk as a diffusers folder, and with
latents and captions that are kept already.  The bare script imports what training needs, loads the same model, gives it
a LoRA, and does one step on inputs that were made for it; it looks at no pictures and checks nothing.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.describe import to_toml
from ..config.options import opt
from ..errors import UserError
from .bench_figure import Figure, reported
from .bench_group import with_library
from .bench_run import made_up_run, scratch, settings, with_pictures

TARGET = 1.2
OURS = "import sys; from library.cli import main; raise SystemExit(main(sys.argv[1:]))"
BARE = """
import sys
import torch
from accelerate import Accelerator
import diffusers
from peft import LoraConfig

folder, pipeline, name, part, rank, precision, *targets = sys.argv[1:]
getattr(diffusers, pipeline)  # its text encoders come with it, as with every script that trains or draws
accelerator = Accelerator(mixed_precision=precision)
dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
diffusers.utils.logging.disable_progress_bar()
model = getattr(diffusers, name).from_pretrained(folder, subfolder=part, torch_dtype=dtype).to(accelerator.device)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=int(rank), target_modules=targets))
learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
for parameter in learnt:
    parameter.data = parameter.data.float()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(learnt, lr=1e-4))
arguments, named = torch.load(folder + "/call.pt", map_location=accelerator.device)
with accelerator.autocast():
    predicted = model(*arguments, **named)[0]
loss = torch.nn.functional.mse_loss(predicted.float(), torch.zeros_like(predicted, dtype=torch.float32))
accelerator.backward(loss)
optimizer.step()
print("training 1/1", float(loss), file=sys.stderr, flush=True)
"""


@dataclass(frozen=True)
class StartOptions:
    """How often is measured."""

    repetitions: int = opt(5, "how often each of the two is started, after once to warm up", minimum=1)
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments(RunConfig):
    bench: StartOptions = field(default_factory=StartOptions)


def run(argv: Sequence[str]) -> str:
    """Measure and report."""
    config, given = settings(argv, Arguments)
    options = config.bench
    with scratch() as folder:
        ways = _ways(with_pictures(config, folder, 1), given, folder)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.repetitions + 1):
            for name, way in ways.items():
                found[name].append(_until_first_step(way))
    figures = _figures({name: times[1:] for name, times in found.items()})
    return reported("startup", argv, figures, as_values=options.json)


def _ways(config: RunConfig, given: frozenset[str], folder: Path) -> dict[str, list[str]]:
    """The two commands, with everything on disk that they need."""
    model = folder / "model"
    with made_up_run(config, given, folder) as job:
        family = job.task.family
        denoiser: Any = job.strategy.unwrapped(job.adapter).denoiser
        _write_call(job, denoiser, model)
        name, precision = type(denoiser).__name__, job.strategy.precision
    family.load(config.model.pretrained_model_name_or_path, next(denoiser.parameters()).dtype).save_pretrained(model)
    started = replace(
        config,
        model=replace(config.model, pretrained_model_name_or_path=str(model)),
        cache=replace(
            config.cache,
            cache_latents=False,
            cache_latents_to_disk=True,
            cache_text_encoder_outputs=False,
            cache_text_encoder_outputs_to_disk=True,
        ),
    )
    (folder / "run.toml").write_text(to_toml(started), "utf-8")
    python = [sys.executable, "-c"]
    return {
        "ours": [*python, OURS, "--config_file", str(folder / "run.toml")],
        "bare": [*python, BARE, str(model), family.facts.pipeline, name, family.denoiser,
                 str(config.adapter.network_dim), precision, *family.lora_targets],
    }  # fmt: skip


def _write_call(job: Any, denoiser: Any, model: Path) -> None:
    """What the model is called with in the first step, for a script that has no pictures."""
    import torch

    calls: list[tuple[Any, Any]] = []
    hook = denoiser.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    steps = job.loader.steps(0)
    with torch.no_grad(), job.strategy.accelerator.autocast():
        job.task(next(steps).batches[0], 0)
    steps.close()
    hook.remove()
    model.mkdir()
    torch.save(calls[0], model / "call.pt")


def _until_first_step(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until the program says that it did a step, where it is ended, and what that took of the processors."""
    before, started, first, said = _worked(), time.perf_counter(), None, list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                          env=with_library()) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if first is None and "training 1/1" in line:
                first = time.perf_counter() - started
                process.kill()
    if first is None:
        raise UserError("a program of this bench failed:\n" + "".join(said[-15:]))
    return first, _worked() - before


def _worked() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _figures(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Figure]:
    figures = []
    for number, clock in enumerate(("", ", processor time")):
        ours, bare = (tuple(times[number] for times in found[name]) for name in ("ours", "bare"))
        ratios = tuple(one / other for one, other in zip(ours, bare, strict=True))
        figures += [Figure(f"ours until the first step{clock}", ours, "s"),
                    Figure(f"bare until the first step{clock}", bare, "s"),
                    Figure(f"ours / bare{clock}", ratios, "", TARGET)]  # fmt: skip
    return figures
