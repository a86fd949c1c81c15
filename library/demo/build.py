"""Makes the built-in model again: ``python -m library.demo.build STAGE NOTO FLUENT TWEMOJI WORK``.

``STAGE`` is ``vae``, ``denoiser``, ``decoder``, ``export`` or ``sheet``, in this order; the second and third may run
side by side.  ``NOTO`` is the file NotoColorEmoji.ttf, ``FLUENT`` and ``TWEMOJI`` are folders of pictures, ``WORK`` is
a folder for what is half done: the stage ``denoiser`` goes on where it was interrupted.  The model card beside the
weights says which packages hold these files, and how long each stage took.  The package fonttools reads the font.
"""

import logging
import random
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer

from .building import autoencoder, captions, denoiser, emoji, pictures, sheet, tokens
from .building.subjects import SUBJECTS, UNSEEN

logger = logging.getLogger(__name__)

SEED = 0
BANK = 6000
VAE_ROUNDS = ((1800, 2e-3), (2600, 1.5e-3))
"""Steps and peak learning rate; each begins with small crops and a rising rate again."""
DECODER_STEPS = 1200
DENOISER_STEPS, BATCH = 5000, 16

Pictures = Mapping[int, Image.Image]


@dataclass(frozen=True)
class Sources:
    """Emoji of three styles."""

    noto: Pictures
    fluent: Pictures
    twemoji: Pictures

    @property
    def common(self) -> list[int]:
        """What all three styles have."""
        return sorted(set(self.noto) & set(self.fluent) & set(self.twemoji))


def main(stage: str, noto: str, fluent: str, twemoji: str, work: str) -> None:
    """One stage of the building."""
    sources = Sources(emoji.noto(Path(noto)), emoji.files(Path(fluent), ".webp"), emoji.files(Path(twemoji), ".png"))
    {"vae": train_vae, "denoiser": train_denoiser, "decoder": train_decoder, "export": export,
     "sheet": draw_sheet}[stage](sources, Path(work))  # fmt: skip


def train_vae(sources: Sources, work: Path) -> None:
    """Encoder and decoder together; the latents are fixed from here on."""
    shown = bank(sources)
    vae = autoencoder.make(SEED)
    for number, (steps, peak) in enumerate(VAE_ROUNDS):
        autoencoder.train(vae, shown, steps, SEED + 2 * number, peak=peak)
    autoencoder.reduced(vae, _stacked(map(Image.open, _pictures(sources, work)[1]))).save_pretrained(work / "vae")


def train_decoder(sources: Sources, work: Path) -> None:
    """The decoder alone, which may go on while the denoiser learns."""
    vae = _vae(work / "vae")
    autoencoder.train(vae, bank(sources), DECODER_STEPS, SEED + 1, whole=False, peak=1e-3,
                      save=lambda: vae.save_pretrained(work / "vae-decoder"))  # fmt: skip


def train_denoiser(sources: Sources, work: Path) -> None:
    """UNet and text encoder; the only long stage."""
    tokenizer = _tokenizer(work / "tokenizer")
    model = denoiser.Both(denoiser.make_unet(SEED), denoiser.make_text_encoder(tokenizer, SEED))
    learner, kept = denoiser.Learner.of(model), work / "denoiser.pt"
    if kept.exists():
        learner.load(kept)
    dataset, _ = _pictures(sources, work)
    lessons = denoiser.Lessons.of(dataset, _vae(work / "vae"), tokenizer, SEED, DENOISER_STEPS)
    denoiser.train(learner, lessons, DENOISER_STEPS, SEED, lambda: learner.save(kept))


def export(sources: Sources, work: Path) -> None:
    """The averaged weights in half precision, as a diffusers folder."""
    tokenizer = _tokenizer(work / "tokenizer")
    model = denoiser.Both(denoiser.make_unet(SEED), denoiser.make_text_encoder(tokenizer, SEED))
    learner = denoiser.Learner.of(model)
    learner.load(work / "denoiser.pt")
    decoder = work / "vae-decoder"
    cls: Any = StableDiffusionPipeline
    pipe = cls(
        vae=_vae(decoder if decoder.exists() else work / "vae"),
        text_encoder=learner.average.module.text_encoder,
        tokenizer=tokenizer,
        unet=learner.average.module.unet,
        scheduler=denoiser.make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(dtype=torch.float16).save_pretrained(work / "model")
    # transformers loads what this says, diffusers loads float32, and both are to fit together.
    config = work / "model" / "text_encoder" / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"float16"', '"float32"'), encoding="utf-8")
    for config in (work / "model").glob("*/config.json"):
        lines = config.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if '"_name_or_path"' not in line]  # where this machine has it
        config.write_text("\n".join(kept) + "\n", encoding="utf-8")


def draw_sheet(sources: Sources, work: Path) -> None:
    """What the exported model draws, and how much of it is nearest to what it should be."""
    cls: Any = StableDiffusionPipeline
    drawn = sheet.draw(cls.from_pretrained(work / "model"), list(SUBJECTS), SEED)
    named = dict(zip(SUBJECTS, drawn, strict=True))
    sheet.sheet(named).save(work / "sheet.png", optimize=True)
    right = sheet.right(named, sources.noto, SUBJECTS)
    logger.info("%d of %d are nearest to their own drawing; not: %s", len(right), len(named),
                ", ".join(name for name in named if name not in right) or "none")  # fmt: skip


def bank(sources: Sources) -> Tensor:
    """Random emoji of all styles, those of the closed set more often."""
    codes = sources.common + sorted([*SUBJECTS.values(), *UNSEEN.values()]) * 8
    styles = {"noto": sources.noto, "fluent": sources.fluent, "twemoji": sources.twemoji}
    draw = random.Random(SEED)
    return _stacked(emoji.any_picture(styles, codes, (96, 96), draw) for _ in range(BANK))


def _pictures(sources: Sources, work: Path) -> tuple[Path, list[Path]]:
    """The dataset file, made when it is not there, and the square pictures."""
    file = work / "dataset.toml"
    if not file.exists():
        pictures.write(SUBJECTS, sources.noto, work, BATCH, SEED)
    return file, sorted((work / "pictures").glob("*-96x96-*.png"))


def _tokenizer(folder: Path) -> CLIPTokenizer:
    if folder.exists():
        return tokens.load(folder)
    names = (unicodedata.name(chr(code), "") for code in range(0x2600, 0x1FB00))
    others = {word.lower() for name in names for word in name.split() if word.isalpha()}
    return tokens.make(captions.words(list(SUBJECTS)), sorted(others), folder)


def _vae(folder: Path) -> Any:
    cls: Any = AutoencoderKL
    return cls.from_pretrained(folder).eval()


def _stacked(drawn: Iterable[Image.Image]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in drawn])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(*sys.argv[1:])
