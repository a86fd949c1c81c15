"""Measure whether the LoRA of ``make demo-video`` has learned its motion, and draw clips before and after.

    python -m scripts.demo_video [LORA.safetensors [STRIP.png ANIMATION.webp]]

prints, for each prompt without and with the LoRA, how the path of the emoji correlates with a loop: the positions of
its center in all frames, both coordinates together, beside those of a circle from its lowest point, clockwise.  Of the
motions that the model knew before, it prints the correlation with their own path.  All are means over several seeds.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline
from numpy.typing import NDArray
from PIL import Image

from library.dataset.clip_encoding import encode_webp
from library.demo import BUILT_IN_VIDEO_MODEL_DIR, DEMO_CONFIG_DIR
from library.models.families import FAMILIES
from library.models.families.wan import is_not_about_rounding
from library.models.text_encoding import pad_text_embeds
from scripts.demo_video_model.clips import NUM_FRAMES, SIDE, correlate_tracks, find_centers
from scripts.demo_video_model.lora_clips import FIRST_FRAMES_DIR, HELD_OUT, TRAINED
from scripts.demo_video_model.text import TEXT_TOKENS

LOOPS = tuple(f"a {subject} loops" for subject in (*TRAINED[::2], *HELD_OUT))
KNOWN = tuple(f"a {subject} {words}" for subject in HELD_OUT[::2] for words in ("walks to the right", "jumps"))
SEEDS = (1, 2, 3, 4)
STEPS, GUIDANCE = 4, 1.0
SCALE, GAP, SHOWN_FPS = 2, 2, 8.0

Clips = NDArray[np.uint8]
"""(seeds, frames, height, width, 3)"""


def build_path(motion: str) -> NDArray[np.float64]:
    """Build the path of a motion: x and y of each frame, with y downwards."""
    t = np.linspace(0, 1, NUM_FRAMES)
    match motion:
        case "loops":
            return np.stack([-np.sin(2 * np.pi * t), np.cos(2 * np.pi * t)], axis=1)
        case "jumps":
            return np.stack([0 * t, -4 * t * (1 - t)], axis=1)
        case _:
            return np.stack([t, 0 * t], axis=1)


def load_pipeline(lora: Path | None = None) -> Any:
    """Load the built-in video model as a pipeline of diffusers, and a LoRA file into it."""
    pipeline_class: Any = WanImageToVideoPipeline
    pipe = pipeline_class.from_pretrained(BUILT_IN_VIDEO_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    logging.getLogger(pipeline_class.__module__).addFilter(is_not_about_rounding)
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    return pipe


@torch.no_grad()
def make_clips(
    pipe: Any,
    prompts: Sequence[str],
    seeds: Sequence[int] = SEEDS,
    first_frames: Mapping[str, Image.Image] = MappingProxyType({}),
) -> dict[str, Clips]:
    """Make a clip of each prompt with each seed, from first frames in which the emoji is where its motion begins."""
    family = FAMILIES.get("wan22_ti2v")()
    embeds, negative = (family.encode_prompts(pipe, list(texts))["embeds"] for texts in (prompts, [""]))
    texts, nothing = (pad_text_embeds(each, TEXT_TOKENS)[0] for each in (embeds, negative))
    made = {}
    for prompt, text in zip(prompts, texts, strict=True):
        drawn = pipe(
            image=first_frames.get(prompt) or load_first_frame(prompt),
            prompt_embeds=text.expand(len(seeds), -1, -1),
            negative_prompt_embeds=nothing.expand(len(seeds), -1, -1),
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            # The pipeline rounds to one more than a multiple of 1, the frames of a latent.
            **{"height": SIDE, "width": SIDE, "num_frames": NUM_FRAMES - 1},
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
        )
        made[prompt] = (255 * drawn.frames).round().astype(np.uint8)
    return made


def load_first_frame(prompt: str) -> Image.Image:
    """Load the first frame of a prompt's clip."""
    subject, motion = prompt.split(maxsplit=2)[1:]
    side = "_left" if motion.startswith("walks") else ""
    with Image.open(DEMO_CONFIG_DIR / FIRST_FRAMES_DIR / f"{subject}{side}.png") as file:
        return file.convert("RGB")


def measure(clips: Clips, motion: str) -> list[float]:
    """Correlate the path of the emoji in each clip with that of a motion."""
    return [correlate_tracks(find_centers(frames), build_path(motion)) for frames in clips]


def format_table(before: Mapping[str, Clips], after: Mapping[str, Clips]) -> str:
    """Format a row of each prompt: the correlations with its motion, without and with the LoRA."""
    lines = [f"{'':30} before  after"]
    for prompt in before:
        motion = prompt.split()[2]
        means = [float(np.mean(measure(clips[prompt], motion))) for clips in (before, after)]
        lines.append(f"{prompt:30} {means[0]:6.2f} {means[1]:6.2f}")
    return "\n".join(lines)


def draw_strip(rows: Sequence[Clips]) -> Image.Image:
    """Draw a row of each clip (frames, height, width, 3), with its frames side by side."""
    frames = [np.concatenate([np.pad(frame, _frame_edge(), constant_values=225) for frame in row], 1) for row in rows]
    return _enlarge(np.concatenate(frames))


def animate(rows: Sequence[Sequence[Clips]]) -> bytes:
    """Encode an animation of clips in rows."""
    padded = [[np.pad(clip, ((0, 0), *_frame_edge()), constant_values=225) for clip in row] for row in rows]
    joined = np.concatenate([np.concatenate(row, axis=2) for row in padded], axis=1)
    return encode_webp([_enlarge(frame) for frame in joined], SHOWN_FPS)


def _frame_edge() -> tuple[tuple[int, int], ...]:
    return ((0, GAP), (0, GAP), (0, 0))


def _enlarge(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels).resize((pixels.shape[1] * SCALE, pixels.shape[0] * SCALE), Image.Resampling.BICUBIC)


def run(lora: Path, strip: Path | None = None, animation: Path | None = None) -> str:
    """Make clips without and with the LoRA, draw them, and return the table."""
    prompts = (*LOOPS, *KNOWN)
    before, after = (make_clips(load_pipeline(file), prompts) for file in (None, lora))
    shown = ("a fox loops", f"a {HELD_OUT[0]} loops", f"a {HELD_OUT[1]} loops", KNOWN[0])
    if strip is not None:
        draw_strip([clips[prompt][0] for prompt in shown[:3] for clips in (before, after)]).save(strip, optimize=True)
    if animation is not None:
        animation.write_bytes(animate([[clips[prompt][0] for prompt in LOOPS] for clips in (before, after)]))
    return format_table(before, after)


if __name__ == "__main__":
    arguments = [Path(word) for word in sys.argv[1:]] or [Path("output/demo_video/demo_video.safetensors")]
    sys.stdout.write(run(*arguments[:3]) + "\n")
