"""The latents of a run's pictures as a cache holds them, for a batch at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch import Moments
from .blobs import Bytes, layout, stacked
from .store import Store
from .wanted import WantedPictures

MOMENTS, MASK = "moments", "mask"
"""Names of the tensors (2, C, H, W), and (1, H, W) where a picture has a mask: shares of each latent, 0..1."""


class LatentReader:
    """Mean and spread of each picture's latents, copied once, from the file into the batch; and the masks."""

    def __init__(self, store: Store, wanted: WantedPictures, samples: int):
        self.store = store
        self._rows = np.full((samples, 2), -1, np.int64)
        self._rows[wanted.samples, wanted.mirrored.astype(np.int64)] = store.find(wanted.keys)

    def moments(self, samples: Sequence[int], mirrored: Sequence[bool]) -> Moments:
        """Of samples of one bucket, each straight or mirrored."""
        both = stacked(self._blobs(samples, mirrored), MOMENTS)
        if not isinstance(both, Tensor):
            raise AssertionError("a batch is of one bucket, whose latents have one size")
        return Moments(both)

    def masks(self, samples: Sequence[int], mirrored: Sequence[bool]) -> Tensor | None:
        """The same for masks; of a picture without one everything counts, and nothing is there when none has one."""
        blobs = self._blobs(samples, mirrored)
        places = [layout(blob) for blob in blobs]
        if not any(MASK in place for place in places):
            return None
        height, width = places[0][MOMENTS].shape[-2:]
        return torch.stack([stacked([blob], MASK)[0] if MASK in place else torch.ones(1, height, width)
                            for blob, place in zip(blobs, places, strict=True)])  # fmt: skip

    def _blobs(self, samples: Sequence[int], mirrored: Sequence[bool]) -> list[Bytes]:
        rows = self._rows[list(samples), [int(is_mirrored) for is_mirrored in mirrored]].tolist()
        return [self.store.blob(row) for row in rows]
