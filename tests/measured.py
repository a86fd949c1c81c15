"""What a real step takes, as torch's allocator tells it; for beside the forecast.

``PYTHONPATH=.:tests python tests/measured.py random:sd1 512 1 --option ...`` prints both; with ``--processes 2``
behind it those of two, with what comes from others and the room for what goes to them.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from ranks import on_ranks

from benchmarks.synthetic_run import CAPTION, build_run, load_training_options, write_dataset
from library.families.detect import detect
from library.training.forecast.forecast import Devices, Load, forecast
from library.training.forecast.pace import Assumed
from library.training.forecast.ways import ways
from library.training.forecast.weightless import Heaviest
from library.training.loop import train


def peak_of_step(folder: Path, *words: str) -> int:
    """Bytes in the worst moment of forward and backward, beside the weights and gradients that are there already."""
    config, _ = load_training_options(words)
    learns = config.train.blocks_to_swap or config.train.gradient_checkpointing_budget
    steps = 2 if learns else 1  # in the first, nobody knows yet which weight comes next, and what is expensive
    with build_run(write_dataset(words, folder, steps), folder) as run:
        own, found = run.strategy.gradients, []

        def watched(*arguments):
            for parameter in run.parameters:
                parameter.grad = torch.zeros_like(parameter)
            with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                said = own(*arguments)
            found.append(peak(seen))
            return said

        run.strategy.gradients = watched
        train(run)
    return found[-1]


def peak(seen: torch.profiler.profile) -> int:
    """The highest sum of what was taken and given back."""
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def forecast_of(*words: str, processes: int = 1) -> int:
    """Of the first way that agrees with the words."""
    config, given = load_training_options(words)
    size, model = config.data.resolution, detect(config.model)
    captions = (CAPTION.format(1),) * config.data.train_batch_size
    load, devices = Load(Heaviest((size.width, size.height), captions), 1.0), Devices(processes, 2**50, Assumed(1, 1))
    (row,) = forecast(config, given, model, load, devices, [ways(config, given, processes, model)[0].name])
    return row.need.activations + row.need.fetched + row.need.exchange


def peak_on_rank(folder: Path, *words: str) -> int:
    """The same, where every process has a folder of its own."""
    own = folder / os.environ.get("RANK", "0")
    own.mkdir()
    return peak_of_step(own, *words)


if __name__ == "__main__":
    model, size, batch, *more = sys.argv[1:]
    processes = int(more.pop(more.index("--processes") + 1)) if "--processes" in more else 1
    more = [word for word in more if word != "--processes"]
    words = ["--pretrained_model_name_or_path", model, "--resolution", size, "--train_batch_size", batch, *more]
    with tempfile.TemporaryDirectory() as place:
        foretold = forecast_of(*words, processes=processes)
        counted = max(on_ranks(processes, peak_on_rank, Path(place), *words))
    sys.stdout.write(f"{' '.join(sys.argv[1:])}: forecast {foretold / 1e6:.1f} MB, allocated {counted / 1e6:.1f} MB,"
                     f" {100 * (foretold / counted - 1):+.1f} %\n")  # fmt: skip
