"""The samples and batches of a run on texts alone (``--slider_prompts``): latents are denoised from noise in training.

Each prompt is a sample and a bucket of its own, so that the batch plan, checkpoints and every strategy know nothing
else of sliders.  In an epoch each prompt is trained for one optimizer step, whatever the number of processes.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

from ..config.types import Resolution
from ..dataset.clip_windows import FrameRule
from ..dataset.image_ref import ByteRange, ImageRef
from ..dataset.schema import DatasetConfig
from ..dataset.slider_prompts import SliderPrompt
from ..problems import Problem
from ..randomness import Purpose, derive_rng
from .batch_plan import AnyBatchPlan, Bucket, MicroBatch
from .buckets import BucketAssignment
from .manifest import Manifest, Sample

if TYPE_CHECKING:
    from .batch import Cond, PixelBatch
    from .loader import StepBatches

SIZE_STEP = 64
"""Sides that ``dynamic_resolution`` draws are multiples of this, as in sd-scripts."""

LatentShape = Callable[[tuple[int, int], int], tuple[int, ...]]
"""Maps width and height, and a number of frames, to the shape of latents without batch."""


def build_slider_manifest(
    path: Path, prompts: Sequence[SliderPrompt], datasets: Sequence[DatasetConfig], notices: Sequence[str]
) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """Build a sample for each prompt of a file, and its size."""
    samples, assignments = [], []
    for number, prompt in enumerate(prompts):
        size = prompt.resolution.width, prompt.resolution.height
        image = ImageRef(path.parent, path.name, ByteRange(f"prompt {number + 1}", 0, 0))
        samples.append(
            Sample(
                key=get_prompt_key(number),
                image=image,
                size=size,
                caption=prompt.target,
                dataset_index=number,
                subset_index=0,
                repeats=1.0,
                loss_weight=prompt.weight,
                is_reg=False,
                content_hash=prompt.content_hash,
            )
        )
        assignments.append(BucketAssignment(size, size, (0, 0)))
    return Manifest(tuple(datasets), tuple(samples), tuple(notices), ()), tuple(assignments)


def get_prompt_key(number: int) -> str:
    """Return the name of the sample of a prompt."""
    return f"prompt {number + 1}"


def get_prompt_number(key: str) -> int:
    """Return the number of the prompt of a sample, from 0: the inverse of ``get_prompt_key``."""
    return int(key.rpartition(" ")[2]) - 1


def build_slider_buckets(prompts: Sequence[SliderPrompt]) -> tuple[Bucket, ...]:
    """Build a bucket for each prompt, so that no batch mixes strengths of the LoRA."""
    return tuple(
        Bucket(
            resolution=(prompt.resolution.width, prompt.resolution.height),
            sample_indices=[number],
            repeats=[1.0],
            batch_size=prompt.batch_size,
            dataset_index_in_file=number,
            num_frames=prompt.frames,
        )
        for number, prompt in enumerate(prompts)
    )


def repeat_to_steps(buckets: Sequence[Bucket], micro_batches: int) -> list[Bucket]:
    """Repeat the prompt of each bucket until it fills one optimizer step of so many micro-batches of all ranks."""
    return [replace(bucket, repeats=[float(bucket.batch_size * micro_batches)]) for bucket in buckets]


def find_impossible_frames(prompts: Sequence[SliderPrompt], rule: FrameRule | None, model: str) -> Iterator[Problem]:
    """Find numbers of frames that the model does not make."""
    for prompt in prompts:
        place = prompt.places.get("frames")
        if rule is None and prompt.frames != 1:
            yield Problem("frames", f"{model} makes images, not {prompt.frames} frames", "remove it", place)
        elif rule is not None and rule.round_down(prompt.frames) != prompt.frames:
            below = rule.round_down(prompt.frames)
            text = f"{model} makes {rule.describe_lengths()} frames, not {prompt.frames}"
            yield Problem("frames", text, f"use {below} or {rule.round_up(prompt.frames)}", place)


def draw_size(prompt: SliderPrompt, seed: int, step: int, multiple: int) -> Resolution:
    """Draw the size of the pictures of a step: with ``dynamic_resolution`` sides from half of a square up to it."""
    size, unit = prompt.resolution, math.lcm(SIZE_STEP, multiple)
    low, high = size.width // 2 // unit, size.width // unit
    if not prompt.dynamic_resolution or size.width != size.height or high < 1:
        return size
    rng = derive_rng(seed, Purpose.SLIDER_SIZE, step)
    return Resolution(rng.randint(max(1, low), high) * unit, rng.randint(max(1, low), high) * unit)


def draw_size_conditioning(prompt: SliderPrompt, size: Resolution, seed: int, *indices: int) -> tuple[int, ...]:
    """Draw what SDXL is told of a picture: that it is whole, or with ``dynamic_crops`` cut out of a larger one."""
    if not prompt.dynamic_crops:
        return size.height, size.width, 0, 0, size.height, size.width
    rng = derive_rng(seed, Purpose.SLIDER_CROP, *indices)
    scale = rng.uniform(1, 3)
    height, width = int(size.height * scale), int(size.width * scale)
    top, left = rng.randint(0, height - size.height), rng.randint(0, width - size.width)
    return height, width, top, left, size.height, size.width


class SliderLoader:
    """This rank's batches of texts, with latents of the right shape and without content."""

    def __init__(
        self,
        prompts: Sequence[SliderPrompt],
        batch_plan: AnyBatchPlan,
        rank: int,
        get_latent_shape: LatentShape,
        read_cond: "Callable[[Sequence[str]], Cond]",
        size_multiple: int,
    ):
        self.prompts, self.batch_plan, self.rank = prompts, batch_plan, rank
        self.get_latent_shape, self.read_cond, self.size_multiple = get_latent_shape, read_cond, size_multiple

    def iter_steps(self, first_step: int) -> "Iterator[StepBatches]":
        """Yield the batches of each optimizer step from ``first_step`` on, without end."""
        from .loader import StepBatches

        step = first_step
        while True:
            first = step * self.batch_plan.accumulation_steps
            positions = range(first, first + self.batch_plan.accumulation_steps)
            batches = tuple(self.build_micro_batch(position) for position in positions)
            yield StepBatches(batches, self.batch_plan.count_real_samples(step))
            step += 1

    def build_micro_batch(self, position: int) -> "PixelBatch":
        """Build one micro-batch."""
        shard = self.batch_plan.get_micro_batch(position).shard(self.rank, self.batch_plan.dp_size)
        return self.build_batch(shard, position // self.batch_plan.accumulation_steps)

    def build_batch(self, shard: MicroBatch, step: int) -> "PixelBatch":
        import torch

        from .batch import Moments, PixelBatch

        (number,) = set(shard.sample_indices)
        prompt, count, seed = self.prompts[number], len(shard.sample_indices), self.batch_plan.seed
        size = draw_size(prompt, seed, step, self.size_multiple)
        positions = shard.global_positions
        conditioning = [draw_size_conditioning(prompt, size, seed, step, position) for position in positions]
        captions = (prompt.target,) * count
        shape = self.get_latent_shape((size.width, size.height), prompt.frames)
        return PixelBatch(
            pixels=None,
            captions=captions,
            size_conditioning=torch.tensor(conditioning, dtype=torch.float32),
            loss_weights=torch.tensor([prompt.weight * real for real in shard.is_real], dtype=torch.float32),
            global_positions=positions,
            sample_keys=(get_prompt_key(number),) * count,
            moments=Moments(torch.zeros(count, 2, *shape)),
            cond=self.read_cond(captions),
            network_multiplier=prompt.multiplier,
        )


def format_slider_summary(
    prompts: Sequence[SliderPrompt], notes: Sequence[str], batch_plan: AnyBatchPlan, total_steps: int
) -> str:
    """Format the prompts of a run, and how long it trains each."""
    sizes = [f"{prompt.resolution.width}x{prompt.resolution.height}" for prompt in prompts]
    lines = [f"{len(prompts)} prompts, without images:", *notes]
    for prompt, size in zip(prompts, sizes, strict=True):
        frames = f"x{prompt.frames}" if prompt.frames > 1 else ""
        batch = prompt.batch_size * batch_plan.dp_size * batch_plan.accumulation_steps
        weight = f", weight {prompt.weight:g}" if prompt.weight != 1 else ""
        size = f"up to {size}" if prompt.dynamic_resolution else size
        lines.append(f"  {prompt.describe()} ({size}{frames}, {batch} in a step{weight})")
    epochs = total_steps / len(prompts)
    lines.append(f"one epoch: {len(prompts)} steps, one for each; the run: {total_steps} steps = {epochs:.3g} epochs")
    return "\n".join(lines)


MAX_PROMPTS_IN_METADATA = 16
"""The most prompts that sd-scripts lists in a LoRA file."""


def build_slider_metadata(path: str, prompts: Sequence[SliderPrompt]) -> dict[str, str]:
    """Build the keys of a LoRA file that sd-scripts' ``train_leco.py`` writes, with the name of the file alone."""
    shown = [prompt.export_json() for prompt in prompts[:MAX_PROMPTS_IN_METADATA]]
    return {
        "ss_leco_prompt_count": str(len(prompts)),
        "ss_leco_prompts_file": PureWindowsPath(path).name,
        "ss_leco_preview": json.dumps(shown, ensure_ascii=False),
    }
