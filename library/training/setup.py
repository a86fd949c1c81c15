"""From settings to a run that is ready: the model's parts loaded, adapters put in, optimizer and loader made."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adapters import lora
from ..adapters.lora import cast_trainable_parameters
from ..adapters.regularization import MaxNormRegularizer
from ..atomic_files import find_write_error
from ..cache.paths import resolve_cache_dirs
from ..cache.precompute import CacheReaders
from ..cache.readers import build_step_loader
from ..config import RunConfig
from ..config.validate_objective import find_active_options, validate_objective_for_model
from ..data.prepare import PreparedData, prepare_data
from ..data.prompts import Prompt
from ..data.run_plan import RunPlan
from ..diffusion.objective import Objective
from ..diffusion.process import FlowMatchingProcess
from ..diffusion.weighting import find_unbounded_weightings
from ..distributed.async_copy import CopyStream
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST, MIXED_PRECISION_DTYPES
from ..errors import ConfigError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.loading import set_attention_mode
from ..models.parallel_plan import build_tensor_parallel_plan, map_layer_token_streams
from ..models.schedulers import override_scheduler
from ..optim import optimizers, schedules
from ..optim.ema import AdapterEMA
from ..optim.preflight import find_learning_rate_warnings
from ..parallel.blocks import BlockSequence, ParallelPlan, UNetBlockSequence
from ..parallel.offload import is_quantized_or_offloaded, quantize_and_offload_base
from ..parallel.strategy import Strategy
from .activation_checkpointing import enable_activation_checkpointing
from .init_weights import InitialWeights, load_network_weights
from .state import NullMetricLogger, TrainingRun
from .step_guards import BadSamples, NanGuard, OomRecovery
from .task import DiffusionTask
from .trainable import (
    build_lora_dropout,
    build_param_groups,
    build_trainable_modules,
    format_trainable_summary,
    get_trainable_parameters,
    select_trained_text_encoders,
)

logger = logging.getLogger(__name__)


def load_training_pipeline(
    config: RunConfig,
    strategy: Strategy,
    family: Family,
    detected: DetectedModel,
    cache_readers: CacheReaders,
    prompts: Sequence[Prompt],
) -> Any:
    """The parts that training needs, on the device; what was kept needs no encoder any more.

    What is trained is where the strategy wants it.  A VAE that only previews need rests in host memory between them.
    """
    needed = [
        part
        for part in family.components
        if part == family.denoiser_name
        or part.startswith("tokenizer")
        or (cache_readers.latent_reader is None if part == "vae" else cache_readers.text_reader is None)
    ]
    dtype = MIXED_PRECISION_DTYPES[strategy.mixed_precision]
    trained = {family.denoiser_name, *select_trained_text_encoders(config, family.facts)}
    homes = {part: strategy.base_load_device if part in trained else strategy.device for part in needed}
    if is_quantized_or_offloaded(config.model, config.train):  # the full weights might not fit on the device
        homes[family.denoiser_name] = HOST
    pipe = None
    for home in dict.fromkeys(homes.values()):
        pipe = family.load(detected, dtype, [part for part in needed if homes[part] == home], pipe=pipe, device=home)
    if "vae" not in needed and prompts:
        pipe = family.load(detected, dtype, ("vae",), pipe=pipe)
    for part in family.components:
        module = getattr(pipe, part)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False)
            if part in needed:
                module.to(homes[part])
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
) -> tuple[TrainingRun, lora.Adapter]:
    """Put the adapters into the model, and hand both to the strategy."""
    objective = build_objective(config, family, pipe)
    set_attention_mode(getattr(pipe, family.denoiser_name), config.distributed.attn_mode)
    trained, adapter = build_trainable_modules(config, family, pipe, initial_weights.rank_alphas)
    load_network_weights(trained, adapter, initial_weights)
    if config.distributed.full_bf16:
        cast_trainable_parameters(trained, torch.bfloat16)
    for parameter in get_trainable_parameters(trained):  # before an optimizer looks where they are
        parameter.data = parameter.data.to(strategy.device)
    for line in format_trainable_summary(trained, adapter):
        logger.info("%s", line)
    if is_quantized_or_offloaded(config.model, config.train):
        quantize_and_offload_base(trained.denoiser, strategy.device, config.model, config.train)
    groups = build_param_groups(trained, adapter, config, family.facts)
    optimizer = _build_optimizer(config, groups)
    compilation = strategy.compile(list(trained.children()), trained.denoiser, config.distributed.compile_dynamic)
    if compilation is not None:
        _configure_compile_cache(config, prepared)
        compilation.set_activation_memory_budget(config.train.activation_memory_budget)
    wrapped, optimizer = strategy.wrap(trained, optimizer, build_parallel_plan(family, trained.denoiser))
    task = DiffusionTask(
        family,
        pipe,
        wrapped,
        objective,
        config.train.seed,
        CopyStream(strategy.device),
        config.data.masked_loss_normalize,
        config.cache.vae_batch_size,
        config.cache.text_encoder_batch_size,
        cache_readers.text_reader,
        config.adapter.trains_text_encoders,
        build_lora_dropout(config.adapter, trained, adapter),
        pads_texts=config.parallel.pp_size > 1,
    )
    loader = build_step_loader(
        prepared,
        plan.batch_plan,
        strategy.data_parallel_rank,
        total_steps=plan.steps,
        pin_memory=strategy.pins_memory,
        latent_reader=cache_readers.latent_reader,
        text_reader=cache_readers.text_reader,
    )
    if task.dropout is not None:
        task.dropout.token_positions = strategy.get_token_positions
    if strategy.comm.is_main:
        _warn_truncated_captions(family, pipe, prepared.list_first_epoch_captions(plan.batch_plan, plan.steps))
    schedule = schedules.build_lr_schedule(config.optim, plan.steps)
    watch = NanGuard(config.train.max_nan_steps)
    bad_samples = BadSamples(
        config.data.max_invalid_images, len({sample.image for sample in prepared.manifest.samples})
    )
    job = TrainingRun(
        config,
        plan,
        strategy,
        task,
        loader,
        wrapped,
        groups,
        optimizer,
        schedule,
        watch,
        _build_oom_recovery(config, trained),
        bad_samples,
        NullMetricLogger(),
        compilation=compilation,
    )
    if config.adapter.scale_weight_norms is not None:
        job.max_norm_regularizer = MaxNormRegularizer(trained, adapter, config.adapter.scale_weight_norms)
    if config.optim.ema_decay is not None:
        job.ema = AdapterEMA(job.parameters, config.optim.ema_decay)
    if callable(getattr(optimizer, "train", None)):  # schedule-free ones have two sets of weights
        optimizer.train()
    return job, adapter


def _build_oom_recovery(config: RunConfig, trainable: Any) -> OomRecovery:
    """What can be done when memory is out; activations can be computed twice, unless they are already."""
    can_save = partial(enable_activation_checkpointing, list(trainable.children()), trainable.denoiser, config.train)
    return OomRecovery(config.train.on_oom == "recover", None if config.train.gradient_checkpointing else can_save)


def _build_optimizer(config: RunConfig, groups: Sequence[optimizers.ParamGroup]) -> torch.optim.Optimizer:
    for line in find_learning_rate_warnings(config.optim, groups):
        logger.warning("%s", line)
    optimizer = optimizers.build_optimizer(config.optim, groups)
    logger.info("optimizer: %s", optimizers.describe_optimizer(optimizer))
    return optimizer


def _configure_compile_cache(config: RunConfig, prepared: PreparedData) -> None:
    """In the folder that was named, or else where other things of these pictures are kept, if that can be written."""
    from ..parallel.compile import set_compile_cache_dir

    named = config.distributed.compile_cache_dir
    one = replace(prepared.manifest, samples=prepared.manifest.samples[:1])
    folder = resolve_cache_dirs(one, config.cache)[0] / "compiled" if named is None else Path(named).expanduser()
    if why := find_write_error(folder):
        logger.warning(
            "what is compiled is not kept in %s: %s; name another folder with --compile_cache_dir", folder, why
        )
    else:
        set_compile_cache_dir(folder.absolute(), override=named is not None)


def _warn_truncated_captions(family: Family, pipe: Any, captions: Sequence[str]) -> None:
    """Captions of which the model reads only the beginning."""
    if found := family.find_truncated_prompts(pipe, captions):
        logger.warning(
            "%d of %d captions are longer than what the text encoder reads; their ends are left out, for "
            "example of: %s",
            len(found),
            len(captions),
            found[0],
        )


def build_objective(config: RunConfig, family: Family, pipe: Any) -> Objective:
    """What the model is asked; from here on its scheduler, which draws previews, follows the options, too."""
    pipe.scheduler = override_scheduler(pipe.scheduler, config.noise)
    process = family.build_noise_process(pipe)
    # Small files need not tell what a model predicts, so this is certain only now that it is loaded.
    problems = [
        f"--{names[0]}: {problem}"
        for names, problem in validate_objective_for_model(
            config.noise, config.loss, family.facts.title, process.prediction_type
        )
    ]
    problems += [
        f"--{name}: the model's last time has no signal, and so a weight without end; leave it out"
        for name in find_unbounded_weightings(process, config.loss)
    ]
    if problems:
        raise ConfigError(problems)
    times = config.noise.flow_timestep_sampling if isinstance(process, FlowMatchingProcess) else "uniform"
    settings = "".join(f", {name} {value}" for name, value in find_active_options(config.noise, config.loss).items())
    logger.info("the model predicts %s; times are %s%s", process.prediction_type, times, settings)
    return Objective(process, config.noise, config.loss)


def build_block_sequence(family: Family, denoiser: Any) -> BlockSequence:
    """The denoiser's blocks in the order in which they run."""
    if family.has_skip_connections:
        return UNetBlockSequence.from_unet(denoiser)
    return BlockSequence.from_lists(denoiser, family.block_lists, family.block_activation_args)


def build_parallel_plan(family: Family, denoiser: nn.Module) -> ParallelPlan:
    """How the denoiser can be taken apart."""
    return ParallelPlan(
        build_block_sequence(family, denoiser),
        build_tensor_parallel_plan(denoiser),
        family.block_token_args,
        map_layer_token_streams(denoiser, family.block_lists, family.block_activation_args),
        denoiser,
    )


def prepare_dataset(config: RunConfig, comm: Communicator, pixel_step: int) -> PreparedData:
    """One process of each machine looks at the pictures; the others read what it found out, beside the pictures."""
    prepared = comm.run_local_main_first(lambda: prepare_data(config.data, pixel_step, config.cache.cache_dir))
    comm.assert_equal_across_ranks(
        {
            "number of pictures": len(prepared.manifest.samples),
            "images, captions or dataset settings": prepared.manifest.compute_fingerprint(),
        }
    )
    return prepared
