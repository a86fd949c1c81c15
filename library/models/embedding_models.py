"""Embeddings of pictures, and of texts, by models of transformers: DINOv2, DINOv3, CLIP, SigLIP 2 and others."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError, take_first_line
from ..problems import Problem

if TYPE_CHECKING:
    from PIL.Image import Image

BATCH_SIZE = 16


def find_embedding_problem(option: str, name: str, *, needs_texts: bool) -> Problem | None:
    """Read the configuration of a model, from a folder or the hub, and say why it cannot be used."""
    import transformers

    auto: Any = transformers  # whose classes have partial type hints
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1) and not path.is_dir():
        return Problem(option, f"no such folder (looked in {path.absolute().parent})", value=name)
    try:
        config = auto.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        return Problem(option, f"cannot be read: {take_first_line(error)}", value=name)
    if not _reads_texts(config) and not _reads_pictures_alone(config):
        text = f"{config.model_type} has no embeddings of pictures"
        return Problem(option, text, "give a DINOv2, DINOv3, CLIP or SigLIP model", value=name)
    if needs_texts and not _reads_texts(config):
        text = f"{config.model_type} has no embeddings of texts"
        return Problem(option, text, "give a CLIP or SigLIP model", value=name)
    return None


class EmbeddingModel:
    """A model with its processors; embeddings are numpy arrays with one row for each picture or text."""

    def __init__(self, option: str, name: str, device: torch.device):
        import transformers

        auto: Any = transformers
        self.name, self.device = name, device
        try:
            config = auto.AutoConfig.from_pretrained(name)
            self.reads_texts = _reads_texts(config)
            self.processor: Any = auto.AutoImageProcessor.from_pretrained(name)
            self.tokenizer: Any = auto.AutoTokenizer.from_pretrained(name) if self.reads_texts else None
            self.model: Any = auto.AutoModel.from_pretrained(name, dtype=torch.float32).to(device).eval()
        except (OSError, ValueError, ImportError) as error:
            raise UserError(Problem(option, f"cannot be loaded: {take_first_line(error)}", value=name)) from None

    @contextmanager
    def use_device(self, device: torch.device) -> Iterator[None]:
        """Compute on another device within the context."""
        original = self.device
        self.device = device
        self.model.to(device)
        try:
            yield
        finally:
            self.device = original
            self.model.to(original)

    @torch.no_grad()
    def embed_pictures(self, images: "Sequence[Image]") -> NDArray[np.float64]:
        """Compute one embedding for each picture: that of CLIP and SigLIP, else of the class token."""
        rows = []
        for start in range(0, len(images), BATCH_SIZE):
            batch = [image.convert("RGB") for image in images[start : start + BATCH_SIZE]]
            inputs = self.processor(images=batch, return_tensors="pt")
            embed = self.model.get_image_features if self.reads_texts else self.model
            known = inspect.signature(embed if self.reads_texts else self.model.forward).parameters
            # NaFlex needs masks and shapes beside the pixels.
            given = {name: value.to(self.device) for name, value in inputs.items() if name in known}
            rows.append(_get_embedding(embed(**given)))
        return _to_array(torch.cat(rows))

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Compute one embedding for each text, which is truncated to the length of the model."""
        length = self.model.config.text_config.max_position_embeddings
        padding = "max_length" if self.model.config.model_type.startswith("siglip") else True  # as SigLIP was trained
        inputs = self.tokenizer(list(texts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        names = [name for name in ("input_ids", "attention_mask") if name in inputs]
        if padding == "max_length":  # SigLIP attends to its padding
            names = ["input_ids"]
        return _to_array(
            _get_embedding(self.model.get_text_features(**{name: inputs[name].to(self.device) for name in names}))
        )


def _reads_texts(config: Any) -> bool:
    """Whether the model embeds pictures and texts; models that answer in texts have both configurations as well."""
    found = _find_class(config)
    return hasattr(found, "get_image_features") and hasattr(found, "get_text_features")


def _reads_pictures_alone(config: Any) -> bool:
    return getattr(_find_class(config), "main_input_name", "") == "pixel_values"


def _find_class(config: Any) -> Any:
    """Return the class that AutoModel makes of a configuration; None if there is none."""
    import transformers

    mapping: Any = transformers.MODEL_MAPPING
    found = mapping[type(config)] if type(config) in mapping else None
    return found[0] if isinstance(found, (tuple, list)) else found


def _get_embedding(output: Any) -> Tensor:
    """Return the embedding of a model's output, which is a tensor in some versions of transformers."""
    if isinstance(output, Tensor):
        return output
    pooled = getattr(output, "pooler_output", None)
    found: Tensor = output.last_hidden_state[:, 0] if pooled is None else pooled
    return found


def _to_array(embeddings: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = embeddings.double().cpu().numpy()
    return array
