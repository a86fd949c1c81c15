"""Encoded captions in a cache: each by its own text, a row of what the text encoders made of a list of them."""

from collections.abc import Sequence

from torch import Tensor

from ...errors import UserError
from ..batch import Cond
from .blobs import ByteArray, read_tensor_spans, stack_tensors, deserialize_tensors
from .keys import compute_text_key
from .records import stack_keys
from .store import CacheStore

_VARIABLE_LENGTH_SUFFIX = "*"
"""Behind the names of what a family hands out as a list, because captions differ in it."""


def split_cond(cond: Cond, num_captions: int) -> list[dict[str, Tensor]]:
    """The conditioning of ``count`` captions as an entry for each."""
    return [{f"{name}{_VARIABLE_LENGTH_SUFFIX}" if isinstance(value, list) else name: value[row].cpu()
             for name, value in cond.items()} for row in range(num_captions)]  # fmt: skip


def build_cond(blobs: Sequence[ByteArray]) -> Cond:
    """The other way round: entries as the conditioning of a batch."""
    cond: Cond = {}
    for name in read_tensor_spans(blobs[0]):
        if name.endswith(_VARIABLE_LENGTH_SUFFIX):
            cond[name.removesuffix(_VARIABLE_LENGTH_SUFFIX)] = [deserialize_tensors(blob)[name] for blob in blobs]
            continue
        value = stack_tensors(blobs, name)
        if isinstance(value, list):
            raise AssertionError(f"{name} differs in shape from caption to caption; the family must hand out a list")
        cond[name] = value
    return cond


class TextReader:
    """Conditioning for captions of a run."""

    def __init__(self, store: CacheStore, encoder_fingerprint: str):
        self.store, self.encoder_fingerprint = store, encoder_fingerprint

    def read_cond(self, captions: Sequence[str]) -> Cond:
        """As ``Family.encode_prompts`` would give it for these captions."""
        rows = self.store.find_rows(stack_keys(compute_text_key(caption, self.encoder_fingerprint) for caption in captions))
        if (rows < 0).any():
            missing = captions[int((rows < 0).argmax())]
            raise UserError(f"the caption {missing!r} is not among those that were encoded before the run")
        return build_cond([self.store.read_blob(int(row)) for row in rows])
