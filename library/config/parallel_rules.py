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
        yield (("tp_size", "network_args"),
               f"layers with an adapter of kind {kind} cannot be cut; use pp_size, cp_size or fsdp")  # fmt: skip
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
        "base_storage": config.model.base_storage != "float",
    }
    return (name for name, is_on in asked.items() if is_on)
