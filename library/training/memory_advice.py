"""What to tell when memory did not suffice: where it was, and which switch to try next."""

from collections.abc import Iterator

from ..config import RunConfig
from ..data.batch import PixelBatch
from ..distributed.memory import OutOfMemory

PHASE_DESCRIPTIONS = {
    "data": "while pictures were read",
    "encode": "while pictures and captions were encoded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "while the optimizer changed the weights",
    "communication": "while gradients were put together for the other processes",
    "another process": "on another process",
}
MAX_BATCH_IMAGES_SHOWN = 4


def format_oom_message(error: Exception, config: RunConfig, step: int | None) -> str:
    """Lines for a user; ``step`` counts from 0, and without one the run had not begun."""
    phase, batch, reason = "", None, str(error).partition("\n")[0]
    if isinstance(error, OutOfMemory):
        phase, batch, reason = error.phase, error.batch, error.reason
    when = "before the first step" if step is None else f"in step {step + 1} {PHASE_DESCRIPTIONS.get(phase, '')}".rstrip()
    what = f", with {_describe_batch(batch)}" if batch is not None else ""
    first, *others = suggest_oom_fixes(config, phase, len(batch) if batch is not None else 1)
    rest = f"\nIf that is not enough: {'; '.join(others)}." if others else ""
    return f"out of memory {when}{what}{f' ({reason})' if reason else ''}.\nTry next: {first}.{rest}"


def _describe_batch(batch: PixelBatch) -> str:
    height, width = (int(number) for number in batch.size_conditioning[0, -2:].tolist())
    more = f" and {len(batch) - MAX_BATCH_IMAGES_SHOWN} more" if len(batch) > MAX_BATCH_IMAGES_SHOWN else ""
    count = "1 picture" if len(batch) == 1 else f"{len(batch)} pictures"
    return f"{count} of {width}x{height}: {', '.join(batch.sample_keys[:MAX_BATCH_IMAGES_SHOWN])}{more}"


def suggest_oom_fixes(config: RunConfig, phase: str, batch_size: int) -> Iterator[str]:
    """Settings that save memory and are not set yet: first those that cost nothing, last those that change the LoRA."""
    cache, train = config.cache, config.train
    if phase == "encode" and cache.vae_batch_size > 1:
        yield "--vae_batch_size 1"
    if phase == "encode" and cache.text_encoder_batch_size > 1:
        yield "--text_encoder_batch_size 1"
    if not cache.caches_latents:
        yield "--cache_latents, after which the VAE is not needed"
    if not cache.caches_text_outputs:
        yield "--cache_text_encoder_outputs, after which the text encoders are not needed"
    if config.distributed.mixed_precision == "no":
        yield "--mixed_precision bf16"
    is_cut = config.parallel.pp_size * config.parallel.tp_size > 1
    is_whole = not (is_cut or config.sharding.fsdp or config.deepspeed.deepspeed)
    if is_whole and config.parallel.model_parallel_size == 1 and train.on_oom == "fail" and batch_size > 1 and phase != "optimizer":
        yield "--on_oom ladder, which cuts batches in parts as far as needed, with the same result"
    if not train.gradient_checkpointing:
        yield "--gradient_checkpointing, which computes activations twice"
    elif not train.cpu_offload_checkpointing:
        yield "--cpu_offload_checkpointing, which keeps what is computed twice in host memory"
    if is_whole and not train.blocks_to_swap and not config.distributed.torch_compile:
        yield "--blocks_to_swap, which keeps frozen weights of so many blocks in host memory"
    if is_whole and config.model.base_storage == "float":
        yield "--base_storage int8, which keeps frozen weights in half as many bits as bf16"
    if config.optim.optimizer_type.lower() in ("adamw", "adam"):
        yield "--optimizer_type AdamW8bit"
    yield "a smaller resolution in the dataset file, or a smaller --network_dim"
