"""The models that embed the pictures of an evaluation, and compare them with their captions."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL.Image import Image

from ..models.embedding_models import EmbeddingModel, find_embedding_problem
from ..problems import Problem
from .embedding_metrics import Array, normalize_embeddings
from .picture_features import FeatureEmbedder

logger = logging.getLogger(__name__)
Embedder = EmbeddingModel | FeatureEmbedder


@dataclass(frozen=True)
class EmbedderChoice:
    """The models that are named by options, and the names of these options."""

    image_model: str | None
    text_model: str | None
    prefix: str = ""
    """What the names of the options begin with."""

    @property
    def image_option(self) -> str:
        return f"{self.prefix}image_model"

    @property
    def text_option(self) -> str:
        return f"{self.prefix}text_model"

    def find_problems(self) -> Iterator[Problem]:
        """Read the configurations of the models, and yield why they cannot be used."""
        for option, name, needs_texts in (
            (self.image_option, self.image_model, False),
            (self.text_option, self.text_model, True),
        ):
            if name and (problem := find_embedding_problem(option, name, needs_texts=needs_texts)):
                yield problem


@dataclass(frozen=True)
class PictureEmbedder:
    """Embeds pictures, and compares them with captions where a model reads texts."""

    image_model: Embedder
    text_model: EmbeddingModel | None
    _texts: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def load(cls, choice: EmbedderChoice, device: torch.device, *, is_demo: bool) -> "PictureEmbedder":
        """Load the models; one that embeds pictures and texts serves as both."""
        image_model: Embedder = FeatureEmbedder()
        if choice.image_model is not None:
            image_model = EmbeddingModel(choice.image_option, choice.image_model, device)
        elif not is_demo:
            text = "no --%s: pictures are compared by colors and edges only, which says little of photos"
            logger.warning(text, choice.image_option)
        if choice.text_model is not None:
            return cls(image_model, EmbeddingModel(choice.text_option, choice.text_model, device))
        if isinstance(image_model, EmbeddingModel) and image_model.reads_texts:
            return cls(image_model, image_model)
        logger.info("no --%s: prompt following is not measured", choice.text_option)
        return cls(image_model, None)

    @contextmanager
    def use_device(self, device: torch.device) -> Iterator[None]:
        """Compute on another device within the context."""
        models = {id(each): each for each in (self.image_model, self.text_model) if isinstance(each, EmbeddingModel)}
        with ExitStack() as stack:
            for model in models.values():
                stack.enter_context(model.use_device(device))
            yield

    def compare_with_texts(self, images: Sequence[Image], texts: Sequence[str]) -> Array | None:
        """Compute the cosine of each picture with its caption; None without a model that reads texts."""
        if self.text_model is None:
            return None
        for text in dict.fromkeys(texts):
            if text not in self._texts:
                self._texts[text] = normalize_embeddings(self.text_model.embed_texts([text]))[0]
        pictures = normalize_embeddings(self.text_model.embed_pictures(images))
        cosines: Array = (pictures * np.stack([self._texts[text] for text in texts])).sum(axis=-1)
        return cosines
