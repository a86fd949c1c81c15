"""Train the built-in video model from scratch, stage by stage: ``python -m scripts.demo_video_model STAGE --work DIR``.

Stages, in this order: ``vae``, ``denoiser``, ``export``; ``denoiser`` resumes where it was interrupted.  ``clips``
writes the clips of ``make demo-video``.  The model card next to the weights says how long each stage took.
"""

import logging
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from .autoencoder import NUM_CLIPS, build_vae, draw_mixed_clips, set_linear_weights
from .denoiser import TrainingState, build_scheduler, encode_dataset, train_denoiser
from .lora_clips import write_lora_clips
from .text import build_tokenizer

SEED = 0
DENOISER_STEPS = 1650


def main(argv: Sequence[str]) -> None:
    """Run one stage."""
    stages: dict[str, Callable[[Path], None]] = {
        "vae": run_vae,
        "denoiser": run_denoiser,
        "export": run_export,
        "clips": lambda work: write_lora_clips(work, SEED),
    }
    parser = ArgumentParser("python -m scripts.demo_video_model", description="Train the built-in video model.")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--work", type=Path, required=True, help="directory for everything that is written")
    options = parser.parse_args(argv)
    stages[options.stage](options.work)


def run_vae(work: Path) -> None:
    """Compute the weights of encoder and decoder; the latents are fixed from here on."""
    vae = build_vae(SEED)
    set_linear_weights(vae, draw_mixed_clips(NUM_CLIPS, SEED))
    vae.save_pretrained(work / "vae")


def run_denoiser(work: Path) -> None:
    """Train transformer and text encoder; the only long stage."""
    tokenizer, checkpoint = build_tokenizer(work / "tokenizer"), work / "denoiser.pt"
    state = TrainingState(len(tokenizer), SEED)
    if checkpoint.exists():
        state.load(checkpoint)
    dataset = encode_dataset(_load_vae(work / "vae"), SEED)
    train_denoiser(state, dataset, tokenizer, DENOISER_STEPS, seed=SEED, path=checkpoint)


def run_export(work: Path) -> None:
    """Export the averaged weights in half precision as a diffusers folder."""
    tokenizer = build_tokenizer(work / "tokenizer")
    state = TrainingState(len(tokenizer), SEED)
    state.load(work / "denoiser.pt")
    cls: Any = WanPipeline
    pipe = cls(
        expand_timesteps=True,
        vae=_load_vae(work / "vae"),
        text_encoder=state.ema.module.text_encoder,
        tokenizer=tokenizer,
        transformer=state.ema.module.transformer,
        scheduler=build_scheduler(),
    )
    pipe.to(dtype=torch.float16).save_pretrained(work / "model")
    build_tokenizer(work / "model" / "tokenizer")  # as it was built, not as it was loaded
    # transformers loads in the dtype of this file, diffusers in float32, and both have to agree.
    config = work / "model" / "text_encoder" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"float16"', '"float32"'), encoding="utf-8")
    for config in (work / "model").glob("*/config.json"):
        lines = config.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if '"_name_or_path"' not in line]  # a path of this machine
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _load_vae(directory: Path) -> Any:
    cls: Any = AutoencoderKLWan
    return cls.from_pretrained(directory).eval()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(sys.argv[1:])
