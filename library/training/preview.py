"""Pictures drawn while training, to see what the LoRA has learnt so far; shared over the processes."""

import io
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.schema import PreviewConfig
from ..data.prompts import Prompt
from ..families.sampling import evaluating
from ..optim.optimizers import weights_as_used
from ..randomness import seed_for
from .loop import Run
from .plan import is_due

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

SECONDS_UNTIL_ALL_FAIL = 60.0
"""Processes that draw together fail at the same place, if it is the picture's fault."""


@contextmanager
def at(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have ``module`` on the device for a while, and back where it rests."""
    home = next(module.parameters()).device
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


class Preview:
    """Draws the prompts of a file when they are due."""

    can_wait = True

    def __init__(self, config: PreviewConfig, prompts: Sequence[Prompt], folder: Path, name: str):
        self.config, self.prompts, self.folder, self.name = config, prompts, folder, name
        self.written: list[Path] = []

    def is_due(self, run: Run) -> bool:
        return is_due(run.plan, run.state.step, self.config.sample_every_n_steps, self.config.sample_every_n_epochs)

    def __call__(self, run: Run) -> None:
        self.draw(run)

    def begin(self, run: Run) -> None:
        """Draw before the first step, if that was asked for."""
        if self.config.sample_at_first and not run.state.step:
            self.draw(run)

    @torch.no_grad()
    def draw(self, run: Run) -> None:
        """Draw the prompts, each process its share; a picture that fails is a warning and no more."""
        with weights_as_used(run.optimizer), evaluating(run.strategy.unwrapped(run.adapter)):
            drawn = self._draw_all(run)
        if run.strategy.is_tracked:
            everybody = run.strategy.from_all(drawn)
            run.teller.pictured(run, {f"preview/{index:02d}": picture for index, picture in sorted(everybody)})

    def _draw_all(self, run: Run) -> list[tuple[int, bytes]]:
        """The numbers of prompts, and the pictures as PNG files."""
        drawn = []
        for index, prompt in enumerate(self.prompts):
            is_mine = index % run.strategy.size == run.strategy.rank
            if not (is_mine or run.strategy.computes_together):
                continue
            picture = None
            try:
                picture, seed = self._picture(run, index, prompt)
                if is_mine:
                    drawn.append((index, self._write(run, index, picture, seed)))
            except Exception as error:  # out of memory, a sampler's limits: nothing here may end a training run
                is_exchanged = run.strategy.computes_together and picture is None
                if is_exchanged and not self._fails_everywhere(run, index):
                    raise  # the others wait for this process's part of this picture
                logger.warning("preview %d (%s) failed and is left out: %s", index, prompt.text, error)
        return drawn

    def _fails_everywhere(self, run: Run, index: int) -> bool:
        return run.strategy.happens_to_all(f"preview {index} after step {run.state.step}", SECONDS_UNTIL_ALL_FAIL)

    def _picture(self, run: Run, index: int, prompt: Prompt) -> "tuple[Image, int]":
        """With the seed that it was drawn from."""
        task, seed = run.task, prompt.seed
        if seed is None:
            seed = seed_for(run.config.train.seed, "preview", index) % 2**32
        with run.strategy.accelerator.autocast():
            cond, negative = task.text([prompt.text]), task.text([prompt.negative])
            generator = torch.Generator().manual_seed(seed)
            sampler = prompt.sampler or self.config.sample_sampler
            with at(task.pipe.vae, task.here.device):
                return task.family.draw(task.pipe, prompt, cond, negative, generator, sampler), seed

    def _write(self, run: Run, index: int, picture: "Image", seed: int) -> bytes:
        """The file, and what is in it."""
        epoch = run.plan.epoch_just_ended(run.state.step)
        when = f"e{epoch:06d}" if self.config.sample_every_n_epochs and epoch else f"{run.state.step:06d}"
        path = self.folder / f"{self.name}_{when}_{index:02d}_{time.strftime('%Y%m%d%H%M%S')}_{seed}.png"
        data = io.BytesIO()
        picture.save(data, "PNG")
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())
        self.written.append(path)
        return data.getvalue()
