"""The options about DeepSpeed, by sd-scripts' names."""

from dataclasses import dataclass

from .options import define_option


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
