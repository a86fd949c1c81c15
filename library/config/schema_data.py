"""Options of the dataset, caches and validation."""

from dataclasses import dataclass
from typing import Literal

from .option_needs import AnyOf, HasValue, IsSet, IsUnset, LacksValue, OfModel
from .options import ALWAYS, Alias, define_option
from .types import MAX_SIDE, FaceCropRange, MemorySize, Resolution, ResolutionSchedule

_HAS_MASKS = LacksValue(
    "mask_source", (None,), "no subset has masks (conditioning_data_dir or alpha_mask)", "images with masks"
)
_UPSCALES = LacksValue("bucket_no_upscale", (True,), "bucket_no_upscale is set")
_HAS_NATIVE_STAGE = IsSet("has_native_stage", text="a native stage in `resolution_schedule`")
_HAS_KOHYA_BUCKETS = LacksValue(
    "file_format",
    ("musubi-tuner",),
    "the dataset file is in musubi-tuner's format, whose buckets follow from resolution alone",
    "a dataset file in sd-scripts' format",
)


@dataclass(frozen=True)
class DataConfig:
    """Images and captions; most of these can also be set in the dataset TOML, for each dataset or subset."""

    dataset_config: str | None = define_option(
        None,
        "dataset TOML: the folders of images and how to train on them",
        needs=ALWAYS,
        is_compared_by_content=True,
        is_path=True,
        is_basic=True,
        is_for_texts=True,
    )
    train_data_dir: str | None = define_option(
        None,
        "without dataset_config: folder of folders named REPEATS_CLASS, such as '10_mika dog'; with in_json, folder of "
        "the images",
        needs=(IsUnset("dataset_config"),),
        is_compared_by_content=True,
        is_path=True,
        is_for_texts=True,
    )
    reg_data_dir: str | None = define_option(
        None,
        "folder of regularization images, laid out like train_data_dir",
        needs=(IsUnset("dataset_config"),),
        is_compared_by_content=True,
        is_path=True,
        is_for_texts=True,
    )
    in_json: str | None = define_option(
        None,
        "without dataset_config: metadata file (.json, .jsonl) of the images",
        needs=(IsUnset("dataset_config"),),
        is_compared_by_content=True,
        is_path=True,
        is_for_texts=True,
    )
    slider_prompts: str | None = define_option(
        None,
        "instead of images: file of texts, TOML or YAML, from which a slider is learned or a concept erased "
        "(docs/sliders.md)",
        needs=ALWAYS,
        is_compared_by_content=True,
        is_path=True,
        aliases=(Alias("prompts_file"),),
        is_for_texts=True,
    )
    train_batch_size: int = define_option(
        1,
        "batch size per device and micro-batch",
        minimum=1,
        maximum=65_536,
        needs=ALWAYS,
        is_compared_by_content=True,
        is_basic=True,
        dataset_table="dataset",
        dataset_key="batch_size",
    )
    resolution: Resolution | None = define_option(
        None,
        "training resolution in pixels: 512, or 512,768 (width,height)",
        needs=(IsUnset("resolution_schedule"),),
        is_basic=True,
        dataset_table="dataset",
    )
    resolution_schedule: ResolutionSchedule | None = define_option(
        None,
        "train at several resolutions in turn, such as 256:1000,512:1000,native (RESOLUTION:STEPS); the last may omit "
        "its steps, and native trains each image at its own size",
        needs=ALWAYS,
        dataset_table="dataset",
    )
    dataset_repeats: int = define_option(
        1,
        "repeats of each image per epoch",
        minimum=1,
        needs=(
            AnyOf(
                (IsSet("dataset_config"), IsSet("in_json"), IsUnset("train_data_dir")),
                "the names of the folders in train_data_dir set the repeats",
            ),
        ),
        dataset_table="shared",
        dataset_key="num_repeats",
    )
    enable_bucket: bool = define_option(
        False, "aspect ratio bucketing: train each image at the nearest bucket", needs=ALWAYS, dataset_table="dataset"
    )
    min_bucket_reso: int = define_option(
        256,
        "minimum side of a bucket in pixels",
        minimum=1,
        maximum=MAX_SIDE,
        needs=(IsSet("enable_bucket"), _HAS_KOHYA_BUCKETS, _UPSCALES),
        dataset_table="dataset",
    )
    max_bucket_reso: int = define_option(
        1024,
        "maximum side of a bucket in pixels",
        minimum=1,
        maximum=MAX_SIDE,
        needs=(
            IsSet("enable_bucket"),
            AnyOf((_HAS_NATIVE_STAGE, _HAS_KOHYA_BUCKETS)),
            AnyOf((_HAS_NATIVE_STAGE, _UPSCALES)),
        ),
        dataset_table="dataset",
    )
    bucket_reso_steps: int = define_option(
        64,
        "bucket sides are multiples of this many pixels",
        minimum=1,
        needs=(IsSet("enable_bucket"), _HAS_KOHYA_BUCKETS),
        dataset_table="dataset",
    )
    bucket_no_upscale: bool = define_option(
        False,
        "never upscale images; buckets follow the image sizes",
        needs=(IsSet("enable_bucket"),),
        dataset_table="dataset",
    )
    bucket_mode: Literal["kohya", "symmetric"] = define_option(
        "kohya",
        "kohya: buckets of sd-scripts; symmetric: buckets of equal area for portrait and landscape alike, chosen by "
        "log aspect ratio",
        needs=(IsSet("enable_bucket"), _HAS_KOHYA_BUCKETS),
        dataset_table="dataset",
    )
    bucket_max_crop: float = define_option(
        1.0,
        "bucket_mode symmetric: reject images that lose a larger fraction by cropping",
        minimum=0,
        maximum=1,
        needs=(HasValue("bucket_mode", ("symmetric",)),),
        dataset_table="dataset",
    )
    bucket_min_images: int = define_option(
        1,
        "bucket_mode symmetric: merge buckets with fewer images (without repeats) into the nearest bucket",
        minimum=1,
        needs=(HasValue("bucket_mode", ("symmetric",)),),
        former_name="bucket_min_pictures",
        dataset_table="dataset",
    )
    resize_interpolation: (
        Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"] | None
    ) = define_option(
        None,
        "interpolation for resizing; default: area to downscale, Lanczos to upscale",
        needs=ALWAYS,
        metadata_key="ss_resize_interpolation",
        dataset_table="shared",
    )
    flip_aug: bool = define_option(
        False,
        "flip half of the images horizontally, chosen anew in each epoch",
        needs=ALWAYS,
        varies="image",
        dataset_table="shared",
    )
    random_crop: bool = define_option(
        False, "crop at a random position instead of the center", needs=ALWAYS, varies="image", dataset_table="shared"
    )
    face_crop_aug_range: FaceCropRange | None = define_option(
        None,
        "crop around the face that a file name gives (NAME_CENTERX_CENTERY_WIDTH_HEIGHT.png), so that the shorter side "
        "of the crop is MIN to MAX times the size of the face",
        needs=(IsUnset("enable_bucket", "enable_bucket is set, whose crops sd-scripts takes instead"),),
        varies="image",
        dataset_table="shared",
    )
    color_aug: bool = define_option(
        False,
        "change hue or gamma slightly in a third of the images, chosen anew in each epoch",
        needs=ALWAYS,
        varies="image",
        dataset_table="shared",
    )
    alpha_mask: bool = define_option(
        False,
        "use the alpha channel as a loss mask: transparent pixels are excluded from the loss",
        needs=(
            LacksValue(
                "mask_source", ("folder",), "conditioning_data_dir has the masks", "no masks in `conditioning_data_dir`"
            ),
        ),
        dataset_table="subset",
    )
    masked_loss: bool = define_option(
        False,
        "weight the loss by masks, the grayscale images in conditioning_data_dir of a subset",
        needs=(_HAS_MASKS,),
    )
    masked_loss_normalize: bool = define_option(
        False,
        "normalize the masked loss by the mask area, so that every image has equal weight",
        needs=(_HAS_MASKS,),
    )
    caption_extension: tuple[str, ...] | None = define_option(
        None,
        "extension of caption files; of several, the first that exists for an image; default: .caption, or .txt where "
        "a folder has no .caption and the subset no class_tokens",
        needs=(
            IsUnset("metadata_file", "metadata_file has the captions"),
            IsUnset("parquet", "the captions are in the parquet files"),
        ),
        aliases=(Alias("caption_extention"),),
        former_default="('.caption',)",
        dataset_table="shared",
    )
    caption_separator: str = define_option(
        ",",
        "separator of the tags in a caption",
        needs=(
            AnyOf(
                (
                    IsSet("shuffle_caption"),
                    IsSet("caption_tag_dropout_rate"),
                    IsSet("token_warmup_step"),
                    IsSet("secondary_separator"),
                    IsSet("metadata_file"),
                ),
                "captions are not split into tags",
            ),
        ),
        dataset_table="shared",
    )
    shuffle_caption: bool = define_option(
        False,
        "shuffle the tags of a caption each time it is used",
        needs=ALWAYS,
        varies="caption",
        dataset_table="shared",
    )
    keep_tokens: int = define_option(
        0,
        "number of tags at the start that are neither shuffled nor dropped",
        minimum=0,
        needs=(
            AnyOf(
                (IsSet("shuffle_caption"), IsSet("caption_tag_dropout_rate"), IsSet("token_warmup_step")),
                "tags are neither shuffled nor dropped",
            ),
        ),
        dataset_table="shared",
    )
    keep_tokens_separator: str = define_option(
        "",
        "separator after the tags to keep in place, such as |||",
        needs=(
            AnyOf(
                (IsSet("shuffle_caption"), IsSet("caption_tag_dropout_rate"), IsSet("token_warmup_step")),
                "tags are neither shuffled nor dropped",
            ),
        ),
        dataset_table="shared",
    )
    secondary_separator: str | None = define_option(
        None,
        "separator that keeps tags together while shuffling; replaced by caption_separator afterwards",
        needs=ALWAYS,
        dataset_table="shared",
    )
    enable_wildcard: bool = define_option(
        False,
        "choose randomly from {a|b} in captions, and from several lines",
        needs=ALWAYS,
        varies="caption",
        dataset_table="shared",
    )
    caption_prefix: str | None = define_option(
        None, "text to prepend to every caption", needs=ALWAYS, dataset_table="shared"
    )
    caption_suffix: str | None = define_option(
        None, "text to append to every caption", needs=ALWAYS, dataset_table="shared"
    )
    caption_dropout_rate: float = define_option(
        0.0,
        "probability of training with an empty caption",
        minimum=0,
        maximum=1,
        needs=ALWAYS,
        metadata_key="ss_caption_dropout_rate",
        varies="caption",
        dataset_table="shared",
    )
    conditioning_dropout_prob: float = define_option(
        0.0,
        "InstructPix2Pix: probability of training without the caption, without the picture that is edited, and without"
        " both, each; so that previews can be guided by one of them",
        minimum=0,
        maximum=0.33,
        needs=(OfModel(),),
    )
    caption_dropout_every_n_epochs: int = define_option(
        0,
        "train with empty captions in every n-th epoch; 0: never",
        minimum=0,
        needs=ALWAYS,
        metadata_key="ss_caption_dropout_every_n_epochs",
        varies="caption",
        dataset_table="shared",
    )
    caption_tag_dropout_rate: float = define_option(
        0.0,
        "probability of dropping each tag",
        minimum=0,
        maximum=1,
        needs=ALWAYS,
        metadata_key="ss_caption_tag_dropout_rate",
        varies="caption",
        dataset_table="shared",
    )
    token_warmup_min: int = define_option(
        1,
        "token warmup: number of tags at the start",
        minimum=1,
        needs=(IsSet("token_warmup_step"),),
        dataset_table="shared",
    )
    token_warmup_step: float = define_option(
        0.0,
        "token warmup: step (below 1: ratio of the run) at which all tags are used; 0: no warmup",
        minimum=0,
        needs=ALWAYS,
        varies="caption",
        dataset_table="shared",
    )
    prior_loss_weight: float = define_option(
        1.0,
        "loss weight of regularization images (is_reg)",
        minimum=0,
        needs=(IsSet("is_reg", "there are no regularization images", "regularization images"),),
        metadata_key="ss_prior_loss_weight",
        dataset_table="run",
    )
    validation_split: float = define_option(
        0.0,
        "fraction of the images that is held out for validation; can be set for each subset",
        minimum=0,
        maximum=1,
        needs=ALWAYS,
        metadata_key="ss_validation_split",
        dataset_table="shared",
    )
    validation_seed: int | None = define_option(
        None,
        "seed for choosing the validation images; default: 0",
        needs=(IsSet("validation_split"),),
        metadata_key="ss_validation_seed",
        dataset_table="dataset",
    )
    on_invalid_images: Literal["fail", "skip"] = define_option(
        "fail",
        "when images cannot be used, such as damaged files: stop before training, or skip them",
        needs=ALWAYS,
        changes_result=False,
        former_name="on_bad_data",
    )
    max_invalid_images: int = define_option(
        10,
        "stop when more images than this, or half of all, become unreadable during training; 0: at the first",
        minimum=0,
        needs=ALWAYS,
        changes_result=False,
        former_name="max_bad_samples",
    )
    max_data_loader_n_workers: int = define_option(
        8,
        "maximum number of data loader workers; never more than CPU cores; 0: load in the main process",
        minimum=0,
        needs=ALWAYS,
        changes_result=False,
        is_per_machine=True,
    )
    prefetch_factor: int = define_option(
        2,
        "batches that each data loader worker loads in advance",
        minimum=1,
        needs=(IsSet("max_data_loader_n_workers", "there are no data loader workers"),),
        changes_result=False,
        is_per_machine=True,
    )
    remote_cache_dir: str | None = define_option(
        None,
        "folder for copies of remote files (s3://, gs://, hf://, https://); default: ~/.cache/lorikeet/remote",
        needs=(IsSet("is_remote", "no images are read from a URL", "images at URLs"),),
        changes_result=False,
        is_per_machine=True,
    )
    remote_cache_size: MemorySize = define_option(
        MemorySize(50 * 2**30),
        "maximum size of these copies; the ones not used for longest are deleted",
        needs=(IsSet("is_remote", "no images are read from a URL", "images at URLs"),),
        changes_result=False,
        is_per_machine=True,
    )
    remote_retry_seconds: float = define_option(
        120.0,
        "how long a failed request to a remote server is repeated before the run stops",
        minimum=0,
        needs=(IsSet("is_remote", "no images are read from a URL", "images at URLs"),),
        changes_result=False,
        is_per_machine=True,
    )

    @property
    def dataset_option(self) -> str | None:
        """The option that says what is trained on; of several folders, the one that counts in sd-scripts."""
        names = ("slider_prompts", "dataset_config", "in_json", "train_data_dir", "reg_data_dir")
        return next((name for name in names if getattr(self, name)), None)


