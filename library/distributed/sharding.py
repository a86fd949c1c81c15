"""How the frozen model is to be spread over processes: what our options and the launcher say, in one answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..config import RunConfig
from .world import World, truth

OURS = {"fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "false"),
        "fsdp_reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", "true"),
        "dp_replicate_size": ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"),
        "dp_shard_size": ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")}  # fmt: skip
"""Our options, the variable of the same meaning, and what ``accelerate launch`` puts there when nobody asked."""

REFUSED = {
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
    **{f"PARALLELISM_CONFIG_{name}_SIZE": (("1",), "is for language models; write --cp_size behind the script")
       for name in ("CP", "SP")},
}  # fmt: skip
"""Variables, what may stand in them, and why nothing else may."""

WITHOUT_EFFECT = {
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
class Sharding:
    """Replicas of the model, each spread over so many processes."""

    replicas: int
    parts: int
    offloads: bool = False
    """Whether parts rest in host memory."""
    reshards: bool = True
    """Whether a block is put away between its forward and its backward."""
    blocks: tuple[str, ...] = ()
    """Classes that are kept whole; without any, the model's own list."""


@dataclass(frozen=True)
class Asked:
    """What comes of everything that is said about it."""

    sharding: Sharding | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def asked_for(args: RunConfig, world: World) -> Asked:
    """Whether this run shards, how, and what speaks against it.  Pure."""
    wanted, launched = args.sharding.fsdp, "FSDP" in world.engines
    if wanted is False and launched:
        return Asked(problems=("--no-fsdp: the launcher asks for FSDP; take it out of one of the two",))
    said = _said(world)
    if not (wanted or launched):
        return Asked(problems=tuple(_idle(args, said)))
    problems = [*_refused(said), *_contradictions(args, said), *_others(args, world, said)]
    sharding = _sharding(args, world, said)
    if not problems:
        problems += _sizes(sharding, args, world)
    return Asked(None if problems else sharding, tuple(problems), tuple(_remarks(said)))


def _said(world: World) -> dict[str, str]:
    """What the launcher says for an engine that it asks for; other variables are left over from somewhere."""
    starts = {"FSDP": "FSDP_", "a parallelism config": "PARALLELISM_CONFIG_"}
    asked = tuple(start for engine, start in starts.items() if engine in world.engines)
    return {name: value for name, value in world.said.items() if name.startswith(asked)}


def _idle(args: RunConfig, said: Mapping[str, str]) -> Iterator[str]:
    """What is said about parts of a model that nobody wants in parts."""
    names = [f"--{name}" for name in OURS if getattr(args.sharding, name) is not None]
    sizes = [name for name, size in said.items() if name.endswith("_SIZE") and size != "1"]
    for name in (*names, *(f"the launcher's {spoken(size)}" for size in sizes)):
        yield f"{name}: nothing is spread over processes; add --fsdp"


def _sharding(args: RunConfig, world: World, said: Mapping[str, str]) -> Sharding:
    ours = args.sharding
    launched = {name: said.get(variable, usual) for name, (variable, usual) in OURS.items()}
    replicas = ours.dp_replicate_size or _number(launched["dp_replicate_size"])
    parts = ours.dp_shard_size or _number(launched["dp_shard_size"])
    if parts == 1 and ours.dp_shard_size is None:  # the launcher's way to say nothing
        parts = max(1, _with_own_pictures(args, world) // replicas)
    offloads, reshards = ours.fsdp_offload_params, ours.fsdp_reshard_after_forward
    blocks = tuple(name.strip() for name in said.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",") if name.strip())
    return Sharding(replicas, parts, bool(truth(launched["fsdp_offload_params"])) if offloads is None else offloads,
                    bool(truth(launched["fsdp_reshard_after_forward"])) if reshards is None else reshards,
                    blocks)  # fmt: skip


def _refused(said: Mapping[str, str]) -> Iterator[str]:
    for name, (allowed, why) in REFUSED.items():
        if name in said and said[name] not in allowed:
            yield f"the launcher's {spoken(name)} {said[name]}: {why}"


def _contradictions(args: RunConfig, said: Mapping[str, str]) -> Iterator[str]:
    for name, (variable, usual) in OURS.items():
        ours, theirs = getattr(args.sharding, name), said.get(variable, usual)
        if ours is not None and theirs != usual and str(ours).lower() != theirs:
            yield f"--{name} {str(ours).lower()}: the launcher says {theirs}; say it once"


def _others(args: RunConfig, world: World, said: Mapping[str, str]) -> Iterator[str]:
    """What does not go together with it."""
    if truth(said.get("FSDP_ACTIVATION_CHECKPOINTING")) and not args.train.gradient_checkpointing:
        yield "the launcher's fsdp_activation_checkpointing true: add --gradient_checkpointing, which does it here"
    if args.train.on_oom == "ladder":
        yield ("--on_oom ladder: with FSDP every forward is an exchange, so no process can try a step by itself; use "
               "--on_oom fail")  # fmt: skip
    if not world.joins_group:
        yield "FSDP: this is one process, and there is nobody to share with; start several, or leave FSDP out"
    if "DeepSpeed" in world.engines:
        yield "FSDP: the launcher asks for DeepSpeed, too; take one of the two"


def _sizes(sharding: Sharding, args: RunConfig, world: World) -> Iterator[str]:
    replicas, parts, count = sharding.replicas, sharding.parts, _with_own_pictures(args, world)
    if replicas * parts != count:
        groups = f" / {args.parallel.tp_size} (tp_size)" if args.parallel.tp_size > 1 else ""
        yield (f"FSDP: {replicas} x {parts} (dp_replicate_size x dp_shard_size) is not the number of processes,"
               f" {world.size}{groups}")  # fmt: skip
    elif count == 1 and world.size > 1:
        yield (f"FSDP: --tp_size {args.parallel.tp_size} takes all {world.size} processes, and none is left to share"
               " with; start more, or leave FSDP out")  # fmt: skip
    elif parts == 1 and world.size > 1:
        groups = f" x tp_size {args.parallel.tp_size}" if args.parallel.tp_size > 1 else ""
        yield (f"FSDP: dp_replicate_size {replicas}{groups} takes all {world.size} processes, which leaves nothing to"
               " share; make it smaller, or leave FSDP out")  # fmt: skip


def _with_own_pictures(args: RunConfig, world: World) -> int:
    """Of processes that share layers, one."""
    return world.size // args.parallel.tp_size


def _remarks(said: Mapping[str, str]) -> Iterator[str]:
    for name, usual in WITHOUT_EFFECT.items():
        if name in said and said[name] not in usual:
            yield f"the launcher's {spoken(name)} {said[name]} has no effect here"


def spoken(variable: str) -> str:
    """As it is written behind ``accelerate launch`` and in its file."""
    spoken = variable.lower()
    return {"fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap"}.get(spoken, spoken)


def _number(word: str) -> int:
    return int(word) if word.isdigit() else 1
