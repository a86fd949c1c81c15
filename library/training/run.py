"""A training run as a whole: check, plan, load, train, say where the files are."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..adapters import lora
from ..config import RunConfig
from ..config.schema import PreviewConfig
from ..data.prepare import Prepared, prepare
from ..data.prompts import Prompt, read_prompts
from ..distributed.accelerator import prepare_accelerator
from ..distributed.contradictions import contradictions_of_this_run
from ..distributed.strategy import DataParallel
from ..errors import ConfigError, UserError
from ..families import FAMILIES
from ..families.base import Family
from ..families.detect import Detected, detect
from ..families.drawable import undrawable
from ..log import Progress
from ..optim import optimizers, schedules
from ..optim.average import RunningAverage
from . import before_after
from .bad_samples import BadSamples
from .bundle import read_bundle, replay
from .export import Export
from .health import NoMore, Watch
from .loop import Run, Silence, count, train, trainable
from .metrics import MetricsFile
from .objective import objective_of
from .outline import outline
from .plan import RunPlan
from .preview import Preview
from .task import Task
from .track import Track, start_trackers

logger = logging.getLogger(__name__)

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Precision of the frozen model; the adapters in it are always float32."""


def run(config: RunConfig, given: frozenset[str] = frozenset()) -> None:
    """Train from beginning to end; ``given`` names the options that somebody wrote down."""
    started_at = time.time()
    optimizers.rehearse(config.optim)
    schedules.rehearse(config.optim)
    strategy = DataParallel(prepare_accelerator(config))
    try:
        _run(config, given, strategy, started_at)
    finally:
        strategy.leave()


def _run(config: RunConfig, given: frozenset[str], strategy: DataParallel, started_at: float) -> None:
    for line in contradictions_of_this_run(config, given):
        logger.warning("%s", line)
    detected = detect(config.model)
    logger.info("model family %s: %s", detected.family, detected.reason)
    strategy.on_main(lambda: _check_folder(Path(config.save.output_dir)))
    prompts = _prompts(config.preview, detected)
    prepared = prepare(config.data, detected.pixel_step)
    plan = RunPlan.of(prepared.batch_plan(strategy.size, config.train), config.train, config.optim)
    for line in outline(prepared, plan, strategy.size).splitlines():
        logger.info("%s", line)

    job, adapter = _assemble(config, strategy, detected, prepared, plan)
    preview = _preview(config, prompts)
    export = Export(adapter, prepared.pictures, prepared.resolution, started_at)
    if config.train.replay is not None:
        for line in replay(job, read_bundle(Path(config.train.replay))):
            logger.info("%s", line)
        return
    start_trackers(config, strategy)
    with Progress(plan.steps, job.state.step, "training", wanted=strategy.is_main) as progress:
        name = f"{config.save.output_name}.metrics.jsonl"
        path = Path(config.save.output_dir) / name
        job.teller = Track(progress, MetricsFile(path, job.state.step) if strategy.is_main else None)
        job.actions = [preview, export]
        if config.preview.sample_at_first:
            preview.draw(job)
        try:
            train(job)
        except NoMore:
            _keep(export, job)
            raise
    job.bad_samples.tell_all()
    strategy.finish()
    _say_where(export.written, preview, _sheet(config, prompts, started_at) if strategy.is_main else None)


def _keep(export: Export, job: Run) -> None:
    """What was learnt until a run could not go on; why it could not is what the user has to read."""
    if not job.state.has_learnt:
        return
    try:
        export.save(job, f"{job.config.save.output_name}-step{job.state.step:08d}.safetensors")
    except UserError as error:
        logger.warning("what was learnt so far is not saved: %s", error)


def _prompts(preview: PreviewConfig, detected: Detected) -> list[Prompt]:
    """The prompts of previews, all of which this model can draw."""
    prompts = read_prompts(Path(preview.sample_prompts)) if preview.sample_prompts else []
    if problems := undrawable(prompts, preview.sample_sampler, detected):
        raise ConfigError(problems)
    return prompts


