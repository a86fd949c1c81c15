"""Checks of full fine-tuning (``--train full``) against other options: what it does not have is refused here."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ..problems import Problem
from .network_args import NetworkFacts, count_unet_blocks
from .schema import RunConfig

_FROZEN_ONLY = "for frozen weights, and train full trains them"
FP16_REASON = "fp16 would update weights before it is known whether another gradient overflows"
PROCESSES_REASON = "weights would be updated before the gradients of other processes arrive"


def resolve_text_encoder_rates(config: RunConfig) -> RunConfig:
    """Give ``learning_rate_te1`` and ``learning_rate_te2`` the form of ``text_encoder_lr``, unless that is set."""
    rates = config.full.text_encoder_rates
    if not (config.adapter.is_full and config.adapter.train_text_encoder and rates) or config.optim.text_encoder_lr:
        return config
    return replace(config, optim=replace(config.optim, text_encoder_lr=_fill_rates(config)))


def _fill_rates(config: RunConfig) -> tuple[float, ...]:
    rates = config.full.text_encoder_rates
    return tuple(config.optim.learning_rate if rate is None else rate for rate in rates)


def validate_full_training(config: RunConfig) -> Iterator[Problem]:
    """Refuse what full training does not support, all at once."""
    if not config.adapter.is_full:
        return
    yield from _validate_base_options(config)
    yield from _validate_layout(config)
    yield from _validate_text_encoders(config)
    yield from _validate_fused_backward(config)
    if config.full.block_lr is not None and config.optim.unet_lr is not None:
        yield Problem("block_lr", "contradicts unet_lr", "remove one of them", others=("unet_lr",))
    if config.full.block_lr is not None and not config.optim.learning_rate and config.adapter.trains_text_encoders:
        text = "0 beside block_lr: sd-scripts then trains no block"
        yield Problem("learning_rate", text, "remove one of them", others=("block_lr",))
    for pattern in config.adapter.train_modules:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem("train_modules", f"{pattern!r} is no regular expression: {error}")


def _validate_base_options(config: RunConfig) -> Iterator[Problem]:
    """Refuse options of a frozen base model, and those of adapters whose loss would go unnoticed."""
    adapter, train = ("train",), config.adapter
    if config.model.quantize_base != "none":
        yield Problem("quantize_base", f"it is {_FROZEN_ONLY}", "remove it", others=adapter)
    if config.train.blocks_to_swap and not config.full.fused_backward_pass:
        text = "with train full the gradients of all weights would be on the device, which are as large as the weights"
        yield Problem("blocks_to_swap", text, "add --fused_backward_pass", others=("train", "fused_backward_pass"))
    if train.network_weights:
        fix = "merge it with base_weights, or train lora"
        yield Problem("network_weights", "train full trains no LoRA that could start from it", fix, others=adapter)
    if train.training_adapter:
        text = "it would not be part of the model that is saved"
        yield Problem("training_adapter", f"train full: {text}", "merge it with base_weights", others=adapter)
    if config.model.control != "none":
        yield Problem("control", "is trained as a LoRA only", "use train lora", others=adapter)
    if config.distributed.cuda_graphs:
        yield Problem("cuda_graphs", "not supported with train full", "remove it", others=adapter)
    if config.distributed.mixed_precision == "fp8":
        fix = "use mixed_precision bf16"
        yield Problem("mixed_precision", "fp8 multiplies with frozen weights, which train full has not", fix)
    if option := config.preservation.active_option:
        text = "it keeps what the model predicts without the LoRA, and train full has none"
        yield Problem(option, text, "remove it", others=adapter)


def _validate_layout(config: RunConfig) -> Iterator[Problem]:
    """Refuse the strategies that take all trained weights to be adapters, which every rank holds."""
    fix, adapter = "use --fsdp, DDP or one process", ("train",)
    sizes = {name: size for name, size in config.parallel.model_parallel_sizes.items() if size > 1}
    if "pp_size" in sizes and len(sizes) > 1:
        first, *_ = (name for name in sizes if name != "pp_size")
        text = f"with {first} it is not supported with train full"
        yield Problem("pp_size", text, "use one of the two", value=str(sizes["pp_size"]), others=(first, *adapter))
    if "pp_size" in sizes and config.distributed.mixed_precision == "fp16":
        text = "fp16 looks for overflows among all gradients, and each stage of a pipeline has those of its blocks"
        yield Problem("mixed_precision", text, "use bf16 or no", value="fp16", others=("pp_size", *adapter))
    if config.sharding.fsdp_offload_params and config.distributed.mixed_precision == "fp16":
        text = "fp16 scales gradients on the device, and fsdp_offload_params keeps those of train full in host memory"
        yield Problem("mixed_precision", text, "use bf16 or no", value="fp16", others=("fsdp_offload_params", *adapter))
    if config.parallel.device_map is not None:
        yield Problem("device_map", "not supported with train full", fix, others=adapter)


def _validate_fused_backward(config: RunConfig) -> Iterator[Problem]:
    """Refuse what needs the gradients of all weights, or of all processes, before the first weight is updated."""
    if not config.full.fused_backward_pass:
        return
    reasons = {
        "mixed_precision": (config.distributed.mixed_precision == "fp16", FP16_REASON, "use bf16 or no"),
        "on_oom": (
            config.train.on_oom == "recover",
            "a step that has updated weights cannot be tried again",
            "remove it",
        ),
        "fsdp": (config.sharding.fsdp, PROCESSES_REASON, "remove one of them"),
        "deepspeed": (config.deepspeed.deepspeed, PROCESSES_REASON, "remove one of them"),
        "cp_size": (config.parallel.cp_size > 1, PROCESSES_REASON, "remove one of them"),
        "tp_size": (config.parallel.tp_size > 1, PROCESSES_REASON, "remove one of them"),
        "pp_size": (config.parallel.pp_size > 1, PROCESSES_REASON, "remove one of them"),
    }
    for name, (is_used, reason, fix) in reasons.items():
        if is_used:
            yield Problem(name, f"with fused_backward_pass {reason}", fix, others=("fused_backward_pass",))


def validate_block_rates(config: RunConfig, network: NetworkFacts, title: str) -> Iterator[Problem]:
    """Check that there is a learning rate for each block of the model, and that one is not 0."""
    if config.full.block_lr is None:
        return
    count, rates = count_unet_blocks(network), config.full.block_lr.rates
    if not count:
        yield Problem("block_lr", f"{title} has no such blocks", "remove it, or choose weights with train_modules")
    elif len(rates) != count:
        yield Problem("block_lr", f"{len(rates)} values for {count} blocks", f"give {count} values")
    elif not any(rates) and not config.adapter.trains_text_encoders:
        yield Problem("block_lr", "every learning rate is 0", "give one block another one")


def validate_fused_launch(config: RunConfig, world_size: int, engine: str, mixed_precision: str) -> Iterator[Problem]:
    """Check the fused backward pass against what the launcher sets."""
    is_set = config.sharding.fsdp or config.deepspeed.deepspeed or config.parallel.model_parallel_size > 1
    if (world_size > 1 or engine) and not is_set:
        yield Problem("fused_backward_pass", PROCESSES_REASON, "start one process, or remove it", value="true")
    if mixed_precision == "fp16" and config.distributed.mixed_precision is None:
        yield Problem("mixed_precision", f"with fused_backward_pass {FP16_REASON}", "use bf16 or no", value="fp16")


def _validate_text_encoders(config: RunConfig) -> Iterator[Problem]:
    singles = [name for name in ("learning_rate_te1", "learning_rate_te2") if getattr(config.full, name) is not None]
    if config.full.learning_rate_te is not None and singles:
        yield Problem(
            "learning_rate_te",
            f"contradicts {singles[0]}",
            "remove one of them",
            others=(singles[0],),
        )
    given = [*(["learning_rate_te"] if config.full.learning_rate_te is not None else []), *singles]
    if given and config.optim.text_encoder_lr not in ((), _fill_rates(config)):
        yield Problem(given[0], "contradicts text_encoder_lr", "remove one of them", others=("text_encoder_lr",))
