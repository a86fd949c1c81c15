"""Options of precision, compiling, data parallelism, FSDP, model parallelism and DeepSpeed."""

import math
from dataclasses import dataclass
from typing import Literal

from .option_needs import AnyOf, Has, HasValue, LacksValue, Trait
from .options import ALWAYS, Alias, define_option
from .schema_full import IS_LORA
from .types import DeviceMap


@dataclass(frozen=True)
class DistributedConfig:
    """Mixed precision, attention, DDP and torch.compile."""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = define_option(
        None,
        "mixed precision; default: as set by accelerate launch or accelerate config",
        needs=ALWAYS,
        changes_result=False,
        is_basic=True,
    )
    full_bf16: bool = define_option(
        False,
        "trained weights, gradients and optimizer state in bf16: half the memory, but small updates are rounded away"
        " (train full: see stochastic_rounding)",
        needs=ALWAYS,
        changes_result=False,
    )
    attn_mode: Literal["sdpa", "torch", "math", "efficient", "cudnn", "flash", "flash3", "xformers"] = define_option(
        "sdpa",
        "attention backend; sdpa, torch: PyTorch chooses, but not cuDNN; the others must be supported by the model and"
        " the GPU; cudnn is the fastest on Hopper",
        needs=ALWAYS,
        changes_result=False,
        aliases=(
            Alias("xformers", "xformers"),
            Alias("diffusers_xformers", "xformers"),
            Alias("use_flash_attn", "flash"),
            Alias("flash_attn", "flash", program="musubi-tuner"),
            Alias("flash3", "flash3", program="musubi-tuner"),
        ),
    )
    fused_layers: bool = define_option(
        True,
        "LoRA layers in fewer kernels, norms that write half precision, and activations computed again in backward,"
        " for less time and memory; off: peft's layers, and norms in float32 as autocast has them",
        needs=(
            IS_LORA,
            LacksValue("mixed_precision", ("no", "fp8"), "mixed_precision is neither fp16 nor bf16"),
            LacksValue("torch_compile", (True,), "torch_compile fuses by itself"),
        ),
        changes_result=False,
    )
    ddp_timeout: int | None = define_option(
        None,
        "timeout of the process group in minutes; default: 30",
        minimum=1,
        needs=ALWAYS,
        is_unset_by_zero=True,
        changes_result=False,
    )
    ddp_gradient_as_bucket_view: bool = define_option(
        False,
        "DDP: gradients are views of the communication buckets, which saves memory",
        needs=ALWAYS,
        changes_result=False,
    )
    ddp_static_graph: bool = define_option(
        False, "DDP: assume that the autograd graph never changes, to save work", needs=ALWAYS, changes_result=False
    )
    check_sync_every_n_steps: int | None = define_option(
        None,
        "compare the adapter weights of all processes every n steps, not only before saving",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
    )
    torch_compile: bool | None = define_option(
        None,
        "compile the denoiser with torch.compile; default: as set by accelerate launch or accelerate config",
        needs=ALWAYS,
        changes_result=False,
        aliases=(Alias("compile", True, program="musubi-tuner"),),
    )
    cuda_graphs: bool = define_option(
        False,
        "capture forward and backward of each bucket as a CUDA graph and replay it: for models whose many small kernels"
        " take the host longer to launch than the device to run (Stable Diffusion); not tried in training on a GPU yet",
        needs=ALWAYS,
        changes_result=False,
    )
    dynamo_backend: Literal[
        "eager",
        "aot_eager",
        "inductor",
        "aot_ts_nvfuser",
        "nvprims_nvfuser",
        "cudagraphs",
        "ofi",
        "fx2trt",
        "onnxrt",
        "tensorrt",
        "aot_torchxla_trace_once",
        "torchxla_trace_once",
        "tvm",
        "hpu_backend",
        "neuron",
    ] = define_option(
        "inductor",
        "torch_compile: backend",
        needs=(Has(Trait.COMPILED),),
        changes_result=False,
        aliases=(Alias("compile_backend", program="musubi-tuner"),),
        value_aliases=(("tensort", "tensorrt"),),
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = define_option(
        "default",
        "torch_compile: mode; max-autotune compiles longer for faster kernels",
        needs=(Has(Trait.COMPILED),),
        changes_result=False,
        aliases=(Alias("compile_mode", program="musubi-tuner"),),
    )
    dynamo_fullgraph: bool = define_option(
        False,
        "torch_compile: fail on graph breaks",
        needs=(Has(Trait.COMPILED),),
        changes_result=False,
        aliases=(Alias("compile_fullgraph", True, program="musubi-tuner"),),
    )
    dynamo_use_regional_compilation: bool = define_option(
        True,
        "torch_compile: compile the repeated blocks of a model once for all of them; off: the whole denoiser",
        needs=(
            Has(Trait.COMPILED),
            HasValue("pp_size", (1,), "with pp_size, the model is always compiled block by block"),
            HasValue("tp_size", (1,), "with tp_size, the model is always compiled block by block"),
            HasValue("cp_size", (1,), "with cp_size, the model is always compiled block by block"),
        ),
        changes_result=False,
    )
    compile_dynamic: Literal["auto", "false", "true"] = define_option(
        "auto",
        "torch_compile: true: one graph for all image sizes; false: a graph for each size, which starts slower and may "
        "run faster; auto: true from three sizes on",
        needs=(Has(Trait.COMPILED),),
        changes_result=False,
        aliases=(Alias("dynamo_dynamic", "true", program="musubi-tuner"),),
        former_name="compile_shapes",
        former_values=(("static", "false"), ("dynamic", "true")),
    )
    compile_cache_dir: str | None = define_option(
        None,
        "torch_compile: folder of compiled kernels for the next run; default: next to the image caches",
        needs=(Has(Trait.COMPILED),),
        changes_result=False,
        is_path=True,
    )
    deterministic: bool = define_option(
        False,
        "only deterministic kernels: equal runs give equal bits on a GPU, too, but are slower",
        needs=ALWAYS,
        changes_result=False,
    )


@dataclass(frozen=True)
class ShardingConfig:
    """FSDP2: shard the frozen model over devices. Without these options, the launcher decides."""

    fsdp: bool | None = define_option(
        None,
        "shard the frozen model over all devices with FSDP2; default: as set by the launcher",
        needs=ALWAYS,
        changes_result=False,
    )
    fsdp_offload_params: bool | None = define_option(
        None, "fsdp: offload the shards to CPU memory", needs=(Has(Trait.FSDP),), changes_result=False
    )
    fsdp_reshard_after_forward: bool | None = define_option(
        None,
        "fsdp: free a block's weights after forward and all-gather them again for backward; default: true",
        needs=(Has(Trait.FSDP),),
        changes_result=False,
    )
    dp_replicate_size: int | None = define_option(
        None,
        "fsdp: number of replicas of the model, such as one per node (HSDP); default: 1",
        minimum=1,
        needs=(Has(Trait.FSDP),),
        changes_result=False,
    )
    dp_shard_size: int | None = define_option(
        None,
        "fsdp: number of devices that share a replica; default: all devices / dp_replicate_size",
        minimum=1,
        needs=(Has(Trait.FSDP),),
        changes_result=False,
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor, context and pipeline parallelism, for models that do not fit on one device."""

    pp_size: int = define_option(
        1,
        "pipeline parallelism: number of stages; each device has a part of the blocks",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
    )
    tp_size: int = define_option(
        1,
        "tensor parallelism: number of devices that split each layer, with an all-reduce per attention and MLP",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
    )
    cp_size: int = define_option(
        1,
        "context parallelism: number of devices that split the tokens of each image",
        minimum=1,
        needs=ALWAYS,
        changes_result=False,
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved"] = define_option(
        "1f1b",
        "pipeline schedule of the micro-batches; interleaved: two shorter stages per device",
        needs=(LacksValue("pp_size", (1,)),),
        changes_result=False,
    )
    device_map: DeviceMap | None = define_option(
        None,
        "place the blocks of the model on several devices of one process; default: one device",
        needs=ALWAYS,
        changes_result=False,
    )

    @property
    def model_parallel_sizes(self) -> dict[str, int]:
        return {"pp_size": self.pp_size, "tp_size": self.tp_size, "cp_size": self.cp_size}

    @property
    def model_parallel_size(self) -> int:
        """Number of devices that work on the same images."""
        return math.prod(self.model_parallel_sizes.values())


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed ZeRO. Without these options, the launcher decides."""

    deepspeed: bool | None = define_option(
        None, "use DeepSpeed ZeRO; default: as set by the launcher", needs=ALWAYS, changes_result=False
    )
    zero_stage: int | None = define_option(
        None,
        "deepspeed: ZeRO stage; 1 shards the optimizer state, 2 also gradients, 3 also the model; default: as set by "
        "the launcher, or 2",
        minimum=0,
        maximum=3,
        needs=(AnyOf((HasValue("zero_stage", (2,)), Has(Trait.DEEPSPEED))),),
        changes_result=False,
    )
    offload_optimizer_device: str | None = define_option(
        None,
        "deepspeed: cpu: keep optimizer state in CPU memory and run the optimizer step there; nvme: the same, with "
        "the memory in files (train full, zero_stage 3); none: no offload",
        needs=(Has(Trait.DEEPSPEED),),
        changes_result=False,
    )
    offload_optimizer_nvme_path: str | None = define_option(
        None,
        "deepspeed: folder for offload_optimizer_device nvme, on a fast local disk of each node",
        needs=(
            Has(Trait.DEEPSPEED),
            AnyOf(
                (HasValue("offload_optimizer_device", ("nvme",)), Has(Trait.LAUNCHED_DEEPSPEED)),
                "offload_optimizer_device is not nvme",
            ),
        ),
        changes_result=False,
        is_path=True,
    )
    offload_param_device: str | None = define_option(
        None,
        "deepspeed, zero_stage 3: offload the model to CPU memory (cpu) or to files (nvme); or none",
        needs=(Has(Trait.DEEPSPEED),),
        changes_result=False,
    )
    offload_param_nvme_path: str | None = define_option(
        None,
        "deepspeed: folder for offload_param_device nvme, on a fast local disk of each node",
        needs=(
            Has(Trait.DEEPSPEED),
            AnyOf(
                (HasValue("offload_param_device", ("nvme",)), Has(Trait.LAUNCHED_DEEPSPEED)),
                "offload_param_device is not nvme",
            ),
        ),
        changes_result=False,
        is_path=True,
    )
