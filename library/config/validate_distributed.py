"""Rules across the options by which several devices work on one picture; no torch."""

from collections.abc import Iterator

from .network_args import get_adapter_type
from .schema import RunConfig

NON_TORCH_ATTENTION = ("flash", "flash3", "xformers")
"""Ways to compute attention that are not torch's own."""


def validate_parallel_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    parallel, kind, compiling = config.parallel, get_adapter_type(config.adapter), config.distributed
    if "pp_schedule" in explicit and parallel.pp_size == 1:
        yield ("pp_schedule", "pp_size"), "there is no pipeline; set pp_size"
    if parallel.tp_size > 1 and kind != "lora":
        yield (
            ("tp_size", "network_args"),
            f"layers with an adapter of kind {kind} cannot be cut; use pp_size, cp_size or fsdp",
        )
    if parallel.cp_size > 1:
        if config.distributed.attn_mode in NON_TORCH_ATTENTION:
            yield ("attn_mode", "cp_size"), "only torch's own attention can be shared; use sdpa or cudnn"
    if parallel.device_map is not None:
        for name in _find_device_map_conflicts(config):
            yield ("device_map", name), f"not together with --{name}; take one of the two out"
    if parallel.model_parallel_size == 1:
        return
    name = next(name for name, size in parallel.model_parallel_sizes.items() if size > 1)
    if compiling.torch_compile and "dynamo_use_regional_compilation" in explicit:
        if not compiling.dynamo_use_regional_compilation:
            yield ("dynamo_use_regional_compilation", name), "a model that is taken apart is compiled block by block"
    if config.deepspeed.deepspeed:
        instead = "cp_size" if name == "cp_size" else "tp_size"
        yield ("deepspeed", name), f"not together with --{name}; use --fsdp with --{instead}"


def _find_device_map_conflicts(config: RunConfig) -> Iterator[str]:
    """What else is asked for that needs the model in other places than a device map puts it."""
    asked: dict[str, object] = {
        **{name: size > 1 for name, size in config.parallel.model_parallel_sizes.items()},
        "fsdp": config.sharding.fsdp,
        "deepspeed": config.deepspeed.deepspeed,
        "torch_compile": config.distributed.torch_compile,
        "blocks_to_swap": config.train.blocks_to_swap,
        "quantize_base": config.model.quantize_base != "none",
    }
    return (name for name, is_on in asked.items() if is_on)


MIN_PROFILE_STEPS = 3
"""One step to time undisturbed, one to warm the profiler up, and one to profile."""


_CHECKPOINTING_OPTIONS = (
    ("gradient_checkpointing_every", 1),
    ("activation_memory_budget", 0),
    ("cpu_offload_checkpointing", False),
)


_BUDGET_BACKENDS = ("inductor", "aot_eager")
"""Backends that decide themselves what is computed again."""


def validate_memory_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    for name, nothing in _CHECKPOINTING_OPTIONS:
        if getattr(config.train, name) != nothing and not config.train.gradient_checkpointing:
            yield (name, "gradient_checkpointing"), "there are no checkpoints; set gradient_checkpointing as well"
    backend = config.distributed.dynamo_backend
    if config.train.activation_memory_budget and config.distributed.torch_compile and backend not in _BUDGET_BACKENDS:
        yield (
            ("activation_memory_budget", "dynamo_backend"),
            f"what {backend} compiles has no budget; {' and '.join(_BUDGET_BACKENDS)} have one",
        )
    if config.train.activation_memory_budget and config.distributed.torch_compile:
        for name, nothing in (("gradient_checkpointing_every", 1), ("cpu_offload_checkpointing", False)):
            if getattr(config.train, name) != nothing:
                yield (name, "activation_memory_budget"), "where blocks are compiled, the budget alone decides"
    if config.train.blocks_to_swap and config.distributed.torch_compile:
        yield (
            ("blocks_to_swap", "torch_compile"),
            "weights that come and go cannot be compiled; leave it, or --torch_compile, out",
        )
    steps, train = config.train.profile_steps, config.train
    if steps is not None:
        if steps.first < 2 or steps.last - steps.first + 1 < MIN_PROFILE_STEPS:
            yield (
                ("profile_steps",),
                (
                    f"{steps}: needs at least {MIN_PROFILE_STEPS} steps, from step 2 on, because step 1"
                    " warms everything up; such as 11:30"
                ),
            )
        elif train.max_train_epochs is None and steps.last > train.max_train_steps:
            yield ("profile_steps", "max_train_steps"), f"the run ends with step {train.max_train_steps}"
