"""Every option of the trainer, once, in typed frozen groups; a field's name is its flag and its TOML key."""

from dataclasses import dataclass, field
from typing import Literal

from .options import define_option
from .schema_data import CacheConfig, DataConfig, ValidateConfig
from .schema_distributed import DeepSpeedConfig, DistributedConfig, ParallelConfig, ShardingConfig
from .schema_objective import LossConfig, NoiseConfig
from .schema_output import LogConfig, PreviewConfig, SaveConfig, StateConfig
from .types import StepRange, StepsOrRatio


@dataclass(frozen=True)
class ModelConfig:
    """What is fine-tuned."""

    pretrained_model_name_or_path: str | None = define_option(
        None,
        "diffusers folder, .safetensors file or hub id of the base model, or random:FAMILY[:tiny] for random weights; "
        "without it the built-in model is used",
    )
    family: str | None = define_option(
        None, "kind of model, or your own package.module:Class; without it, found in its files"
    )
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
    max_token_length: int = define_option(
        75, "longest caption in tokens: 75, 150 or 225 (Stable Diffusion 1, 2, XL)", minimum=1
    )
    t5xxl_max_token_length: int | None = define_option(
        None,
        "length of T5's text in tokens; without it 256 for SD3 and FLUX.1 schnell, 512 for FLUX.1 dev",
        minimum=1,
        maximum=512,
    )
    quantize_base: Literal["none", "fp8", "int8", "nf4"] = define_option(
        "none", "how the frozen weights of the denoiser's blocks rest in memory: as they compute, or in 8 or 4 bits"
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
    network_dropout: float = define_option(
        0.0, "share of what the down matrices of a LoRA say that is left out", minimum=0, maximum=0.999
    )
    network_args: tuple[str, ...] = define_option(
        (), "more about the adapter as name=value, such as conv_dim=4; docs/adapters.md lists them"
    )
    network_weights: str | None = define_option(None, "LoRA file, of any program, from which the adapter starts")
    dim_from_weights: bool = define_option(False, "train the modules of network_weights, with their ranks and alphas")
    base_weights: tuple[str, ...] = define_option(
        (), "LoRA files that are merged into the model before anything is trained"
    )
    base_weights_multiplier: tuple[float, ...] = define_option(
        (), "strengths of base_weights, one for each; without it 1"
    )
    scale_weight_norms: float | None = define_option(
        None, "no module's update becomes longer than this; LoRA only", minimum=0.000001
    )
    network_train_unet_only: bool = define_option(
        True, "train the denoiser and leave the text encoders as they are; off: train both"
    )
    network_train_text_encoder_only: bool = define_option(
        False, "train the text encoders and leave the denoiser as it is"
    )

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
    optimizer_args: tuple[str, ...] = define_option(
        (), "arguments for the optimizer as name=value, such as weight_decay=0.01"
    )
    learning_rate: float = define_option(1e-4, "peak learning rate", minimum=0)
    unet_lr: float | None = define_option(
        None, "peak learning rate of the denoiser; without it learning_rate", minimum=0
    )
    text_encoder_lr: tuple[float, ...] = define_option(
        (), "peak learning rate of the text encoders, one for all or one for each; without it learning_rate", minimum=0
    )
    max_grad_norm: float = define_option(
        1.0, "gradients longer than this are shortened to it; 0 turns it off", minimum=0
    )
    lr_scheduler: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "rex",
        "inverse_sqrt",
        "warmup_stable_decay",
        "piecewise_constant",
        "adafactor",
    ] = define_option("constant", "course of the learning rate over the run")
    lr_warmup_steps: StepsOrRatio = define_option(
        StepsOrRatio(0, False), "steps until the peak is reached: a number, a ratio, or N%"
    )
    lr_decay_steps: StepsOrRatio = define_option(
        StepsOrRatio(0, False), "warmup_stable_decay: steps of the decay at the end: a number, a ratio, or N%"
    )
    lr_scheduler_num_cycles: int = define_option(1, "restarts of cosine_with_restarts", minimum=1)
    lr_scheduler_power: float = define_option(1.0, "power of the polynomial schedule", minimum=0)
    lr_scheduler_timescale: int | None = define_option(
        None, "inverse_sqrt: the larger, the slower it falls; without it, the steps of the warm-up", minimum=1
    )
    lr_scheduler_min_lr_ratio: float | None = define_option(
        None,
        "cosine_with_min_lr, warmup_stable_decay: lowest learning rate as a share of the peak",
        minimum=0,
        maximum=1,
    )
    lr_scheduler_type: str = define_option(
        "", "a scheduler class instead of lr_scheduler, of torch.optim.lr_scheduler or as package.module.Class"
    )
    lr_scheduler_args: tuple[str, ...] = define_option(
        (), "arguments for lr_scheduler_type or piecewise_constant as name=value, such as gamma=0.99"
    )
    ema_decay: float | None = define_option(
        None,
        "keep a running average of the adapter with this decay, such as 0.999, and save it beside the adapter",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class TrainConfig:
    """How long, and in which portions."""

    max_train_steps: int = define_option(
        1600, "optimizer steps, counted once however many devices there are", minimum=1
    )
    max_train_epochs: int | None = define_option(
        None, "train this many epochs; takes the place of max_train_steps", minimum=1
    )
    gradient_accumulation_steps: int = define_option(1, "micro-steps per optimizer step", minimum=1)
    gradient_checkpointing: bool = define_option(False, "compute activations twice to save memory")
    gradient_checkpointing_every: int = define_option(
        1, "of the denoiser's blocks, only every n-th computes its activations twice", minimum=1
    )
    activation_memory_budget: float = define_option(
        0.0,
        "share of what the denoiser's expensive operations make that is kept and not computed twice",
        minimum=0,
        maximum=1,
    )
    cpu_offload_checkpointing: bool = define_option(
        False, "gradient_checkpointing keeps what it computes from in host memory (denoiser only)"
    )
    blocks_to_swap: int = define_option(
        0, "so many of the denoiser's blocks have their frozen weights in host memory, and fetch them ahead", minimum=0
    )
    seed: int = define_option(42, "all randomness of a run follows from it", minimum=0)
    max_nan_steps: int = define_option(
        10, "stop after this many steps whose loss or gradient is no number; each of them is left out", minimum=1
    )
    on_oom: Literal["fail", "recover"] = define_option(
        "fail", "on CUDA out of memory; recover: split the micro-batch, then enable gradient checkpointing; fail: stop"
    )
    profile_steps: StepRange | None = define_option(
        None, "profile these steps, such as 11:30: a table of phases, FLOPs, MFU, and a trace of the last three"
    )
    dry_run: bool = define_option(False, "check everything, print the plan, and stop before any model is loaded")


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
