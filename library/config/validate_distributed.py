"""Checks of precision, compiling, parallelism and memory options against each other, without importing torch."""

from collections.abc import Iterator
from importlib.util import find_spec

from ..problems import Problem
from .network_args import get_adapter_type
from .schema import AdapterConfig, RunConfig, TrainConfig
from .schema_distributed import DeepSpeedConfig, DistributedConfig, ParallelConfig

NON_TORCH_ATTENTION = ("flash", "flash3", "xformers")
"""Values of ``attn_mode`` that do not run torch's scaled_dot_product_attention."""

ATTENTION_PACKAGES = {
    "flash": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
    "xformers": ("xformers", "xformers"),
}
"""The module that each attention mode needs, and the package to install."""

MIN_PROFILE_STEPS = 3
"""One step without the profiler for timing, one to warm the profiler up, and one to record."""


def validate_attention_package(mode: str) -> Iterator[Problem]:
    if mode in ATTENTION_PACKAGES and find_spec(ATTENTION_PACKAGES[mode][0]) is None:
        fix = f"pip install {ATTENTION_PACKAGES[mode][1]}, or use sdpa"
        yield Problem("attn_mode", "not installed", fix, value=mode)


def validate_precision(distributed: DistributedConfig) -> Iterator[Problem]:
    precision = distributed.mixed_precision
    if distributed.full_bf16 and precision not in (None, "bf16"):
        yield Problem("full_bf16", f"needs mixed_precision bf16, not {precision}", others=("mixed_precision",))


def validate_device_map_options(config: RunConfig) -> Iterator[Problem]:
    """A device map places whole modules, so nothing else may split, move or compile the model."""
    if config.parallel.device_map is None:
        return
    is_used = {
        **{name: size > 1 for name, size in config.parallel.model_parallel_sizes.items()},
        "fsdp": config.sharding.fsdp,
        "deepspeed": config.deepspeed.deepspeed,
        "torch_compile": config.distributed.torch_compile,
        "blocks_to_swap": config.train.blocks_to_swap,
    }
    for name in (name for name, value in is_used.items() if value):
        yield Problem("device_map", f"cannot be combined with {name}", "remove one of them", others=(name,))


def validate_parallel_options(
    parallel: ParallelConfig, adapter: AdapterConfig, distributed: DistributedConfig, deepspeed: DeepSpeedConfig
) -> Iterator[Problem]:
    """Check tensor, context and pipeline parallelism."""
    adapter_type = get_adapter_type(adapter)
    if parallel.tp_size > 1 and adapter_type != "lora":
        yield Problem(
            "tp_size",
            f"tensor parallelism supports lora only, not {adapter_type}",
            "use pp_size, cp_size or fsdp",
            others=("network_args",),
        )
    if parallel.cp_size > 1 and distributed.attn_mode in NON_TORCH_ATTENTION:
        yield Problem(
            "attn_mode",
            f"context parallelism does not support {distributed.attn_mode}",
            "use sdpa or cudnn",
            others=("cp_size",),
        )
    name = next((name for name, size in parallel.model_parallel_sizes.items() if size > 1), None)
    if name is None:
        return
    if deepspeed.deepspeed:
        yield Problem(
            "deepspeed",
            f"cannot be combined with {name}",
            f"use fsdp with {'cp_size' if name == 'cp_size' else 'tp_size'}",
            others=(name,),
        )


def validate_block_swap_options(train: TrainConfig, distributed: DistributedConfig) -> Iterator[Problem]:
    """Check block swapping."""
    if distributed.torch_compile and train.blocks_to_swap:
        yield Problem(
            "blocks_to_swap", "cannot be combined with torch_compile", "remove one of them", others=("torch_compile",)
        )


def validate_cuda_graph_options(config: RunConfig) -> Iterator[Problem]:
    """A graph has the same kernels on the same memory in every replay, and nothing that the host does in between."""
    distributed, train = config.distributed, config.train
    if not distributed.cuda_graphs:
        return
    compiles_graphs = bool(distributed.torch_compile) and distributed.dynamo_mode in ("reduce-overhead", "max-autotune")
    obstacles = {
        "blocks_to_swap": (train.blocks_to_swap, "the host chooses the buffer of each block"),
        "on_oom": (train.on_oom == "recover", "a graph cannot be split when memory runs out"),
        "cpu_offload_checkpointing": (train.cpu_offload_checkpointing, "it copies between host and device"),
        "activation_memory_budget": (train.activation_memory_budget, "it chooses what it saves in the first steps"),
        "dynamo_mode": (compiles_graphs, f"{distributed.dynamo_mode} captures graphs of its own"),
        "deepspeed": (config.deepspeed.deepspeed, "its hooks run in the backward pass"),
        "fsdp": (config.sharding.fsdp, "it gathers weights in the forward and backward pass"),
        "device_map": (config.parallel.device_map is not None, "a graph is that of one device"),
        **{
            name: (size > 1, "ranks communicate in the forward and backward pass")
            for name, size in config.parallel.model_parallel_sizes.items()
        },
        **{
            name: (getattr(config.model, name), "it draws random numbers in the model's forward pass")
            for name in ("clip_l_dropout_rate", "clip_g_dropout_rate", "t5_dropout_rate", "pos_emb_random_crop_rate")
        },
    }
    for name, (is_used, reason) in obstacles.items():
        if is_used:
            yield Problem(
                "cuda_graphs", f"cannot be combined with {name}: {reason}", "remove one of them", others=(name,)
            )


def validate_profile_steps(train: TrainConfig) -> Iterator[Problem]:
    steps = train.profile_steps
    if steps is None:
        return
    if steps.first < 2 or steps.last - steps.first + 1 < MIN_PROFILE_STEPS:
        yield Problem(
            "profile_steps",
            f"{steps}: expected at least {MIN_PROFILE_STEPS} steps after step 1 (warmup), such as 11:30",
        )
    elif train.max_train_epochs is None and steps.last > train.max_train_steps:
        yield Problem(
            "profile_steps", f"{steps}: the run has {train.max_train_steps} steps", others=("max_train_steps",)
        )
