"""Train the built-in demo model from scratch, stage by stage: ``python -m scripts.demo_model STAGE --noto FILE ...``.

Stages, in this order: ``vae``, ``denoiser``, ``decoder``, ``export``, ``evaluate``; ``denoiser`` and ``decoder`` may
run side by side, and ``denoiser`` resumes where it was interrupted.  ``lora_dataset`` writes the images of ``make
demo``.  The model card next to the weights says which packages contain the emoji and how long each stage took.
Reading the font needs the package fonttools.
"""

import logging
import random
import sys
import unicodedata
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer

from .autoencoder import build_vae, reduce_channels, train_vae
from .captions import collect_words
from .dataset import write_dataset
from .denoiser import TrainingState, build_scheduler, encode_dataset, train_denoiser
from .emoji import draw_random_image, load_directory, load_noto
from .evaluation import draw_contact_sheet, find_recognizable, generate_samples
from .lora_dataset import write_lora_dataset
from .subjects import SUBJECTS, UNSEEN
from .tokenizer import load_tokenizer, train_tokenizer

logger = logging.getLogger(__name__)

SEED = 0
VAE_IMAGES = 6000
VAE_ROUNDS = ((1800, 2e-3), (2600, 1.5e-3))
"""Steps and peak learning rate; each round starts with small crops and a warmup."""
DECODER_STEPS = 1200
DENOISER_STEPS, BATCH_SIZE = 5000, 16

Images = Mapping[int, Image.Image]


@dataclass(frozen=True)
class Sources:
    """Emoji of three styles, by code point."""

    noto: Images
    fluent: Images
    twemoji: Images


def main(argv: Sequence[str]) -> None:
    """Run one stage."""
    stages: dict[str, Callable[[Sources, Path], None]] = {
        "vae": run_vae,
        "denoiser": run_denoiser,
        "decoder": run_decoder,
        "export": run_export,
        "evaluate": run_evaluate,
        "lora_dataset": lambda sources, work: write_lora_dataset(sources.noto, work),
    }
    parser = ArgumentParser("python -m scripts.demo_model", description="Train the built-in demo model from scratch.")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--noto", type=Path, required=True, help="NotoColorEmoji.ttf")
    parser.add_argument("--fluent", type=Path, help="directory of Fluent emoji (WebP), for vae and decoder")
    parser.add_argument("--twemoji", type=Path, help="directory of Twemoji (PNG), for vae and decoder")
    parser.add_argument("--work", type=Path, required=True, help="directory for everything that is written")
    options = parser.parse_args(argv)
    if options.stage in ("vae", "decoder") and not (options.fluent and options.twemoji):
        parser.error(f"the stage {options.stage} needs --fluent and --twemoji")
    fluent = load_directory(options.fluent, ".webp") if options.fluent else {}
    twemoji = load_directory(options.twemoji, ".png") if options.twemoji else {}
    stages[options.stage](Sources(load_noto(options.noto), fluent, twemoji), options.work)


def run_vae(sources: Sources, work: Path) -> None:
    """Train encoder and decoder together; the latents are fixed from here on."""
    images = draw_vae_images(sources)
    vae = build_vae(SEED)
    for number, (steps, peak_lr) in enumerate(VAE_ROUNDS):
        train_vae(vae, images, steps, SEED + 2 * number, peak_lr=peak_lr)
    _prepare_dataset(sources, work)
    squares = sorted((work / "images").glob("*-96x96-*.png"))
    reduce_channels(vae, _stack_images(map(Image.open, squares))).save_pretrained(work / "vae")


def run_decoder(sources: Sources, work: Path) -> None:
    """Train the decoder further."""
    vae = _load_vae(work / "vae")
    images = draw_vae_images(sources)

    def save() -> None:
        vae.save_pretrained(work / "vae-decoder")

    train_vae(vae, images, DECODER_STEPS, SEED + 1, decoder_only=True, peak_lr=1e-3, save=save)


def run_denoiser(sources: Sources, work: Path) -> None:
    """Train U-Net and text encoder; the only long stage."""
    tokenizer = _prepare_tokenizer(work / "tokenizer")
    state, checkpoint = TrainingState(tokenizer, SEED), work / "denoiser.pt"
    if checkpoint.exists():
        state.load(checkpoint)
    dataset = encode_dataset(_prepare_dataset(sources, work), _load_vae(work / "vae"), tokenizer, SEED, DENOISER_STEPS)
    train_denoiser(state, dataset, DENOISER_STEPS, SEED, lambda: state.save(checkpoint))


def run_export(sources: Sources, work: Path) -> None:
    """Export the averaged weights in half precision as a diffusers folder."""
    tokenizer = _prepare_tokenizer(work / "tokenizer")
    state = TrainingState(tokenizer, SEED)
    state.load(work / "denoiser.pt")
    decoder = work / "vae-decoder"
    cls: Any = StableDiffusionPipeline
    pipe = cls(
        vae=_load_vae(decoder if decoder.exists() else work / "vae"),
        text_encoder=state.ema.module.text_encoder,
        tokenizer=tokenizer,
        unet=state.ema.module.unet,
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(dtype=torch.float16).save_pretrained(work / "model")
    # transformers loads in the dtype of this file, diffusers in float32, and both have to agree.
    config = work / "model" / "text_encoder" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"float16"', '"float32"'), encoding="utf-8")
    for config in (work / "model").glob("*/config.json"):
        lines = config.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if '"_name_or_path"' not in line]  # a path of this machine
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_evaluate(sources: Sources, work: Path) -> None:
    """Generate one sample of each subject, and log how many are nearest to their own emoji."""
    cls: Any = StableDiffusionPipeline
    samples = generate_samples(cls.from_pretrained(work / "model"), list(SUBJECTS), SEED)
    images = dict(zip(SUBJECTS, samples, strict=True))
    draw_contact_sheet(images).save(work / "sheet.png", optimize=True)
    found = find_recognizable(images, sources.noto, SUBJECTS)
    missing = ", ".join(name for name in images if name not in found) or "none"
    logger.info("%d of %d are nearest to their own emoji; not: %s", len(found), len(images), missing)


def draw_vae_images(sources: Sources) -> Tensor:
    """Draw random emoji of all styles, the model's subjects more often."""
    common = set(sources.noto) & set(sources.fluent) & set(sources.twemoji)
    codes = sorted(common) + sorted([*SUBJECTS.values(), *UNSEEN.values()]) * 8
    styles = {"noto": sources.noto, "fluent": sources.fluent, "twemoji": sources.twemoji}
    rng = random.Random(SEED)
    return _stack_images(draw_random_image(styles, codes, (96, 96), rng) for _ in range(VAE_IMAGES))


def _prepare_dataset(sources: Sources, work: Path) -> Path:
    """Return the dataset TOML, written first where it is missing."""
    file = work / "dataset.toml"
    return file if file.exists() else write_dataset(SUBJECTS, sources.noto, work, BATCH_SIZE, SEED)


def _prepare_tokenizer(directory: Path) -> CLIPTokenizer:
    if directory.exists():
        return load_tokenizer(directory)
    names = (unicodedata.name(chr(code), "") for code in range(0x2600, 0x1FB00))
    others = {word.lower() for name in names for word in name.split() if word.isalpha()}
    return train_tokenizer(collect_words(list(SUBJECTS)), sorted(others), directory)


def _load_vae(directory: Path) -> Any:
    cls: Any = AutoencoderKL
    return cls.from_pretrained(directory).eval()


def _stack_images(images: Iterable[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(sys.argv[1:])
