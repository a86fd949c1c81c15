"""Output preservation: for captions without the trained subject, the model with the LoRA predicts as it does without.

The target is the prediction of the frozen model itself, so no regularization images are needed: the base is one switch
away from the adapter.  The latents, the noise and the timesteps are those of the training images, and only the texts
differ: the caption with the class word instead of the trigger (differential output preservation), or the empty text.

The captions are rewritten in ``config.schema_objective``; ``training.task`` adds the loss to that of the images.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.injection import bypass_lora
from ..config.schema_objective import PreservationConfig
from ..dataloader.batch import Batch
from ..diffusion.objective import NoisyBatch
from ..errors import ConfigError
from ..models.base import Family
from ..problems import Problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreservedTexts:
    """The texts of a batch for which the output is preserved, and the weight of the loss of each."""

    captions: tuple[str, ...]
    weights: Tensor  # (B,): 0 where the caption has no trigger


@dataclass(frozen=True)
class PreservedOutput:
    """What the loss of preserved texts is computed from; the target is the prediction of the base model."""

    batch: Batch
    noised: NoisyBatch
    weights: Tensor


class OutputPreservation:
    """Predicts with the base model, and says for which texts; it draws no random numbers and keeps no state."""

    def __init__(self, config: PreservationConfig, model: nn.Module):
        """``model`` is without the collectives of DDP, as the base model needs no gradients."""
        self.config, self._model = config, model
        self._modules = list(model.modules())

    def list_texts(self, captions: Sequence[str]) -> Iterator[PreservedTexts]:
        """List the texts of a batch, once for each kind of preservation."""
        for weight, rewrite in self.config.list_rewrites():
            texts = [rewrite(caption) for caption in captions]
            weights = torch.tensor([0.0 if text is None else weight for text in texts])
            pairs = zip(texts, captions, strict=True)
            yield PreservedTexts(tuple(caption if text is None else text for text, caption in pairs), weights)

    @torch.no_grad()
    def predict(self, family: Family, pipe: Any, noised: NoisyBatch, batch: Batch) -> Tensor:
        """Predict with the base model, without the adapter."""
        with bypass_lora(*self._modules):
            return family.predict(pipe, self._model, noised.latents, noised.timesteps, batch)

    def build_output(
        self, family: Family, pipe: Any, noised: NoisyBatch, batch: Batch, weights: Tensor
    ) -> PreservedOutput:
        """Let the base model predict the target of a batch of other texts."""
        target = self.predict(family, pipe, noised, batch)
        return PreservedOutput(batch, replace(noised, target=target), weights)


def build_preservation(config: PreservationConfig, model: nn.Module) -> OutputPreservation | None:
    """Build the preservation of a run, if it has one; ``model`` is as ``OutputPreservation`` takes it."""
    return None if config.active_option is None else OutputPreservation(config, model)


def check_trigger(config: PreservationConfig, captions: Sequence[str]) -> None:
    """Raise if no caption contains the trigger; otherwise log how many do, if there is one."""
    if not config.is_differential:
        return
    count = sum(config.replace_trigger(caption) is not None for caption in captions)
    if not count:
        problem = Problem(
            "diff_output_preservation_trigger",
            f"no caption contains {config.diff_output_preservation_trigger!r}, so nothing would be preserved",
            "write it into the captions, or give the word that they contain",
            others=("diff_output_preservation_class",),
        )
        raise ConfigError([problem])
    logger.info("differential output preservation: %d of %d captions contain the trigger", count, len(captions))
