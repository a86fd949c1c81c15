"""The samples of a run: image, caption, mask, repeats and weight of each, and a fingerprint of all."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..config.types import Resolution
from ..dataset.clip_windows import ClipFrames, FrameWindow
from ..dataset.controls import ControlImage
from ..dataset.image_ref import ImageRef
from ..dataset.mask_files import Mask
from ..dataset.schema import DatasetConfig, SubsetConfig


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of one subset."""

    key: str  # folder and file name, unique; the rest of the path is left out
    image: ImageRef
    size: tuple[int, int]  # (width, height) after EXIF orientation
    caption: str  # lines are alternatives
    dataset_index: int
    subset_index: int
    repeats: float  # uses in an epoch; 2.5 alternates between 2 and 3
    loss_weight: float  # factor of its loss
    is_reg: bool
    content_hash: str  # hash of the file
    mask: Mask | None = None
    controls: tuple[ControlImage, ...] = ()
    window: FrameWindow | None = None  # of a clip

    @property
    def num_frames(self) -> int:
        """The number of frames of a window, 1 for an image."""
        return 1 if self.window is None else self.window.length

    @property
    def has_sound(self) -> bool:
        """Whether the sound of a window is trained together with its frames."""
        return self.window is not None and self.window.has_sound

    @property
    def identity(self) -> str:
        """What tells samples of different content apart: the file, and the window of a clip."""
        if self.window is None:
            return self.content_hash
        return f"{self.content_hash} {' '.join(map(str, self.window.list_facts()))}"


@dataclass(frozen=True, slots=True)
class ClipSummary:
    """One clip of one subset: its frames, and how many windows of each length it gives, which may be none."""

    image: ImageRef
    size: tuple[int, int]
    dataset_index: int
    subset_index: int
    frames: ClipFrames
    num_frames: int  # at the rate of training
    windows: tuple[tuple[int, int], ...]  # lengths and their numbers of windows


