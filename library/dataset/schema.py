"""Schema of the dataset file: the keys of sd-scripts and ours, each with its type, its tables and its flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config.option_needs import HasValue, IsSet, LacksValue, Needs
from ..config.options import ALWAYS, Option, define_option, iter_options
from ..config.schema import RunConfig
from ..config.schema_data import DataConfig
from ..config.types import FaceCropRange, Resolution, ResolutionSchedule
from ..problems import Place, Problem
from ..storage.remote_path import build_remote_path, is_remote_url, strip_query
from ..storage.remote_store import RemoteSettings, RemoteStore
from .caption_files import DEFAULT_EXTENSION
from .clip_windows import DEFAULT_MAX_FRAMES, FrameExtraction, FrameRule, FrameSettings, RateConversion
from .one_frame import OneFrame

GENERAL_TABLE, DATASET_TABLE, SUBSET_TABLE = "[general]", "[[datasets]]", "[[datasets.subsets]]"
DatasetFormat = Literal["sd-scripts", "musubi-tuner"]
DatasetKind = Literal["dreambooth", "finetuning", "controlnet"]
"""Captions in files next to the images, captions in a metadata file, or ``conditioning_data_dir`` is set."""


class _LocatedKeys:
    locations: Mapping[str, Place]

    def locate(self, key: str) -> Place:
        """Return where the value of ``key`` was set, for the start of a message, under the name that it has there."""
        place = self.locations.get(key, self.locations[""])
        return place if place.key else place.with_key(key)

    def is_set_in_file(self, key: str) -> bool:
        """Whether the dataset file sets ``key``, and not an option of the run."""
        return key in self.locations and not self.locations[key].flag

    def report(self, key: str, text: str, fix: str = "", *, others: tuple[str, ...] = ()) -> Problem:
        """Build a problem of the value of ``key``."""
        return Problem(key, text, fix, self.locate(key), others=others)


@dataclass(frozen=True)
class SubsetConfig(_LocatedKeys):
    """One source of images or clips (folder, metadata file, parquet files or tar shards) with its settings."""

    image_dir: str | None
    metadata_file: str | None
    parquet: tuple[str, ...]
    webdataset: tuple[str, ...]
    recursive: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    image_column: str | None
    caption_column: str | None
    control_column: tuple[str, ...]
    conditioning_data_dir: str | None
    control_directory: str | None
    is_reg: bool
    alpha_mask: bool
    num_repeats: int
    class_tokens: str | None
    caption_extension: tuple[str, ...] | None  # None means not set
    caption_separator: str
    shuffle_caption: bool
    keep_tokens: int
    keep_tokens_separator: str
    secondary_separator: str | None
    enable_wildcard: bool
    caption_prefix: str | None
    caption_suffix: str | None
    caption_dropout_rate: float
    caption_dropout_every_n_epochs: int
    caption_tag_dropout_rate: float
    token_warmup_min: int
    token_warmup_step: float
    color_aug: bool
    flip_aug: bool
    random_crop: bool
    face_crop_aug_range: FaceCropRange | None
    resize_interpolation: str | None
    custom_attributes: Mapping[str, Any] | None
    cache_info: bool
    cache_directory: str | None
    validation_split: float
    dataset_file: Path | None = field(compare=False)
    locations: Mapping[str, Place] = field(compare=False, repr=False)  # of each key; "" for the subset itself
    control_from_image: str | None = None
    multiple_target: bool = False
    video_dir: str | None = None
    target_frames: tuple[int, ...] = ()
    frame_extraction: FrameExtraction = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = DEFAULT_MAX_FRAMES
    source_fps: float | None = None
    keeps_all_frames: bool = False  # without source_fps, as in musubi-tuner; not a key of the file
    uses_musubi_captions: bool = False  # captions of several lines, and no images without one; not a key of the file
    conditioning_is_control: bool = False  # without --masked_loss, conditioning_data_dir has control images
    remote: RemoteStore = field(default_factory=RemoteStore, compare=False, repr=False)  # reads URLs; not a key

    def resolve_image_dir(self) -> Path | None:
        """Return the folder of the images, or of the clips."""
        return self._resolve(self.image_dir if self.video_dir is None else self.video_dir)

    @property
    def frame_settings(self) -> FrameSettings:
        """The keys that choose the frames of clips."""
        return FrameSettings(
            target_frames=self.target_frames,
            frame_extraction=self.frame_extraction,
            frame_stride=self.frame_stride,
            frame_sample=self.frame_sample,
            max_frames=self.max_frames,
        )

    def build_rate_conversion(self, rule: FrameRule) -> RateConversion:
        """Build the conversion of clips to the rate of a model."""
        if self.source_fps is None and self.keeps_all_frames:
            return RateConversion()
        return RateConversion(rule.fps, self.source_fps)

    def resolve_metadata_file(self) -> Path | None:
        return self._resolve(self.metadata_file)

    def resolve_cache_directory(self) -> Path | None:
        return self._resolve(self.cache_directory)

    def resolve_mask_dir(self) -> Path | None:
        return None if self.conditioning_is_control else self._resolve(self.conditioning_data_dir)

    @property
    def control_key(self) -> str | None:
        """The key that sets the folder of control images."""
        if self.control_directory is not None:
            return "control_directory"
        return "conditioning_data_dir" if self.conditioning_is_control else None

    def resolve_control_dir(self) -> Path | None:
        return None if self.control_key is None else self._resolve(getattr(self, self.control_key))

    def _resolve(self, name: str | None) -> Path | None:
        return None if name is None else resolve_path(self.dataset_file, name, self.remote)

    @property
    def normalized_caption_extensions(self) -> tuple[str, ...]:
        """``caption_extension`` with leading dots, which are optional in the file."""
        names = self.caption_extension or (DEFAULT_EXTENSION,)
        return tuple(name if name.startswith(".") or not name else f".{name}" for name in names)

    @property
    def can_fall_back_to_txt(self) -> bool:
        """Whether .txt is read where there is no .caption: not where sd-scripts would find another caption."""
        return self.caption_extension is None and self.class_tokens is None

    @property
    def source_key(self) -> str:
        """The key that sets the source of the images."""
        keys = ("parquet", "webdataset", "metadata_file", "video_dir")
        return next((key for key in keys if getattr(self, key)), "image_dir")

    @property
    def source(self) -> str:
        """The source of the images as written in the file."""
        shards = self.parquet or self.webdataset
        return ", ".join(map(strip_query, shards or (str(self.metadata_file or self.video_dir or self.image_dir),)))


@dataclass(frozen=True)
class DatasetConfig(_LocatedKeys):
    """Subsets that are trained at the same resolution and batch size."""

    kind: DatasetKind
    resolution: Resolution
    batch_size: int
    enable_bucket: bool
    min_bucket_reso: int
    max_bucket_reso: int
    bucket_reso_steps: int
    bucket_no_upscale: bool
    bucket_mode: Literal["kohya", "symmetric"]
    bucket_max_crop: float
    bucket_min_images: int
    network_multiplier: float
    validation_split: float
    validation_seed: int | None
    resize_interpolation: str | None
    prior_loss_weight: float
    subsets: tuple[SubsetConfig, ...]
    locations: Mapping[str, Place] = field(compare=False, repr=False)
    weight: float | None = None  # share of an epoch relative to the other datasets
    resolution_schedule: ResolutionSchedule | None = None
    from_step: int = 0  # first step that trains this dataset, counted from 0
    to_step: int | None = None  # end of these steps, exclusive
    dataset_index_in_file: int = 0  # index in the file
    control_resolution: Resolution | None = None  # the resolution of control images; None means that of their pictures
    no_resize_control: bool = False
    one_frame: OneFrame | None = None  # musubi-tuner's keys of one-frame training, which is an option of the run
    window: int | None = None  # musubi-tuner's size of FramePack's sections in pictures, which is one, too
    file_format: DatasetFormat = "sd-scripts"  # whose rules sizes and buckets follow; not a key of the file

    @property
    def has_own_control_size(self) -> bool:
        """Whether control images have sizes of their own, not those of their pictures."""
        return self.no_resize_control or self.control_resolution is not None


def resolve_path(dataset_file: Path | None, name: str, remote: RemoteStore) -> Path:
    """Resolve relative to the working directory, as sd-scripts does, or else to the folder of the dataset file.

    For a URL the result is a ``RemotePath``.
    """
    if is_remote_url(name):
        return build_remote_path(name, remote)
    path = Path(name).expanduser()
    if dataset_file is None:
        return path
    next_to_file = dataset_file.parent / path
    return next_to_file if not path.exists() and next_to_file.exists() else path


@dataclass(frozen=True)
class DatasetKey:
    """One key of the dataset file."""

    option: Option  # parses the value
    tables: tuple[str, ...]
    flag: str | None = None  # option of the run that supplies the default

    @property
    def name(self) -> str:
        return self.option.name


class _FreeTable:
    syntax: ClassVar[str] = "TABLE"

    @classmethod
    def parse(cls, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected a table, such as { name = 'value' }")
        return value


@dataclass(frozen=True)
class _DatasetKeys:
    network_multiplier: float = define_option(1.0, "multiplier of the LoRA during training", needs=ALWAYS)
    weight: float | None = define_option(
        None, "share of an epoch relative to the weights of the other datasets", needs=ALWAYS
    )
    from_step: int = define_option(0, "train the dataset from this step on", minimum=0, needs=ALWAYS)
    to_step: int | None = define_option(None, "train the dataset up to this step", minimum=1, needs=ALWAYS)
    control_resolution: Resolution | None = define_option(  # noqa: RUF009
        None,
        "resolution of control images; without it, that of their pictures",
        needs=(IsSet("has_controls", "no subset here has control images", "control images"),),
    )
    no_resize_control: bool = define_option(
        False,
        "keep the size of control images; with control_resolution, shrink only the larger ones",
        needs=(IsSet("has_controls", "no subset here has control images", "control images"),),
    )


_HAS_CLIPS = (IsSet("has_clips", "no subset here has clips", "clips"),)


def _of_extraction(name: FrameExtraction) -> Needs:
    """Return the needs of a key that one way to cut clips reads."""
    return (*_HAS_CLIPS, HasValue("frame_extraction", (name,)))


@dataclass(frozen=True)
class _SharedKeys:
    class_tokens: str | None = define_option(None, "caption of images without one", needs=ALWAYS)
    control_from_image: str | None = define_option(
        None,
        "make the control image from the image itself: canny, inpainting, colorization, deblurring, or a random mask",
        needs=ALWAYS,
    )
    multiple_target: bool = define_option(
        False,
        "numbered images beside each image, NAME_0.png, NAME_1.png ..., are its layers, for models that make layers",
        needs=ALWAYS,
    )
    custom_attributes: _FreeTable | None = define_option(None, "free table", needs=ALWAYS)  # noqa: RUF009
    cache_info: bool = define_option(False, "cache sizes and captions in a file", needs=ALWAYS)
    cache_directory: str | None = define_option(None, "folder for the caches of these images", needs=ALWAYS)
    recursive: bool = define_option(False, "search subfolders too", needs=ALWAYS)
    include: tuple[str, ...] = define_option(
        (), "use only images whose path matches one of these patterns", needs=ALWAYS
    )
    exclude: tuple[str, ...] = define_option((), "skip images whose path matches one of these patterns", needs=ALWAYS)
    image_column: str | None = define_option(None, "column of images, or of their file names", needs=ALWAYS)
    caption_column: str | None = define_option(None, "column of captions", needs=ALWAYS)
    target_frames: tuple[int, ...] = define_option(
        (),
        "lengths of the windows that are cut out of each clip",
        minimum=1,
        needs=(*_HAS_CLIPS, LacksValue("frame_extraction", ("full",))),
    )
    frame_extraction: FrameExtraction = define_option(  # noqa: RUF009
        "head",
        "windows of a clip: its beginning, consecutive, overlapping or evenly spread ones, or the whole clip",
        needs=_HAS_CLIPS,
    )
    frame_stride: int = define_option(
        1, "slide: frames from one window to the next", minimum=1, needs=_of_extraction("slide")
    )
    frame_sample: int = define_option(1, "uniform: number of windows", minimum=1, needs=_of_extraction("uniform"))
    max_frames: int = define_option(
        DEFAULT_MAX_FRAMES, "full: the most frames of a clip", minimum=1, needs=_of_extraction("full")
    )
    source_fps: float | None = define_option(
        None,
        "frames per second of all clips, by which frames are counted and dropped as musubi-tuner does",
        minimum=0.001,
        needs=_HAS_CLIPS,
    )


@dataclass(frozen=True)
class _SubsetKeys:
    image_dir: str | None = define_option(None, "folder of images", needs=ALWAYS)
    video_dir: str | None = define_option(None, "folder of video files, for models that make videos", needs=ALWAYS)
    metadata_file: str | None = define_option(
        None, ".json, .jsonl, .csv or .parquet file of image paths and captions", needs=ALWAYS
    )
    parquet: tuple[str, ...] = define_option((), "parquet files that contain the images", needs=ALWAYS)
    webdataset: tuple[str, ...] = define_option((), "tar shards that contain the images", needs=ALWAYS)
    conditioning_data_dir: str | None = define_option(
        None, "folder of control images; with --masked_loss, folder of masks", needs=ALWAYS
    )
    control_directory: str | None = define_option(None, "folder of control images, for editing models", needs=ALWAYS)
    control_column: tuple[str, ...] = define_option((), "columns of control images in parquet files", needs=ALWAYS)
    is_reg: bool = define_option(False, "regularization images", needs=ALWAYS)


@dataclass(frozen=True)
class _FileOnlyKeys:
    dataset: _DatasetKeys = field(default_factory=_DatasetKeys)
    shared: _SharedKeys = field(default_factory=_SharedKeys)
    subset: _SubsetKeys = field(default_factory=_SubsetKeys)


_TABLES_BY_LEVEL = {
    "dataset": (GENERAL_TABLE, DATASET_TABLE),
    "shared": (GENERAL_TABLE, DATASET_TABLE, SUBSET_TABLE),
    "subset": (SUBSET_TABLE,),
    "run": (),
}


def _build_keys() -> dict[str, DatasetKey]:
    keys = {option.name: DatasetKey(option, _TABLES_BY_LEVEL[option.group]) for option in iter_options(_FileOnlyKeys)}
    for option in iter_options(RunConfig):
        if option.dataset_table:
            name = option.dataset_key or option.name
            keys[name] = DatasetKey(replace(option, name=name), _TABLES_BY_LEVEL[option.dataset_table], option.name)
    return keys


DATASET_KEYS: Mapping[str, DatasetKey] = _build_keys()


def build_remote_store(config: DataConfig) -> RemoteStore:
    """Build what reads the URLs of a run; a new one sees what the servers have now."""
    return RemoteStore(
        RemoteSettings(config.remote_cache_dir, config.remote_cache_size.num_bytes, config.remote_retry_seconds)
    )


def collect_flag_defaults(config: DataConfig) -> dict[str, Any]:
    """Collect the values of the run's options for keys that the file does not set."""
    defaults = {key.name: getattr(config, key.flag) for key in DATASET_KEYS.values() if key.flag is not None}
    if config.conditioning_dropout_prob:  # captions alone, and captions with pictures
        defaults["caption_dropout_rate"] = 2 * config.conditioning_dropout_prob
    return defaults
