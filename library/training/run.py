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
from ..data.prepare import Prepared
from ..data.prompts import Prompt, read_prompts
from ..distributed.accelerator import prepare_accelerator
from ..distributed.contradictions import contradictions_of_this_run
from ..distributed.lock import FolderLock
from ..distributed.signals import Signals
from ..distributed.strategy import DataParallel
from ..errors import ConfigError, UserError
from ..families import FAMILIES
from ..families.base import Family
from ..families.detect import Detected, detect
from ..families.drawable import undrawable
from ..log import Progress
from ..optim import optimizers, schedules
from ..optim.average import RunningAverage
from . import before_after, state_folder
from .bad_samples import BadSamples
from .bundle import read_bundle, replay
from .caching import Kept, keep_latents, keep_texts
from .ending import Ending
from .export import Export
from .going_on import GoingOn
from .health import NoMore, Watch
from .keep_state import KeepState
from .ladder import Ladder
from .loop import Ended, Run, Silence, count, train, trainable
from .metrics import MetricsFile
from .objective import objective_of
from .outline import outline
from .pictures import same_pictures
from .plan import RunPlan
from .precision import DTYPES
from .preview import Preview
from .reporting import Report
from .task import Task
from .track import Track, start_trackers

logger = logging.getLogger(__name__)


def run(config: RunConfig, given: frozenset[str] = frozenset()) -> None:
    """Train from beginning to end; ``given`` names the options that somebody wrote down."""
    started_at = time.time()
    optimizers.rehearse(config.optim)
    schedules.rehearse(config.optim)
    strategy = DataParallel(prepare_accelerator(config))
    folder, name = Path(config.save.output_dir), config.save.output_name
    try:
        with FolderLock(folder, name) as lock:
            strategy.on_main(lambda: _make_ready(folder, name, lock))
            ending = Ending(strategy, config)
            try:
                _run(config, given, strategy, started_at, ending)
            except Exception as error:
                if (end := ending.of(error)) is error:
                    raise
                raise end from error
    finally:
        strategy.leave()


def _run(config: RunConfig, given: frozenset[str], strategy: DataParallel, started_at: float, ending: Ending) -> None:
    for line in contradictions_of_this_run(config, given):
        logger.warning("%s", line)
    detected = detect(config.model)
    logger.info("model family %s: %s", detected.family, detected.reason)
    prompts = _prompts(config.preview, detected)
    prepared = same_pictures(config, strategy, detected.pixel_step)
    plan = RunPlan.of(prepared.batch_plan(strategy.size, config.train), config.train, config.optim)
    for line in outline(prepared, plan, strategy.size).splitlines():
        logger.info("%s", line)
    going_on = GoingOn(config, strategy, detected, prepared, plan, started_at)
    if going_on.is_complete(plan):
        return

    family: Family = FAMILIES.get(detected.family)(config.model)
    pictures = len(prepared.manifest.samples)
    prepared, latents = keep_latents(config, strategy, family, detected, prepared)
    if len(prepared.manifest.samples) < pictures:
        plan = RunPlan.of(prepared.batch_plan(strategy.size, config.train), config.train, config.optim)
    texts = keep_texts(config, strategy, family, detected, prepared, plan, prompts)
    pipe = _load(strategy, family, detected, Kept(latents, texts), prompts)
    job, adapter = _assemble(config, strategy, family, pipe, prepared, plan, Kept(latents, texts))
    preview = _preview(config, prompts)
    export = Export(adapter, prepared.pictures, prepared.resolution, going_on.started_at)
    if config.train.replay is not None:
        for line in replay(job, read_bundle(Path(config.train.replay))):
            logger.info("%s", line)
        return
    going_on.restore(job)
    keeper = KeepState(config.state, export, Path(config.save.output_dir), going_on.facts)
    start_trackers(config, strategy)
    with Signals() as signals, Progress(plan.steps, job.state.step, "training", wanted=strategy.is_main) as progress:
        name = f"{config.save.output_name}.metrics.jsonl"
        path = Path(config.save.output_dir) / name
        job.teller = Track(progress, MetricsFile(path, job.state.step) if strategy.is_main else None,
                           job.state.samples)  # fmt: skip
        told = outline(prepared, plan, strategy.size)
        report = Report(export, told, [prompt.text for prompt in prompts], path, going_on.started_at)
        job.actions = [preview, export, report, keeper]
        strategy.is_asked = lambda: signals.asked is not None
        if config.preview.sample_at_first and going_on.found is None:
            preview.draw(job)
        going_on.pay(job)
        try:
            train(job)
        except NoMore:
            _keep(export, job)
            raise
        except Ended as end:
            raise going_on.stop(job, keeper, end.owed, signals) from None
        except Exception as error:
            signals.ignore()
            raise ending.of(error, job, keeper) from error
    keeper.finish(job)
    job.bad_samples.tell_all()
    strategy.finish()
    sheet = _sheet(config, prompts, going_on.started_at) if strategy.is_main else None
    _say_where(export.written, preview, sheet, report.path)


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


