"""Every option of the trainer, once, in typed frozen groups; a field's name is its flag and its TOML key."""

from dataclasses import dataclass, field
from typing import Literal

from .deepspeed_schema import DeepSpeedConfig as DeepSpeedConfig
from .objective_schema import LossConfig as LossConfig
from .objective_schema import NoiseConfig as NoiseConfig
from .options import define_option
from .parallel_schema import ParallelConfig
from .resolution_schedule import ResolutionSchedule
from .save_schema import SaveConfig as SaveConfig
from .sharding_schema import ShardingConfig as ShardingConfig
from .values import StepsOrRatio, Resolution, StepRange


@dataclass(frozen=True)
class ModelConfig:
    """What is fine-tuned."""

    pretrained_model_name_or_path: str | None = define_option(
        None,
        "diffusers folder, .safetensors file or hub id of the base model, or random:FAMILY[:tiny] for random weights; "
        "without it the built-in model is used",
    )
    family: str | None = define_option(None, "kind of model, or your own package.module:Class; without it, found in its files")
    v2: bool = define_option(False, "say that the model is Stable Diffusion 2; an error when it is not")
    vae: str | None = define_option(None, "VAE in the place of the model's own: file, diffusers folder or hub id")
    clip_l: str | None = define_option(None, "CLIP-L text encoder: file, folder or hub id")
    clip_g: str | None = define_option(None, "CLIP-G text encoder: file, folder or hub id")
    t5xxl: str | None = define_option(None, "T5-XXL text encoder: file, folder or hub id")
    text_encoder: str | None = define_option(None, "text encoder of Z-Image or Qwen-Image: file, folder or hub id")
    ae: str | None = define_option(None, "VAE of FLUX or Z-Image: file, diffusers folder or hub id")
    tokenizer_cache_dir: str | None = define_option(
        None, "folder for the tokenizers that single files need; filled from the hub when they are not in it yet"
    )
    clip_skip: int | None = define_option(None, "use the n-th last layer of CLIP (Stable Diffusion 1 and 2)", minimum=1)
    max_token_length: int = define_option(75, "longest caption in tokens: 75, 150 or 225 (Stable Diffusion 1, 2, XL)", minimum=1)
    t5xxl_max_token_length: int | None = define_option(
        None,
        "length of T5's text in tokens; without it 256 for SD3 and FLUX.1 schnell, 512 for FLUX.1 dev",
        minimum=1,
        maximum=512,
    )
    base_storage: Literal["float", "fp8", "int8", "nf4"] = define_option(
        "float", "how the frozen weights of the denoiser's blocks rest in memory: as they compute, or in 8 or 4 bits"
    )
    guidance_scale: float = define_option(1.0, "guidance that FLUX.1 dev is told while it is trained", minimum=0)


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained."""

    network_module: str = define_option(
        "networks.lora",
        "kind of adapter: networks.lora, networks.loha, networks.lokr, networks.oft, or lycoris.kohya with algo in "
        "network_args",
    )
    network_dim: int = define_option(4, "rank of the LoRA matrices", minimum=1)
    network_alpha: float = define_option(1.0, "the update is scaled by alpha / rank", minimum=0)
    network_dropout: float = define_option(0.0, "share of what the down matrices of a LoRA say that is left out",
                                 minimum=0, maximum=0.999)  # fmt: skip
    network_args: tuple[str, ...] = define_option(
        (), "more about the adapter as name=value, such as conv_dim=4; docs/adapters.md lists them"
    )
    network_weights: str | None = define_option(None, "LoRA file, of any program, from which the adapter starts")
    dim_from_weights: bool = define_option(False, "train the modules of network_weights, with their ranks and alphas")
    base_weights: tuple[str, ...] = define_option((), "LoRA files that are merged into the model before anything is trained")
    base_weights_multiplier: tuple[float, ...] = define_option((), "strengths of base_weights, one for each; without it 1")
    scale_weight_norms: float | None = define_option(
        None, "no module's update becomes longer than this; LoRA only", minimum=0.000001
    )
    network_train_unet_only: bool = define_option(
        True, "train the denoiser and leave the text encoders as they are; off: train both"
    )
    network_train_text_encoder_only: bool = define_option(False, "train the text encoders and leave the denoiser as it is")

    @property
    def trains_denoiser(self) -> bool:
        return not self.network_train_text_encoder_only

    @property
    def trains_text_encoders(self) -> bool:
        return self.network_train_text_encoder_only or not self.network_train_unet_only


@dataclass(frozen=True)
class OptimConfig:
    """How weights follow gradients."""

    optimizer_type: str = define_option(
        "AdamW", "AdamW, AdamW8bit, Lion, Adafactor, Prodigy, AdamWScheduleFree ..., or any package.module.Class"
    )
    optimizer_args: tuple[str, ...] = define_option((), "arguments for the optimizer as name=value, such as weight_decay=0.01")
    learning_rate: float = define_option(1e-4, "peak learning rate", minimum=0)
    unet_lr: float | None = define_option(None, "peak learning rate of the denoiser; without it learning_rate", minimum=0)
    text_encoder_lr: tuple[float, ...] = define_option(
        (), "peak learning rate of the text encoders, one for all or one for each; without it learning_rate", minimum=0
    )
    max_grad_norm: float = define_option(1.0, "gradients longer than this are shortened to it; 0 turns it off", minimum=0)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "rex", "inverse_sqrt", "warmup_stable_decay", "piecewise_constant", "adafactor"
    ] = define_option("constant", "course of the learning rate over the run")  # fmt: skip
    lr_warmup_steps: StepsOrRatio = define_option(StepsOrRatio(0, False), "steps until the peak is reached: a number, a ratio, or N%")
    lr_decay_steps: StepsOrRatio = define_option(
        StepsOrRatio(0, False), "warmup_stable_decay: steps of the decay at the end: a number, a ratio, or N%"
    )
    lr_scheduler_num_cycles: int = define_option(1, "restarts of cosine_with_restarts", minimum=1)
    lr_scheduler_power: float = define_option(1.0, "power of the polynomial schedule", minimum=0)
    lr_scheduler_timescale: int | None = define_option(
        None, "inverse_sqrt: the larger, the slower it falls; without it, the steps of the warm-up", minimum=1
    )
    lr_scheduler_min_lr_ratio: float | None = define_option(
        None, "cosine_with_min_lr, warmup_stable_decay: lowest learning rate as a share of the peak",
        minimum=0, maximum=1
    )  # fmt: skip
    lr_scheduler_type: str = define_option(
        "", "a scheduler class instead of lr_scheduler, of torch.optim.lr_scheduler or as package.module.Class"
    )
    lr_scheduler_args: tuple[str, ...] = define_option(
        (), "arguments for lr_scheduler_type or piecewise_constant as name=value, such as gamma=0.99"
    )
    ema_decay: float | None = define_option(
        None, "keep a running average of the adapter with this decay, such as 0.999, and save it beside the adapter",
        minimum=0, maximum=1
    )  # fmt: skip


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
    enable_bucket: bool = define_option(False, "keep the aspect ratio: train each picture at the nearest of several sizes")
    min_bucket_reso: int = define_option(256, "shortest side of a bucket", minimum=1)
    max_bucket_reso: int = define_option(1024, "longest side of a bucket", minimum=1)
    bucket_reso_steps: int = define_option(64, "bucket sides are multiples of this", minimum=1)
    bucket_no_upscale: bool = define_option(False, "never enlarge a picture; make buckets from the sizes that are there")
    bucket_mode: Literal["kohya", "symmetric"] = define_option(
        "kohya", "kohya: sd-scripts' buckets; symmetric: all of one area, upright as lying, nearest by log aspect ratio"
    )
    bucket_max_crop: float = define_option(
        1.0, "bucket_mode symmetric: a picture that loses a larger share of itself cannot be used", minimum=0, maximum=1
    )
    bucket_min_pictures: int = define_option(
        1, "bucket_mode symmetric: buckets with fewer pictures (repeats not counted) join the nearest one", minimum=1
    )
    resize_interpolation: (
        Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"] | None
    ) = define_option(None, "how pictures are resized; without it, area when shrinking and Lanczos when enlarging")
    flip_aug: bool = define_option(False, "mirror half of the pictures, another half in each epoch")
    random_crop: bool = define_option(False, "cut what does not fit the bucket at a random place, not evenly")
    color_aug: bool = define_option(False, "change hue or brightness a little in a third of the pictures, others in each epoch")
    alpha_mask: bool = define_option(False, "a picture's opacity is its mask: what is transparent is not trained")
    masked_loss: bool = define_option(False, "train only what masks leave bright; masks lie in conditioning_data_dir of a subset")
    masked_loss_normalize: bool = define_option(False, "pictures weigh alike however much of them a mask leaves")
    caption_extension: tuple[str, ...] = define_option(
        (".caption",), "ending of caption files; of several, the first that a picture has"
    )
    caption_separator: str = define_option(",", "what stands between the tags of a caption")
    shuffle_caption: bool = define_option(False, "shuffle the tags of a caption each time it is shown")
    keep_tokens: int = define_option(0, "this many tags at the start stay where they are", minimum=0)
    keep_tokens_separator: str = define_option("", "mark in a caption that ends the part that stays, such as |||")
    secondary_separator: str | None = define_option(None, "mark inside a tag that is replaced by the separator at the end")
    enable_wildcard: bool = define_option(False, "{a|b} in a caption means one of these; of several lines one is taken")
    caption_prefix: str | None = define_option(None, "text before every caption")
    caption_suffix: str | None = define_option(None, "text after every caption")
    caption_dropout_rate: float = define_option(0.0, "share of captions replaced by the empty one", minimum=0, maximum=1)
    caption_dropout_every_n_epochs: int = define_option(0, "in every n-th epoch all captions are empty", minimum=0)
    caption_tag_dropout_rate: float = define_option(0.0, "share of tags left out", minimum=0, maximum=1)
    token_warmup_min: int = define_option(1, "number of tags shown at the start of a token warm-up", minimum=1)
    token_warmup_step: float = define_option(0.0, "step (or, below 1, share of the run) from which all tags show", minimum=0)
    prior_loss_weight: float = define_option(1.0, "weight of the loss on regularisation pictures", minimum=0)
    validation_split: float = define_option(
        0.0, "share of the pictures that is not trained on, but measured; in the dataset file for each subset",
        minimum=0, maximum=1
    )  # fmt: skip
    validation_seed: int | None = define_option(None, "seed of the choice of these pictures; without it, 0")
    on_bad_data: Literal["fail", "skip"] = define_option("fail", "what to do with pictures that cannot be used")
    max_bad_samples: int = define_option(
        10, "end the run when more pictures than this, or half of all, become unreadable; 0: at the first", minimum=0
    )
    max_data_loader_n_workers: int = define_option(8, "processes that read pictures ahead; never more than CPU cores", minimum=0)
    prefetch_factor: int = define_option(2, "batches that each of these processes reads ahead", minimum=1)


@dataclass(frozen=True)
class CacheConfig:
    """What is computed once before training and then kept: latents of pictures, encoded captions."""

    cache_latents: bool = define_option(False, "encode each picture once, before training, and keep its latents for this run")
    cache_latents_to_disk: bool = define_option(False, "the same, and keep them on disk for other runs; by content, never stale")
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
class TrainConfig:
    """How long, and in which portions."""

    max_train_steps: int = define_option(1600, "optimizer steps, counted once however many devices there are", minimum=1)
    max_train_epochs: int | None = define_option(None, "train this many epochs; takes the place of max_train_steps", minimum=1)
    gradient_accumulation_steps: int = define_option(1, "micro-steps per optimizer step", minimum=1)
    gradient_checkpointing: bool = define_option(False, "compute activations twice to save memory")
    gradient_checkpointing_every: int = define_option(
        1, "of the denoiser's blocks, only every n-th computes its activations twice", minimum=1
    )
    gradient_checkpointing_budget: float = define_option(
        0.0, "share of what the denoiser's expensive operations make that is kept and not computed twice",
        minimum=0, maximum=1
    )  # fmt: skip
    cpu_offload_checkpointing: bool = define_option(
        False, "gradient_checkpointing keeps what it computes from in host memory (denoiser only)"
    )
    blocks_to_swap: int = define_option(
        0, "so many of the denoiser's blocks have their frozen weights in host memory, and fetch them ahead", minimum=0
    )
    seed: int = define_option(42, "all randomness of a run follows from it", minimum=0)
    max_bad_steps: int = define_option(
        10, "stop after this many steps whose loss or gradient is no number; each of them is left out", minimum=1
    )
    on_oom: Literal["fail", "ladder"] = define_option(
        "fail", "ladder: where memory does not suffice, cut batches in parts, then turn gradient_checkpointing on"
    )
    profile_steps: StepRange | None = define_option(
        None, "profile these steps, such as 11:30: a table of phases, FLOPs, MFU, and a trace of the last three"
    )
    dry_run: bool = define_option(False, "check everything, print the plan, and stop before any model is loaded")


@dataclass(frozen=True)
class DistributedConfig:
    """How the work is spread over devices, and with which precision."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = define_option(
        None, "compute precision; without it, accelerate launch or accelerate config decides"
    )
    full_bf16: bool = define_option(
        False, "adapter, gradients and optimizer in bf16, too: half their memory, and small steps are lost in rounding"
    )
    attn_mode: Literal["sdpa", "torch", "math", "efficient", "cudnn", "flash", "flash3", "xformers"] = define_option(
        "sdpa",
        "how attention is computed: sdpa and torch let PyTorch choose; others where model and device have them",
    )
    ddp_timeout: int | None = define_option(None, "minutes that one process waits for the others; 30 without it", minimum=1)
    ddp_gradient_as_bucket_view: bool = define_option(False, "DDP: gradients share memory with the exchange buffers")
    ddp_static_graph: bool = define_option(False, "DDP: the graph never changes, which saves work")
    check_sync_every_n_steps: int | None = define_option(
        None, "compare what is trained over all processes every n steps, too, not only before it is saved", minimum=1
    )
    torch_compile: bool | None = define_option(
        None, "compile the denoiser; without it, accelerate launch or accelerate config decides"
    )
    dynamo_backend: Literal[
        "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt",
        "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron"
    ] = define_option("inductor", "what torch_compile compiles with")  # fmt: skip
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = define_option(
        "default", "how much time compiling may take"
    )
    dynamo_fullgraph: bool = define_option(False, "fail where a model cannot be compiled in one piece")
    dynamo_use_regional_compilation: bool = define_option(
        True, "compile the blocks that a model repeats, all alike ones at once; off: the denoiser as a whole"
    )
    compile_shapes: Literal["auto", "static", "dynamic"] = define_option(
        "auto",
        "dynamic: compile once for all sizes of pictures; static: once for each, which may be faster and takes longer "
        "to begin; auto: dynamic from three sizes on",
    )
    compile_cache_dir: str | None = define_option(
        None, "folder for what is compiled, for the next start; without it, beside what is kept of the pictures"
    )


