"""What is advised after out of memory, in the order of what it costs."""

from collections.abc import Iterator, Sequence

from ..config import RunConfig
from ..models.gguf_blocks import BLOCK_SIZES
from ..parallel.frozen_base import MAX_REQUANTIZED_SHARE
from ..parallel.quantize import PACKED_TYPES

NF4_BYTES = 0.53
"""Bytes of a weight in nf4, with its part of a scale."""


def suggest_oom_fixes(
    config: RunConfig, phase: str, batch_size: int, stored_formats: Sequence[str] = ()
) -> Iterator[str]:
    """Suggest settings that save memory: first those without cost, last those that change the LoRA.

    ``stored_formats`` are those in which the model's files have weights quantized.
    """
    cache, train = config.cache, config.train
    is_full, is_fused = config.adapter.is_full, config.full.fused_backward_pass
    if phase == "encode" and cache.vae_batch_size > 1:
        yield "--vae_batch_size 1"
    if phase == "encode" and cache.text_encoder_batch_size > 1:
        yield "--text_encoder_batch_size 1"
    if not cache.caches_latents:
        yield "--cache_latents, which frees the VAE"
    if not cache.caches_text_outputs and not config.adapter.trains_embedding:
        needed = " (Stable Diffusion: with --network_train_unet_only)" if config.adapter.trains_text_encoders else ""
        yield f"--cache_text_encoder_outputs{needed}, which frees the text encoders"
    if config.distributed.mixed_precision == "no":
        yield "--mixed_precision bf16"
    is_split = config.parallel.pp_size * config.parallel.tp_size > 1
    has_full_model = not (is_split or config.sharding.fsdp or config.deepspeed.deepspeed)
    can_recover = has_full_model and config.parallel.model_parallel_size == 1 and phase != "optimizer" and not is_fused
    if can_recover and train.on_oom == "fail" and batch_size > 1:
        yield "--on_oom recover, which splits micro-batches as far as needed, with the same result"
    if not train.gradient_checkpointing:
        yield "--gradient_checkpointing, which recomputes activations in the backward pass"
    elif not train.cpu_offload_checkpointing:
        yield "--cpu_offload_checkpointing, which offloads checkpointed activations to host memory"
    if is_full and has_full_model and not is_fused:
        yield "--fused_backward_pass, which never holds all gradients (one process)"
    can_swap = has_full_model and not train.blocks_to_swap and not config.distributed.torch_compile
    if can_swap and not is_full:
        yield "--blocks_to_swap N, which offloads the frozen weights of N blocks to host memory"
    elif can_swap and is_fused:
        yield "--blocks_to_swap N, which keeps weights and optimizer state of N blocks in host memory"
    if not is_full and config.model.quantize_base == "none" and config.deepspeed.zero_stage != 3:
        yield from _suggest_smaller_base(config, stored_formats)
    if config.optim.optimizer_type.lower() in ("adamw", "adam"):
        yield "--optimizer_type AdamW8bit"
    smaller = ", or a smaller --network_dim" if config.adapter.has_adapter else ""
    yield f"a smaller resolution in the dataset file{smaller}"


def _suggest_smaller_base(config: RunConfig, stored_formats: Sequence[str]) -> Iterator[str]:
    """Suggest what makes the frozen weights smaller, which may be stored quantized and stay so."""
    if stored_formats and config.model.dequantize_base:
        yield "leave out --dequantize_base, so that the base model takes the memory of its file"
        return
    if not stored_formats or config.adapter.base_weights:  # which are merged into dequantized weights
        yield "--quantize_base int8, which halves the memory of the frozen weights compared to bf16"
        return
    large = [name for name in stored_formats if NF4_BYTES < MAX_REQUANTIZED_SHARE * _count_weight_bytes(name)]
    if large:
        yield f"--quantize_base nf4, which makes weights in {', '.join(large)} smaller"


def _count_weight_bytes(stored_format: str) -> float:
    """Count the bytes of one weight as a file stores it, without scales of whole rows; 0 for ordinary floats."""
    if stored_format == "scaled":
        return 0
    values, nbytes = BLOCK_SIZES.get(stored_format, (2, 1) if stored_format in PACKED_TYPES else (1, 1))
    return nbytes / values
