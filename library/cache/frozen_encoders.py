"""The frozen VAE and text encoders that fill the caches: loaded for it, and freed by ``latent_cache`` and
``text_encoder_cache`` when these are full."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from ..config.schema import ModelConfig
from ..config.schema_data import CacheConfig
from ..dataloader.batch import Cond
from ..dataset.clip_windows import TextImages
from ..models.base import ControlTextFamily, Family, T5Family
from ..models.detect import DetectedModel
from ..parallel.strategy import Strategy
from .model_fingerprint import FileHashCache, compute_component_fingerprints

FILE_HASHES_NAME = "files.json"


@dataclass(frozen=True)
class FrozenEncoders:
    """Loads the frozen VAE or text encoders of a model onto this process's device."""

    strategy: Strategy
    family: Family
    model: DetectedModel
    model_config: ModelConfig
    cache: CacheConfig
    text_components: tuple[str, ...]
    """The components that encode texts: those of T5 alone where CLIP is trained."""

    @property
    def is_t5_only(self) -> bool:
        return self.text_components != self.family.facts.text.components

    @property
    def text_images(self) -> TextImages:
        """The images that the text encoder reads together with captions."""
        return self.family.facts.text_images

    def encode_prompts(
        self,
        pipe: Any,
        prompts: Sequence[str],
        controls: Sequence[Sequence[Image]] = (),
        *,
        is_negative: bool = False,
    ) -> Cond:
        """Encode texts with the text components; ``controls`` are the images of each, if they are read."""
        is_apart = is_negative and self.family.facts.text.has_negative_encoding
        if isinstance(self.family, ControlTextFamily) and not is_apart:
            return self.family.encode_prompts_with_controls(pipe, prompts, controls)
        if isinstance(self.family, T5Family) and self.is_t5_only:
            return self.family.encode_t5_prompts(pipe, prompts)
        return (self.family.encode_negative_prompts if is_negative else self.family.encode_prompts)(pipe, prompts)

    def load(self, components: Sequence[str], dtype: torch.dtype) -> Any:
        """Load a pipeline with these components, frozen and on the device."""
        pipe = self.family.load(self.model, dtype, components, device=self.strategy.device)
        for component in components:
            module = getattr(pipe, component)
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False).to(self.strategy.device)
        return pipe

    def compute_weight_hashes(self, components: Sequence[str], cache_dir: Path) -> list[str]:
        """Compute the hashes of components on the main process, so that the others need not read all weights too."""
        hashes = FileHashCache(cache_dir / FILE_HASHES_NAME)
        return self.strategy.comm.run_on_main_and_broadcast(
            lambda: compute_component_fingerprints(self.family, self.model, components, hashes)
        )
