"""What is advised after out of memory, in the order of what it costs."""

from collections.abc import Iterator

from ..config import RunConfig


def suggest_oom_fixes(config: RunConfig, phase: str, batch_size: int) -> Iterator[str]:
    """Suggest settings that save memory: first those without cost, last those that change the LoRA."""
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
        yield "--quantize_base int8, which halves the memory of the frozen weights compared to bf16"
    if config.optim.optimizer_type.lower() in ("adamw", "adam"):
        yield "--optimizer_type AdamW8bit"
    smaller = ", or a smaller --network_dim" if config.adapter.has_adapter else ""
    yield f"a smaller resolution in the dataset file{smaller}"
