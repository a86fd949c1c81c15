"""Checks of settings against the model, which is built on the meta device: adapter targets, parallelism, block swap."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import injection
from ..config.network_args import get_adapter_type
from ..config.schema import AdapterConfig, ModelConfig, RunConfig, TrainConfig
from ..config.schema_distributed import ParallelConfig
from ..config.schema_optim import OptimConfig
from ..config.schema_output import EvaluateConfig, PreviewConfig
from ..config.validate_adapter import validate_adapter_for_model
from ..config.validate_slider import explain_unscalable
from ..dataloader.sample_prompts import Prompt
from ..errors import ConfigError
from ..evaluation.embedders import EmbedderChoice
from ..evaluation.pictures import find_unsupported_reason
from ..models.base import Family
from ..models.detect import DetectedModel, build_control_limits
from ..models.loading import load_components_on_meta
from ..models.trained_components import select_trained_text_encoders
from ..models.validate_options import validate_attention_mode, validate_splits
from ..optim.optimizers import resolve_optimizer
from ..parallel.cuda_graphs import find_graph_obstacle
from ..parallel.frozen_base import find_innermost_blocks
from ..parallel.parallel_plan import build_block_sequence, list_split_attentions
from ..parallel.quantized_matmul import QUANT_TYPES, find_matmul_obstacle
from ..parallel.validate_engines import validate_device_map
from ..problems import Problem
from .trainable_modules import select_target_components


def validate_attention(mode: str, detected: DetectedModel) -> Iterator[Problem]:
    yield from validate_attention_mode(mode, detected)


def validate_adapter_targets(
    adapter: AdapterConfig, optim: OptimConfig, family: Family, detected: DetectedModel
) -> Iterator[Problem]:
    """Check the adapter options, and that the patterns of ``network_args`` match layers."""
    facts = family.facts
    problems = list(
        validate_adapter_for_model(
            adapter,
            optim,
            facts.options.network,
            title=facts.title,
            text_encoders=tuple(facts.lora.text_encoders),
            t5=facts.text.t5_encoder,
        )
    )
    yield from problems
    if not problems and adapter.network_args:
        encoders = select_trained_text_encoders(adapter, optim, facts)
        pipe = load_components_on_meta(detected, (family.facts.denoiser_name, *encoders))
        components = select_target_components(adapter, optim, family, pipe)
        try:
            injection.select_target_layers(components, adapter, facts.options.network)
        except ConfigError as error:
            yield from error.problems


def validate_model_parallel(
    parallel: ParallelConfig, optimizer_type: str, family: Family, load_denoiser: Callable[[], Any]
) -> Iterator[Problem]:
    """Check that the denoiser can be split as ``--pp_size``, ``--tp_size``, ``--cp_size`` or ``--device_map`` ask."""
    if parallel.model_parallel_size == 1 and parallel.device_map is None:
        return
    if problems := list(validate_splits(parallel, family.facts)):
        yield from problems
        return
    denoiser = load_denoiser()
    if parallel.device_map is not None:
        yield from validate_device_map(denoiser, parallel.device_map)
        if resolve_optimizer(optimizer_type).is_lr_free:
            yield Problem(
                "device_map",
                f"{optimizer_type} computes its step size from all parameters, which would be on several devices",
                "use another optimizer, or --pp_size",
            )
    yield from _validate_pipeline(parallel, family, denoiser)
    yield from _validate_attention_heads(parallel, denoiser)


def load_denoiser_on_meta(family: Family, detected: DetectedModel) -> Any:
    """Build the denoiser on the meta device."""
    return getattr(load_components_on_meta(detected, (family.facts.denoiser_name,)), family.facts.denoiser_name)


def validate_trained_weights(adapter: AdapterConfig, family: Family, detected: DetectedModel) -> Iterator[Problem]:
    """Full training knows models of one denoiser; each pattern of ``train_modules`` matches a weight of it."""
    if adapter.is_full and family.facts.pipeline.experts is not None:
        yield Problem("train", f"{family.facts.title} has two transformers, and full trains one", "train lora")
        return
    if not (adapter.is_full and adapter.train_modules):
        return
    names = [name for name, _ in load_denoiser_on_meta(family, detected).named_parameters()]
    where, fix = family.facts.denoiser_name, f"they have names such as {names[len(names) // 2]}"
    for pattern in adapter.train_modules:
        if not any(re.search(pattern, name) for name in names):
            yield Problem("train_modules", f"{pattern!r} matches no weight of the {where}", fix)


def validate_model_file(config: RunConfig, family: Family, detected: DetectedModel) -> Iterator[Problem]:
    """A model is saved as one file only if the base model is one, with the trained weights in it."""
    if not config.adapter.is_full or config.save.save_model_as != "safetensors":
        return
    from .save_single_file import find_single_file_obstacle

    if obstacle := find_single_file_obstacle(config, family, detected):
        yield Problem("save_model_as", obstacle, "use diffusers", value="safetensors", others=("train",))


def _validate_pipeline(parallel: ParallelConfig, family: Family, denoiser: nn.Module) -> Iterator[Problem]:
    devices = parallel.pp_size
    if devices == 1:
        return
    blocks = len(build_block_sequence(family, denoiser).blocks)
    stages_per_device = 2 if parallel.pp_schedule == "interleaved" else 1
    if blocks < devices * stages_per_device:
        stages = f" with {stages_per_device} stages each" if stages_per_device > 1 else ""
        yield Problem(
            "pp_size",
            f"{family.facts.title} has {blocks} blocks, too few for {devices} devices{stages}",
            f"use {max(1, blocks // stages_per_device)}",
            value=str(devices),
        )


def _list_head_counts(attention: Any) -> tuple[int, int]:
    """The heads of queries, and those of keys and values."""
    heads = attention.heads if hasattr(attention, "heads") else attention.num_heads
    if hasattr(attention, "inner_kv_dim"):
        return heads, attention.inner_kv_dim * heads // attention.inner_dim
    return heads, getattr(attention, "num_kv_heads", heads)


def _validate_attention_heads(parallel: ParallelConfig, denoiser: Any) -> Iterator[Problem]:
    """Tensor and context parallelism split the attention heads, whose number they must divide."""
    sizes = {name: size for name, size in parallel.model_parallel_sizes.items() if name != "pp_size"}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        return
    total = math.prod(sizes.values())
    names = list_split_attentions(name for name, _ in denoiser.named_modules())
    heads = {count for name in names for count in _list_head_counts(denoiser.get_submodule(name))}
    if indivisible := sorted(number for number in heads if number % total):
        fitting = [size for size in range(2, total + 8) if not any(number % size for number in heads)]
        fix = f"use {' or '.join(map(str, fitting))}" if fitting else "use --fsdp"
        first, *others = sizes
        by, in_total = (f" by {total}", " in total" if fitting else "") if others else ("", "")
        together = f"with {' and '.join(f'{name} {sizes[name]}' for name in others)}, " if others else ""
        yield Problem(
            first,
            f"{together}{indivisible[0]} attention heads are not divisible{by}",
            f"{fix}{in_total}",
            value=str(sizes[first]),
            others=tuple(others),
        )


def validate_quantize_offload(
    model: ModelConfig, train: TrainConfig, has_full_model: bool, can_quantize_base: bool
) -> Iterator[Problem]:
    """Block swap needs all frozen weights in one process; ZeRO 3 shards only weights that it can cast."""
    if train.blocks_to_swap and not has_full_model:
        yield Problem(
            "blocks_to_swap", "not available in runs that shard the frozen weights over processes", "use one of the two"
        )
    if model.quantize_base != "none" and not can_quantize_base:
        yield Problem(
            "quantize_base", "not available with ZeRO 3", "use --fsdp, which shards quantized weights, or ZeRO 1 or 2"
        )


def validate_quantized_matmul(
    model: ModelConfig, parallel: ParallelConfig, mixed_precision: str, device: torch.device | None
) -> Iterator[Problem]:
    """Products in fp8 and int8 have bf16 results, need whole rows and a device that has them."""
    if not model.quantized_matmul or model.quantize_base not in QUANT_TYPES:
        return
    if mixed_precision not in ("", "bf16"):
        yield Problem(
            "quantized_matmul",
            f"needs mixed_precision bf16, not {mixed_precision}",
            "add --mixed_precision bf16",
            others=("mixed_precision",),
        )
    if parallel.tp_size > 1:
        yield Problem(
            "quantized_matmul",
            "tensor parallelism splits the rows that have one scale",
            "use --fsdp or --cp_size",
            others=("tp_size",),
        )
    if device is not None and (obstacle := find_matmul_obstacle(model.quantize_base, device)):
        yield Problem(
            "quantized_matmul", obstacle, "remove it: weights are then dequantized", others=("quantize_base",)
        )


def validate_cuda_graphs(
    config: RunConfig, family: Family, is_supported: bool, device: torch.device | None
) -> Iterator[Problem]:
    """Graphs need CUDA, one process or DDP, frozen text encoders, and a model whose forward is the device's alone."""
    if not config.distributed.cuda_graphs:
        return
    fix = "remove it"
    if device is not None and (obstacle := find_graph_obstacle(device)):
        yield Problem("cuda_graphs", obstacle, fix)
    if not is_supported:
        yield Problem("cuda_graphs", "the launcher asks for an engine whose hooks a graph does not have", fix)
    if select_trained_text_encoders(config.adapter, config.optim, family.facts):
        fix_encoders = "add --network_train_unet_only"
        yield Problem("cuda_graphs", "text encoders are trained, which run before the graph", fix_encoders)
    if reason := family.facts.blocks.unsupported_strategies.get("cuda_graphs"):
        yield Problem("cuda_graphs", reason, fix)


