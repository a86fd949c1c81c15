"""Options by which the frozen model is spread over processes; part of ``schema.py``."""

from dataclasses import dataclass

from .options import define_option


@dataclass(frozen=True)
class ShardingConfig:
    """Which process holds which part of the frozen model; what nobody says here, the launcher decides."""

    fsdp: bool | None = define_option(None, "each device holds a part of the frozen model (FSDP2); without it, the launcher says")
    fsdp_offload_params: bool | None = define_option(None, "fsdp: these parts rest in host memory while they are not used")
    fsdp_reshard_after_forward: bool | None = define_option(
        None, "fsdp: put a block away after its forward and fetch it again for backward; without it, yes"
    )
    dp_replicate_size: int | None = define_option(
        None, "fsdp: so many groups of devices hold the whole model each, such as one a machine (HSDP); without it, 1",
        minimum=1,
    )  # fmt: skip
    dp_shard_size: int | None = define_option(
        None, "fsdp: so many devices share one model; without it, all devices / dp_replicate_size", minimum=1
    )
