"""Faults that are provoked on the device: NaN, out of memory, Ctrl-C."""

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from library.distributed.device_memory import has_device_memory

from ..processes import TRAIN, run_workers, start_python
from ..report import Measurement
from ..synthetic_run import write_dataset
from .sections import SectionContext, yield_unmeasured
from .training_commands import DEMO, TrainingCommand, run_commands

if TYPE_CHECKING:
    from library.training.state import TrainingRun

NAN_STEP = 3
BATCH = 16
MEMORY_SHARE = 0.7
"""Of the memory that the step needs: too little for it, enough for half of the batch."""
MAX_SHARE = 0.9
"""Of the device's memory, for the runs that are out of theirs at the same time."""


def provoke_faults(context: SectionContext) -> Iterator[Measurement]:
    yield from skip_nan_step(context)
    yield from interrupt_run(context)
    yield from run_out_of_memory(context)


def skip_nan_step(context: SectionContext) -> Iterator[Measurement]:
    """Make the gradient of one step NaN; the weights stay finite, and that step is skipped."""
    folder = context.directory / "nan"
    folder.mkdir()
    argv = write_dataset(["--pretrained_model_name_or_path", "random:sd1:tiny", "--resolution", "64"], folder, 16)
    (result,) = run_workers("benchmarks.gpu.faults:train_with_nan_step", {}, argv, 1, context.environment)
    yield Measurement("NaN: weights that are not finite", [result["not_finite"]], at_most=0)
    yield Measurement("NaN: skipped steps that were not the bad one", [result["wrong"]], at_most=0)


def train_with_nan_step(run: "TrainingRun") -> dict[str, int]:
    from library.training.loop import train

    strategy: Any = run.strategy
    compute_gradients = strategy.compute_gradients

    def compute_and_spoil(task: Any, batches: Any, count: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = compute_gradients(task, batches, count, step)
        if step == NAN_STEP:
            gradient = run.parameters[0].grad
            assert gradient is not None
            gradient.fill_(float("nan"))
        return loss

    strategy.compute_gradients = compute_and_spoil
    train(run)
    not_finite = sum(int((~parameter.isfinite()).sum()) for parameter in run.parameters)
    skipped = [each.step for each in run.nan_guard.skipped_steps]
    return {"not_finite": not_finite, "wrong": int(skipped != [NAN_STEP])}


def run_out_of_memory(context: SectionContext) -> Iterator[Measurement]:
    """Train with less memory than the step needs: --on_oom recover goes on, without it one message ends the run."""
    titles = {"recover": "out of memory, on_oom recover: not trained", "fail": "out of memory: no plain message"}
    if not has_device_memory(context.device):
        yield from yield_unmeasured(list(titles.values()))
        return
    folder = context.directory / "oom"
    folder.mkdir()
    options = ["--pretrained_model_name_or_path", "random:sd1:tiny" if context.is_tiny else "random:sd1"]
    options += ["--resolution", "512", "--mixed_precision", "bf16", "--train_batch_size", str(BATCH)]
    argv = write_dataset(options, folder, 4)
    (measured,) = run_workers("benchmarks.variants:measure_steps", {"steps": 2}, argv, 1)
    total = torch.get_device_module(context.device).get_device_properties(0).total_memory / 1e9
    share = MEMORY_SHARE * measured["peak"] / total
    yield Measurement("memory that the step needs", [measured["peak"]], "GB", note=f"limited to {share * total:.1f} GB")
    setup = f"import torch; torch.{context.device_type}.set_per_process_memory_fraction({share})"
    runs = {mode: TrainingCommand(folder / mode, [*argv, "--on_oom", mode], setup=setup) for mode in titles}
    run_commands(list(runs.values()), at_once=len(runs) if len(runs) * share < MAX_SHARE else 1)
    for mode, title in titles.items():
        run = runs[mode]
        if mode == "recover":
            wrong, note = int(run.exit_code != 0), run.failure
        else:
            is_plain = "out of memory" in run.log.lower() and "Traceback" not in run.log
            wrong, note = int(run.exit_code == 0 or not is_plain), run.failure
        yield Measurement(title, [wrong], at_most=0, note=note)


def interrupt_run(context: SectionContext) -> Iterator[Measurement]:
    """Send SIGINT to a run that trains; it ends soon, with a state to resume from."""
    output = context.directory / "interrupted"
    options = [*DEMO, "--max_train_steps", "100000", "--save_state", "--save_every_n_steps", "100000"]
    command = [*TRAIN, *[option for option in options if option != "--quiet"], "--output_dir", str(output)]
    with start_python([*command, "--output_name", "lora"], context.environment) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "training 1/" in line or "training 2/" in line:
                break
        time.sleep(2)
        started = time.perf_counter()
        process.send_signal(signal.SIGINT)
        try:
            _, rest = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            yield Measurement("Ctrl-C: seconds to the end", [], at_most=60, note="did not end within 60 s")
            return
        seconds, code = time.perf_counter() - started, process.returncode
    log = "".join(lines) + (rest or "")
    note = f"exit code {code}" + (", with a traceback" if "Traceback" in log else "")
    yield Measurement("Ctrl-C: seconds to the end", [seconds], "s", at_most=60, note=note)
    states = sorted(path.name for path in output.glob("*-state"))
    yield Measurement("Ctrl-C: no state to resume from", [int(not states)], at_most=0, note=", ".join(states))
