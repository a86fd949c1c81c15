"""The demo video model's transformer, of Wan's class, trained together with the text encoder on cached latents."""

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from library.randomness import derive_rng, derive_seed

from .autoencoder import LATENT_CHANNELS, encode_clips
from .clips import BASE_MOTIONS, SUBJECTS, draw_clip, load_emoji
from .text import TEXT_TOKENS, TEXT_WIDTH, build_text_encoder, draw_caption, encode_texts

logger = logging.getLogger(__name__)

HEADS, HEAD_WIDTH, LAYERS = 4, 32, 4
SHIFT = 3.0
"""Of noise levels, as in training and sampling of Wan: motion is decided where there is much noise."""
WORD_GAIN = 1.5
"""Of the norms of queries and keys of words, before training."""
PEAK_LR, SUBJECTS_OF_BATCH = 2e-3, 2
AVERAGE_DECAY = 0.995
CLIPS_OF_EACH = 16
"""Clips of each subject and motion."""
SAVE_INTERVAL = 200


def build_scheduler() -> Any:
    """Build the scheduler that samples."""
    cls: Any = FlowMatchEulerDiscreteScheduler
    return cls(shift=SHIFT)


def build_transformer(seed: int) -> Any:
    """Build the untrained transformer; a token is a latent, 16x16 pixels of a frame."""
    cls: Any = WanTransformer3DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo_video/transformer"))
        transformer = cls(
            patch_size=(1, 1, 1),
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=2 * HEADS * HEAD_WIDTH,
            num_layers=LAYERS,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
    attend_to_words(transformer)
    return transformer


@torch.no_grad()
def attend_to_words(transformer: Any) -> None:
    """Set the first weights so that the few words of a text are read, and not the 500 zeros after them.

    The key of a zero is the bias of the keys alone, here the opposite of the bias of the queries.
    """
    embedder, gain = transformer.condition_embedder.text_embedder, math.sqrt(3)
    for layer in (embedder.linear_1, embedder.linear_2):
        layer.weight.mul_(gain)
        layer.bias.zero_()
    for block in transformer.blocks:
        attention = block.attn2
        for layer in (attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]):
            layer.weight.mul_(gain)
        attention.to_q.bias.fill_(0.5)
        attention.to_k.bias.fill_(-0.1)
        attention.to_v.bias.zero_()
        for norm in (attention.norm_q, attention.norm_k):
            norm.weight.fill_(WORD_GAIN)
    transformer.proj_out.weight.zero_()
    transformer.proj_out.bias.zero_()


