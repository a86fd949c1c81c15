"""What a dataset file may say: each key of sd-scripts with its type, the levels it may stand on and its flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config.options import Option, define_option, iter_options
from ..config.schema import RunConfig
from ..config.schema_data import DataConfig
from ..config.types import Resolution, ResolutionSchedule

GENERAL_TABLE, DATASET_TABLE, SUBSET_TABLE = "[general]", "[[datasets]]", "[[datasets.subsets]]"


DatasetKind = Literal["dreambooth", "finetuning", "controlnet"]
"""Captions in files beside the pictures, captions in a metadata file, or pictures with masks."""


@dataclass(frozen=True)
class SubsetConfig:
    """One folder of pictures, or one metadata file, with everything that is said about it."""

    image_dir: str | None
    metadata_file: str | None
    parquet: tuple[str, ...]
    webdataset: tuple[str, ...]
    recursive: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    image_column: str | None
    caption_column: str | None
    conditioning_data_dir: str | None
    is_reg: bool
    alpha_mask: bool
    num_repeats: int
    class_tokens: str | None
    caption_extension: tuple[str, ...]
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
    face_crop_aug_range: tuple[float, float] | None
    resize_interpolation: str | None
    custom_attributes: Mapping[str, Any] | None
    cache_info: bool
    cache_directory: str | None
    validation_split: float
    dataset_file: Path = field(compare=False)  # the dataset file
    locations: Mapping[str, str] = field(compare=False, repr=False)  # "file:line" of each key; "" for the subset itself
    join_caption_lines: bool = False  # a caption of several lines is one, as for musubi-tuner; no key says so

    def locate(self, key: str) -> str:
        """Where the value of ``key`` was set, for the start of a message."""
        return self.locations.get(key, self.locations[""])

    def resolve_image_dir(self) -> Path | None:
        """The folder of pictures: seen from the working directory as in sd-scripts, or else from the dataset file."""
        return None if self.image_dir is None else resolve_path(self.dataset_file, self.image_dir)

    def resolve_metadata_file(self) -> Path | None:
        """The metadata file, looked for in the same two places."""
        return None if self.metadata_file is None else resolve_path(self.dataset_file, self.metadata_file)

    def resolve_cache_directory(self) -> Path | None:
        """For what is kept, looked for in the same two places."""
        return None if self.cache_directory is None else resolve_path(self.dataset_file, self.cache_directory)

    def resolve_mask_dir(self) -> Path | None:
        """The folder of masks, looked for in the same two places."""
        return (
            None if self.conditioning_data_dir is None else resolve_path(self.dataset_file, self.conditioning_data_dir)
        )

    @property
    def normalized_caption_extensions(self) -> tuple[str, ...]:
        """``caption_extension`` with the dots, which may be left out."""
        return tuple(
            ending if ending.startswith(".") or not ending else f".{ending}" for ending in self.caption_extension
        )

    @property
    def source_key(self) -> str:
        """The key that names the images."""
        keys = ("parquet", "webdataset", "metadata_file")
        return next((key for key in keys if getattr(self, key)), "image_dir")

    @property
    def source(self) -> str:
        """Where the pictures come from, as it was written."""
        shards = self.parquet or self.webdataset
        return ", ".join(shards) if shards else str(self.metadata_file or self.image_dir)


@dataclass(frozen=True)
class DatasetConfig:
    """Subsets that are trained at one resolution with one batch size."""

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
    locations: Mapping[str, str] = field(compare=False, repr=False)
    weight: float | None = None  # share of an epoch, beside those of the other datasets
    resolution_schedule: ResolutionSchedule | None = None
    from_step: int = 0  # steps that are done before the first that shows it
    to_step: int | None = None  # steps that are done after the last that does
    dataset_number: int = 0  # in the file

    def locate(self, key: str) -> str:
        """Where the value of ``key`` was set, for the start of a message."""
        return self.locations.get(key, self.locations[""])

    def format_location(self, key: str) -> str:
        """The same with the key, which an option of the run tells by itself."""
        place = self.locate(key)
        return place if place.startswith("--") else f"{place}: {key}"


def resolve_path(dataset_file: Path, name: str) -> Path:
    """``name`` seen from the working directory; if nothing is there but beside ``file`` there is, that."""
    path = Path(name).expanduser()
    beside = dataset_file.parent / path
    return beside if not path.exists() and beside.exists() else path


@dataclass(frozen=True)
class DatasetKey:
    """One key of the file."""

    option: Option  # how its value is read
    tables: tuple[str, ...]
    flag: str | None = None  # the option of the run that stands in where the file is silent

    @property
    def name(self) -> str:
        return self.option.name


class _FloatRange:
    syntax: ClassVar[str] = "[SMALLEST, LARGEST]"

    @classmethod
    def parse(cls, value: Any) -> tuple[float, float]:
        if not isinstance(value, list) or len(value) != 2 or any(type(item) not in (int, float) for item in value):
            raise ValueError("expected two numbers, such as [2.0, 4.0]")
        return float(value[0]), float(value[1])


class _FreeTable:
    syntax: ClassVar[str] = "TABLE"

    @classmethod
    def parse(cls, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected a table, such as { name = 'value' }")
        return value


@dataclass(frozen=True)
class _DatasetKeys:
    network_multiplier: float = define_option(1.0, "strength of the adapter while training")
    weight: float | None = define_option(None, "share of an epoch, beside the weights of the other datasets")
    from_step: int = define_option(0, "the dataset is trained after so many steps", minimum=0)
    to_step: int | None = define_option(None, "the dataset is trained until so many steps are done", minimum=1)


@dataclass(frozen=True)
class _SharedKeys:
    class_tokens: str | None = define_option(None, "caption of pictures that have none")
    face_crop_aug_range: _FloatRange | None = define_option(None, "cut around faces")  # noqa: RUF009
    custom_attributes: _FreeTable | None = define_option(None, "free table")  # noqa: RUF009
    cache_info: bool = define_option(False, "keep sizes and captions in a file")
    cache_directory: str | None = define_option(None, "folder for what is kept of these pictures")
    recursive: bool = define_option(False, "search folders below the folder, too")
    include: tuple[str, ...] = define_option((), "patterns of which a picture's path has to match one")
    exclude: tuple[str, ...] = define_option((), "patterns of which a picture's path must match none")
    image_column: str | None = define_option(None, "column of pictures, or of their file names")
    caption_column: str | None = define_option(None, "column of captions")


@dataclass(frozen=True)
class _SubsetKeys:
    image_dir: str | None = define_option(None, "folder of pictures")
    metadata_file: str | None = define_option(
        None, "captions of all pictures in one .json, .jsonl, .csv or .parquet file"
    )
    parquet: tuple[str, ...] = define_option((), "parquet files that hold the pictures")
    webdataset: tuple[str, ...] = define_option((), "tar files that hold the pictures")
    conditioning_data_dir: str | None = define_option(None, "folder of masks")
    is_reg: bool = define_option(False, "regularisation pictures")


@dataclass(frozen=True)
class _FileOnlyKeys:
    dataset: _DatasetKeys = field(default_factory=_DatasetKeys)
    shared: _SharedKeys = field(default_factory=_SharedKeys)
    subset: _SubsetKeys = field(default_factory=_SubsetKeys)


_DATASET_FLAGS = {
    "resolution",
    "train_batch_size",
    "enable_bucket",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "bucket_no_upscale",
    "bucket_mode",
    "bucket_max_crop",
    "bucket_min_images",
    "validation_seed",
    "resolution_schedule",
}


_SUBSET_FLAGS = {"alpha_mask"}


_FLAG_TO_KEY = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}


def _build_keys() -> dict[str, DatasetKey]:
    levels = {
        "dataset": (GENERAL_TABLE, DATASET_TABLE),
        "shared": (GENERAL_TABLE, DATASET_TABLE, SUBSET_TABLE),
        "subset": (SUBSET_TABLE,),
    }
    keys = {option.name: DatasetKey(option, levels[option.group]) for option in iter_options(_FileOnlyKeys)}
    wanted = {item.name for item in (*fields(SubsetConfig), *fields(DatasetConfig))}
    for option in iter_options(RunConfig):
        name = _FLAG_TO_KEY.get(option.name, option.name)
        if option.group == "data" and name in wanted:
            level: tuple[str, ...] = levels["dataset"] if option.name in _DATASET_FLAGS else levels["shared"]
            level = levels["subset"] if option.name in _SUBSET_FLAGS else level
            level = () if name == "prior_loss_weight" else level  # sd-scripts takes it from the run alone
            keys[name] = DatasetKey(_rename_option(option, name), level, option.name)
    return keys


def _rename_option(option: Option, name: str) -> Option:
    return Option(**{**{item.name: getattr(option, item.name) for item in fields(Option)}, "name": name})


DATASET_KEYS: Mapping[str, DatasetKey] = _build_keys()


def collect_flag_defaults(config: DataConfig) -> dict[str, Any]:
    """What the run's options say for keys that the file leaves out."""
    return {key.name: getattr(config, key.flag) for key in DATASET_KEYS.values() if key.flag is not None}
