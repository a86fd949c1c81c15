"""How the frozen model is to be spread over processes: what our options and the launcher say, in one answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..config import RunConfig
from .world import World, parse_env_bool

FSDP_OPTION_VARIABLES = {
    "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
    "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    "dp_replicate_size": ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
    "dp_shard_size": ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"),
}
"""Our options, the variable of the same meaning, and what ``accelerate launch`` puts there when nobody asked."""


UNSUPPORTED_VARIABLES = {
    "FSDP_VERSION": (("2",), "FSDP1 is not there, and cannot freeze a part of what it flattens; use fsdp_version 2"),
    "FSDP_SHARDING_STRATEGY": (
        ("FULL_SHARD", "1"),
        "belongs to FSDP1; leave it out: fsdp_reshard_after_forward false is SHARD_GRAD_OP, dp_replicate_size is "
        "HYBRID_SHARD, and --multi_gpu is NO_SHARD",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        ("TRANSFORMER_BASED_WRAP",),
        "a model is spread by its blocks; use TRANSFORMER_BASED_WRAP, or leave it out",
    ),
    "FSDP_RESHARD_AFTER_FORWARD": (("true", "false"), "belongs to FSDP1; write true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "is not there; leave it out"),
    "FSDP_IGNORED_MODULES": ((), "is not there; leave it out, adapters are never spread"),
    "PARALLELISM_CONFIG_TP_SIZE": (("1",), "accelerate does nothing with it; write --tp_size behind the script"),
    **{
        f"PARALLELISM_CONFIG_{name}_SIZE": (("1",), "is for language models; write --cp_size behind the script")
        for name in ("CP", "SP")
    },
}
"""Variables, what may stand in them, and why nothing else may."""


IGNORED_VARIABLES = {
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE",),
    "FSDP_FORWARD_PREFETCH": ("false",),
    "FSDP_USE_ORIG_PARAMS": ("true",),
    "FSDP_STATE_DICT_TYPE": (),
    "FSDP_MIN_NUM_PARAMS": ("100000000",),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("true",),
    "FSDP_SYNC_MODULE_STATES": ("true",),
}
"""Variables that change nothing here, and what stands in them when nobody asked for anything."""


@dataclass(frozen=True)
class FSDPSettings:
    """Replicas of the model, each spread over so many processes."""

    dp_replicate: int
    dp_shard: int
    offload_params: bool = False
    """Whether parts rest in host memory."""
    reshard_after_forward: bool = True
    """Whether a block is put away between its forward and its backward."""
    block_classes: tuple[str, ...] = ()
    """Classes that are kept whole; without any, the model's own list."""


@dataclass(frozen=True)
class ResolvedFSDP:
    """What comes of everything that is said about it."""

    settings: FSDPSettings | None = None
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def resolve_fsdp(config: RunConfig, world: World) -> ResolvedFSDP:
    """Whether this run shards, how, and what speaks against it.  Pure."""
    wanted, launched = config.sharding.fsdp, "FSDP" in world.engines
    if wanted is False and launched:
        return ResolvedFSDP(problems=("--no-fsdp: the launcher asks for FSDP; take it out of one of the two",))
    said = _read_launcher_variables(world)
    if not (wanted or launched):
        return ResolvedFSDP(problems=tuple(_validate_unused_options(config, said)))
    problems = [
        *_validate_variables(said),
        *_validate_agreement(config, said),
        *_validate_combinations(config, world, said),
    ]
    sharding = _build_settings(config, world, said)
    if not problems:
        problems += _validate_mesh_size(sharding, config, world)
    return ResolvedFSDP(None if problems else sharding, tuple(problems), tuple(_collect_notices(said)))


def _read_launcher_variables(world: World) -> dict[str, str]:
    """What the launcher says for an engine that it asks for; other variables are left over from somewhere."""
    starts = {"FSDP": "FSDP_", "a parallelism config": "PARALLELISM_CONFIG_"}
    asked = tuple(start for engine, start in starts.items() if engine in world.engines)
    return {name: value for name, value in world.launcher_variables.items() if name.startswith(asked)}


def _validate_unused_options(config: RunConfig, variables: Mapping[str, str]) -> Iterator[str]:
    """What is said about parts of a model that nobody wants in parts."""
    names = [f"--{name}" for name in FSDP_OPTION_VARIABLES if getattr(config.sharding, name) is not None]
    sizes = [name for name, size in variables.items() if name.endswith("_SIZE") and size != "1"]
    for name in (*names, *(f"the launcher's {format_launcher_option(size)}" for size in sizes)):
        yield f"{name}: nothing is spread over processes; add --fsdp"


