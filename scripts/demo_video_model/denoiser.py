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
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from library.randomness import derive_rng, derive_seed

from .autoencoder import LATENT_CHANNELS, encode_clips
from .clips import BASE_MOTIONS, SUBJECTS, Pixels, Track, draw_clip, load_emoji
from .text import TEXT_TOKENS, TEXT_WIDTH, build_text_encoder, draw_caption, encode_texts

logger = logging.getLogger(__name__)

HEADS, HEAD_WIDTH, LAYERS = 4, 32, 4
SHIFT = 4.0
"""Of noise levels: motion is decided where there is much noise."""
SAMPLING_SHIFT = 12.0
PURE_NOISE = 0.5
"""The share of clips of which the model sees nothing but the first frame."""
WORD_GAIN = 1.5
"""Of the norms of queries and keys of words, before training."""
PEAK_LR, SUBJECTS_OF_BATCH = 2e-3, 2
AVERAGE_DECAY = 0.995
LOOKS, CLIPS_OF_EACH = 4, 5
"""Looks of each subject (mirrored, with other colors), and clips of each look and motion."""
SAVE_INTERVAL = 100


def build_scheduler() -> Any:
    """Build the scheduler that samples."""
    cls: Any = FlowMatchEulerDiscreteScheduler
    return cls(shift=SAMPLING_SHIFT)


def build_transformer(seed: int) -> Any:
    """Build the untrained transformer; a token is 2x2 latents, 16x16 pixels of a frame."""
    cls: Any = WanTransformer3DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo_video/transformer"))
        transformer = cls(
            patch_size=(1, 2, 2),
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
        pass_noise_on(transformer)
    attend_to_words(transformer)
    attend_to_places(transformer)
    return transformer


@torch.no_grad()
def pass_noise_on(transformer: Any) -> None:
    """Set the first weights so that the prediction is about what is given: in pure noise, the noise is most of it."""
    embed, out = transformer.patch_embedding, transformer.proj_out
    size = LATENT_CHANNELS * 4
    basis = nn.init.orthogonal_(torch.empty(HEADS * HEAD_WIDTH, size))
    embed.weight.copy_(basis.view(embed.weight.shape))
    embed.bias.zero_()
    # Outputs are ordered by place in the token and then by channel, inputs the other way round; both are normalized.
    rows = basis.T.reshape(LATENT_CHANNELS, 4, -1).transpose(0, 1).flatten(0, 1)
    out.weight.copy_(rows * math.sqrt(size / (HEADS * HEAD_WIDTH)))
    out.bias.zero_()


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


@torch.no_grad()
def attend_to_places(transformer: Any) -> None:
    """Set the first weights so that heads attend by distance from the start: in time, in place, and in both.

    In pure noise there is nothing else by which tokens could be told apart.  A bias of queries and keys is turned by
    the position of each token, and the product of both is the cosine of the distance.
    """
    place = 2 * (HEAD_WIDTH // 6)
    time = HEAD_WIDTH - 2 * place
    down, across = time, time + place
    strengths = ({0: 1.0, 2: 3.0}, {down: 3.0, across: 3.0}, {0: 3.0, down: 2.0, across: 2.0})
    for block in transformer.blocks:
        for head, parts in enumerate(strengths):
            for part, strength in parts.items():
                for layer in (block.attn1.to_q, block.attn1.to_k):
                    layer.bias[head * HEAD_WIDTH + part] = strength


class CountedZeros(WanAttnProcessor):
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

    def forward(self, first: Tensor, noisy: Tensor, timesteps: Tensor, tokenizer: Any, captions: list[str]) -> Tensor:
        """Predict the velocity of all frames but the first, which is given as it is, with timestep 0."""
        for block in self.transformer.blocks:
            block.attn2.set_processor(CountedZeros())  # type: ignore[no-untyped-call]
        texts = F.pad(encode_texts(tokenizer, self.text_encoder, captions), (0, 0, 0, 1))
        latents = torch.cat([first, noisy[:, :, 1:]], dim=2)
        times = timesteps[:, None, None].repeat(1, latents.shape[2], latents.shape[3] * latents.shape[4] // 4)
        times[:, 0] = 0
        predicted: Tensor = self.transformer(latents, times.flatten(1), texts, return_dict=False)[0]
        return predicted[:, :, 1:]


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
            for number in range(LOOKS * CLIPS_OF_EACH):
                rng = derive_rng(seed, f"demo_video/clips/{subject}/{name}", number)
                motion = draw(rng)
                clips.append(torch.from_numpy(_draw_look(emoji, motion.track, number % LOOKS, rng)))
                names.append((subject, motion.words))
        latents.append(encode_clips(vae, torch.stack(clips).permute(0, 4, 1, 2, 3).contiguous()))
    return LatentClips(torch.cat(latents), names)


def _draw_look(emoji: Image.Image, track: Track, look: int, rng: random.Random) -> Pixels:
    """Draw a clip of an emoji as it is, mirrored, or with its colors exchanged, so that looks are not told by names."""
    drawn = draw_clip(ImageOps.mirror(emoji) if look % 2 else emoji, track)
    channels = rng.sample(range(3), 3) if look > 1 else range(3)
    return np.ascontiguousarray(drawn[..., list(channels)])


def compute_lr(step: int, steps: int) -> float:
    """Compute the learning rate: warmup, constant, and from half of it a cosine to zero over the last third."""
    remaining = (steps - step) / steps
    decay = 1.0 if remaining > 1 / 3 else 0.5 * (1 - math.cos(1.5 * math.pi * remaining))
    return PEAK_LR * min(1.0, (step + 1) / 100, decay)


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
    """Compute the loss with the right and with a wrong motion in the caption, at three levels of noise."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = rng.sample(range(len(dataset.names)), 24)
    latents, names = dataset.latents[chosen], [dataset.names[index] for index in chosen]
    noise = torch.randn(latents.shape, generator=generator)
    motions = sorted({words for _, words in dataset.names})
    right = [f"a {subject} {words}" for subject, words in names]
    wrong = [f"a {subject} {rng.choice([other for other in motions if other != words])}" for subject, words in names]
    losses = {}
    for sigma in (0.8, 0.95, 1.0):
        noisy, levels = torch.lerp(latents, noise, sigma), torch.full((len(chosen),), 1000 * sigma)
        both = (model(latents[:, :, :1], noisy, levels, tokenizer, captions) for captions in (right, wrong))
        one, other = (round(F.mse_loss(predicted, (noise - latents)[:, :, 1:]).item(), 4) for predicted in both)
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
    u, pure = torch.rand(2, len(chosen), generator=generator)
    sigma = torch.where(pure < PURE_NOISE, 1.0, SHIFT * u / (1 + (SHIFT - 1) * u))
    noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
    predicted = state.model(latents[:, :, :1], noisy, 1000 * sigma, tokenizer, captions)
    return F.mse_loss(predicted, (noise - latents)[:, :, 1:])


def _choose_clips(rng: random.Random) -> list[int]:
    """Choose clips of a batch: some subjects, each with every motion, so that only words tell what moves how."""
    motions, each = len(BASE_MOTIONS), LOOKS * CLIPS_OF_EACH
    subjects = rng.sample(range(len(SUBJECTS)), SUBJECTS_OF_BATCH)
    return [
        (subject * motions + motion) * each + rng.randrange(each) for subject in subjects for motion in range(motions)
    ]
