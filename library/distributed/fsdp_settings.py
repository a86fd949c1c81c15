"""FSDP settings, resolved from our options and from what ``accelerate launch --use_fsdp`` exports; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..config.schema_distributed import ShardingConfig
from ..config.types import parse_env_bool
from .world import World

FSDP_OPTION_VARIABLES = {
    "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    "dp_replicate_size": ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
    "dp_shard_size": ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"),
}
"""Options, accelerate's variable of the same meaning, and the default that ``accelerate launch`` exports."""

UNSUPPORTED_VARIABLES = {
    "FSDP_VERSION": (("2",), "FSDP1 is not supported: it cannot freeze a part of a flat parameter; use fsdp_version 2"),
    "FSDP_SHARDING_STRATEGY": (
        ("FULL_SHARD", "1"),
        "an option of FSDP1, remove it; fsdp_reshard_after_forward false is SHARD_GRAD_OP, dp_replicate_size is "
        "HYBRID_SHARD, and --multi_gpu is NO_SHARD",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        ("TRANSFORMER_BASED_WRAP",),
        "models are sharded block by block; use TRANSFORMER_BASED_WRAP, or remove it",
    ),
    "FSDP_RESHARD_AFTER_FORWARD": (("true", "false"), "an FSDP1 value; write true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "not supported; remove it"),
    "FSDP_IGNORED_MODULES": ((), "not supported; remove it, adapters are never sharded"),
    "PARALLELISM_CONFIG_TP_SIZE": (("1",), "ignored by accelerate; set --tp_size behind the script"),
    "PARALLELISM_CONFIG_CP_SIZE": (("1",), "for language models only; set --cp_size behind the script"),
    "PARALLELISM_CONFIG_SP_SIZE": (("1",), "for language models only; set --cp_size behind the script"),
}
"""Variables, the values that are accepted, and why no others are."""

IGNORED_VARIABLES = {
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE",),
    "FSDP_FORWARD_PREFETCH": ("false",),
    "FSDP_USE_ORIG_PARAMS": ("true",),
    "FSDP_STATE_DICT_TYPE": (),
    "FSDP_MIN_NUM_PARAMS": ("100000000",),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("true",),
    "FSDP_SYNC_MODULE_STATES": ("true",),
}
"""Variables that have no effect, and their defaults."""


@dataclass(frozen=True)
class FSDPSettings:
    """The FSDP2 mesh (replicate x shard) and policies."""

    dp_replicate: int
    dp_shard: int
    offload_params: bool = False
    reshard_after_forward: bool = True
    block_classes: tuple[str, ...] = ()
    """Classes that are sharded as a unit; empty for the model's own list."""


def resolve_fsdp(sharding: ShardingConfig, tp_size: int, world: World) -> FSDPSettings | None:
    """Resolve options and launcher settings; ``None`` without FSDP.  Assumes that ``validate_fsdp`` passes."""
    if not (sharding.fsdp or ("FSDP" in world.engines and sharding.fsdp is None)):
        return None
    variables = read_fsdp_variables(world)
    launched = {name: variables.get(*entry) for name, entry in FSDP_OPTION_VARIABLES.items()}
    replicas = sharding.dp_replicate_size or _parse_int(launched["dp_replicate_size"])
    shards = sharding.dp_shard_size or _parse_int(launched["dp_shard_size"])
    if shards == 1 and sharding.dp_shard_size is None:  # the launcher's default
        shards = max(1, world.world_size // tp_size // replicas)
    offload, reshard = sharding.fsdp_offload_params, sharding.fsdp_reshard_after_forward
    classes = [name.strip() for name in variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")]
    return FSDPSettings(
        replicas,
        shards,
        bool(parse_env_bool(launched["fsdp_offload_params"])) if offload is None else offload,
        bool(parse_env_bool(launched["fsdp_reshard_after_forward"])) if reshard is None else reshard,
        tuple(filter(None, classes)),
    )


def read_fsdp_variables(world: World) -> dict[str, str]:
    """Read the launcher's variables for the engines that it requests; others are left over in the environment."""
    prefix_by_engine = {"FSDP": "FSDP_", "a parallelism config": "PARALLELISM_CONFIG_"}
    prefixes = tuple(prefix for engine, prefix in prefix_by_engine.items() if engine in world.engines)
    return {name: value for name, value in world.launcher_variables.items() if name.startswith(prefixes)}


def find_ignored_fsdp_settings(world: World) -> Iterator[str]:
    """Yield a notice for each launcher setting that has no effect."""
    variables = read_fsdp_variables(world)
    for name, default in IGNORED_VARIABLES.items():
        if name in variables and variables[name] not in default:
            yield f"the launcher's {format_launcher_option(name)} {variables[name]} has no effect here"


def format_launcher_option(variable: str) -> str:
    """Return the name of the option in accelerate's command line and config file."""
    name = variable.lower()
    return {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}.get(name, name)


def _parse_int(text: str) -> int:
    return int(text) if text.isdigit() else 1