def _check_folder(folder: Path) -> None:
    """That LoRA files can be written is known before training, not after it."""
    probe = folder / f".writable-{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written to: {error.strerror}") from None


def _assemble(
    config: RunConfig, strategy: DataParallel, detected: Detected, prepared: Prepared, plan: RunPlan
) -> tuple[Run, lora.Adapter]:
    """Load the model, put the adapters in, and hand both to the strategy."""
    family: Family = FAMILIES.get(detected.family)(config.model)
    parts = ("vae", *family.text_parts, family.denoiser)
    pipe = family.load(detected, DTYPES[strategy.precision], parts, device=strategy.device)
    objective = objective_of(config, family, pipe)
    for part in parts:
        module = getattr(pipe, part)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).to(strategy.device)
    denoiser = getattr(pipe, family.denoiser)
    adapter = lora.inject(denoiser, config.adapter, family.lora_targets, config.train.seed, family.lora_names,
                          family.idle_layers(denoiser))  # fmt: skip
    if config.train.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()
    denoiser.train()
    parameters = trainable(denoiser)
    share = count(parameters) / count(list(denoiser.parameters()))
    logger.info("training %d LoRA modules of rank %d in %s: %s numbers, %.2f %% of the model", len(adapter.modules),
                adapter.rank, type(denoiser).__name__, f"{count(parameters):,}", 100 * share)  # fmt: skip
    groups = [optimizers.Group("unet", parameters, config.optim.learning_rate)]
    for line in optimizers.remarks(config.optim, groups):
        logger.warning("%s", line)
    optimizer = optimizers.make_optimizer(config.optim, groups)
    wrapped, optimizer = strategy.wrap(denoiser, optimizer)
    task = Task(family, pipe, wrapped, objective, config.train.seed, strategy.device,
                config.data.masked_loss_normalize)  # fmt: skip
    loader = prepared.loader(plan.batches, strategy.rank, total_steps=plan.steps, pin_memory=strategy.pins_memory)
    if strategy.is_main:
        _tell_long_captions(family, pipe, prepared.first_captions(plan.batches, plan.steps))
    schedule = schedules.make_schedule(config.optim, plan.steps)
    watch = Watch(config.train.max_bad_steps, Path(config.save.output_dir))
    bad_samples = BadSamples(config.data.max_bad_samples, len({sample.image for sample in prepared.manifest.samples}))
    job = Run(config, plan, strategy, task, loader, wrapped, groups, optimizer, schedule, watch, bad_samples, Silence())
    if config.optim.ema_decay is not None:
        job.average = RunningAverage(job.parameters, config.optim.ema_decay)
    if callable(getattr(optimizer, "train", None)):  # schedule-free ones have two sets of weights
        optimizer.train()
    return job, adapter


def _tell_long_captions(family: Family, pipe: Any, captions: Sequence[str]) -> None:
    """Captions of which the model reads only the beginning."""
    if found := family.too_long(pipe, captions):
        logger.warning("%d of %d captions are longer than what the text encoder reads; their ends are left out, for "
                       "example of: %s", len(found), len(captions), found[0])  # fmt: skip


def _preview(config: RunConfig, prompts: Sequence[Prompt]) -> Preview:
    settings: PreviewConfig = config.preview
    return Preview(settings, prompts, Path(config.save.output_dir) / "sample", config.save.output_name)


def _sheet(config: RunConfig, prompts: Sequence[Prompt], started_at: float) -> Path | None:
    """All previews of the run side by side; that they cannot be drawn does not spoil the run."""
    folder = Path(config.save.output_dir)
    try:
        return before_after.write(folder / "sample", config.save.output_name, [prompt.text for prompt in prompts],
                                  started_at, folder / "before_after.png")  # fmt: skip
    except OSError as error:
        logger.warning("before_after.png could not be written: %s", error)
        return None


def _say_where(files: Sequence[Path], preview: Preview, sheet: Path | None) -> None:
    """The last lines: what to open."""
    logger.info("LoRA file: %s", files[-1])
    if preview.written:
        logger.info("pictures: %s", preview.folder)
    if sheet is not None:
        logger.info("before and after, side by side: %s", sheet)