def validate_preservation(config: RunConfig, family: Family, is_compile_enabled: bool) -> Iterator[Problem]:
    """The target of output preservation is that of frozen text encoders, and a model whose adapter is switched off."""
    option = config.preservation.active_option
    if option is None:
        return
    if select_trained_text_encoders(config.adapter, config.optim, family.facts):
        yield Problem(
            option, "text encoders are trained, so the base model has no texts", "add --network_train_unet_only"
        )
    if is_compile_enabled and not config.distributed.torch_compile:
        yield Problem(
            option,
            "accelerate's settings ask for torch.compile, whose blocks have the adapter switched on",
            "add --no-torch_compile",
        )
    recomputes = config.train.gradient_checkpointing or config.train.on_oom == "recover"
    if recomputes and (reason := family.facts.blocks.unsupported_strategies.get("preservation")):
        yield Problem(option, f"{reason} by gradient checkpointing", "remove one of them")


def validate_prompt_strengths(adapter: AdapterConfig, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Check that previews can be made at the strengths of the adapter that their prompts ask for."""
    reason = explain_unscalable(adapter)
    for prompt in prompts if reason else ():
        if prompt.network_multiplier != 1:
            yield prompt.report("network_multiplier", reason or "", "leave it out")


def validate_evaluation(config: EvaluateConfig, family: Family) -> Iterator[Problem]:
    """Check that the pictures of an evaluation can be generated during training, and embedded."""
    if not config.is_active:
        return
    if reason := find_unsupported_reason(family):
        option = "evaluate_every_n_steps" if config.evaluate_every_n_steps else "evaluate_every_n_epochs"
        yield Problem(option, f"{family.facts.title} {reason}", "remove it")
    yield from EmbedderChoice(
        config.evaluation_image_model, config.evaluation_text_model, "evaluation_"
    ).find_problems()


def validate_slider_family(
    config: RunConfig, family: Family, detected: DetectedModel, is_compile_enabled: bool = False
) -> Iterator[Problem]:
    """Training on texts alone needs a model that makes pictures or clips of texts alone, with one denoiser."""
    if config.data.slider_prompts is None:
        return
    if is_compile_enabled and not config.distributed.torch_compile:
        text = "accelerate's settings ask for torch.compile, whose blocks have the adapter switched on"
        yield Problem("slider_prompts", text, "add --no-torch_compile")
    facts, reason = family.facts, ""
    if facts.pipeline.experts is not None:
        reason = "has two transformers, and the latents of one are denoised by both"
    elif build_control_limits(detected).describe_problem(0) or facts.text_images == "controls":
        reason = "needs control images"
    elif type(family).encode_frame_cond is not Family.encode_frame_cond:
        reason = f"needs the {'pictures' if facts.pipeline.frames is None else 'frames of clips'} themselves"
    if reason:
        fix = "use a model that makes its pictures or clips of texts alone"
        yield Problem("slider_prompts", f"{facts.title} {reason}", fix, others=("pretrained_model_name_or_path",))


def validate_compile(family: Family, is_compile_enabled: bool) -> Iterator[Problem]:
    reason = family.facts.blocks.unsupported_strategies.get("compile")
    if is_compile_enabled and reason:
        yield Problem("torch_compile", reason, "remove it")


def validate_noise_experts(
    adapter: AdapterConfig, preview: PreviewConfig, family: Family, engine: str
) -> Iterator[Problem]:
    """A run of both experts starts from no LoRA file and knows no DeepSpeed; previews need both."""
    experts = family.facts.pipeline.experts
    if experts is None:
        return
    if experts.trained != "both":
        if preview.sample_prompts is not None:
            text = f"previews are sampled with both experts, and {experts.trained} alone is loaded"
            yield Problem("sample_prompts", text, "leave it out, or set noise_experts both", others=("noise_experts",))
        return
    if engine and (reason := family.facts.blocks.unsupported_strategies.get(engine.lower())):
        yield Problem("noise_experts", f"{engine}: {reason}, or use --fsdp")
    if family.shares_adapters and get_adapter_type(adapter) == "dora":
        text = "the magnitudes of DoRA are those of one transformer, and both share the adapter"
        yield Problem("expert_adapters", text, "set expert_adapters separate, or train a LoRA without dora_wd")
    for name in ("network_weights", "base_weights", "training_adapter"):
        if getattr(adapter, name):
            text = "a LoRA file is loaded into one expert, and both are trained"
            yield Problem(
                name, text, "train one with --noise_experts high_noise or low_noise", others=("noise_experts",)
            )


def validate_sound(config: RunConfig, family: Family, engine: str) -> Iterator[Problem]:
    """Sound is read once, while latents are cached, and trained by what knows steps without it."""
    rule, option = family.frame_rule, "train_audio"
    if rule is None or not rule.sound_rate:
        return
    if config.data.slider_prompts is not None:
        yield Problem(option, "slider_prompts trains without clips", "remove one", others=("slider_prompts",))
    elif not config.cache.caches_latents:
        text = "sound is read and encoded once, together with the latents of the clips"
        yield Problem(option, text, "add --cache_latents_to_disk or --cache_latents", others=("cache_latents",))
    if config.adapter.is_full:
        yield Problem(option, "full training has not been tried with sound", "train lora", others=("train",))
    if preserved := config.preservation.active_option:
        text = "the output of the base model is preserved for frames alone"
        yield Problem(option, text, f"remove it or {preserved}", others=(preserved,))
    if engine and (reason := family.facts.blocks.unsupported_strategies.get(engine.lower())):
        yield Problem(option, f"{engine}: {reason}", "use --fsdp")


def validate_block_swap(
    blocks_to_swap: int | None, family: Family, detected: DetectedModel, is_compile_enabled: bool
) -> Iterator[Problem]:
    """Swapped blocks must exist, and cannot be compiled."""
    if not blocks_to_swap:
        return
    if is_compile_enabled:
        yield Problem(
            "blocks_to_swap",
            "accelerate's settings ask for torch.compile, which does not work with block swap",
            "add --no-torch_compile",
        )
    count = len(find_innermost_blocks(load_denoiser_on_meta(family, detected)))
    count *= len(family.facts.pipeline.denoisers)  # which have equally many
    if blocks_to_swap > count:
        yield Problem("blocks_to_swap", f"{blocks_to_swap}; this model has {count} blocks")
