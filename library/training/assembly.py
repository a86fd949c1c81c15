"""From settings to a run that is ready: the model's parts loaded, adapters put in, optimizer and loader made."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..adapters import lora
from ..adapters.norms import Limit
from ..adapters.switching import in_dtype
from ..config import RunConfig
from ..data.cache.places import homes
from ..data.prepare import Prepared
from ..data.prompts import Prompt
from ..distributed.copies import Copies
from ..distributed.devices import HOST
from ..distributed.strategy import DataParallel
from ..durable import why_not_writable
from ..families.attention import use_attention
from ..families.base import Family
from ..families.detect import Detected
from ..optim import optimizers, schedules
from ..optim.average import RunningAverage
from .activation_checkpointing import enable_activation_checkpointing
from .bad_samples import BadSamples
from .caching import Kept
from .groups import groups_of
from .health import Health
from .job import Run, Silence
from .ladder import Ladder
from .objective import objective_of
from .parallel_fit import structure_of
from .plan import RunPlan
from .precision import DTYPES
from .resting import is_wanted, let_weights_rest
from .starting import Starts, start_from
from .task import Task
from .trained import described, dropout_of, put_adapters, trainable, trained_text_parts

logger = logging.getLogger(__name__)


def load(config: RunConfig, strategy: DataParallel, family: Family, detected: Detected, kept: Kept,
         prompts: Sequence[Prompt]) -> Any:  # fmt: skip
    """The parts that training needs, on the device; what was kept needs no encoder any more.

    What is trained is where the strategy wants it.  A VAE that only previews need rests in host memory between them.
    """
    needed = [part for part in family.parts if part == family.denoiser or part.startswith("tokenizer")
              or (kept.latents is None if part == "vae" else kept.texts is None)]  # fmt: skip
    dtype = DTYPES[strategy.precision]
    trained = {family.denoiser, *trained_text_parts(config, family.facts)}
    homes = {part: strategy.frozen_home if part in trained else strategy.device for part in needed}
    if is_wanted(config):  # weights that are to rest in host memory, or in fewer bits, might not fit as they are
        homes[family.denoiser] = HOST
    pipe = None
    for home in dict.fromkeys(homes.values()):
        pipe = family.load(detected, dtype, [part for part in needed if homes[part] == home], into=pipe, device=home)
    if "vae" not in needed and prompts:
        pipe = family.load(detected, dtype, ("vae",), into=pipe)
    for part in family.parts:
        module = getattr(pipe, part)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False)
            if part in needed:
                module.to(homes[part])
    return pipe


def assemble(
    config: RunConfig,
    strategy: DataParallel,
    family: Family,
    pipe: Any,
    prepared: Prepared,
    plan: RunPlan,
    kept: Kept,
    starts: Starts,
) -> tuple[Run, lora.Adapter]:
    """Put the adapters into the model, and hand both to the strategy."""
    objective = objective_of(config, family, pipe)
    use_attention(getattr(pipe, family.denoiser), config.distributed.attn_mode)
    trained, adapter = put_adapters(config, family, pipe, starts.sizes)
    start_from(trained, adapter, starts)
    if config.distributed.full_bf16:
        in_dtype(trained, torch.bfloat16)
    for parameter in trainable(trained):  # before an optimizer looks where they are
        parameter.data = parameter.data.to(strategy.device)
    for line in described(trained, adapter):
        logger.info("%s", line)
    if is_wanted(config):
        let_weights_rest(config, trained.denoiser, strategy.device)
    groups = groups_of(trained, adapter, config, family.facts)
    optimizer = _optimizer(config, groups)
    compilation = strategy.compile(list(trained.children()), trained.denoiser, config.distributed.compile_shapes)
    if compilation is not None:
        _keep_compiled(config, prepared)
        compilation.keep_share(config.train.gradient_checkpointing_budget)
    structure = structure_of(family, trained.denoiser)
    wrapped, optimizer = strategy.wrap(trained, optimizer, trained.denoiser, structure)
    task = Task(family, pipe, wrapped, objective, config.train.seed, Copies(strategy.device),
                config.data.masked_loss_normalize, config.cache.vae_batch_size, config.cache.text_encoder_batch_size,
                kept.texts, config.adapter.trains_texts, dropout_of(config.adapter, trained, adapter),
                evens_texts=config.parallel.pp_size > 1)  # fmt: skip
    loader = prepared.loader(plan.batches, strategy.data_rank, total_steps=plan.steps, pin_memory=strategy.pins_memory,
                             latents=kept.latents, texts=kept.texts)  # fmt: skip
    strategy.shape_of, strategy.recall = task.shape_of, task.recall
    if task.dropout is not None:
        task.dropout.places = strategy.places
    if strategy.is_main:
        _tell_long_captions(family, pipe, prepared.first_captions(plan.batches, plan.steps))
    schedule = schedules.make_schedule(config.optim, plan.steps)
    watch = Health(config.train.max_bad_steps)
    bad_samples = BadSamples(config.data.max_bad_samples, len({sample.image for sample in prepared.manifest.samples}))
    job = Run(config, plan, strategy, task, loader, wrapped, groups, optimizer, schedule, watch,
              _ladder(config, trained), bad_samples, Silence(), compilation=compilation)  # fmt: skip
    if config.adapter.scale_weight_norms is not None:
        job.limit = Limit(trained, adapter, config.adapter.scale_weight_norms)
    if config.optim.ema_decay is not None:
        job.average = RunningAverage(job.parameters, config.optim.ema_decay)
    if callable(getattr(optimizer, "train", None)):  # schedule-free ones have two sets of weights
        optimizer.train()
    return job, adapter


def _ladder(config: RunConfig, trained: Any) -> Ladder:
    """What can be done when memory is out; activations can be computed twice, unless they are already."""
    can_save = partial(enable_activation_checkpointing, list(trained.children()), trained.denoiser, config.train)
    return Ladder(config.train.on_oom == "ladder", None if config.train.gradient_checkpointing else can_save)


def _optimizer(config: RunConfig, groups: Sequence[optimizers.Group]) -> torch.optim.Optimizer:
    for line in optimizers.remarks(config.optim, groups):
        logger.warning("%s", line)
    optimizer = optimizers.make_optimizer(config.optim, groups)
    logger.info("optimizer: %s", optimizers.described(optimizer))
    return optimizer


def _keep_compiled(config: RunConfig, prepared: Prepared) -> None:
    """In the folder that was named, or else where other things of these pictures are kept, if that can be written."""
    from ..distributed.compiling import keep_compiled_in

    named = config.distributed.compile_cache_dir
    one = replace(prepared.manifest, samples=prepared.manifest.samples[:1])
    folder = homes(one, config.cache)[0] / "compiled" if named is None else Path(named).expanduser()
    if why := why_not_writable(folder):
        logger.warning("what is compiled is not kept in %s: %s; name another folder with --compile_cache_dir", folder,
                       why)  # fmt: skip
    else:
        keep_compiled_in(folder.absolute(), is_named=named is not None)


def _tell_long_captions(family: Family, pipe: Any, captions: Sequence[str]) -> None:
    """Captions of which the model reads only the beginning."""
    if found := family.too_long(pipe, captions):
        logger.warning("%d of %d captions are longer than what the text encoder reads; their ends are left out, for "
                       "example of: %s", len(found), len(captions), found[0])  # fmt: skip
