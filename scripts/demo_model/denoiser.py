"""The demo model's U-Net and text encoder, trained together on cached latents.

Buckets, captions and batches are those of ``library.data``, the noise process is that of ``library.diffusion``.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.config.schema_objective import NoiseConfig
from library.dataloader.batch import normalize_pixels
from library.dataloader.batch_plan import AnyBatchPlan
from library.dataloader.images import BadSample
from library.dataloader.loader import MicroBatchDataset
from library.dataloader.prepare import prepare_data
from library.diffusion.process import NoiseProcess, build_discrete_process
from library.diffusion.timestep_sampling import compute_timesteps
from library.errors import UserError
from library.randomness import derive_seed

from .autoencoder import LATENT_CHANNELS
from .tokenizer import END, MAX_TOKENS, START

logger = logging.getLogger(__name__)

WIDTH = 128
PIXEL_STEP = 16
SAVE_INTERVAL = 500
PEAK_LR = 1.5e-3


def build_scheduler() -> Any:
    """Build a cosine schedule with zero terminal SNR and v-prediction, which is easiest to train for a small model."""
    cls: Any = DDIMScheduler
    return cls(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        clip_sample=False,
        timestep_spacing="trailing",
    )


def build_unet(seed: int) -> Any:
    cls: Any = UNet2DConditionModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo/unet"))
        return cls(
            sample_size=12,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            block_out_channels=(64, 128),
            # At the highest resolution, attention costs most and helps least.
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=16,
            attention_head_dim=4,
            cross_attention_dim=WIDTH,
        )


def build_text_encoder(tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModel:
    vocabulary = tokenizer.get_vocab()
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=vocabulary[START],
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[END],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo/text"))
        encoder = CLIPTextModel(config)
        weights: Any = encoder.get_input_embeddings().weight
        nn.init.normal_(weights, std=0.3)
    return encoder


class Denoiser(nn.Module):
    """U-Net and text encoder as one trainable module."""

    def __init__(self, unet: nn.Module, text_encoder: nn.Module):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder

    def forward(self, noisy: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        embeds = self.text_encoder(tokens)[0]
        predicted: Tensor = self.unet(noisy, t, encoder_hidden_states=embeds, return_dict=False)[0]
        return predicted


class TrainingState:
    """Everything that a checkpoint contains: weights, their exponential moving average, optimizer, step."""

    def __init__(self, tokenizer: CLIPTokenizer, seed: int):
        self.model = Denoiser(build_unet(seed), build_text_encoder(tokenizer, seed))
        self.ema: Any = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.01)
        self.step = 0

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "average": self.ema, "optimizer": self.optimizer}
        torch.save(
            {**{name: part.state_dict() for name, part in parts.items()}, "step": self.step}, path.with_suffix(".new")
        )
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.ema.load_state_dict(checkpoint["average"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step = checkpoint["step"]


@dataclass(frozen=True)
class LatentDataset:
    """Latents and tokens of each step, as the trainer's batch plan orders them."""

    plan: AnyBatchPlan
    reader: MicroBatchDataset
    latents: list[Tensor]
    tokenizer: CLIPTokenizer

    def load_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Load latents and tokens of a step, without the samples that only pad the batch."""
        micro = self.plan.get_micro_batch(step)
        real = [
            entry for entry in zip(micro.sample_indices, micro.repeat_indices, micro.is_real, strict=True) if entry[2]
        ]
        captions = [self.reader.get_caption(micro.epoch, step, index, copy) for index, copy, _ in real]
        tokens = self.tokenizer(
            captions, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).input_ids
        return torch.stack([self.latents[index] for index, _, _ in real]), tokens


def encode_dataset(dataset: Path, vae: Any, tokenizer: CLIPTokenizer, seed: int, steps: int) -> LatentDataset:
    """Encode every image of the dataset once."""
    prepared = prepare_data(DataConfig(dataset_config=str(dataset)), PIXEL_STEP)
    plan = prepared.build_batch_plan(1, TrainConfig(seed=seed))
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, seed, steps)
    latents = []
    with torch.no_grad():
        for index in range(len(prepared.manifest.samples)):
            sample = reader.load_image(0, index, 0)
            if isinstance(sample, BadSample):
                raise UserError(sample.problem)
            pixels = normalize_pixels(torch.from_numpy(np.ascontiguousarray(sample.pixels.transpose(2, 0, 1))))
            latents.append(vae.encode(pixels[None]).latent_dist.mean[0])
    return LatentDataset(plan, reader, latents, tokenizer)


def build_noise_process() -> NoiseProcess:
    cls: Any = DDPMScheduler
    scheduler = cls.from_config(build_scheduler().config)
    return build_discrete_process(scheduler.alphas_cumprod, scheduler.config.prediction_type)


def compute_lr(step: int, steps: int) -> float:
    """Compute the learning rate: warmup, constant, and cosine decay to zero over the last two fifths."""
    remaining = (steps - step) / (0.4 * steps)
    return PEAK_LR * min(1.0, (step + 1) / 200, 0.5 * (1 - math.cos(math.pi * min(1.0, remaining))))


def train_denoiser(
    state: TrainingState, dataset: LatentDataset, steps: int, seed: int, save: Callable[[], None]
) -> None:
    """Train from the state's step to the last one."""
    process, start, first_step, average = build_noise_process(), time.time(), state.step, 0.0
    state.model.train()
    while state.step < steps:
        step = state.step
        for group in state.optimizer.param_groups:
            group["lr"] = compute_lr(step, steps)
        latents, tokens = dataset.load_batch(step)
        generator = torch.Generator().manual_seed(derive_seed(seed, "demo/noise", step))
        t = compute_timesteps(torch.rand(len(latents), generator=generator), NoiseConfig(), process, latents.shape[1:])
        noise = torch.randn(latents.shape, generator=generator)
        noisy, target = process.add_noise(latents, noise, t)
        # On CPUs, the backward pass of fused attention takes longer than all the rest of attention.
        with torch.autocast(latents.device.type, torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            predicted = state.model(noisy, t, tokens)
        loss = F.mse_loss(predicted.float(), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.ema.update_parameters(state.model)
        state.step += 1
        average = loss.item() if step == first_step else 0.99 * average + 0.01 * loss.item()
        if state.step % 100 == 0:
            seconds = (time.time() - start) / (state.step - first_step)
            logger.info("denoiser step %d of %d, loss %.4f, %.2f s/step", state.step, steps, average, seconds)
        if state.step % SAVE_INTERVAL == 0 or state.step == steps:
            save()
