"""Every option of the trainer, once, in typed frozen groups; a field's name is its flag and its TOML key."""

from dataclasses import dataclass
from typing import Literal

from .options import define_option
from .types import Resolution, ResolutionSchedule


@dataclass(frozen=True)
class DataConfig:
    """Which pictures and captions, and how they are shown; most can be set in the dataset file as well."""

    dataset_config: str | None = define_option(None, "TOML file that names the folders of pictures and how to use them")
    train_batch_size: int = define_option(1, "pictures per device and micro-step", minimum=1)
    resolution: Resolution | None = define_option(None, "training size in pixels: 512, or 512,768 as width,height")
    resolution_schedule: ResolutionSchedule | None = define_option(
        None,
        "sizes and how many steps are trained at each, one after the other: 256:1000,512:1000,native; the last may be "
        "without a number, and native leaves each picture its own size",
    )
    dataset_repeats: int = define_option(1, "how often each picture is shown per epoch", minimum=1)
    enable_bucket: bool = define_option(
        False, "keep the aspect ratio: train each picture at the nearest of several sizes"
    )
    min_bucket_reso: int = define_option(256, "shortest side of a bucket", minimum=1)
    max_bucket_reso: int = define_option(1024, "longest side of a bucket", minimum=1)
    bucket_reso_steps: int = define_option(64, "bucket sides are multiples of this", minimum=1)
    bucket_no_upscale: bool = define_option(
        False, "never enlarge a picture; make buckets from the sizes that are there"
    )
    bucket_mode: Literal["kohya", "symmetric"] = define_option(
        "kohya", "kohya: sd-scripts' buckets; symmetric: all of one area, upright as lying, nearest by log aspect ratio"
    )
    bucket_max_crop: float = define_option(
        1.0, "bucket_mode symmetric: a picture that loses a larger share of itself cannot be used", minimum=0, maximum=1
    )
    bucket_min_images: int = define_option(
        1, "bucket_mode symmetric: buckets with fewer pictures (repeats not counted) join the nearest one", minimum=1
    )
    resize_interpolation: (
        Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"] | None
    ) = define_option(None, "how pictures are resized; without it, area when shrinking and Lanczos when enlarging")
    flip_aug: bool = define_option(False, "mirror half of the pictures, another half in each epoch")
    random_crop: bool = define_option(False, "cut what does not fit the bucket at a random place, not evenly")
    color_aug: bool = define_option(
        False, "change hue or brightness a little in a third of the pictures, others in each epoch"
    )
    alpha_mask: bool = define_option(False, "a picture's opacity is its mask: what is transparent is not trained")
    masked_loss: bool = define_option(
        False, "train only what masks leave bright; masks lie in conditioning_data_dir of a subset"
    )
    masked_loss_normalize: bool = define_option(False, "pictures weigh alike however much of them a mask leaves")
    caption_extension: tuple[str, ...] = define_option(
        (".caption",), "ending of caption files; of several, the first that a picture has"
    )
    caption_separator: str = define_option(",", "what stands between the tags of a caption")
    shuffle_caption: bool = define_option(False, "shuffle the tags of a caption each time it is shown")
    keep_tokens: int = define_option(0, "this many tags at the start stay where they are", minimum=0)
    keep_tokens_separator: str = define_option("", "mark in a caption that ends the part that stays, such as |||")
    secondary_separator: str | None = define_option(
        None, "mark inside a tag that is replaced by the separator at the end"
    )
    enable_wildcard: bool = define_option(False, "{a|b} in a caption means one of these; of several lines one is taken")
    caption_prefix: str | None = define_option(None, "text before every caption")
    caption_suffix: str | None = define_option(None, "text after every caption")
    caption_dropout_rate: float = define_option(
        0.0, "share of captions replaced by the empty one", minimum=0, maximum=1
    )
    caption_dropout_every_n_epochs: int = define_option(0, "in every n-th epoch all captions are empty", minimum=0)
    caption_tag_dropout_rate: float = define_option(0.0, "share of tags left out", minimum=0, maximum=1)
    token_warmup_min: int = define_option(1, "number of tags shown at the start of a token warm-up", minimum=1)
    token_warmup_step: float = define_option(
        0.0, "step (or, below 1, share of the run) from which all tags show", minimum=0
    )
    prior_loss_weight: float = define_option(1.0, "weight of the loss on regularisation pictures", minimum=0)
    validation_split: float = define_option(
        0.0,
        "share of the pictures that is not trained on, but measured; in the dataset file for each subset",
        minimum=0,
        maximum=1,
    )
    validation_seed: int | None = define_option(None, "seed of the choice of these pictures; without it, 0")
    on_invalid_images: Literal["fail", "skip"] = define_option("fail", "what to do with pictures that cannot be used")
    max_invalid_images: int = define_option(
        10, "end the run when more pictures than this, or half of all, become unreadable; 0: at the first", minimum=0
    )
    max_data_loader_n_workers: int = define_option(
        8, "processes that read pictures ahead; never more than CPU cores", minimum=0
    )
    prefetch_factor: int = define_option(2, "batches that each of these processes reads ahead", minimum=1)


@dataclass(frozen=True)
class CacheConfig:
    """What is computed once before training and then kept: latents of pictures, encoded captions."""

    cache_latents: bool = define_option(
        False, "encode each picture once, before training, and keep its latents for this run"
    )
    cache_latents_to_disk: bool = define_option(
        False, "the same, and keep them on disk for other runs; by content, never stale"
    )
    cache_text_encoder_outputs: bool = define_option(
        False, "encode every caption that will be shown once, before training, and keep them for this run"
    )
    cache_text_encoder_outputs_to_disk: bool = define_option(False, "the same, and keep them on disk for other runs")
    cache_dir: str | None = define_option(
        None, "folder for what is kept; without it, .cache-lorikeet beside the pictures (for one run, a temporary one)"
    )
    cache_precision: Literal["float", "fp16", "bf16"] = define_option(
        "float", "precision of kept latents; float trains as if nothing were kept, the others need half the room"
    )
    skip_cache_check: bool = define_option(False, "do not read through what is on disk to see whether it is undamaged")
    vae_batch_size: int = define_option(1, "pictures that the VAE encodes at once, kept or not", minimum=1)
    text_encoder_batch_size: int = define_option(1, "captions that are encoded at once, kept or not", minimum=1)

    @property
    def caches_latents(self) -> bool:
        """Whether latents are kept, on disk or for this run."""
        return self.cache_latents or self.cache_latents_to_disk

    @property
    def caches_text_outputs(self) -> bool:
        """Whether encoded captions are kept, on disk or for this run."""
        return self.cache_text_encoder_outputs or self.cache_text_encoder_outputs_to_disk


@dataclass(frozen=True)
class ValidateConfig:
    """When the pictures are measured that are kept for validation."""

    validate_every_n_steps: int | None = define_option(None, "measure every n steps, and at the end", minimum=1)
    validate_every_n_epochs: int | None = define_option(
        None, "measure every n epochs, and at the end; every epoch when nothing is said", minimum=1
    )
    max_validation_steps: int | None = define_option(
        None, "measure at most so many batches, over all devices; without it, all pictures", minimum=1
    )