@dataclass(frozen=True)
class CacheConfig:
    """Latents and text encoder outputs that are computed once before training."""

    cache_latents: bool = define_option(
        False,
        "cache latents for this run: the VAE encodes each image once",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
    )
    cache_latents_to_disk: bool = define_option(
        False,
        "cache latents on disk for later runs; entries are keyed by content, so they are never stale",
        needs=ALWAYS,
        changes_result=False,
        musubi_default=True,
    )
    cache_text_encoder_outputs: bool = define_option(
        False,
        "cache text encoder outputs for this run: each caption is encoded once",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
        is_for_texts=True,
    )
    cache_text_encoder_outputs_to_disk: bool = define_option(
        False,
        "cache text encoder outputs on disk for later runs",
        needs=ALWAYS,
        changes_result=False,
        musubi_default=True,
        is_for_texts=True,
    )
    cache_dir: str | None = define_option(
        None,
        "folder of the caches; default: .cache-lorikeet next to the images (for one run, a temporary folder)",
        needs=ALWAYS,
        changes_result=False,
        is_path=True,
        is_for_texts=True,
    )
    cache_precision: Literal["float", "fp16", "bf16"] = define_option(
        "float",
        "dtype of cached latents; float trains exactly as without a cache, fp16 and bf16 take half the space",
        needs=(AnyOf((IsSet("cache_latents"), IsSet("cache_latents_to_disk")), "latents are not cached"),),
        changes_result=False,
    )
    skip_cache_check: bool = define_option(
        False,
        "do not verify the checksums of caches on disk",
        needs=(
            AnyOf(
                (IsSet("cache_latents_to_disk"), IsSet("cache_text_encoder_outputs_to_disk")), "there is no disk cache"
            ),
        ),
        changes_result=False,
        is_for_texts=True,
    )
    vae_batch_size: int = define_option(
        1,
        "batch size of the VAE when encoding images",
        minimum=1,
        needs=ALWAYS,
        is_unset_by_zero=True,
        changes_result=False,
    )
    text_encoder_batch_size: int = define_option(
        1,
        "batch size of the text encoders when encoding captions",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
        is_for_texts=True,
    )

    @property
    def caches_latents(self) -> bool:
        return self.cache_latents or self.cache_latents_to_disk

    @property
    def caches_text_outputs(self) -> bool:
        return self.cache_text_encoder_outputs or self.cache_text_encoder_outputs_to_disk


@dataclass(frozen=True)
class ValidateConfig:
    """Validation loss on held-out images (validation_split)."""

    validate_every_n_steps: int | None = define_option(
        None,
        "validate every n steps, and at the end",
        minimum=1,
        needs=(IsSet("validation_split"),),
        changes_result=False,
        metadata_key="ss_validate_every_n_steps",
    )
    validate_every_n_epochs: int | None = define_option(
        None,
        "validate every n epochs, and at the end; default: every epoch, without validate_every_n_steps",
        minimum=1,
        needs=(IsSet("validation_split"),),
        changes_result=False,
        metadata_key="ss_validate_every_n_epochs",
    )
    max_validation_steps: int | None = define_option(
        None,
        "maximum number of validation batches, over all devices; default: all images",
        minimum=1,
        needs=(IsSet("validation_split"),),
        changes_result=False,
        metadata_key="ss_max_validation_steps",
    )
