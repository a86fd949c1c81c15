"""The demo run, shortened: the LoRA generates the bird for prompts that name it and for no others, also in diffusers."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from library.dataloader.sample_prompts import load_prompts
from library.demo import BUILT_IN_MODEL_DIR
from library.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = ROOT / "dataset_configs" / "demo_prompts.txt"
STEPS, SEEDS = 80, 8
pytestmark = [pytest.mark.slow, pytest.mark.daily]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The output folder of ``make demo``, with fewer steps."""
    folder = tmp_path_factory.mktemp("demo")
    once = [
        word
        for name in ("max_train_steps", "sample_every_n_steps", "validate_every_n_steps")
        for word in (f"--{name}", str(STEPS))
    ]
    command = [
        sys.executable,
        *"train_lora.py --dataset_config dataset_configs/demo.toml --config_file dataset_configs/demo_run.toml".split(),
        *once,
        "--validation_split",
        "0.3",
        "--output_dir",
        str(folder),
        *(
            "--mixed_precision no --max_data_loader_n_workers 0 --cache_latents --cache_text_encoder_outputs "
            "--no_half_vae"
        ).split(),
    ]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    (folder / "log.txt").write_text(result.stderr, "utf-8")
    return folder


@pytest.fixture(scope="module")
def pipes(output):
    """The diffusers pipelines without and with the LoRA."""
    both = []
    for lora in (None, output / "demo.safetensors"):
        pipe = StableDiffusionPipeline.from_pretrained(BUILT_IN_MODEL_DIR)
        pipe.set_progress_bar_config(disable=True)
        if lora is not None:
            pipe.load_lora_weights(str(lora))
        both.append(pipe)
    return both


def coarse(image):
    """Downscale an image to 24 x 24 pixels."""
    small = image.convert("RGB").resize((24, 24), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255


def drawn(pipe, prompt):
    """Generate eight images of a prompt with different seeds."""
    noise = torch.Generator().manual_seed(100)
    return [
        coarse(image)
        for image in pipe(
            prompt,
            num_images_per_prompt=SEEDS,
            width=96,
            height=96,
            num_inference_steps=10,
            guidance_scale=3.0,
            generator=noise,
        ).images
    ]


OTHERS = ["a fox", "a penguin", "a sunflower"]


@pytest.fixture(scope="module")
def known(pipes):
    """Reference images: the training images of the bird, and base model samples of other subjects."""
    birds = [
        coarse(Image.open(path))
        for path in (ROOT / "dataset_configs" / "demo").glob("*.png")
        if Image.open(path).size == (96, 96)
    ]
    return {"bird": birds} | {prompt: drawn(pipes[0], prompt) for prompt in OTHERS}


def kinds(images, known):
    """Classify each image by its nearest reference; references from the same noise are excluded."""
    actual = []
    for number, image in enumerate(images):
        distances = {
            name: min(np.abs(image - other).mean() for place, other in enumerate(others) if place != number)
            for name, others in known.items()
        }
        actual.append(min(distances, key=distances.get))
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["a lorikeet", "a funny lorikeet"])
def test_prompts_with_the_bird_generate_the_bird(pipes, known, prompt):
    before, after = (kinds(drawn(pipe, prompt), known) for pipe in pipes)
    assert before.count("bird") == 0
    assert after.count("bird") >= 0.75 * SEEDS  # a quarter of the steps of the demo


@pytest.mark.parametrize("prompt", OTHERS)
def test_other_prompts_generate_the_same_subjects_as_before(pipes, known, prompt):
    assert kinds(drawn(pipes[1], prompt), known) == [prompt] * SEEDS
    assert kinds(known[prompt], known) == [prompt] * SEEDS


def test_the_last_previews_equal_diffusers_samples_with_the_lora(output, pipes):
    for index, prompt in list(enumerate(load_prompts(PROMPTS)))[1:4]:
        (path,) = (output / "sample").glob(f"demo_{STEPS:06d}_{index:02d}_*.png")
        theirs = pipes[1](
            prompt.text,
            width=prompt.width,
            height=prompt.height,
            num_inference_steps=prompt.num_inference_steps,
            guidance_scale=prompt.cfg_scale,
            generator=torch.Generator().manual_seed(prompt.seed),
        ).images[0]
        difference = np.abs(np.asarray(Image.open(path), int) - np.asarray(theirs, int))
        assert difference.max() <= 3 and difference.mean() < 0.1


@torch.no_grad()
def test_the_loss_on_the_bird_decreases_significantly(pipes):
    family = FAMILIES.get("sd1")()
    gains = []
    for path in sorted((ROOT / "dataset_configs" / "demo").glob("*.png")):
        side = Image.open(path).resize((96, 96))
        pixels = torch.from_numpy(np.array(side)).permute(2, 0, 1)[None] / 127.5 - 1
        latents = (
            family.encode_moments(pipes[0], pixels).sample([torch.Generator().manual_seed(1)]).expand(4, -1, -1, -1)
        )
        t = torch.tensor([200.0, 400.0, 600.0, 800.0])
        noise = torch.randn(4, *latents.shape[1:], generator=seeded(path))
        noisy, target = family.build_noise_process(pipes[0]).add_noise(latents, noise, t)
        cond = family.encode_prompts(pipes[0], [path.with_suffix(".txt").read_text().strip()] * 4)["embeds"]
        before, after = ((pipe.unet(noisy, t, cond).sample - target).square().mean() for pipe in pipes)
        gains.append(float(before - after))
    assert np.mean(gains) > 4 * np.std(gains) / math.sqrt(len(gains)), gains


def seeded(path):
    return torch.Generator().manual_seed(sum(path.name.encode()))


def test_the_validation_loss_improves_by_more_than_its_interval_and_is_logged(output):
    lines = [json.loads(line) for line in (output / "demo.metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation/loss" in line][-1]

    assert last["step"] == STEPS
    assert last["validation/base"] - last["validation/loss"] > last["validation/gain_interval"] > 0, last
    assert "better than the base model" in (output / "demo.report.html").read_text("utf-8")


def test_the_before_after_sheet_is_saved(output):
    with Image.open(output / "demo.before_after.png") as sheet:
        assert sheet.width > 400 and sheet.height > 800


def test_the_log_says_in_usual_terms_what_the_run_does(output):
    log = (output / "log.txt").read_text("utf-8")

    for pattern in (
        r"no effect on this run: --no_half_vae$",
        r"caching latents of \d+ images \([\d.]+ kB\) in /",
        r"caching text-encoder outputs of \d+ captions \([\d.]+ [kM]B\) in /",
        r"rank 16, 278,528 trainable parameters \(6\.53 % of the model\)$",
        r"prediction type: v; timestep sampling: uniform$",
        r"optimizer: AdamW \(fused\)$",
        r"LoRA key names: kohya$",
        r"LoRA update norm: [\d.]+ \(by layer type: see the report\)$",
    ):
        assert re.search(pattern, log, re.MULTILINE), (pattern, log)
    for words in (
        "numbers",
        "pictures",
        "are made",
        "written as",
        "predicts",
        "times are",
        "length of",
        "learnt",
        "done",
    ):
        assert not re.search(rf"\b{words}\b", log), (words, log)
    assert "layers were not updated" not in log
    assert max(map(len, log.splitlines())) < 250, log
