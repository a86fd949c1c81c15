"""A model family with predictable encoder outputs, and the caches of a run, for tests of caching."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from library.cache.frozen_encoders import FrozenEncoders
from library.cache.latent_cache import LatentEncoder, cache_latents
from library.cache.readers import build_step_loader
from library.cache.text_encoder_cache import CaptionEncoder, cache_text_encoder_outputs
from library.config import RunConfig, parse_config
from library.dataloader.batch import Cond, Moments
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataloader.run_plan import RunPlan
from library.dataloader.sample_prompts import Prompt
from library.distributed.accelerator import prepare_accelerator
from library.distributed.communicator import Communicator
from library.models.detect import detect_model
from library.models.facts import TextFacts
from library.models.families import FAMILY_FACTS
from library.parallel.ddp import DDPStrategy
from library.parallel.strategy import Strategy, StrategySettings


class AveragePoolFamily:
    """Latents are means of 8 x 8 pixels; the conditioning of a caption is the numbers in its text."""

    facts = replace(FAMILY_FACTS["sd1"], text=TextFacts(components=("text_encoder",), tokenizer_repo_ids={}))

    def __init__(self, vae_dtype: torch.dtype = torch.float32):
        self.vae_dtype = vae_dtype
        self.loaded: list[tuple[str, ...]] = []

    def load(self, model: Any, dtype: torch.dtype, components: Sequence[str], **_: Any) -> Any:
        self.loaded.append(tuple(components))
        pipe = SimpleNamespace(vae=nn.Linear(1, 1, dtype=self.vae_dtype), text_encoder=nn.Linear(1, 1))
        for module in (pipe.vae, pipe.text_encoder):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        pipe.vae.dtype = self.vae_dtype
        pipe.vae.config = pipe.text_encoder.config = {}
        return pipe

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        mean = avg_pool2d(pixels, 8)
        if pipe.vae.weight.dtype == torch.float16:  # as if white overflowed
            mean = mean.masked_fill(mean.amax((1, 2, 3), keepdim=True) > 0.99, torch.inf)
        return Moments.from_mean_and_std(mean, torch.full_like(mean, 0.25))

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        return self.encode_moments(pipe, control).mean_and_std[:, 0]

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        return {}

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        numbers = [
            torch.tensor([float(word) for word in prompt.replace(",", " ").split() if word.isdigit()])
            for prompt in prompts
        ]
        return {"numbers": numbers, "sums": torch.stack([item.sum() for item in numbers])}


class EncodedNames:
    """Record which images and captions this process encodes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        for encoder in (LatentEncoder, CaptionEncoder):
            self._record(encoder)

    def _record(self, encoder: Any) -> None:
        encode_batches = encoder.encode_batches

        def encode_and_record(itself: Any, groups: Any) -> Any:
            for count, entries in encode_batches(itself, groups):
                flipped = getattr(getattr(itself, "latent_keys", None), "flipped", None)
                self.names += [
                    f"{entry.name}{' flipped' if flipped is not None and flipped[entry.index] else ''}"
                    for entry in entries
                ]
                yield count, entries

        encoder.encode_batches = encode_and_record

    def take(self) -> list[str]:
        """Return the names since the last call."""
        names, self.names = sorted(self.names), []
        return names


class CachedRun:
    """The caches of a run, in one of its processes."""

    def __init__(self, family: Any, *flags: str, strategy: Strategy | None = None, prompts: Sequence[Prompt] = ()):
        self.config: RunConfig = parse_config([*flags, "--quiet"]).require_valid()
        self.strategy = strategy or DDPStrategy(Communicator(prepare_accelerator(self.config)), StrategySettings())
        self.prepared: PreparedData = prepare_data(self.config.data, 8)
        model = detect_model(self.config.model)
        encoders = FrozenEncoders(
            self.strategy, family, model, self.config.model, self.config.cache, family.facts.text.components
        )
        self.prepared, self.latents = cache_latents(encoders, self.prepared)
        batches = self.prepared.build_batch_plan(self.strategy.comm.world_size, self.config.train)
        self.plan = RunPlan.from_config(batches, self.config.train, self.config.optim)
        self.texts = cache_text_encoder_outputs(encoders, self.prepared, self.plan, prompts, self.config.preservation)

    def build_loader(self) -> Any:
        return build_step_loader(
            self.prepared,
            self.plan.batch_plan,
            self.strategy.comm.rank,
            total_steps=self.plan.steps,
            pin_memory=False,
            latent_reader=self.latents,
            text_reader=self.texts,
        )


def replace_cache_options(config: RunConfig, **cache: Any) -> RunConfig:
    return replace(config, cache=replace(config.cache, **cache))


def write_dataset_file(folder: Path, lines: str = "", subset: str = "", resolution: str = "64") -> str:
    """Write a dataset TOML for ``folder``/images."""
    path = folder / "set.toml"
    path.write_text(
        f"""
[general]
enable_bucket = true
min_bucket_reso = 32
bucket_reso_steps = 16
caption_extension = ".txt"
{lines}
[[datasets]]
resolution = {resolution}
  [[datasets.subsets]]
  image_dir = '{folder / "images"}'
  {subset}
""",
        encoding="utf-8",
    )
    return str(path)
