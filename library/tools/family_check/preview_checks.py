"""The checks of previews: their images are those of the diffusers pipeline, and they leave nothing behind."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import ImageChops
from PIL.Image import Image

from ...dataloader.sample_prompts import Prompt
from ...models.base import Family
from ...models.noise_schedulers import build_scheduler
from .cases import TinyCase, ensure, ensure_close
from .checks import call_pipeline, get_images


@contextmanager
def build_preview_prompt(case: TinyCase, text: str, negative: str = "", **options: Any) -> Iterator[Prompt]:
    """Build a prompt in the size of the case; the files of its control images exist inside the block."""
    with tempfile.TemporaryDirectory() as folder:
        clips = [Path(folder, f"clip{number}") for number in range(len(case.controls) * case.has_control_clips)]
        paths = [path / "frame.png" for path in clips]
        paths = paths or [Path(folder, f"control{number}.png") for number in range(len(case.controls))]
        for path, image in zip(paths, case.controls, strict=True):
            path.parent.mkdir(exist_ok=True)
            image.save(path)
        controls = {"control_clips": tuple(clips)} if clips else {"control_images": tuple(paths)}
        ends = dict(zip(("first_image", "last_image"), case.frame_images, strict=False))
        for name, image in ends.items():
            image.save(Path(folder, f"{name}.png"))
        frames = {"num_frames": case.num_frames} if case.num_frames > 1 else {}
        settings = {**case.size_arguments, **frames, **controls, **options}
        yield Prompt(text, negative, **{**settings, **{name: Path(folder, f"{name}.png") for name in ends}})


@torch.no_grad()
def generate_preview(family: Family, case: TinyCase, sampler: str | None = None, **options: Any) -> Image:
    """Sample a preview in a few steps; of a clip, the last frame, as the first may be given."""
    pipe = case.pipe
    settings = {"num_inference_steps": 3, "cfg_scale": 3.0, **options}
    with build_preview_prompt(case, "a red circle", "blue", **settings) as prompt:
        cond = case.encode_prompts(family, pipe, [prompt.text])
        negative = case.encode_negative_prompts(family, pipe, [prompt.negative_prompt])
        return family.generate_frames(
            pipe, prompt, cond, negative, generator=torch.Generator().manual_seed(1), sampler=sampler
        )[-1]


def check_preview(family: Family, case: TinyCase) -> None:
    """Compare a preview with the image that the diffusers pipeline samples."""
    scheduler = case.pipe.scheduler
    if family.build_noise_process(case.pipe).prediction_type != "flow":
        case.pipe.scheduler = _build_preview_scheduler(family, case)
    texts = {"prompt": "a red circle", **case.build_negative(case.pipe, "blue")}
    if case.build_prompt is not None:
        texts = case.build_prompt(case.pipe, "a red circle", "blue")
    arguments = {**texts, **case.texts, "num_inference_steps": 3, case.scale: 3.0}
    generator = torch.Generator().manual_seed(1)
    reference = get_images(call_pipeline(case, **arguments, generator=generator, output_type="pil"))[0]
    reference = reference[-1] if isinstance(reference, list) else reference  # of a clip, its last frame
    case.pipe.scheduler = scheduler
    ours = generate_preview(family, case)
    height, width = case.size
    ensure(ours.size == (width, height), f"the preview has {ours.size} pixels instead of {(width, height)}")
    # Sums over other padding are rounded in another way.
    tolerance = 0 if case.simplify_call is TinyCase.simplify_call and case.compares_arguments else 1
    extrema: Any = ImageChops.difference(ours, reference).getextrema()
    difference = max(high for _, high in extrema)
    ensure(difference <= tolerance, f"the preview differs from the pipeline's image by {difference} of 255")
    is_guided = ours.tobytes() != generate_preview(family, case, cfg_scale=5.0).tobytes()
    ensure(is_guided, "the scale of guidance in a prompt does not change the preview")


def _build_preview_scheduler(family: Family, case: TinyCase) -> Any:
    """Build the scheduler of previews, which has the noise schedule of the model's own scheduler."""
    pipe, expected = case.pipe, case.pipe.scheduler.alphas_cumprod
    components = {**pipe.components, "scheduler": build_scheduler("ddim", pipe.scheduler)}
    settings = type(pipe)._get_signature_keys(type(pipe))[1]
    options = {name: pipe.config[name] for name in settings if name in pipe.config}
    sampled = family.adapt_sampling_pipeline(type(pipe)(**{**components, **options}))
    reason = "previews are sampled with another noise schedule than the model's; see adapt_sampling_pipeline"
    ensure_close(sampled.scheduler.alphas_cumprod, expected, reason)
    return sampled.scheduler


def check_preview_state(family: Family, case: TinyCase) -> None:
    """Generate a preview: the global generator, the scheduler and the training mode of modules are as before."""
    denoiser = getattr(case.pipe, family.facts.denoiser_name).train()
    eval_module = list(denoiser.modules())[-1].eval()
    rng_state, scheduler = torch.random.get_rng_state(), case.pipe.scheduler
    scheduler_state = dict(vars(scheduler))
    generate_preview(family, case, "euler")
    ensure(torch.equal(rng_state, torch.random.get_rng_state()), "a preview draws from torch's global generator")
    is_same = case.pipe.scheduler is scheduler and vars(scheduler) == scheduler_state
    ensure(is_same, "a preview changes the scheduler of the pipeline")
    ensure(denoiser.training and not eval_module.training, "a preview changes the training mode of modules")


def check_preview_without_encoders(family: Family, case: TinyCase) -> None:
    """Generate a preview in bfloat16 from encoded texts, when text encoders are freed."""
    pipe = family.load(case.detect(), torch.bfloat16)
    with torch.no_grad():
        cond, negative = (case.encode_prompts(family, pipe, [text]) for text in ("a", ""))
    for part in family.facts.text.components:
        setattr(pipe, part, None)
    with build_preview_prompt(case, "a", num_inference_steps=2) as prompt:
        image = family.generate_image(
            pipe, prompt, cond, negative, generator=torch.Generator().manual_seed(1), sampler=None
        )
    height, width = case.size
    ensure(image.size == (width, height), f"the preview has {image.size} pixels instead of {(width, height)}")


PREVIEW_CHECKS: Mapping[str, Callable[[Family, TinyCase], None]] = {
    "a preview is the image of the diffusers pipeline": check_preview,
    "a preview changes no state": check_preview_state,
    "a preview needs no text encoder and works in bfloat16": check_preview_without_encoders,
}
"""The checks by the sentence that they prove."""