@dataclass(frozen=True)
class StateConfig:
    """How a run goes on after it was ended."""

    save_state: bool = define_option(False, "beside every LoRA file that is saved, save what is needed to go on from there")
    save_state_on_train_end: bool = define_option(False, "save it at the end, too, so that the run can be made longer")
    save_last_n_epochs_state: int | None = define_option(None, "keep states of the last n epochs only", minimum=1)
    save_last_n_steps_state: int | None = define_option(None, "keep states of the last n steps only", minimum=1)
    resume: str | None = define_option(None, "go on from this state, or from the latest one in output_dir: latest")
    auto_resume: bool = define_option(False, "go on from the latest state if there is one, and begin anew if there is none")
    resume_anyway: bool = define_option(False, "go on although settings or pictures have changed that the result depends on")
    requeue_exit_code: int | None = define_option(
        None, "exit code after a signal ended the run and its state was saved; without it 128 + the signal's number",
        minimum=0, maximum=255,
    )  # fmt: skip


@dataclass(frozen=True)
class PreviewConfig:
    """Pictures drawn while training."""

    sample_prompts: str | None = define_option(None, "file with prompts: .txt (a line each), .toml or .json")
    sample_every_n_steps: int | None = define_option(None, "draw them every n steps", minimum=1)
    sample_every_n_epochs: int | None = define_option(None, "draw them every n epochs; goes before steps", minimum=1)
    sample_at_first: bool = define_option(False, "draw them before training, too")
    sample_sampler: Literal["ddim", "euler", "euler_a", "heun", "dpmsolver++", "pndm"] | None = define_option(
        None, "sampler for the pictures; without it ddim, or for flow matching the model's own"
    )


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


@dataclass(frozen=True)
class LogConfig:
    """What is told, and to whom."""

    logging_dir: str | None = define_option(None, "folder for trackers; each run gets a folder in it")
    log_with: Literal[
        "none", "tensorboard", "wandb", "all", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio"
    ] | None = define_option(None, "experiment tracker; without it, tensorboard when there is a logging_dir")  # fmt: skip
    log_prefix: str | None = define_option(None, "start of the name of the run's folder in logging_dir")
    log_tracker_name: str | None = define_option(None, "project name for the tracker; without it, network_train")
    log_tracker_config: str | None = define_option(None, "TOML file with arguments for the tracker, a table for each")
    wandb_run_name: str | None = define_option(None, "name of the run in wandb")
    log_config: bool = define_option(False, "send the settings to the tracker, without secrets and paths")
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = define_option("INFO", "how much is told")
    console_log_file: str | None = define_option(None, "write messages to this file and not to the terminal")
    console_log_simple: bool = define_option(False, "messages without time and colour")
    quiet: bool = define_option(False, "warnings and errors only, no progress bar")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    state: StateConfig = field(default_factory=StateConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    log: LogConfig = field(default_factory=LogConfig)