class CountedZeros(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention in which the last token stands for all zeros that fill a text up to 512 tokens.

    Equal tokens get equal attention, so one of them with the logarithm of their number added is the same as all.
    """

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *rest: Any) -> Tensor:
        length = encoder_hidden_states.shape[1]
        bias = hidden_states.new_zeros(1, 1, 1, length)
        bias[..., -1] = math.log(TEXT_TOKENS - length + 1)
        attended: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, bias, None)
        return attended


class Denoiser(nn.Module):
    """Transformer and text encoder as one trainable module."""

    def __init__(self, transformer: Any, text_encoder: nn.Module):
        super().__init__()
        self.transformer, self.text_encoder = transformer, text_encoder

    def forward(self, noisy: Tensor, timesteps: Tensor, tokenizer: Any, captions: list[str]) -> Tensor:
        """Predict the velocity."""
        for block in self.transformer.blocks:
            block.attn2.set_processor(CountedZeros())
        texts = F.pad(encode_texts(tokenizer, self.text_encoder, captions), (0, 0, 0, 1))
        predicted: Tensor = self.transformer(noisy, timesteps, texts, return_dict=False)[0]
        return predicted


class TrainingState:
    """Everything that a checkpoint contains: weights, their exponential moving average, optimizer, step."""

    def __init__(self, vocabulary_size: int, seed: int):
        self.model = Denoiser(build_transformer(seed), build_text_encoder(vocabulary_size, seed))
        self.ema: Any = AveragedModel(self.model, multi_avg_fn=_average)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
        self.step = 0

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "average": self.ema, "optimizer": self.optimizer}
        new = path.with_suffix(".new")
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "step": self.step}, new)
        new.replace(path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.ema.load_state_dict(checkpoint["average"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step = checkpoint["step"]


@dataclass(frozen=True)
class LatentClips:
    """Latents of all clips, and the subject and the words of the motion of each."""

    latents: Tensor
    names: Sequence[tuple[str, str]]


def encode_dataset(vae: Any, seed: int) -> LatentClips:
    """Draw and encode the clips of the four motions that the model is trained on."""
    latents, names = [], list[tuple[str, str]]()
    for subject in SUBJECTS:
        emoji, clips = load_emoji(subject), []
        for name, draw in BASE_MOTIONS.items():
            for number in range(CLIPS_OF_EACH):
                motion = draw(derive_rng(seed, "demo_video/clips", subject, name, number))
                clips.append(torch.from_numpy(np.ascontiguousarray(draw_clip(emoji, motion.track))))
                names.append((subject, motion.words))
        latents.append(encode_clips(vae, torch.stack(clips).permute(0, 4, 1, 2, 3).contiguous()))
    return LatentClips(torch.cat(latents), names)


def compute_lr(step: int, steps: int) -> float:
    """Compute the learning rate: warmup, constant, and cosine decay to zero over the last two thirds."""
    remaining = (steps - step) / (0.67 * steps)
    return PEAK_LR * min(1.0, (step + 1) / 100, 0.5 * (1 - math.cos(math.pi * min(1.0, remaining))))


def train_denoiser(
    state: TrainingState, dataset: LatentClips, tokenizer: Any, steps: int, seed: int, path: Path
) -> None:
    """Train from the state's step to the last one."""
    start, first, average = time.time(), state.step, 0.0
    state.model.train()
    while state.step < steps:
        for group in state.optimizer.param_groups:
            group["lr"] = compute_lr(state.step, steps)
        loss = _compute_loss(state, dataset, tokenizer, seed)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.ema.update_parameters(state.model)
        average = loss.item() if state.step == first else 0.98 * average + 0.02 * loss.item()
        state.step += 1
        if state.step % 20 == 0:
            seconds = (time.time() - start) / (state.step - first)
            logger.info("denoiser step %d of %d, loss %.4f, %.2f s/step", state.step, steps, average, seconds)
        if state.step % SAVE_INTERVAL == 0 or state.step == steps:
            state.save(path)
            logger.info("right word, wrong word: %s", compare_words(state.ema.module, dataset, tokenizer, seed))


@torch.no_grad()
def compare_words(model: Denoiser, dataset: LatentClips, tokenizer: Any, seed: int) -> dict[float, tuple[float, float]]:
    """Compute the loss with the right and with a wrong motion in the caption, at two levels of noise."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = rng.sample(range(len(dataset.names)), 24)
    latents, names = dataset.latents[chosen], [dataset.names[index] for index in chosen]
    noise = torch.randn(latents.shape, generator=generator)
    motions = sorted({words for _, words in dataset.names})
    right = [f"a {subject} {words}" for subject, words in names]
    wrong = [f"a {subject} {rng.choice([other for other in motions if other != words])}" for subject, words in names]
    losses = {}
    for sigma in (0.9, 0.97):
        noisy, levels = torch.lerp(latents, noise, sigma), torch.full((len(chosen),), 1000 * sigma)
        both = (model(noisy, levels, tokenizer, captions) for captions in (right, wrong))
        one, other = (round(F.mse_loss(predicted, noise - latents).item(), 4) for predicted in both)
        losses[sigma] = (one, other)
    return losses


def _average(averages: Any, weights: Any, count: Any) -> None:
    """Update the exponential moving averages, which begin as plain ones."""
    torch._foreach_lerp_(averages, weights, 1 - min(AVERAGE_DECAY, (1 + float(count)) / (10 + float(count))))


def _compute_loss(state: TrainingState, dataset: LatentClips, tokenizer: Any, seed: int) -> Tensor:
    rng = random.Random(derive_seed(seed, "demo_video/batch", state.step))
    chosen = _choose_clips(rng)
    captions = [draw_caption(*dataset.names[index], rng) for index in chosen]
    generator = torch.Generator().manual_seed(derive_seed(seed, "demo_video/noise", state.step))
    latents = dataset.latents[chosen]
    noise = torch.randn(latents.shape, generator=generator)
    u = torch.sigmoid(torch.randn(len(chosen), generator=generator))
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
    predicted = state.model(noisy, 1000 * sigma, tokenizer, captions)
    return F.mse_loss(predicted, noise - latents)


def _choose_clips(rng: random.Random) -> list[int]:
    """Choose clips of a batch: some subjects, each with every motion, so that only words tell what moves how."""
    motions = len(BASE_MOTIONS)
    subjects = rng.sample(range(len(SUBJECTS)), SUBJECTS_OF_BATCH)
    return [
        (subject * motions + motion) * CLIPS_OF_EACH + rng.randrange(CLIPS_OF_EACH)
        for subject in subjects
        for motion in range(motions)
    ]