def _build_settings(config: RunConfig, world: World, variables: Mapping[str, str]) -> FSDPSettings:
    ours = config.sharding
    launched = {name: variables.get(variable, usual) for name, (variable, usual) in FSDP_OPTION_VARIABLES.items()}
    replicas = ours.dp_replicate_size or _parse_int(launched["dp_replicate_size"])
    parts = ours.dp_shard_size or _parse_int(launched["dp_shard_size"])
    if parts == 1 and ours.dp_shard_size is None:  # the launcher's way to say nothing
        parts = max(1, _compute_data_parallel_size(config, world) // replicas)
    offloads, reshards = ours.fsdp_offload_params, ours.fsdp_reshard_after_forward
    blocks = tuple(
        name.strip() for name in variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",") if name.strip()
    )
    return FSDPSettings(
        replicas,
        parts,
        bool(parse_env_bool(launched["fsdp_offload_params"])) if offloads is None else offloads,
        bool(parse_env_bool(launched["fsdp_reshard_after_forward"])) if reshards is None else reshards,
        blocks,
    )


def _validate_variables(variables: Mapping[str, str]) -> Iterator[str]:
    for name, (allowed, why) in UNSUPPORTED_VARIABLES.items():
        if name in variables and variables[name] not in allowed:
            yield f"the launcher's {format_launcher_option(name)} {variables[name]}: {why}"


def _validate_agreement(config: RunConfig, variables: Mapping[str, str]) -> Iterator[str]:
    for name, (variable, usual) in FSDP_OPTION_VARIABLES.items():
        ours, theirs = getattr(config.sharding, name), variables.get(variable, usual)
        if ours is not None and theirs != usual and str(ours).lower() != theirs:
            yield f"--{name} {str(ours).lower()}: the launcher says {theirs}; say it once"


def _validate_combinations(config: RunConfig, world: World, variables: Mapping[str, str]) -> Iterator[str]:
    """What does not go together with it."""
    if parse_env_bool(variables.get("FSDP_ACTIVATION_CHECKPOINTING")) and not config.train.gradient_checkpointing:
        yield "the launcher's fsdp_activation_checkpointing true: add --gradient_checkpointing, which does it here"
    if config.train.on_oom == "recover":
        yield (
            "--on_oom recover: with FSDP every forward is an exchange, so no process can try a step by itself; use "
            "--on_oom fail"
        )
    if not world.needs_process_group:
        yield "FSDP: this is one process, and there is nobody to share with; start several, or leave FSDP out"
    if "DeepSpeed" in world.engines:
        yield "FSDP: the launcher asks for DeepSpeed, too; take one of the two"


def _validate_mesh_size(settings: FSDPSettings, config: RunConfig, world: World) -> Iterator[str]:
    replicas, parts, count = settings.dp_replicate, settings.dp_shard, _compute_data_parallel_size(config, world)
    if replicas * parts != count:
        groups = f" / {config.parallel.tp_size} (tp_size)" if config.parallel.tp_size > 1 else ""
        yield (
            f"FSDP: {replicas} x {parts} (dp_replicate_size x dp_shard_size) is not the number of processes,"
            f" {world.world_size}{groups}"
        )
    elif count == 1 and world.world_size > 1:
        yield (
            f"FSDP: --tp_size {config.parallel.tp_size} takes all {world.world_size} processes, and none is left to share"
            " with; start more, or leave FSDP out"
        )
    elif parts == 1 and world.world_size > 1:
        groups = f" x tp_size {config.parallel.tp_size}" if config.parallel.tp_size > 1 else ""
        yield (
            f"FSDP: dp_replicate_size {replicas}{groups} takes all {world.world_size} processes, which leaves nothing to"
            " share; make it smaller, or leave FSDP out"
        )


def _compute_data_parallel_size(config: RunConfig, world: World) -> int:
    """Of processes that share layers, one."""
    return world.world_size // config.parallel.tp_size


def _collect_notices(variables: Mapping[str, str]) -> Iterator[str]:
    for name, usual in IGNORED_VARIABLES.items():
        if name in variables and variables[name] not in usual:
            yield f"the launcher's {format_launcher_option(name)} {variables[name]} has no effect here"


def format_launcher_option(variable: str) -> str:
    """As it is written behind ``accelerate launch`` and in its file."""
    spoken = variable.lower()
    return {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}.get(spoken, spoken)


def _parse_int(text: str) -> int:
    return int(text) if text.isdigit() else 1
