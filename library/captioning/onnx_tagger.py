"""Taggers in ONNX format, as those of SmilingWolf (WD14): images to tags above a threshold."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError, UserError
from ..problems import Problem, report_file

if TYPE_CHECKING:
    from PIL.Image import Image

MODEL_FILE, TAGS_FILE = "model.onnx", "selected_tags.csv"
GENERAL, CHARACTER, RATING = "0", "4", "9"
"""Categories of the tag table."""

_MAX_EMOTICON_LENGTH = 3
"""Tags of at most three characters keep their underscores: they are emoticons, such as ^_^."""


@dataclass(frozen=True)
class TagSelection:
    """The choice of a tagger's tags that go into a caption, under sd-scripts' names."""

    general_threshold: float = 0.35
    character_threshold: float = 0.35
    remove_underscore: bool = False
    undesired_tags: Sequence[str] = ()
    always_first_tags: Sequence[str] = ()
    use_rating_tags: bool = False
    separator: str = ", "


def find_tagger(model: str) -> Path | None:
    """Return the folder of a tagger, downloaded if ``model`` is a hub id; ``None`` for other models."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path if (path / MODEL_FILE).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(model, TAGS_FILE)
        return Path(hf_hub_download(model, MODEL_FILE)).parent
    except EntryNotFoundError:
        return None
    except HFValidationError:
        raise UserError(Problem("model", "no such folder, and not a hub id", value=model)) from None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(Problem("model", str(error).splitlines()[0], value=model)) from None


class OnnxTagger:
    """A tagger on all devices that the installed onnxruntime supports."""

    def __init__(self, folder: Path, selection: TagSelection):
        self.selection = selection
        self.tags = _read_tag_table(folder / TAGS_FILE)
        self.session = _open_session(folder / MODEL_FILE)
        model_input = self.session.get_inputs()[0]
        self.input_name, (batch, height, width, channels) = model_input.name, _check_shape(model_input.shape, folder)
        if channels != 3 or height != width:
            raise FileError(
                [report_file(folder / MODEL_FILE, f"input {model_input.shape} is not batch x size x size x 3")]
            )
        self.size: int = height
        self.fixed_batch_size: int | None = batch if isinstance(batch, int) else None
        outputs = self.session.get_outputs()[0].shape[-1]
        if isinstance(outputs, int) and outputs != len(self.tags):
            raise FileError(
                [report_file(folder / TAGS_FILE, f"has {len(self.tags)} tags, the model has {outputs} outputs")]
            )

    def write_captions(self, images: Sequence["Image"]) -> list[str]:
        """Return a line of tags for each image, the most probable first."""
        pixels = np.stack([_prepare_pixels(image, self.size) for image in images])
        size = self.fixed_batch_size or len(pixels)
        parts = [self._predict(pixels[start : start + size], size) for start in range(0, len(pixels), size)]
        return [self._format_tags(probabilities) for probabilities in np.concatenate(parts)]

    def _predict(self, pixels: NDArray[np.float32], batch_size: int) -> NDArray[np.float32]:
        count = len(pixels)
        if count < batch_size:
            pixels = np.concatenate([pixels, np.zeros((batch_size - count, *pixels.shape[1:]), np.float32)])
        probabilities: NDArray[np.float32] = self.session.run(None, {self.input_name: pixels})[0][:count]
        return probabilities

    def _format_tags(self, probabilities: NDArray[np.float32]) -> str:
        chosen, selection = list[tuple[float, str]](), self.selection
        thresholds = {GENERAL: selection.general_threshold, CHARACTER: selection.character_threshold}
        for (name, category), probability in zip(self.tags, probabilities.tolist(), strict=True):
            if probability >= thresholds.get(category, 2.0):
                chosen.append((probability, name))
        chosen.sort(key=lambda item: -item[0])
        names = [name for _, name in chosen]
        ratings = [
            (p, name)
            for (name, category), p in zip(self.tags, probabilities.tolist(), strict=True)
            if category == RATING
        ]
        if selection.use_rating_tags and ratings:
            names.insert(0, max(ratings)[1])
        names = [_remove_underscore(name) if selection.remove_underscore else name for name in names]
        names = [name for name in names if name not in selection.undesired_tags]
        first = [name for name in selection.always_first_tags if name in names]
        return selection.separator.join([*first, *(name for name in names if name not in first)])


def _remove_underscore(name: str) -> str:
    return name if len(name) <= _MAX_EMOTICON_LENGTH else name.replace("_", " ")


def _read_tag_table(path: Path) -> list[tuple[str, str]]:
    """Return the name and category of each output."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            if not {"name", "category"} <= set(table.fieldnames or ()):
                raise KeyError
            return [(row["name"], row["category"]) for row in table]
    except OSError as error:
        raise FileError([report_file(path, f"cannot be read: {error.strerror}")]) from None
    except (KeyError, csv.Error, UnicodeDecodeError):
        raise FileError([report_file(path, "is not a table with the columns name and category")]) from None


def _open_session(path: Path) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise UserError(
            "taggers in ONNX format need onnxruntime: pip install onnxruntime (or onnxruntime-gpu)"
        ) from None
    try:
        return onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())
    except Exception as error:  # of onnxruntime's own types
        raise FileError([report_file(path, f"cannot be loaded: {str(error).splitlines()[0]}")]) from None


def _check_shape(shape: Sequence[Any], folder: Path) -> tuple[Any, Any, Any, Any]:
    if len(shape) != 4:
        raise FileError([report_file(folder / MODEL_FILE, f"input {list(shape)} is not batch x size x size x 3")])
    return shape[0], shape[1], shape[2], shape[3]


def _prepare_pixels(image: "Image", size: int) -> NDArray[np.float32]:
    """Pad to a white square, resize, and order the channels as blue, green, red from 0 to 255."""
    from PIL import Image

    side = max(image.size)
    square = Image.new("RGB", (side, side), (255, 255, 255))
    square.paste(image, ((side - image.size[0]) // 2, (side - image.size[1]) // 2))
    if side != size:
        filter_ = Image.Resampling.BOX if side > size else Image.Resampling.LANCZOS
        square = square.resize((size, size), filter_)
    return np.asarray(square, np.float32)[:, :, ::-1]
