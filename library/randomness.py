"""Stateless randomness: a draw is a function of (seed, purpose, indices) on any rank, also after a resume."""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Purpose:
    """What is drawn, so that a new draw never shifts the others.  Part of each seed: never change a string."""

    # Data, by epoch, sample and repeat.
    CROP, FLIP, CAPTION, COLOR, CONTROL = "crop", "flip", "caption", "colour", "control"

    # The batch plan, by epoch and bucket; the plan of a later resolution stage has a seed of its own.
    STAGE = "stage"
    BLOCK_SAMPLES, REMAINDER_SAMPLES = "spread", "remainder"
    BLOCK_ORDER, GROUP_ORDER, SINGLE_MICRO_BATCHES = "blocks", "groups", "singles"
    REPEAT_MIX, REPEAT_OWNERS, REPEAT_ROWS, REPEAT_REST = "mix", "deal", "rows", "last"
    FRACTIONAL_REPEATS = "turns"

    # The validation split, by content hash: "PURPOSE/HASH".
    HELD_OUT, VALIDATION_CAPTION, VALIDATION_POSITION = "held out", "caption", "place"

    # Each training step, by the global position of the sample; in validation by its quantile and position.
    LORA_DROPOUT, LATENT_SAMPLE, NOISE = "dropout", "vae", "noise"
    NOISE_OFFSET, MULTIRES_NOISE, INPUT_NOISE = "noise offset", "multires noise", "input noise"
    TEXT_DROPOUT, POSITION_CROP = "text encoder dropout", "position crop"
    CONTROL_DROPOUT = "control dropout"
    SOUND_NOISE = "sound noise"

    # Sliders: how far a step denoises and at which size, by step; the crop that SDXL is told, by step and position.
    SLIDER_STEPS, SLIDER_SIZE, SLIDER_CROP = "slider steps", "slider size", "slider crop"

    # The expert that a step trains, by step.
    NOISE_EXPERT = "expert"

    # The section of clips that a step trains, by step.
    SECTION = "section"

    # The parts of the timestep distribution, by block of as many samples in a row.
    TIMESTEP_BUCKETS = "timestep buckets"

    VALIDATION_NOISE = VALIDATION_BATCH = "measured"
    VALIDATION_SOUND_NOISE = "measured sound"

    # Initial weights of the adapter, by module: "PURPOSE/MODULE"; other adapter types use the names of their tensors.
    LORA_INIT = "lora"

    # The vectors of a new word that start from none, by text encoder: "PURPOSE/COMPONENT".
    TOKEN_VECTORS = "token vectors"

    # The rounding of a weight to bf16, by step: "PURPOSE/WEIGHT", and of its moments: "PURPOSE/WEIGHT/MOMENT".
    ROUNDING = "rounding"

    RANDOM_MODEL = "random weights"
    PREVIEW, GRADIENT_PROBE, SESSION_ID = "preview", "probe", "session"

    # The noise of the pictures of an evaluation, by caption and seed: "PURPOSE/GROUP"; captions by content hash.
    EVALUATION_PICTURE, EVALUATION_CAPTION = "evaluation picture", "evaluation caption"


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Derive a 63-bit seed, for ``random.Random`` or ``torch.Generator``.

    The hash must never change: checkpoints store no generator states, and a resumed run draws the same numbers because
    it derives the same seeds.
    """
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_rng(seed: int, purpose: str, *indices: int) -> random.Random:
    """Build an independent generator for one purpose."""
    return random.Random(derive_seed(seed, purpose, *indices))


def derive_generator(seed: int, purpose: str, *indices: int) -> "torch.Generator":
    """Build an independent torch generator on the CPU, whose numbers do not depend on the device that trains."""
    import torch  # settings are checked without it

    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))
