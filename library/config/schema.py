"""All options of training, in typed frozen groups; a field's name is its flag and its key in the run TOML."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .option_needs import AnyOf, Has, HasValue, IsSet, IsUnset, Needs, OfModel, Trait
from .options import ALWAYS, Alias, define_option
from .schema_data import CacheConfig, DataConfig, ValidateConfig
from .schema_distributed import DeepSpeedConfig, DistributedConfig, ParallelConfig, ShardingConfig
from .schema_embedding import TrainedPartConfig
from .schema_full import IS_FULL, IS_LORA, FullConfig
from .schema_objective import LossConfig, NoiseConfig, PreservationConfig, SliderConfig
from .schema_optim import OptimConfig
from .schema_output import EvaluateConfig, LogConfig, PreviewConfig, SaveConfig, StateConfig
from .types import MemorySize, StepRange

LUMINA2_SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
"""The text that Lumina-Image 2.0 was trained to find before captions."""

_RECOMPUTES_BLOCKS: Needs = (
    AnyOf((IsSet("gradient_checkpointing"), HasValue("on_oom", ("recover",))), "gradient_checkpointing is not set"),
    AnyOf(
        (IsUnset("torch_compile"), IsUnset("activation_memory_budget")),
        "with torch_compile, activation_memory_budget alone decides what is recomputed",
    ),
)


def _define_component(help: str, *, needs: Needs | None = None, **facts: Any) -> Any:
    """Declare an option that replaces a component of the model by one of another file."""
    return define_option(
        None,
        help,
        needs=(OfModel(),) if needs is None else needs,
        is_compared_by_content=True,
        is_path=True,
        changes_text_outputs=False,
        **facts,
    )


def _define_model_option(default: Any, help: str, **facts: Any) -> Any:
    """Declare an option of some models that changes no outputs of text encoders."""
    return define_option(default, help, needs=(OfModel(),), changes_text_outputs=False, **facts)


def _define_text_dropout(encoder: str, *, changes_text_outputs: bool) -> Any:
    return define_option(
        0.0,
        f"probability of training an image with zeros instead of what {encoder} returns (SD3)",
        minimum=0,
        maximum=1,
        needs=(OfModel(),),
        changes_text_outputs=changes_text_outputs,
    )


@dataclass(frozen=True)
class ModelConfig:
    """Base model."""

    pretrained_model_name_or_path: str | None = define_option(
        None,
        "base model: diffusers folder, .safetensors file or hub id; random:FAMILY[:tiny] for random weights; default: "
        "the built-in demo model",
        needs=ALWAYS,
        is_compared_by_content=True,
        is_path=True,
        is_basic=True,
        changes_text_outputs=False,
        aliases=(Alias("dit", program="musubi-tuner"),),
    )
    family: str | None = define_option(
        None,
        "model family, with :VARIANT where a single file does not tell it (z_image:base), or package.module:Class for "
        "your own; default: detected from the files",
        needs=ALWAYS,
        is_compared_by_content=True,
        changes_text_outputs=False,
    )
    model_version: str | None = define_option(
        None,
        "version of the model by musubi-tuner's names, such as edit-2511 or t2v-14B; tells apart files with the "
        "same weights, and is an error for any other model",
        needs=ALWAYS,
        is_compared_by_content=True,
        changes_text_outputs=False,
        aliases=(
            Alias("edit", "edit", program="musubi-tuner"),
            Alias("edit_plus", "edit-2509", program="musubi-tuner"),
            Alias("task", program="musubi-tuner"),
        ),
    )
    v2: bool = define_option(
        False,
        "require Stable Diffusion 2; an error for any other model",
        needs=ALWAYS,
        is_compared_by_content=True,
        changes_text_outputs=False,
    )
    vae: str | None = _define_component(
        "VAE to use instead of the model's: file, diffusers folder or hub id", needs=ALWAYS
    )
    clip_l: str | None = _define_component(
        "CLIP-L text encoder: file, folder or hub id", aliases=(Alias("text_encoder2", program="musubi-tuner"),)
    )
    clip_g: str | None = _define_component("CLIP-G text encoder: file, folder or hub id")
    t5xxl: str | None = _define_component(
        "T5-XXL text encoder: file, folder or hub id", aliases=(Alias("text_encoder1", program="musubi-tuner"),)
    )
    byt5: str | None = _define_component(
        "byT5 text encoder of HunyuanImage 2.1 and HunyuanVideo 1.5: file, folder or hub id"
    )
    text_encoder: str | None = _define_component(
        "text encoder, where it is a language model: file, folder or hub id",
        aliases=(Alias("qwen3"), Alias("gemma2"), Alias("t5", program="musubi-tuner")),
    )
    image_encoder: str | None = _define_component(
        "image encoder (CLIP, SigLIP) of models that make videos from images: file, folder or hub id",
        aliases=(Alias("clip", program="musubi-tuner"),),
    )
    dit_high_noise: str | None = _define_component(
        "file of the transformer for high noise of Wan 2.2 A14B, where pretrained_model_name_or_path is that for low "
        "noise"
    )
    ae: str | None = _define_component("alias of vae, for flow-matching models: file, diffusers folder or hub id")
    llm_adapter_path: str | None = _define_component(
        "the adapter between text encoder and transformer of Anima: file, folder or hub id"
    )
    t5_tokenizer_path: str | None = define_option(
        None,
        "folder of Anima's T5 tokenizer; default: from the model's folder, tokenizer_cache_dir or the hub",
        needs=(OfModel(),),
        is_path=True,
    )
    tokenizer_cache_dir: str | None = define_option(
        None,
        "folder of the tokenizers that single-file models need; downloaded from the hub if missing",
        needs=ALWAYS,
        changes_result=False,
        is_path=True,
        changes_text_outputs=False,
    )
    clip_skip: int | None = define_option(
        None,
        "use the output of CLIP's n-th layer from the end (Stable Diffusion 1 and 2)",
        minimum=0,
        needs=(OfModel(),),
        metadata_key="ss_clip_skip",
    )
    max_token_length: int = define_option(
        75,
        "maximum length of captions in tokens: 75, 150 or 225 (Stable Diffusion 1, 2, XL)",
        minimum=1,
        needs=(OfModel(),),
    )
    weighted_captions: bool = define_option(
        False,
        "read weights in captions, such as (red:1.3), (red) and [red], as A1111 and sd-scripts do (Stable Diffusion 1, "
        "2, XL)",
        needs=(OfModel(),),
    )
    t5xxl_max_token_length: int | None = define_option(
        None,
        "maximum length of T5 input in tokens; default: 256 for SD3 and FLUX.1 schnell, 512 for FLUX.1 dev",
        minimum=1,
        maximum=512,
        needs=(OfModel(),),
    )
    apply_t5_attn_mask: bool = define_option(
        False,
        "mask the padding tokens of T5: in T5 itself (SD3, FLUX.1), and in the attention of the transformer (FLUX.1)",
        needs=(OfModel(),),
    )
    qwen3_max_token_length: int = define_option(
        512, "maximum length of Qwen3's input in tokens (Anima)", minimum=1, needs=(OfModel(),)
    )
    t5_max_token_length: int = define_option(
        512, "maximum length of captions in T5's tokens (Anima)", minimum=1, maximum=512, needs=(OfModel(),)
    )
    apply_lg_attn_mask: bool = define_option(
        False, "mask the padding tokens of CLIP-L and CLIP-G in these encoders themselves (SD3)", needs=(OfModel(),)
    )
    clip_l_dropout_rate: float = _define_text_dropout("CLIP-L", changes_text_outputs=True)
    clip_g_dropout_rate: float = _define_text_dropout("CLIP-G", changes_text_outputs=True)
    t5_dropout_rate: float = _define_text_dropout("T5", changes_text_outputs=False)
    pos_emb_random_crop_rate: float = _define_model_option(
        0.0,
        "probability of training an image with a random part of the position embedding instead of its center (SD3)",
        minimum=0,
        maximum=1,
    )
    enable_scaled_pos_embed: bool = _define_model_option(
        False,
        "stretch the position embedding for each dataset's resolution, so that images of all resolutions have the "
        "range of positions of 1024 pixels (SD3.5 medium)",
    )
    gemma2_max_token_length: int | None = define_option(
        None,
        "maximum length of Gemma 2's input in tokens, system prompt included (Lumina-Image 2.0); default: 256",
        minimum=1,
        needs=(OfModel(),),
    )
    system_prompt: str = define_option(
        LUMINA2_SYSTEM_PROMPT,
        "text before every caption, with <Prompt Start> between the two (Lumina-Image 2.0); empty: captions alone",
        needs=(OfModel(),),
        default_text="that of diffusers' pipeline",
        written_at_default="kohya",
    )
    quantize_base: Literal["none", "fp8", "int8", "nf4"] = define_option(
        "none",
        "quantize the frozen weights of the denoiser's blocks; each matmul dequantizes them to mixed_precision's dtype",
        needs=ALWAYS,
        changes_text_outputs=False,
        aliases=(Alias("fp8_base", "fp8"), Alias("fp8_base_unet", "fp8"), Alias("fp8_scaled", "fp8")),
        former_name="base_storage",
        former_values=(("float", "none"),),
    )
    dequantize_base: bool = define_option(
        False,
        "dequantize weights that the model's files store quantized (fp8, GGUF, nf4 ...) when they are loaded, instead"
        " of in each matmul: more memory, faster steps, the same result",
        needs=(Has(Trait.STORED_QUANTIZED), IS_LORA),
        changes_text_outputs=False,
        changes_result=False,
    )
    quantized_matmul: bool = define_option(
        False,
        "quantize_base fp8, int8: multiply in that format, with inputs and gradients that are quantized token by token,"
        " instead of dequantizing weights; fp8 needs an Ada, Hopper or later GPU; not measured on a GPU yet",
        needs=(HasValue("quantize_base", ("fp8", "int8"), "quantize_base is neither fp8 nor int8"),),
        changes_text_outputs=False,
    )
    guidance_scale: float = define_option(
        1.0,
        "value of the guidance embedding of FLUX.1 dev, FLUX.2 dev, HunyuanVideo and FramePack in training; not"
        " classifier-free guidance",
        minimum=0,
        needs=(Has(Trait.GUIDANCE), OfModel()),
        changes_text_outputs=False,
        written_at_default="kohya",
    )
    noise_experts: Literal["both", "high_noise", "low_noise"] = _define_model_option(
        "both",
        "the transformers of Wan 2.2 A14B that are trained: both in one run, each with a LoRA file of its own, or one, "
        "which alone is loaded",
    )
    expert_adapters: Literal["separate", "shared"] = define_option(
        "separate",
        "noise_experts both: an adapter and a LoRA file for each transformer, or one that both share, as musubi-tuner"
        " trains it with dit_high_noise",
        needs=(OfModel(), HasValue("noise_experts", ("both",), "one transformer alone is trained")),
        changes_text_outputs=False,
        musubi_default="shared",
    )
    timestep_boundary: float | None = _define_model_option(
        None,
        "the noise level, in 0 to 1 or 0 to 1000, from which on the transformer for high noise of Wan 2.2 A14B "
        "predicts, in training and previews; default: 0.875 from text, 0.9 from images",
        minimum=0,
        maximum=1000,
    )
    image_to_video: bool = _define_model_option(
        False,
        "train clips with their first frame given (Wan 2.2 TI2V, LTX-Video 0.9.5, LTX-2, Kandinsky 6): it is clean and "
        "has no loss; images are trained as without this option",
    )
    train_audio: bool = _define_model_option(False, "train sound (LTX-2, Kandinsky 6); needs cached latents")
    f1: bool = _define_model_option(
        False,
        "FramePack F1: sections follow what was before them, instead of coming before what is after them",
    )
    one_frame: bool = _define_model_option(
        False,
        "FramePack makes single pictures from control images, as frames of one section; positions: one_frame_settings",
    )
    one_frame_settings: str = define_option(
        "",
        "positions of the picture and of its control images, in training and in previews without --of, as"
        " musubi-tuner's one_frame_inference: no_post,no_2x,no_4x,target_index=1,control_index=0;10",
        needs=(OfModel(), IsSet("one_frame", "pictures are not trained as one frame")),
        changes_text_outputs=False,
    )
    latent_window_size: int = _define_model_option(9, "latent frames of a section of FramePack", minimum=1)
    control: Literal["none", "omini", "channels"] = define_option(
        "none",
        "train conditioning on images: omini: OminiControl, the condition as extra tokens, with LoRA on these only "
        "(FLUX.1); channels: its latents as extra input channels, diffusers' control LoRA (FLUX.1, Stable Diffusion 1)",
        needs=ALWAYS,
    )
    control_position: Literal["aligned", "offset"] = define_option(
        "aligned",
        "positions of condition tokens (control omini): those of the image, for edges, masks, colors; or left of it, "
        "for subjects",
        needs=(HasValue("control", ("omini",)),),
    )
    control_independent: bool = define_option(
        False,
        "condition tokens attend to themselves alone (control omini): previews compute their keys and values once",
        needs=(HasValue("control", ("omini",)),),
    )
    control_scale: float = define_option(
        1.0,
        "strength of the condition in previews (control omini): a factor of its attention weights",
        minimum=0,
        needs=(HasValue("control", ("omini",)),),
    )

    @property
    def noise_boundary(self) -> float | None:
        """``timestep_boundary`` in 0..1."""
        boundary = self.timestep_boundary
        return boundary if boundary is None or boundary <= 1 else boundary / 1000


@dataclass(frozen=True)
class AdapterConfig(TrainedPartConfig):
    """The adapter: its type, rank, initial weights and what it is attached to."""

    train_text_encoder: bool = define_option(
        False,
        "train full: train the CLIP text encoders as well",
        needs=(IS_FULL, Has(Trait.TEXT_ENCODERS)),
    )
    train_modules: tuple[str, ...] = define_option(
        (),
        "train full: regular expressions; only the weights of the denoiser whose names match one of them are trained",
        needs=(IS_FULL, Has(Trait.TRAINED_DENOISER)),
    )
    network_module: str = define_option(
        "networks.lora",
        "adapter type: networks.lora, networks.loha, networks.lokr, networks.oft, or lycoris.kohya with algo in "
        "network_args",
        needs=(IS_LORA,),
        is_public=True,
    )
    network_dim: int = define_option(
        4,
        "rank of the adapter",
        minimum=1,
        needs=(IS_LORA, IsUnset("dim_from_weights", "dim_from_weights takes it from network_weights")),
        is_basic=True,
    )
    network_alpha: float = define_option(
        1.0,
        "LoRA alpha: the update is multiplied by alpha / rank; 0: the same as the rank",
        minimum=0,
        needs=(
            IS_LORA,
            Has(Trait.ALPHA),
            IsUnset("dim_from_weights", "dim_from_weights takes it from network_weights"),
        ),
        is_basic=True,
    )
    network_dropout: float = define_option(
        0.0,
        "LoRA dropout: probability of zeroing each output of the down matrix",
        minimum=0,
        maximum=0.999,
        needs=(IS_LORA, Has(Trait.DROPOUT)),
        metadata_key="ss_network_dropout",
        is_dropped_at_zero=True,
    )
    network_args: tuple[str, ...] = define_option(
        (), "more adapter arguments as name=value, such as conv_dim=4; see docs/adapters.md", needs=(IS_LORA,)
    )
    network_weights: str | None = define_option(
        None, "LoRA file to start from, saved by any program", needs=ALWAYS, is_path=True
    )
    dim_from_weights: bool = define_option(
        False, "take modules, ranks and alphas from network_weights", needs=(IsSet("network_weights"),)
    )
    base_weights: tuple[str, ...] = define_option(
        (), "LoRA files to merge into the base model before training", needs=ALWAYS, is_path=True
    )
    base_weights_multiplier: tuple[float, ...] = define_option(
        (), "multiplier for each file of base_weights; default: 1", needs=(IsSet("base_weights"),)
    )
    training_adapter: str | None = define_option(
        None,
        "LoRA file that undoes the distillation of a few-step model (Z-Image-Turbo, FLUX.1 schnell): added to the base "
        "model while training and validating, not in previews; not part of the trained LoRA",
        needs=ALWAYS,
        is_compared_by_content=True,
        is_path=True,
    )
    scale_weight_norms: float | None = define_option(
        None,
        "max-norm regularization: scale down modules whose update has a larger norm (LoRA, LoHa, LoKr)",
        minimum=0.000001,
        needs=(IS_LORA,),
        is_unset_by_zero=True,
        metadata_key="ss_scale_weight_norms",
    )
    network_train_unet_only: bool = define_option(
        False,
        "train the denoiser only (U-Net or transformer); default: also the CLIP text encoders of Stable Diffusion and "
        "FLUX.1, as in sd-scripts",
        needs=(IS_LORA, Has(Trait.TEXT_ENCODERS)),
        is_basic=True,
        musubi_default=True,
    )
    network_train_text_encoder_only: bool = define_option(False, "train the text encoders only", needs=(IS_LORA,))

    @property
    def trains_denoiser(self) -> bool:
        return self.train != "embedding" and not self.network_train_text_encoder_only

    @property
    def trains_text_encoders(self) -> bool:
        """Whether text encoders have an adapter, or are trained in full; new vectors alone do not count."""
        if not self.has_adapter:
            return self.train_text_encoder
        return self.network_train_text_encoder_only or not self.network_train_unet_only


@dataclass(frozen=True)
class TrainConfig:
    """Length of training, memory savings and error handling."""

    max_train_steps: int = define_option(
        1600,
        "number of optimizer steps, whatever the number of GPUs",
        minimum=0,
        needs=(IsUnset("max_train_epochs"),),
        changes_result=False,
        is_basic=True,
    )
    max_train_epochs: int | None = define_option(
        None,
        "number of epochs, instead of max_train_steps",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
    )
    initial_step: int | None = define_option(
        None,
        "start after this many steps, whose images and noise are skipped; with network_weights, go on from a LoRA file",
        minimum=1,
        needs=ALWAYS,
        is_unset_by_zero=True,
        is_of_one_run=True,
    )
    initial_epoch: int | None = define_option(
        None,
        "start with this epoch, counted from 1, like initial_step",
        minimum=1,
        needs=(IsUnset("initial_step"),),
        is_unset_by_zero=True,
    )
    gradient_accumulation_steps: int = define_option(
        1,
        "micro-batches per optimizer step",
        minimum=1,
        needs=ALWAYS,
        is_compared_by_content=True,
        metadata_key="ss_gradient_accumulation_steps",
    )
    gpu_memory: MemorySize | None = define_option(
        None,
        "choose options that fit on GPUs with this much memory, such as 12GB, fastest by an estimate: caches, bf16, "
        "gradient_checkpointing, blocks_to_swap, quantize_base, FSDP; what is set stays as it is",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
    )
    gradient_checkpointing: bool = define_option(
        False,
        "recompute activations in backward: less memory, slower steps",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
        metadata_key="ss_gradient_checkpointing",
    )
    gradient_checkpointing_every: int = define_option(
        1,
        "gradient_checkpointing: checkpoint only every n-th block of the denoiser",
        minimum=1,
        needs=_RECOMPUTES_BLOCKS,
        changes_result=False,
    )
    activation_memory_budget: float = define_option(
        0.0,
        "gradient_checkpointing, torch_compile: fraction of the activations of expensive operations to keep; 0: with"
        " gradient_checkpointing recompute everything",
        minimum=0,
        maximum=1,
        needs=(
            AnyOf(
                (IsSet("gradient_checkpointing"), HasValue("on_oom", ("recover",)), Has(Trait.COMPILED)),
                "neither gradient_checkpointing nor torch_compile is set",
            ),
            AnyOf((IsUnset("torch_compile"), HasValue("dynamo_backend", ("inductor", "aot_eager")))),
        ),
        changes_result=False,
        former_name="gradient_checkpointing_budget",
    )
    cpu_offload_checkpointing: bool = define_option(
        False,
        "gradient_checkpointing: offload the saved activations to CPU memory",
        needs=_RECOMPUTES_BLOCKS,
        changes_result=False,
        aliases=(
            Alias("unsloth_offload_checkpointing", True),
            Alias("gradient_checkpointing_cpu_offload", True, program="musubi-tuner"),
        ),
    )
    blocks_to_swap: int = define_option(
        0,
        "number of denoiser blocks whose frozen weights are kept in CPU memory and prefetched when needed; train full,"
        " with fused_backward_pass: whose trained weights and optimizer state are kept there between their uses",
        minimum=0,
        needs=ALWAYS,
        changes_result=False,
        aliases=(Alias("split_mode", 18),),
    )
    block_swap_ring_size: int = define_option(
        0,
        "blocks_to_swap: buffers on the device, each as large as the largest swapped block, to which blocks are copied"
        " ahead of their use; 1: the least memory, but copies and computation alternate;"
        " 0: 2, or as many as fit into 512 MiB",
        minimum=0,
        needs=(IsSet("blocks_to_swap", "blocks_to_swap is not set"),),
        changes_result=False,
    )
    seed: int = define_option(
        42,
        "random seed of the run",
        minimum=0,
        maximum=2**63 - 1,
        needs=ALWAYS,
        is_basic=True,
        kohya_default="another one for each run",
        musubi_default_text="another one for each run",
        metadata_key="ss_seed",
    )
    max_nan_steps: int = define_option(
        10,
        "stop after this many steps with a NaN or Inf loss or gradient; each of them is skipped",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
        former_name="max_bad_steps",
    )
    on_oom: Literal["fail", "recover"] = define_option(
        "fail",
        "when out of memory: stop, or recover by splitting micro-batches, then enabling gradient_checkpointing",
        needs=ALWAYS,
        changes_result=False,
        former_values=(("ladder", "recover"),),
    )
    profile_steps: StepRange | None = define_option(
        None,
        "profile these steps, such as 11:30: time per phase, FLOPs, MFU, and a trace of the last three steps",
        needs=ALWAYS,
        changes_result=False,
    )
    dry_run: bool = define_option(
        False,
        "validate the settings, print the plan, and exit without loading a model",
        needs=ALWAYS,
        changes_result=False,
        is_in_form=False,
        is_of_one_run=True,
    )


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    full: FullConfig = field(default_factory=FullConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    preservation: PreservationConfig = field(default_factory=PreservationConfig)
    slider: SliderConfig = field(default_factory=SliderConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    state: StateConfig = field(default_factory=StateConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    log: LogConfig = field(default_factory=LogConfig)
