"""The built-in model's UNet and text encoder, trained together on latents that are computed once.

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

from ...config.schema import DataConfig, NoiseConfig, TrainConfig
from ...data.batch import as_model_input
from ...data.cutting import BadSample
from ...data.loader import MicroBatchReader
from ...data.prepare import prepare
from ...data.staged_plan import Plan
from ...diffusion.process import Process, from_table
from ...diffusion.timesteps import times
from ...errors import UserError
from ...randomness import seed_for
from .autoencoder import KEPT
from .tokens import END, MAX_TOKENS, START

logger = logging.getLogger(__name__)

WIDTH = 128
PIXEL_STEP = 16


def make_scheduler() -> Any:
    """A cosine table that ends in pure noise, with prediction of velocity: easiest to learn for a small model."""
    cls: Any = DDIMScheduler
    return cls(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", clip_sample=False,
               timestep_spacing="trailing")  # fmt: skip


def make_unet(seed: int) -> Any:
    cls: Any = UNet2DConditionModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "demo/unet"))
        return cls(
            sample_size=12,
            in_channels=KEPT,
            out_channels=KEPT,
            block_out_channels=(64, 128),
            # Attention costs most where there are most places, and brings least there.
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=16,
            attention_head_dim=4,
            cross_attention_dim=WIDTH,
        )


def make_text_encoder(tokenizer: CLIPTokenizer, seed: int) -> CLIPTextModel:
    words = tokenizer.get_vocab()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "demo/text"))
        encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=MAX_TOKENS, bos_token_id=words[START],
                eos_token_id=words[END], pad_token_id=words[END],
            )
        )  # fmt: skip
        weights: Any = encoder.get_input_embeddings().weight
        nn.init.normal_(weights, std=0.3)
    return encoder


class Both(nn.Module):
    """What learns."""

    def __init__(self, unet: nn.Module, text_encoder: nn.Module):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder

    def forward(self, noisy: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        embeds = self.text_encoder(tokens)[0]
        predicted: Tensor = self.unet(noisy, t, encoder_hidden_states=embeds, return_dict=False)[0]
        return predicted


@dataclass
class Learner:
    """Everything that a checkpoint holds."""

    model: Both
    average: Any  # of the weights over the last steps
    optimizer: torch.optim.Optimizer
    step: int = 0

    @classmethod
    def of(cls, model: Both) -> "Learner":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.01)
        return cls(model, average, optimizer)

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "average": self.average.state_dict(),
                    "optimizer": self.optimizer.state_dict(), "step": self.step}, path.with_suffix(".new"))  # fmt: skip
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        held = torch.load(path, weights_only=True)
        self.model.load_state_dict(held["model"])
        self.average.load_state_dict(held["average"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step = held["step"]


@dataclass(frozen=True)
class Lessons:
    """The work of each step: latents and tokens by the project's own batch plan."""

    plan: Plan
    reader: MicroBatchReader
    latents: list[Tensor]
    tokenizer: CLIPTokenizer

    @classmethod
    def of(cls, dataset: Path, vae: Any, tokenizer: CLIPTokenizer, seed: int, steps: int) -> "Lessons":
        prepared = prepare(DataConfig(dataset_config=str(dataset)), PIXEL_STEP)
        plan = prepared.batch_plan(1, TrainConfig(seed=seed))
        reader = MicroBatchReader(prepared.manifest, prepared.placements, plan, 0, seed, steps)
        latents = []
        with torch.no_grad():
            for index in range(len(prepared.manifest.samples)):
                shown = reader.picture(0, index, 0)
                if isinstance(shown, BadSample):
                    raise UserError(shown.problem)
                pixels = as_model_input(torch.from_numpy(np.ascontiguousarray(shown.pixels.transpose(2, 0, 1))))
                latents.append(vae.encode(pixels[None]).latent_dist.mean[0])
        return cls(plan, reader, latents, tokenizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Latents and tokens; samples that only fill up are left out."""
        micro = self.plan.micro_batch(step)
        real = [entry for entry in zip(micro.samples, micro.copies, micro.weights, strict=True) if entry[2]]
        captions = [self.reader.caption(micro.epoch, step, index, copy) for index, copy, _ in real]
        tokens = self.tokenizer(captions, padding="max_length", truncation=True, max_length=MAX_TOKENS,
                                return_tensors="pt").input_ids  # fmt: skip
        return torch.stack([self.latents[index] for index, _, _ in real]), tokens


def process() -> Process:
    cls: Any = DDPMScheduler
    trained = cls.from_config(make_scheduler().config)
    return from_table(trained.alphas_cumprod, trained.config.prediction_type)


def rate(step: int, steps: int, peak: float) -> float:
    """Level, and down to nothing over the last two fifths."""
    rest = (steps - step) / (0.4 * steps)
    return peak * min(1.0, (step + 1) / 200, 0.5 * (1 - math.cos(math.pi * min(1.0, rest))))


def train(learner: Learner, lessons: Lessons, steps: int, seed: int, save: Callable[[], None], *,
          peak: float = 1.5e-3, every: int = 500) -> None:  # fmt: skip
    noises, started, first, shown = process(), time.time(), learner.step, 0.0
    learner.model.train()
    while learner.step < steps:
        step = learner.step
        for group in learner.optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        latents, tokens = lessons.batch(step)
        draw = torch.Generator().manual_seed(seed_for(seed, "demo/noise", step))
        t = times(torch.rand(len(latents), generator=draw), NoiseConfig(), noises, latents.shape[1:])
        noise = torch.randn(latents.shape, generator=draw)
        noisy, target = noises.add_noise(latents, noise, t)
        # On CPUs, the backward pass of fused attention takes longer than all the rest of attention.
        with torch.autocast(latents.device.type, torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            predicted = learner.model(noisy, t, tokens)
        loss = F.mse_loss(predicted.float(), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        learner.average.update_parameters(learner.model)
        learner.step += 1
        shown = loss.item() if step == first else 0.99 * shown + 0.01 * loss.item()
        if learner.step % 100 == 0:
            logger.info("denoiser step %d of %d, loss %.4f, %.2f s a step", learner.step, steps, shown,
                        (time.time() - started) / (learner.step - first))  # fmt: skip
        if learner.step % every == 0 or learner.step == steps:
            save()
