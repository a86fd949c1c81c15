"""Encoded captions in a cache: each by its own text, a row of what the text encoders made of a list of them."""

from collections.abc import Sequence

from torch import Tensor

from ...errors import UserError
from ..batch import Cond
from .blobs import Bytes, layout, stacked, unpacked
from .keys import text_key
from .records import as_keys
from .store import Store

_OF_ANY_LENGTH = "*"
"""Behind the names of what a family hands out as a list, because captions differ in it."""


def rows_of(cond: Cond, count: int) -> list[dict[str, Tensor]]:
    """The conditioning of ``count`` captions as an entry for each."""
    return [{f"{name}{_OF_ANY_LENGTH}" if isinstance(value, list) else name: value[row].cpu()
             for name, value in cond.items()} for row in range(count)]  # fmt: skip


def cond_of(blobs: Sequence[Bytes]) -> Cond:
    """The other way round: entries as the conditioning of a batch."""
    cond: Cond = {}
    for name in layout(blobs[0]):
        if name.endswith(_OF_ANY_LENGTH):
            cond[name.removesuffix(_OF_ANY_LENGTH)] = [unpacked(blob)[name] for blob in blobs]
            continue
        value = stacked(blobs, name)
        if isinstance(value, list):
            raise AssertionError(f"{name} differs in shape from caption to caption; the family must hand out a list")
        cond[name] = value
    return cond


class TextReader:
    """Conditioning for captions of a run."""

    def __init__(self, store: Store, encoder: str):
        self.store, self.encoder = store, encoder

    def cond(self, captions: Sequence[str]) -> Cond:
        """As ``Family.encode_prompts`` would give it for these captions."""
        rows = self.store.find(as_keys(text_key(caption, self.encoder) for caption in captions))
        if (rows < 0).any():
            missing = captions[int((rows < 0).argmax())]
            raise UserError(f"the caption {missing!r} is not among those that were encoded before the run")
        return cond_of([self.store.blob(int(row)) for row in rows])