def _make_ready(folder: Path, name: str, lock: FolderLock) -> None:
    """That files can be written, and by this run alone, is known before training, not after it."""
    probe = folder / f".writable-{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written to: {error.strerror}") from None
    lock.take()
    state_folder.remove_leftovers(folder, name)


def _load(strategy: DataParallel, family: Family, detected: Detected, kept: Kept, prompts: Sequence[Prompt]) -> Any:
    """The parts that training needs, on the device; what was kept needs no encoder any more.

    A VAE that only previews need rests in host memory between them.
    """
    needed = [part for part in family.parts if part == family.denoiser or part.startswith("tokenizer")
              or (kept.latents is None if part == "vae" else kept.texts is None)]  # fmt: skip
    dtype = DTYPES[strategy.precision]
    pipe = family.load(detected, dtype, needed, device=strategy.device)
    if "vae" not in needed and prompts:
        pipe = family.load(detected, dtype, ("vae",), into=pipe)
    for part in family.parts:
        module = getattr(pipe, part)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False)
            if part in needed:
                module.to(strategy.device)
    return pipe


def _assemble(
    config: RunConfig, strategy: DataParallel, family: Family, pipe: Any, prepared: Prepared, plan: RunPlan, kept: Kept
) -> tuple[Run, lora.Adapter]:
    """Put the adapters into the model, and hand both to the strategy."""
    objective = objective_of(config, family, pipe)
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
                config.data.masked_loss_normalize, config.cache.vae_batch_size, config.cache.text_encoder_batch_size,
                kept.texts)  # fmt: skip
    loader = prepared.loader(plan.batches, strategy.rank, total_steps=plan.steps, pin_memory=strategy.pins_memory,
                             latents=kept.latents, texts=kept.texts)  # fmt: skip
    if strategy.is_main:
        _tell_long_captions(family, pipe, prepared.first_captions(plan.batches, plan.steps))
    schedule = schedules.make_schedule(config.optim, plan.steps)
    watch = Watch(config.train.max_bad_steps, Path(config.save.output_dir))
    bad_samples = BadSamples(config.data.max_bad_samples, len({sample.image for sample in prepared.manifest.samples}))
    compute_twice = None if config.train.gradient_checkpointing else denoiser.enable_gradient_checkpointing
    ladder = Ladder(config.train.on_oom == "ladder", compute_twice)
    job = Run(config, plan, strategy, task, loader, wrapped, groups, optimizer, schedule, watch, ladder, bad_samples,
              Silence())  # fmt: skip
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


def _say_where(files: Sequence[Path], preview: Preview, sheet: Path | None, report: Path) -> None:
    """The last lines: what to open."""
    logger.info("LoRA file: %s", files[-1])
    if preview.written:
        logger.info("pictures: %s", preview.folder)
    if sheet is not None:
        logger.info("before and after, side by side: %s", sheet)
    logger.info("all about this run: %s", report)
