"""A real run on made-up pictures, ready for its first step, for benches that look at steps.

A bench takes every option of training beside its own, so that whatever a user would switch on can be measured.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import RunConfig, load_options
from ..config.checks import conflicts
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..training.job import Run

PICTURES = 8
DEFAULTS = ("--pretrained_model_name_or_path", "random:sd1:tiny", "--resolution", "256", "--network_dim", "16",
            "--cache_latents", "--cache_text_encoder_outputs")  # fmt: skip
"""Encoders run before the first step, so that a step is the model's alone."""
MODELS = {"pipeline": "random:flux:tiny"}
"""Of benches with another model than that."""

Arguments = TypeVar("Arguments", bound=RunConfig)


def settings(argv: Sequence[str], root: type[Arguments]) -> tuple[Arguments, frozenset[str]]:
    """What was asked for, and the names of what somebody wrote down; pictures are made up, so none may be named."""
    loaded = load_options([*DEFAULTS, *argv], root)
    if "dataset_config" in loaded.places:
        loaded.problems.append("--dataset_config: a bench makes its own pictures; take it out")
    if "resolution_schedule" in loaded.places:
        raise ConfigError(["--resolution_schedule: a bench has pictures of one size; say --resolution"])
    return loaded.require(), frozenset(loaded.places)  # type: ignore[return-value]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for pictures, caches and what a run writes; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-bench-") as name:
        yield Path(name)


@contextmanager
def made_up_run(config: RunConfig, given: frozenset[str], folder: Path) -> Iterator["Run"]:
    """The run as training has it before its first step; what it tells goes into a file in ``folder``."""
    from ..distributed.choice import strategy_of

    if problems := [f"--{names[0]}: {message}" for names, message in conflicts(config, given)]:
        raise ConfigError(problems)
    strategy = strategy_of(config)
    with strategy.until_left():
        yield _assembled(config, strategy, folder)


def caption(number: int) -> str:
    """Of one of the pictures that are made up."""
    return f"a picture, number {number}"


def with_pictures(config: RunConfig, folder: Path, steps: int) -> RunConfig:
    """The settings for a run of so many steps on pictures that are made in ``folder``, where everything stays."""
    from PIL import Image

    assert config.data.resolution is not None
    (folder / "pictures").mkdir()
    size = (config.data.resolution.width, config.data.resolution.height)
    whole = config.data.train_batch_size * config.train.gradient_accumulation_steps
    for number in range(whole * math.ceil(PICTURES / whole)):  # nothing is left over that would have to be filled up
        Image.new("RGB", size, (29 * number % 256, 100, 200)).save(folder / "pictures" / f"{number:04d}.png")
        (folder / "pictures" / f"{number:04d}.txt").write_text(caption(number), "utf-8")
    file = folder / "set.toml"
    file.write_text("[general]\ncaption_extension = '.txt'\n[[datasets]]\n[[datasets.subsets]]\n"
                    f"image_dir = '{folder / 'pictures'}'\n", "utf-8")  # fmt: skip
    return replace(config, data=replace(config.data, dataset_config=str(file)),
                   train=replace(config.train, max_train_steps=steps, max_train_epochs=None),
                   save=replace(config.save, output_dir=str(folder / "out")))  # fmt: skip


def _assembled(config: RunConfig, strategy: Any, folder: Path) -> "Run":
    from ..families import FAMILIES
    from ..families.detect import detect
    from ..log import Progress
    from ..training.assembly import assemble, load
    from ..training.caching import Kept, keep_latents, keep_texts
    from ..training.metrics import MetricsFile
    from ..training.parallel_fit import refuse_misfits
    from ..training.pictures import same_pictures
    from ..training.plan import RunPlan
    from ..training.resting import rehearse_resting
    from ..training.starting import read_starts
    from ..training.track import Track

    detected = detect(config.model)
    family = FAMILIES.get(detected.family)(config.model)
    refuse_misfits(config, family, detected)
    starts = read_starts(config, family, detected)
    prepared = same_pictures(config, strategy, detected.pixel_step)
    plan = RunPlan.of(prepared.batch_plan(strategy.data_size, config.train), config.train, config.optim)
    prepared, latents = keep_latents(config, strategy, family, detected, prepared)
    kept = Kept(latents, keep_texts(config, strategy, family, detected, prepared, plan, ()))
    rehearse_resting(config, strategy, family, detected)
    pipe = load(config, strategy, family, detected, kept, ())
    run, _ = assemble(config, strategy, family, pipe, prepared, plan, kept, starts)
    file = MetricsFile(folder / "metrics.jsonl", 0) if strategy.is_main else None
    run.teller = Track(Progress(plan.steps, 0, "bench", wanted=False), file)
    return run
