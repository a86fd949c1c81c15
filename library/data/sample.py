"""A picture as it is trained: where it is, what is said of it, and how much it counts."""

from dataclasses import dataclass

from ..dataset.image_ref import ImageRef
from .mask_files import Mask


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture of one subset."""

    key: str  # folder and file name; unique, and free of the rest of the path
    image: ImageRef
    size: tuple[int, int]  # (width, height) as it is seen, after EXIF orientation
    caption: str  # lines are alternatives
    dataset_index: int
    subset_index: int
    repeats: float  # in an epoch; 2.5 is twice and three times, in turns
    loss_weight: float  # of its loss
    is_reg: bool
    content_hash: str  # hash of the file
    mask: Mask | None = None
