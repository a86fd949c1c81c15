"""Build a training run from settings: load the pipeline, inject adapters, build optimizer, task and data loader."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..adapters import injection
from ..adapters.component_key_names import clean_parameter_name
from ..adapters.lora_dropout import LoraDropout
from ..adapters.precision import cast_trainable_parameters, leave_input_casts_to_autocast
from ..adapters.update_norms import MaxNormRegularizer
from ..atomic_files import find_write_error
from ..cache.paths import resolve_cache_dirs
from ..cache.readers import CacheReaders, build_step_loader
from ..config import RunConfig
from ..config.schema import TrainConfig
from ..config.schema_data import CacheConfig, DataConfig
from ..config.schema_distributed import DistributedConfig
from ..config.schema_objective import LossConfig, NoiseConfig
from ..config.schema_optim import OptimConfig
from ..config.validate_objective import find_active_options
from ..dataloader.loader import StepLoader
from ..dataloader.prepare import PreparedData, prepare_data
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import Prompt
from ..dataloader.slider_data import SliderLoader
from ..diffusion.objective import Objective
from ..diffusion.process import FlowMatchingProcess
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST, MIXED_PRECISION_DTYPES
from ..errors import ConfigError
from ..models.attention import set_attention_mode
from ..models.base import Family
from ..models.collect_component_keys import collect_component_keys
from ..models.detect import DetectedModel, build_control_limits
from ..models.kohya_objective import convert_values
from ..models.loading import describe_dequantized
from ..models.model_configs import is_tokenizer
from ..models.scheduler_overrides import override_scheduler, use_original_snr
from ..models.small_convolutions import multiply_small_convolutions
from ..models.trained_components import (
    list_cached_text_components,
    select_extended_text_encoders,
    select_trained_text_encoders,
)
from ..optim import lr_schedulers, optimizers
from ..optim.ema import AdapterEMA
from ..optim.fused_backward import FusedBackward, PartialStep
from ..optim.stochastic_rounding import StochasticRounding, WeightParts
from ..optim.validate_optimizer import find_learning_rate_warnings, is_divisible
from ..parallel.activation_checkpointing import enable_activation_checkpointing
from ..parallel.async_copy import CopyStream
from ..parallel.cuda_graphs import CudaCapture, StepGraphs
from ..parallel.frozen_base import is_quantized_or_offloaded, quantize_and_offload_base
from ..parallel.parallel_plan import build_parallel_plan
from ..parallel.sharded_weights import get_local_shard, present_shard_like
from ..parallel.stored_base import explain_dequantization, keep_stored_layers
from ..parallel.strategy import Strategy
from ..parallel.trained_block_swap import TrainedBlockSwap, swap_trained_blocks
from .full_weights import build_full_modules, build_full_param_groups, format_full_summary, get_trained_dtypes
from .nan_and_oom_handling import BadSamples, NanGuard, OomRecovery
from .network_weights import InitialWeights, keep_idle_layers, keep_magnitudes, load_network_weights
from .param_groups import build_param_groups
from .preflight import check_objective
from .preservation import build_preservation
from .slider_task import build_slider_task
from .state import NullMetricLogger, TrainingRun, TrainState
from .task import DiffusionTask
from .token_embeddings import (
    add_token_vectors,
    build_embedding_modules,
    build_embedding_param_group,
    format_embedding_summary,
)
from .trainable_modules import (
    TrainableModules,
    build_lora_dropout,
    build_trainable_modules,
    format_trainable_summary,
    fuse_layers,
    get_trainable_parameters,
)

if TYPE_CHECKING:
    from ..parallel.compile import Compilation

logger = logging.getLogger(__name__)


def load_training_pipeline(
    config: RunConfig,
    strategy: Strategy,
    family: Family,
    detected: DetectedModel,
    cache_readers: CacheReaders,
    prompts: Sequence[Prompt],
) -> Any:
    """Load the components that training needs; with cached latents or text embeddings no VAE or text encoder.

    Trained components go where the strategy wants them. A VAE that only previews need stays on the CPU in between.
    """
    encodes_images = cache_readers.latent_reader is None and cache_readers.slider is None
    cached = set() if encodes_images else {*family.facts.image_encoders}
    if cache_readers.text_reader is not None:
        cached |= {*list_cached_text_components(config.adapter, config.optim, family.facts)}
    needed = [name for name in family.facts.components if name not in cached or is_tokenizer(name)]
    encoders = select_trained_text_encoders(config.adapter, config.optim, family.facts)
    trained = {*family.facts.pipeline.denoisers, *encoders}
    dtype = MIXED_PRECISION_DTYPES[strategy.mixed_precision]
    dtypes = dict.fromkeys(needed, dtype)
    dtypes |= get_trained_dtypes(config, family)
    devices = {name: strategy.base_load_device if name in trained else strategy.device for name in needed}
    reason = explain_dequantization(config.model, config.adapter, can_quantize=strategy.can_quantize_base)
    keeps_stored = bool(detected.stored_formats) and reason is None
    if detected.stored_formats and reason is not None:
        logger.info("%s", describe_dequantized(detected, dtypes[family.facts.denoiser_name], reason))
    if keeps_stored or is_quantized_or_offloaded(config.model, config.train):
        # The full weights might not fit on the device.
        devices |= dict.fromkeys(family.facts.pipeline.denoisers, HOST)
    pipe = None
    for device, loaded_dtype in dict.fromkeys((devices[name], dtypes[name]) for name in needed):
        names = [name for name in needed if (devices[name], dtypes[name]) == (device, loaded_dtype)]
        pipe = family.load(detected, loaded_dtype, names, pipe=pipe, device=device, keeps_stored=keeps_stored)
        for name in [each for each in names if each in family.facts.pipeline.denoisers] if keeps_stored else ():
            keep_stored_layers(getattr(pipe, name), config.model.quantize_base, strategy.device)
    if family.facts.pipeline.has_vae and "vae" not in needed and prompts:
        pipe = family.load(detected, dtype, family.facts.image_encoders, pipe=pipe)
    for name in family.facts.components:
        module = getattr(pipe, name)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False)
            if name in needed:
                module.to(devices[name])
    return pipe


def build_run(
    config: RunConfig,
    strategy: Strategy,
    family: Family,
    pipe: Any,
    prepared: PreparedData,
    plan: RunPlan,
    cache_readers: CacheReaders,
    initial_weights: InitialWeights,
) -> tuple[TrainingRun, injection.Adapter | None]:
    """Inject the adapters, build optimizer, task and loader, and wrap the model; without callbacks and logger yet."""
    objective = build_objective(config.noise, config.loss, family, pipe)
    set_attention_mode(getattr(pipe, family.facts.denoiser_name), config.distributed.attn_mode)
    trained, adapter = _select_trained_weights(config, family, pipe, initial_weights)
    swap = _prepare_trainable_parameters(trained, strategy, config)
    for line in _describe_trained_weights(config, trained, adapter):
        logger.info("%s", line)
    _store_frozen_base(config, strategy, trained)
    groups = _build_groups(config, family, trained, adapter)
    optimizer = _build_optimizer(config.optim, groups, strategy, trained)
    compilation = _compile_or_fuse(config.distributed, config.train, config.cache, strategy, trained, prepared=prepared)
    if swap is not None:
        swap.watch(trained.denoiser)
    model, optimizer = strategy.wrap(trained, optimizer, build_parallel_plan(family, trained.denoiser))
    groups = _follow_optimizer(groups, optimizer)
    dropout = _build_dropout(config, strategy, family, trained, adapter)
    task = _build_task(
        config, strategy, family, pipe, model, objective=objective, readers=cache_readers, dropout=dropout, plan=plan
    )
    task = replace(task, resolution_sides=prepared.list_resolution_sides())
    if (facts := cache_readers.slider) is not None:
        task = build_slider_task(task, config.slider, facts, prepared, strategy.unwrap_model(model))
    _prepare_steps(config, strategy, model, optimizer, swap)
    loader = _build_loader(strategy, prepared, plan, cache_readers)
    if strategy.comm.is_main:
        _warn_truncated_captions(family, pipe, prepared.list_first_epoch_captions(plan.batch_plan, plan.steps))
    bad_samples = BadSamples(config.data.max_invalid_images, len({each.image for each in prepared.manifest.samples}))
    trainable = [parameter for group in groups for parameter in group.parameters]
    run = TrainingRun(
        config=config,
        plan=plan,
        strategy=strategy,
        task=task,
        loader=loader,
        model=model,
        param_groups=groups,
        optimizer=optimizer,
        lr_schedule=lr_schedulers.build_lr_schedule(config.optim, plan.steps),
        nan_guard=NanGuard(config.train.max_nan_steps, has_snapshots=not config.adapter.is_full),
        oom_recovery=_build_oom_recovery(config.train, trained),
        bad_samples=bad_samples,
        metric_logger=NullMetricLogger(),
        ema=_build_ema(config.optim, trainable, strategy),
        max_norm_regularizer=_build_max_norm(config, trained, adapter),
        compilation=compilation,
        state=TrainState(step=plan.first_step),
    )
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers hold two sets of weights
        optimizer.train()
    return run, adapter


def _build_ema(config: OptimConfig, trainable: Sequence[nn.Parameter], strategy: Strategy) -> AdapterEMA | None:
    decay = config.ema_decay
    return None if decay is None else AdapterEMA(trainable, decay, strategy.use_written_weights)


def _prepare_steps(
    config: RunConfig, strategy: Strategy, model: nn.Module, optimizer: Any, swap: TrainedBlockSwap | None
) -> None:
    """Let the strategy update weights within the backward pass, or capture the micro-batches, if asked for."""
    rounding = _build_rounding(config, strategy, model, optimizer)
    if config.full.fused_backward_pass:  # accelerate's wrapper steps all weights
        strategy.fused_backward = FusedBackward(optimizer.optimizer, config.optim.max_grad_norm, rounding, swap)
        if config.optim.max_grad_norm:
            message = "fused backward pass: max_grad_norm %g limits the norm of each gradient on its own, not of all"
            logger.info(message, config.optim.max_grad_norm)
    elif rounding is not None:
        divisible = is_divisible(config.optim)
        strategy.partial_step = PartialStep(optimizer.optimizer, rounding, is_divisible=divisible)
    if strategy.uses_cuda_graphs:
        autocast, capture = strategy.accelerator.autocast, CudaCapture(strategy.device)
        strategy.step_graphs = StepGraphs(strategy.unwrap_model(model), autocast, capture)


def _build_rounding(
    config: RunConfig, strategy: Strategy, model: nn.Module, optimizer: Any
) -> StochasticRounding | None:
    """Build what rounds bf16 weights stochastically; None for others, or if they are to be rounded to nearest."""
    if not (config.adapter.is_full and config.distributed.full_bf16 and config.full.stochastic_rounding):
        return None
    weights = strategy.iter_trained_weights(model)
    names: dict[torch.Tensor, str] = {weight: clean_parameter_name(name) for name, weight in weights}
    parts = WeightParts(get_local_shard, present_shard_like, strategy.list_positions)
    return StochasticRounding(optimizer.optimizer, config.train.seed, names, parts)


def _select_trained_weights(
    config: RunConfig, family: Family, pipe: Any, initial_weights: InitialWeights
) -> tuple[TrainableModules, injection.Adapter | None]:
    """Inject the adapters; for full training, select weights of the model instead; add the vectors of a new word."""
    if config.adapter.is_full:
        return build_full_modules(config, family, pipe), None
    if not config.adapter.has_adapter:
        return build_embedding_modules(config, family, pipe), None
    trained, adapter = _inject_adapters(config, family, pipe, initial_weights)
    if config.adapter.trains_embedding:
        add_token_vectors(trained, config, family, pipe)
    return trained, adapter


def _describe_trained_weights(
    config: RunConfig, trained: TrainableModules, adapter: injection.Adapter | None
) -> list[str]:
    if config.adapter.is_full:
        return format_full_summary(trained)
    lines = [] if adapter is None else format_trainable_summary(trained, adapter)
    return [*lines, *format_embedding_summary(trained, config.adapter)]


def _build_groups(
    config: RunConfig, family: Family, trained: TrainableModules, adapter: injection.Adapter | None
) -> list[optimizers.ParamGroup]:
    if config.adapter.is_full:
        return build_full_param_groups(trained, config.optim, config.full, family.facts)
    groups = []
    if adapter is not None:
        groups += build_param_groups(trained, adapter, config.adapter, config.optim, family.facts)
    if config.adapter.trains_embedding:
        groups.append(build_embedding_param_group(trained, config.adapter, config.optim))
    return groups


def _follow_optimizer(groups: Sequence[optimizers.ParamGroup], optimizer: Any) -> list[optimizers.ParamGroup]:
    """Return the groups with the parameters that the strategy gave to the optimizer, which may be shards."""
    both = zip(groups, optimizer.param_groups, strict=True)
    return [replace(group, parameters=list(own["params"])) for group, own in both]


def _build_dropout(
    config: RunConfig, strategy: Strategy, family: Family, trained: TrainableModules, adapter: injection.Adapter | None
) -> LoraDropout | None:
    if adapter is None:
        return None
    return build_lora_dropout(config.adapter, family, trained, adapter, strategy.get_sharded_tokens)


def _build_max_norm(
    config: RunConfig, trained: TrainableModules, adapter: injection.Adapter | None
) -> MaxNormRegularizer | None:
    max_norm = config.adapter.scale_weight_norms
    return None if adapter is None or max_norm is None else MaxNormRegularizer(trained, adapter, max_norm)


def _inject_adapters(
    config: RunConfig, family: Family, pipe: Any, initial_weights: InitialWeights
) -> tuple[TrainableModules, injection.Adapter]:
    """Inject the adapters and give them their initial weights."""
    trained, adapter = build_trainable_modules(
        config, family, pipe, initial_weights.rank_alphas, initial_weights.independent_modules
    )
    load_network_weights(trained, adapter, initial_weights)
    adapter = keep_idle_layers(adapter, initial_weights, collect_component_keys(family, pipe))
    return trained, keep_magnitudes(adapter, family, pipe)


def _prepare_trainable_parameters(
    trained: TrainableModules, strategy: Strategy, config: RunConfig
) -> TrainedBlockSwap | None:
    """Cast and move them before the optimizer is built, as some optimizers allocate their state at once.

    Return what keeps the trained weights of some blocks in host memory, if there are any.
    """
    if config.distributed.full_bf16:
        cast_trainable_parameters(trained, torch.bfloat16)
    if strategy.mixed_precision != "no":
        leave_input_casts_to_autocast(trained)
    swap = None
    if config.adapter.is_full and config.train.blocks_to_swap:
        swap = swap_trained_blocks(trained.denoiser, strategy.device, config.train)
    if strategy.trains_base and not strategy.has_full_model:
        return swap  # no device has to hold all trained weights: the strategy moves them as it shards them
    swapped = set() if swap is None else swap.swapped_weights
    for parameter in get_trainable_parameters(trained):
        if parameter not in swapped:
            parameter.data = parameter.data.to(strategy.device)
    return swap


def _store_frozen_base(config: RunConfig, strategy: Strategy, trained: TrainableModules) -> None:
    """Quantize and offload the frozen weights of the denoiser, if asked for; full training has no use for it."""
    if not config.adapter.is_full and is_quantized_or_offloaded(config.model, config.train, trained.denoiser):
        devices = strategy.device, strategy.base_load_device
        quantize_and_offload_base(trained.denoiser, devices, config.model, config.train, strategy.nf4_kernel)


def _compile_or_fuse(
    distributed: DistributedConfig,
    train: TrainConfig,
    cache: CacheConfig,
    strategy: Strategy,
    trained: TrainableModules,
    prepared: PreparedData,
) -> "Compilation | None":
    """Compile the trained modules; where they are not to be compiled, fuse their layers."""
    compilation = strategy.compile(list(trained.children()), trained.denoiser, distributed.compile_dynamic)
    if compilation is None:
        fuse_layers(trained, distributed, train, strategy.mixed_precision)
        if strategy.device.type == HOST.type and strategy.mixed_precision == "no":
            multiply_small_convolutions(trained.denoiser)
    else:
        _configure_compile_cache(distributed.compile_cache_dir, cache, prepared)
        compilation.set_activation_memory_budget(train.activation_memory_budget)
    return compilation


def _build_loader(strategy: Strategy, prepared: PreparedData, plan: RunPlan, cache_readers: CacheReaders) -> StepLoader:
    slider = cache_readers.slider
    if slider is not None and cache_readers.text_reader is not None:
        rank, read_cond = strategy.data_parallel_rank, cache_readers.text_reader.read_cond
        return SliderLoader(
            prepared.slider_prompts,
            plan.batch_plan,
            rank,
            get_latent_shape=slider.get_latent_shape,
            read_cond=read_cond,
            size_multiple=slider.size_multiple,
        )
    return build_step_loader(
        prepared,
        plan.batch_plan,
        strategy.data_parallel_rank,
        total_steps=plan.steps,
        pin_memory=strategy.pins_memory,
        latent_reader=cache_readers.latent_reader,
        text_reader=cache_readers.text_reader,
    )


def _build_task(
    config: RunConfig,
    strategy: Strategy,
    family: Family,
    pipe: Any,
    model: nn.Module,
    objective: Objective,
    readers: CacheReaders,
    dropout: LoraDropout | None,
    plan: RunPlan,
) -> DiffusionTask:
    return DiffusionTask(
        family=family,
        pipe=pipe,
        denoiser=model,
        objective=objective,
        seed=config.train.seed,
        to_device=CopyStream(strategy.device),
        normalize_masked_loss=config.data.masked_loss_normalize,
        vae_batch_size=config.cache.vae_batch_size,
        text_encoder_batch_size=config.cache.text_encoder_batch_size,
        text_reader=readers.text_reader,
        trains_text_encoders=bool(
            select_trained_text_encoders(config.adapter, config.optim, family.facts)
            or select_extended_text_encoders(config.adapter, family.facts)
        ),
        dropout=dropout,
        conditioning_dropout_prob=config.data.conditioning_dropout_prob,
        preservation=build_preservation(config.preservation, strategy.unwrap_model(model)),
        samples_per_step=plan.samples_per_step,
        pads_texts=config.parallel.pp_size > 1,
    )


def _build_oom_recovery(config: TrainConfig, trainable: TrainableModules) -> OomRecovery:
    enable = partial(enable_activation_checkpointing, list(trainable.children()), trainable.denoiser, config)
    return OomRecovery(config.on_oom == "recover", None if config.gradient_checkpointing else enable)


def _build_optimizer(
    config: OptimConfig, groups: Sequence[optimizers.ParamGroup], strategy: Strategy, trained: TrainableModules
) -> torch.optim.Optimizer:
    for line in find_learning_rate_warnings(config, groups):
        logger.warning("%s", line)
    is_sharded, is_partly_idle = strategy.shard_group is not None, trained.is_partly_idle
    optimizer = optimizers.build_optimizer(config, groups, is_sharded=is_sharded, is_partly_idle=is_partly_idle)
    logger.info("optimizer: %s", optimizers.describe_optimizer(optimizer))
    return optimizer


def _configure_compile_cache(compile_cache_dir: str | None, cache: CacheConfig, prepared: PreparedData) -> None:
    """Cache compiled graphs in ``--compile_cache_dir``, by default next to the cached latents."""
    from ..parallel.compile import set_compile_cache_dir

    if compile_cache_dir is not None:
        directory = Path(compile_cache_dir).expanduser()
    else:
        first_image = replace(prepared.manifest, samples=prepared.manifest.samples[:1])
        directory = resolve_cache_dirs(first_image, cache)[0] / "compiled"
    if error := find_write_error(directory):
        logger.warning("cannot cache compiled graphs in %s: %s; set --compile_cache_dir", directory, error)
    else:
        set_compile_cache_dir(directory.absolute(), override=compile_cache_dir is not None)


def _warn_truncated_captions(family: Family, pipe: Any, captions: Sequence[str]) -> None:
    if truncated := family.find_truncated_prompts(pipe, captions):
        message = "%d of %d captions are longer than the text encoder's limit and are truncated, for example: %s"
        logger.warning(message, len(truncated), len(captions), truncated[0])


def build_objective(noise: NoiseConfig, loss: LossConfig, family: Family, pipe: Any) -> Objective:
    """Build the training objective; the pipeline's scheduler, which previews use, follows the same options."""
    pipe.scheduler = override_scheduler(pipe.scheduler, noise)
    process = family.build_training_process(pipe)
    if noise.objective_defaults == "kohya":
        process = use_original_snr(process, pipe.scheduler)
    check_objective(noise, loss, family, process)
    named_first = ("objective_defaults", "timestep_sampling")
    active = find_active_options(noise, loss)
    settings = "".join(f", {name} {value}" for name, value in active.items() if name not in named_first)
    if is_flow := isinstance(process, FlowMatchingProcess):
        default = family.facts.training_noise.timestep_sampling
        noise = replace(noise, timestep_sampling=noise.get_timestep_sampling(default))
    logger.info(
        "objective_defaults: %s; prediction type: %s; timestep sampling: %s%s",
        noise.objective_defaults,
        process.prediction_type,
        noise.timestep_sampling if is_flow else "uniform",
        settings,
    )
    return Objective(process, *convert_values(noise, loss, family.facts.options.kohya_objective))


def prepare_dataset(data: DataConfig, cache: CacheConfig, comm: Communicator, model: DetectedModel) -> PreparedData:
    """Scan the dataset on one rank per machine; the others read the manifest that it writes next to the images."""
    limits = build_control_limits(model)
    prepared = comm.run_local_main_first(
        lambda: prepare_data(
            data,
            model.size_multiple,
            cache.cache_dir,
            control_limits=limits,
            max_side=model.max_side,
            frame_rule=model.frame_rule,
        )
    )
    manifest, fingerprint = prepared.manifest, prepared.manifest.compute_fingerprint()
    try:
        comm.assert_equal_across_ranks({"images, captions or dataset settings": fingerprint})
    except ConfigError as error:  # on all ranks
        reports = comm.all_gather_object((fingerprint, manifest.compute_sample_digests()))
        other = next(digests for its_fingerprint, digests in reports if its_fingerprint != reports[0][0])
        difference = comm.run_on_main_and_broadcast(lambda: manifest.describe_difference(other))
        detailed = ConfigError(replace(problem, note=difference) for problem in error.problems)
        detailed.is_reported = error.is_reported
        raise detailed from None
    return prepared
