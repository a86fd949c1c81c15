"""The options about DeepSpeed, by sd-scripts' names."""

import math
from dataclasses import dataclass
from typing import Literal

from .options import define_option
from .types import DeviceMap


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO, which divides what processes would all hold; without these, accelerate launch decides."""

    deepspeed: bool | None = define_option(
        None, "divide memory among processes by DeepSpeed's ZeRO; without it, the launcher says"
    )
    zero_stage: int | None = define_option(
        None,
        "deepspeed: 1 divides what the optimizer remembers, 2 gradients, too, 3 the model, too; without it, what"
        " accelerate launch says, or 2",
        minimum=0,
        maximum=3,
    )
    offload_optimizer_device: str | None = define_option(
        None, "deepspeed: cpu for an optimizer that remembers and computes in host memory, or none"
    )
    offload_param_device: str | None = define_option(
        None,
        "deepspeed, zero_stage 3: cpu for a model that rests in host memory, nvme for one that rests in files, or none",
    )
    offload_param_nvme_path: str | None = define_option(
        None, "deepspeed: folder for offload_param_device nvme, on a fast disk of each machine"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Models that do not fit on one device: the frozen model is cut, and adapters stay whole everywhere."""

    pp_size: int = define_option(
        1,
        "pipeline: so many devices have some of the blocks each; micro-batches go from one to the next",
        minimum=1,
    )
    tp_size: int = define_option(
        1,
        "tensor parallel: so many devices have a part of each layer, and exchange a sum in each half of a block",
        minimum=1,
    )
    cp_size: int = define_option(
        1,
        "context parallel: so many devices have a part of each picture, and exchange it in each attention",
        minimum=1,
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved"] = define_option(
        "1f1b", "pp_size: in which order micro-batches run; interleaved gives each device two shorter stages"
    )
    device_map: DeviceMap | None = define_option(
        None, "one process with several devices: deal the blocks of the model out over them"
    )

    @property
    def model_parallel_sizes(self) -> dict[str, int]:
        """The options by which several devices work on one picture."""
        return {"pp_size": self.pp_size, "tp_size": self.tp_size, "cp_size": self.cp_size}

    @property
    def model_parallel_size(self) -> int:
        """So many devices work on one picture."""
        return math.prod(self.model_parallel_sizes.values())


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
    ddp_timeout: int | None = define_option(
        None, "minutes that one process waits for the others; 30 without it", minimum=1
    )
    ddp_gradient_as_bucket_view: bool = define_option(False, "DDP: gradients share memory with the exchange buffers")
    ddp_static_graph: bool = define_option(False, "DDP: the graph never changes, which saves work")
    check_sync_every_n_steps: int | None = define_option(
        None, "compare what is trained over all processes every n steps, too, not only before it is saved", minimum=1
    )
    torch_compile: bool | None = define_option(
        None, "compile the denoiser; without it, accelerate launch or accelerate config decides"
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
    ] = define_option("inductor", "what torch_compile compiles with")
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = define_option(
        "default", "how much time compiling may take"
    )
    dynamo_fullgraph: bool = define_option(False, "fail where a model cannot be compiled in one piece")
    dynamo_use_regional_compilation: bool = define_option(
        True, "compile the blocks that a model repeats, all alike ones at once; off: the denoiser as a whole"
    )
    compile_dynamic: Literal["auto", "false", "true"] = define_option(
        "auto",
        "true: compile one graph for all image sizes; false: one graph for each size (slower to start, may be faster "
        "per step); auto: true from three sizes on",
    )
    compile_cache_dir: str | None = define_option(
        None, "folder for what is compiled, for the next start; without it, beside what is kept of the pictures"
    )


@dataclass(frozen=True)
class ShardingConfig:
    """Which process holds which part of the frozen model; what nobody says here, the launcher decides."""

    fsdp: bool | None = define_option(
        None, "each device holds a part of the frozen model (FSDP2); without it, the launcher says"
    )
    fsdp_offload_params: bool | None = define_option(
        None, "fsdp: these parts rest in host memory while they are not used"
    )
    fsdp_reshard_after_forward: bool | None = define_option(
        None, "fsdp: put a block away after its forward and fetch it again for backward; without it, yes"
    )
    dp_replicate_size: int | None = define_option(
        None,
        "fsdp: so many groups of devices hold the whole model each, such as one a machine (HSDP); without it, 1",
        minimum=1,
    )
    dp_shard_size: int | None = define_option(
        None, "fsdp: so many devices share one model; without it, all devices / dp_replicate_size", minimum=1
    )
