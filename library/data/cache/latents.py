"""The latents of a run's pictures as a cache holds them, for a batch at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch import Moments
from .blobs import ByteArray, read_tensor_spans, stack_tensors
from .store import CacheStore
from .wanted import LatentKeys

MOMENTS_TENSOR, MASK_TENSOR = "moments", "mask"
"""Names of the tensors (2, C, H, W), and (1, H, W) where a picture has a mask: shares of each latent, 0..1."""


class LatentReader:
    """Mean and spread of each picture's latents, copied once, from the file into the batch; and the masks."""

    def __init__(self, store: CacheStore, latent_keys: LatentKeys, num_samples: int):
        self.store = store
        self._rows = np.full((num_samples, 2), -1, np.int64)
        self._rows[latent_keys.sample_indices, latent_keys.flipped.astype(np.int64)] = store.find_rows(latent_keys.keys)

    def read_moments(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Moments:
        """Of samples of one bucket, each straight or mirrored."""
        both = stack_tensors(self._read_blobs(sample_indices, flipped), MOMENTS_TENSOR)
        if not isinstance(both, Tensor):
            raise AssertionError("a batch is of one bucket, whose latents have one size")
        return Moments(both)

    def read_masks(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Tensor | None:
        """The same for masks; of a picture without one everything counts, and nothing is there when none has one."""
        blobs = self._read_blobs(sample_indices, flipped)
        places = [read_tensor_spans(blob) for blob in blobs]
        if not any(MASK_TENSOR in place for place in places):
            return None
        height, width = places[0][MOMENTS_TENSOR].shape[-2:]
        return torch.stack([stack_tensors([blob], MASK_TENSOR)[0] if MASK_TENSOR in place else torch.ones(1, height, width)
                            for blob, place in zip(blobs, places, strict=True)])  # fmt: skip

    def _read_blobs(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> list[ByteArray]:
        rows = self._rows[list(sample_indices), [int(is_mirrored) for is_mirrored in flipped]].tolist()
        return [self.store.read_blob(row) for row in rows]
