"""The preview callback: generate sample images and clips during training, with the prompts distributed over the ranks.

Prompt files are read in ``dataloader.sample_prompts``; frames are sampled in ``models.sampling``.
"""

import io
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..adapters.injection import scale_adapters
from ..atomic_files import write_atomic
from ..config.schema_output import PreviewConfig
from ..dataloader.images import load_text_images
from ..dataloader.sample_prompts import Prompt
from ..dataset.clip_encoding import SoundTrack, encode_mp4, encode_webp
from ..dataset.clip_windows import FrameRule
from ..models.sampling import use_eval_mode
from ..models.training_adapter import bypass_training_adapter
from ..optim.optimizers import use_eval_weights
from ..randomness import Purpose, derive_seed
from .state import TrainingRun, is_interval_reached
from .task import DiffusionTask

if TYPE_CHECKING:
    from PIL.Image import Image


logger = logging.getLogger(__name__)
ALL_RANKS_TIMEOUT_SECONDS = 60.0
"""The time to wait for the other ranks to fail at the same image, which tells a bad prompt from a broken rank."""


@contextmanager
def move_temporarily(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move ``module`` to ``device`` inside the block."""
    original_device = next(module.parameters()).device
    module.to(device)
    try:
        yield
    finally:
        module.to(original_device)


@contextmanager
def move_image_encoders(task: DiffusionTask) -> Iterator[None]:
    """Move what encodes and decodes images to the device of training inside the block."""
    with ExitStack() as moved:
        for name in task.family.facts.image_encoders:
            moved.enter_context(move_temporarily(getattr(task.pipe, name), task.to_device.device))
        yield


class Preview:
    """Generate an image or a clip for each prompt of ``--sample_prompts`` every n steps or epochs."""

    id = "preview"
    is_deferrable = True

    def __init__(self, config: PreviewConfig, prompts: Sequence[Prompt], output_dir: Path, name: str):
        self.config, self.prompts, self.output_dir, self.name = config, prompts, output_dir, name
        self.saved_paths: list[Path] = []

    def should_run(self, run: TrainingRun) -> bool:
        steps, epochs = self.config.sample_every_n_steps, self.config.sample_every_n_epochs
        return is_interval_reached(run.plan, run.state.step, steps=steps, epochs=epochs)

    def __call__(self, run: TrainingRun) -> None:
        self.generate_previews(run)

    def on_train_begin(self, run: TrainingRun) -> None:
        if self.config.sample_at_first and not run.state.samples:
            self.generate_previews(run)

    def generate_previews(self, run: TrainingRun) -> None:
        """Generate the images of all prompts; an image that fails is skipped with a warning."""
        model = run.strategy.unwrap_model(run.model)
        modes = use_eval_mode(model), bypass_training_adapter(model)
        with use_eval_weights(run.optimizer), run.strategy.evaluate(), modes[0], modes[1]:
            drawn = self._generate_for_rank(run)
        if run.metric_logger.has_trackers:
            previews = dict(itertools.chain.from_iterable(run.strategy.comm.all_gather_object(drawn)))
            named = {f"preview/{index:02d}": previews[index] for index in sorted(previews)}
            run.metric_logger.log_previews(run, named)

    def _generate_for_rank(self, run: TrainingRun) -> list[tuple[int, Mapping[str, bytes]]]:
        """Generate the previews of this rank; return the files of each by extension, with the index of its prompt."""
        drawn = list[tuple[int, Mapping[str, bytes]]]()
        for index, prompt in enumerate(self.prompts):
            is_mine = index % run.strategy.comm.world_size == run.strategy.comm.rank
            if not (is_mine or run.strategy.has_collective_forward):
                continue
            frames = None
            try:
                (frames, sound), seed = self._generate_frames(run, index, prompt)
                if is_mine:
                    files = encode_preview(frames, prompt.fps, run.task.family.frame_rule, sound)
                    self._save_files(run, index, files, seed)
                    drawn.append((index, files))
            except Exception as error:  # such as out of memory, or a limit of the sampler
                is_collective = run.strategy.has_collective_forward and frames is None
                if is_collective and not self._has_failed_on_all_ranks(run, index):
                    raise  # the other ranks wait in a collective of this image
                logger.warning("preview %d (%s) failed and is skipped: %s", index, prompt.text, error)
        return drawn

    def _has_failed_on_all_ranks(self, run: TrainingRun, index: int) -> bool:
        return run.strategy.comm.all_ranks_reached(
            f"preview {index} after step {run.state.step}", ALL_RANKS_TIMEOUT_SECONDS
        )

    def _generate_frames(
        self, run: TrainingRun, index: int, prompt: Prompt
    ) -> "tuple[tuple[list[Image], SoundTrack | None], int]":
        """Return the frames with their sound, if they have any, and their seed."""
        task, seed = run.task, prompt.seed
        if seed is None:
            seed = derive_seed(run.config.train.seed, Purpose.PREVIEW, index) % 2**32
        with run.strategy.accelerator.autocast():
            controls = [load_text_images(prompt, task.family.facts.text_images)]
            cond = task.encode_text([prompt.text], controls)
            negative = task.encode_text([prompt.negative_prompt], controls, is_negative=True)
            generator = torch.Generator().manual_seed(seed)
            sampler = prompt.sampler or self.config.sample_sampler
            model = run.strategy.unwrap_model(run.model)
            with move_image_encoders(task), scale_adapters(model, prompt.network_multiplier):
                return task.family.generate_clip(
                    task.pipe, prompt, cond, negative_cond=negative, generator=generator, sampler=sampler
                ), seed

    def _save_files(self, run: TrainingRun, index: int, files: Mapping[str, bytes], seed: int) -> None:
        epoch = run.plan.get_epoch_ended_at(run.state.step)
        when = f"e{epoch:06d}" if self.config.sample_every_n_epochs and epoch else f"{run.state.step:06d}"
        stem = f"{self.name}_{when}_{index:02d}_{time.strftime('%Y%m%d%H%M%S')}_{seed}"
        for extension, data in files.items():
            path = self.output_dir / f"{stem}{extension}"
            write_atomic(path, data)
            self.saved_paths.append(path)


def encode_preview(
    frames: "Sequence[Image]", fps: float | None, rule: FrameRule | None, sound: SoundTrack | None = None
) -> dict[str, bytes]:
    """Encode a preview as a PNG file, or a clip as MP4 and WebP; ``fps`` None is the rate of the model.

    Sound is as fast as the frames.
    """
    if len(frames) == 1 or rule is None:
        data = io.BytesIO()
        frames[0].save(data, "PNG")
        return {".png": data.getvalue()}
    rate = fps or rule.fps
    sound = sound and sound.change_speed(rate / rule.fps)
    return {".mp4": encode_mp4(frames, rate, sound), ".webp": encode_webp(frames, rate)}