@dataclass(frozen=True)
class Manifest:
    """The samples of a run, and notes for the log."""

    datasets: tuple[DatasetConfig, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    caption_counts: tuple[tuple[int, int, str, int, int], ...]
    """Dataset, subset, caption extension, number of captions found, and number of images of each subset."""

    validation_samples: tuple[Sample, ...] = ()  # not trained on
    clips: tuple[ClipSummary, ...] = ()

    @property
    def trained_datasets(self) -> set[int]:
        """Indices of the datasets with images that are not regularization images."""
        return {sample.dataset_index for sample in self.samples if not sample.is_reg}

    def compute_fingerprint(self) -> str:
        """Hash everything that training depends on: images, masks, captions, repeats, weights, settings.

        Where the folders are and what they are called is left out, so that copies are the same; and so is the batch
        size, so that a run can resume with another batch layout.
        """
        return self._compute_fingerprint([sample.image.name_in_folder for sample in self._all_samples])

    def compute_former_fingerprint(self) -> str:
        """Compute the fingerprint of the last release, which checkpoints contain; it depends on names of folders."""
        return self._compute_fingerprint([sample.key for sample in self._all_samples])

    @property
    def _all_samples(self) -> tuple[Sample, ...]:
        return (*self.samples, *self.validation_samples)

    def _compute_fingerprint(self, names: Sequence[str]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for dataset in self.datasets:
            rows = [_format_fingerprint_settings(dataset), *map(_format_fingerprint_settings, dataset.subsets)]
            digest.update(f"[{', '.join(rows)}]".encode())
            if dataset.from_step or dataset.to_step is not None:
                digest.update(ascii((dataset.from_step, dataset.to_step)).encode())
        for name, sample in zip(names, self._all_samples, strict=True):
            digest.update(_format_fingerprint_sample(name, sample))
        return digest.hexdigest()

    def compute_sample_digests(self) -> str:
        """Compute a short digest of each sample, to find out which differ if the fingerprints do.

        Empty for more than ``MAX_DIGESTS`` samples, as every checkpoint contains them.
        """
        if len(self._all_samples) > MAX_DIGESTS:
            return ""
        rows = (_format_fingerprint_sample(sample.image.name_in_folder, sample) for sample in self._all_samples)
        return "".join(hashlib.blake2b(row, digest_size=DIGEST_LENGTH // 2).hexdigest() for row in rows)

    def describe_difference(self, digests: str) -> str:
        """Name the first sample that differs from those with these digests, or is only on one side."""
        own, others = _split_digests(self.compute_sample_digests()), _split_digests(digests)
        if not own or not others:
            return f"more than {MAX_DIGESTS:,} images, which are not compared one by one"
        names = [str(sample.image) for sample in self._all_samples]
        counts = f"{len(own)} images here, {len(others)} there"
        if own == others:
            return "the images are the same, their settings are not"
        length = min(len(own), len(others))
        number = next((number for number in range(length) if own[number] != others[number]), length)
        if len(own) < len(others) and (number == len(own) or own[number] in others[number:]):
            return f"missing here: {'after' if number else 'before'} {names[max(number - 1, 0)]}; {counts}"
        if len(own) > len(others) and (number == len(others) or others[number] in own[number:]):
            return f"only here: {names[number]}; {counts}"
        return f"the first that differs is {names[number]}, image {number + 1}; {counts}"


DIGEST_LENGTH = 8
MAX_DIGESTS = 100_000


def _split_digests(digests: str) -> list[str]:
    return [digests[start : start + DIGEST_LENGTH] for start in range(0, len(digests), DIGEST_LENGTH)]


def _format_fingerprint_sample(name: str, sample: Sample) -> bytes:
    row = (
        name,
        sample.content_hash,
        sample.size,
        sample.caption,
        sample.dataset_index,
        sample.subset_index,
        sample.repeats,
        sample.loss_weight,
    )
    mask = sample.mask and (sample.mask.is_alpha, sample.mask.content_hash)
    window = () if sample.window is None else sample.window.list_facts()
    return ascii((*row, mask, *(control.content_hash for control in sample.controls), *window)).encode()


_FINGERPRINT_EXCLUDED = frozenset(
    "subsets locations dataset_file batch_size dataset_index_in_file resolution_schedule from_step to_step image_dir"
    " metadata_file conditioning_data_dir control_directory conditioning_is_control parquet webdataset recursive"
    " include exclude image_column caption_column control_column"
    " caption_extension class_tokens cache_info cache_directory weight num_repeats is_reg prior_loss_weight"
    " remote video_dir target_frames frame_extraction frame_stride frame_sample max_frames source_fps"
    " keeps_all_frames one_frame window".split()
)
"""Fields of datasets and subsets whose effect is in the samples already, or in options of the run."""

_FINGERPRINT_ADDED = {
    "control_resolution": None,
    "no_resize_control": False,
    "control_from_image": None,
    "multiple_target": False,
    "file_format": "sd-scripts",
}
"""Fields that are in the fingerprint only where they are set: checkpoints of the last release do not know them."""

_FINGERPRINT_NAMES = {"bucket_min_images": "bucket_min_pictures", "uses_musubi_captions": "joins_lines"}
"""Names of fields in the fingerprint as the last release had them, so that its checkpoints can be resumed."""


def _format_fingerprint_settings(table: DatasetConfig | SubsetConfig) -> str:
    pairs = []
    for name in (item.name for item in fields(table) if item.name not in _FINGERPRINT_EXCLUDED):
        value = getattr(table, name)
        if name in _FINGERPRINT_ADDED and value == _FINGERPRINT_ADDED[name]:
            continue
        is_resolution = isinstance(value, Resolution)  # called Size in the last release
        text = f"Size(width={value.width}, height={value.height})" if is_resolution else ascii(value)
        pairs.append(f"({_FINGERPRINT_NAMES.get(name, name)!r}, {text})")
    return f"[{', '.join(pairs)}]"
