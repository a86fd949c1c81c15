"""A training run from start to end: check settings, plan, cache, load the model, train, save, log output paths."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters import injection
from ..cache.frozen_encoders import FrozenEncoders
from ..cache.latent_cache import cache_latents
from ..cache.model_fingerprint import compute_quick_file_fingerprint, compute_quick_model_fingerprint
from ..cache.readers import CacheReaders, build_validation_reader
from ..cache.text_encoder_cache import cache_text_encoder_outputs
from ..config import RunConfig
from ..config.options import flatten_config
from ..config.schema import AdapterConfig
from ..config.schema_output import SaveConfig
from ..dataloader.caption_templates import apply_templates
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import Prompt, load_preview_prompts
from ..diffusion.expert_selection import NoiseExperts
from ..distributed.config_agreement import NF4_KERNEL
from ..distributed.launcher_monitor import LauncherMonitor
from ..distributed.launcher_settings import find_overridden_settings
from ..distributed.process_group import drain_gloo_threads
from ..distributed.signals import StopSignals
from ..errors import UserError
from ..log import ProgressBar
from ..models.base import Family
from ..models.detect import DetectedModel, detect_model
from ..models.families import FAMILIES
from ..models.own_families import compute_family_fingerprint, get_family_facts
from ..models.trained_components import describe_expert_steps, describe_trained_components, list_cached_text_components
from ..optim.lr_schedulers import build_lr_schedule
from ..parallel.stored_base import explain_dequantization
from ..parallel.strategy import Strategy
from ..parallel.strategy_registry import build_strategy, select_base_kernel
from ..problems import Place
from ..report import preview_grid
from ..trackers import Trackers
from . import checkpoint_dir
from .callbacks import SaveReport, UpdateNorms, WeightsDiverged, WeightSyncCheck
from .checkpoint import SaveCheckpoint
from .failure_handling import FailureHandler
from .full_weights import WeightChanges
from .loop import train
from .metrics import MetricsFile, TrainingLogger
from .nan_and_oom_handling import TooManyFailures
from .network_weights import InitialWeights, add_training_adapter, merge_base_weights, read_initial_weights
from .output_lock import hold_output_lock
from .preflight import RunFacts, check_output_dirs, check_run_settings, replace_dataset
from .preservation import check_trigger
from .preview import Preview
from .resume import Resume
from .run_evaluation import RunEvaluation
from .save_adapter import SaveAdapter
from .save_embedding import SaveEmbedding, SavePivotalTuning
from .save_model import SaveModel
from .save_single_file import SaveSingleFile, saves_single_file
from .save_weights import SaveWeights
from .setup import build_run, load_training_pipeline, prepare_dataset
from .slider_task import build_slider_facts
from .state import Callback, StopRequested, TrainingRun
from .validate_token import check_captions_for_token
from .validation_loss import Validation

if TYPE_CHECKING:
    from .profiler import StepProfiler

logger = logging.getLogger(__name__)


def run_training(
    config: RunConfig, locations: Mapping[str, Place] | None = None, check_output: Callable[[], None] = lambda: None
) -> None:
    """Train an adapter, a model or token embeddings; ``locations`` says where each option was set, for messages.

    ``check_output`` may raise for the files in ``output_dir``; it is called on the main rank and raises on all.
    """
    started_at = time.time()
    signals = StopSignals()
    with ExitStack() as stack:
        stack.enter_context(LauncherMonitor(signals))
        strategy = build_strategy(config, lambda: signals.received is not None)
        stack.enter_context(strategy.comm.process_group_scope())
        stack.enter_context(closing(strategy))
        strategy.comm.run_on_main(lambda: _prepare_output_dir(config.save, config.distributed.compile_cache_dir, stack))
        strategy.comm.run_on_main(check_output)
        failure_handler = FailureHandler(strategy.comm, config)
        try:
            _prepare_and_train(
                config, locations or {}, strategy, started_at, failure_handler=failure_handler, signals=signals
            )
        except Exception as error:
            if (final_error := failure_handler.build_final_error(error)) is error:
                raise
            raise final_error from error


def _prepare_and_train(
    config: RunConfig,
    locations: Mapping[str, Place],
    strategy: Strategy,
    started_at: float,
    failure_handler: FailureHandler,
    signals: StopSignals,
) -> None:
    comm = strategy.comm
    for line in find_overridden_settings(config, locations):
        logger.warning("%s", line)
    detected = detect_model(config.model)
    _prepare_stored_base(config, strategy, detected, failure_handler)
    _log_model(config, detected)
    family: Family = FAMILIES.get(detected.family)(config.model)
    check_run_settings(config, RunFacts.from_strategy(strategy, family, detected))
    text_components = list_cached_text_components(config.adapter, config.optim, family.facts)
    encoders = FrozenEncoders(strategy, family, detected, config.model, config.cache, text_components=text_components)
    cached = text_components if config.cache.caches_text_outputs else ()
    initial_weights = read_initial_weights(config.adapter, family, detected, cached_components=cached)
    prompts = load_preview_prompts(config.preview)
    fingerprints = _compute_input_fingerprints(config.adapter, detected, prompts)
    comm.assert_equal_across_ranks({**fingerprints, NF4_KERNEL: strategy.nf4_kernel})
    prepared = apply_templates(prepare_dataset(config.data, config.cache, comm, detected), config.adapter)

    def build_plan() -> RunPlan:
        batch_plan = prepared.build_batch_plan(strategy.data_parallel_size, config.train)
        return RunPlan.from_config(batch_plan, config.train, config.optim)

    plan = build_plan()
    config = replace(config, save=resolve_save_interval(config.save, plan.num_epochs))
    batch_sizes = {bucket.batch_size for bucket in plan.batch_plan.buckets}
    comm.assert_equal_across_ranks({"steps": plan.steps, "batch sizes": sorted(batch_sizes)})
    strategy.check_batch_sizes(batch_sizes, plan.batch_plan.accumulation_steps)
    _log_dataset(config, prepared, plan)
    build_lr_schedule(config.optim, plan.steps)  # some schedulers fail for this number of steps
    resume = Resume(config, strategy, detected=detected, prepared=prepared, plan=plan, started_at=started_at)
    if resume.is_complete(plan):
        return
    _log_first_step(plan, resume, config, detected, family.experts)

    num_images, (prepared, latents) = len(prepared.manifest.samples), cache_latents(encoders, prepared)
    if len(prepared.manifest.samples) < num_images:  # images that could not be read were dropped
        plan = build_plan()
    evaluation = _plan_evaluation(config, strategy, detected, prepared, started_at=resume.started_at)
    pictured = [*prompts, *([] if evaluation is None else evaluation.prompts)]
    texts = cache_text_encoder_outputs(encoders, prepared, plan, pictured, config.preservation)
    readers = CacheReaders(latents, texts, build_slider_facts(prepared, family, detected))
    pipe = load_training_pipeline(config, strategy, family, detected=detected, cache_readers=readers, prompts=pictured)
    _add_initial_weights(config.adapter, family, pipe, initial_weights)
    run, adapter = build_run(
        config, strategy, family, pipe, prepared, plan=plan, cache_readers=readers, initial_weights=initial_weights
    )
    if strategy.shard_group is None:  # else gradients are reduced block by block, while others are computed
        comm.log_all_reduce_time(sum(parameter.nbytes for parameter in run.parameters))
    save = _build_saver(run, adapter, detected, prepared, resume)
    callbacks = _build_callbacks(run, save, prepared, readers=readers, prompts=prompts, resume=resume)
    callbacks = replace(callbacks, evaluation=evaluation)
    _restore(run, callbacks, resume)
    _train_and_save(run, callbacks, failure_handler, signals=signals, resume=resume, prompts=prompts)


def _plan_evaluation(
    config: RunConfig, strategy: Strategy, detected: DetectedModel, prepared: PreparedData, started_at: float
) -> RunEvaluation | None:
    """Plan the evaluations during training, of the pictures of the run unless it names others; None without any."""
    if not config.evaluate.is_active:
        return None
    path = config.evaluate.evaluation_dataset_config
    if path is not None:
        prepared = prepare_dataset(replace_dataset(config.data, path), config.cache, strategy.comm, detected)
    output = Path(config.save.output_dir), config.save.output_name
    return RunEvaluation(config.evaluate, prepared, detected, output, started_at=started_at)


def _restore(run: TrainingRun, callbacks: "RunCallbacks", resume: Resume) -> None:
    """Load the checkpoint, if any; the base model is measured before, where its weights replace what it has."""
    if run.config.adapter.changes_base and callbacks.validation is not None:
        callbacks.validation.compute_base_losses(run)
    if run.config.adapter.changes_base and callbacks.evaluation is not None:
        callbacks.evaluation.measure_base(run)
    resume.restore(run)


def _prepare_stored_base(
    config: RunConfig, strategy: Strategy, detected: DetectedModel, failure_handler: FailureHandler
) -> None:
    """Select the kernel of a base that its files store in nf4, unless it is dequantized; tell what is stored."""
    failure_handler.stored_formats = detected.stored_formats
    reason = explain_dequantization(config.model, config.adapter, can_quantize=strategy.can_quantize_base)
    select_base_kernel(strategy, config.model.quantize_base, detected.stored_formats if reason is None else ())


def _log_model(config: RunConfig, detected: DetectedModel) -> None:
    facts = get_family_facts(detected.family)
    logger.info("model family %s: %s", detected.family_name, detected.reason)
    logger.info("%s", describe_trained_components(config.adapter, config.optim, facts))


def _log_dataset(config: RunConfig, prepared: PreparedData, plan: RunPlan) -> None:
    """Log images and buckets, and check the captions for the trigger of output preservation and for a new word."""
    check_captions_for_token(config.adapter, prepared.manifest)
    for line in prepared.format_summary(plan.batch_plan, plan.steps).splitlines():
        logger.info("%s", line)
    check_trigger(config.preservation, prepared.list_first_epoch_captions(plan.batch_plan, plan.steps))


def _log_first_step(
    plan: RunPlan, resume: Resume, config: RunConfig, detected: DetectedModel, experts: NoiseExperts | None
) -> None:
    steps = range(plan.first_step, plan.steps)
    if line := describe_expert_steps(config.noise, config.train.seed, steps, detected, experts):
        logger.info("%s", line)
    if plan.first_step and resume.checkpoint is None:
        logger.info("starting after step %d of %d, without the steps before", plan.first_step, plan.steps)


def _add_initial_weights(adapter: AdapterConfig, family: Family, pipe: Any, initial_weights: InitialWeights) -> None:
    """Merge the LoRA files that become part of the base model, and add the training adapter."""
    merge_base_weights(pipe, initial_weights)
    add_training_adapter(pipe, family, initial_weights)
    _warn_of_distilled_model(adapter, family, pipe)


def _warn_of_distilled_model(adapter: AdapterConfig, family: Family, pipe: Any) -> None:
    if family.is_step_distilled(pipe) and not adapter.training_adapter:
        logger.warning(
            "%s as loaded is distilled to few steps, which a LoRA trained on it loses: train on the model that it was"
            " distilled from, or set --training_adapter (docs/adapters.md)",
            family.facts.title,
        )


def _compute_input_fingerprints(
    adapter: AdapterConfig, detected: DetectedModel, prompts: Sequence[Prompt]
) -> dict[str, str]:
    """Fingerprint input files, which may be elsewhere on each machine; images take longer and are compared later."""
    return {
        "model": compute_quick_model_fingerprint(detected),
        "source of the family": str(compute_family_fingerprint(detected.family)),
        "network_weights": compute_quick_file_fingerprint(list(filter(None, [adapter.network_weights]))),
        "base_weights": compute_quick_file_fingerprint(adapter.base_weights),
        "embedding_weights": compute_quick_file_fingerprint(list(filter(None, [adapter.embedding_weights]))),
        "training_adapter": compute_quick_file_fingerprint(list(filter(None, [adapter.training_adapter]))),
        "prompts": str(prompts),
    }


def _prepare_output_dir(save: SaveConfig, compile_cache_dir: str | None, stack: ExitStack) -> None:
    """Check that the output can be written, lock the output name, and remove files of a killed run."""
    output_dir = Path(save.output_dir)
    directories = {"output_dir": output_dir}
    if compile_cache_dir is not None:
        directories["compile_cache_dir"] = Path(compile_cache_dir).expanduser()
    check_output_dirs(directories)
    stack.enter_context(hold_output_lock(output_dir, save.output_name))
    checkpoint_dir.remove_leftover_files(output_dir, save.output_name)


def resolve_save_interval(save: SaveConfig, num_epochs: int) -> SaveConfig:
    """``save_n_epoch_ratio`` divides the run into as many parts, of whole epochs, as in sd-scripts."""
    if not save.save_n_epoch_ratio:
        return save
    return replace(save, save_every_n_epochs=max(1, num_epochs // save.save_n_epoch_ratio))


@dataclass(frozen=True)
class RunCallbacks:
    """The callbacks of a run, in the order in which they run after a step."""

    weight_sync_check: WeightSyncCheck
    validation: Validation | None  # is None without validation images
    preview: Preview
    update_norms: UpdateNorms
    save_adapter: SaveWeights
    save_report: SaveReport
    save_checkpoint: SaveCheckpoint
    profiler: "StepProfiler | None"
    evaluation: RunEvaluation | None = None

    def list_all(self) -> list[Callback]:
        callbacks: list[Callback] = [
            self.weight_sync_check,
            *([] if self.validation is None else [self.validation]),
            self.preview,
            *([] if self.evaluation is None else [self.evaluation]),
            self.update_norms,
            self.save_adapter,
            self.save_report,
            self.save_checkpoint,
        ]
        return callbacks if self.profiler is None else self.profiler.wrap(callbacks)


def _build_saver(
    run: TrainingRun,
    adapter: injection.Adapter | None,
    detected: DetectedModel,
    prepared: PreparedData,
    resume: Resume,
) -> SaveWeights:
    """Build the callback that saves the LoRA file, the embedding file or both, or the model of a full training."""
    config, started_at, retention = run.config.save, resume.started_at, resume.restore_retention()
    if run.config.adapter.train == "embedding":
        return SaveEmbedding(config, prepared, started_at, retention)
    if adapter is None:
        kind = SaveSingleFile if saves_single_file(run.config, run.task.family, detected) else SaveModel
        return kind(config, detected, prepared, started_at, retention)
    save = SavePivotalTuning if run.config.adapter.trains_embedding else SaveAdapter
    return save(config, adapter, prepared, started_at, retention)


def _build_callbacks(
    run: TrainingRun,
    save_adapter: SaveWeights,
    prepared: PreparedData,
    readers: CacheReaders,
    prompts: Sequence[Prompt],
    resume: Resume,
) -> RunCallbacks:
    config, output_dir, name = run.config, Path(run.config.save.output_dir), run.config.save.output_name
    plan_text = prepared.format_summary(run.plan.batch_plan, run.plan.steps)
    validation = build_validation_reader(
        prepared, config.validate.max_validation_steps, readers.latent_reader, readers.text_reader
    )
    save_checkpoint = SaveCheckpoint(config.state, save_adapter, output_dir, resume.metadata)
    profiler = None
    if config.train.profile_steps is not None:
        from .profiler import StepProfiler

        profiler = StepProfiler(config.train.profile_steps, output_dir / f"{name}.trace.json.gz")
    return RunCallbacks(
        weight_sync_check=WeightSyncCheck(config.distributed.check_sync_every_n_steps, [save_adapter, save_checkpoint]),
        validation=None if validation is None else Validation(config.validate, *validation),
        preview=Preview(config.preview, prompts, output_dir / "sample", name),
        update_norms=UpdateNorms() if config.adapter.has_adapter else WeightChanges(),
        save_adapter=save_adapter,
        save_report=SaveReport(
            save_adapter,
            plan_text,
            [prompt.text for prompt in prompts],
            _get_metrics_path(config.save),
            resume.started_at,
        ),
        save_checkpoint=save_checkpoint,
        profiler=profiler,
    )


def _get_metrics_path(save: SaveConfig) -> Path:
    return Path(save.output_dir) / f"{save.output_name}.metrics.jsonl"


def _train_and_save(
    run: TrainingRun,
    callbacks: RunCallbacks,
    failure_handler: FailureHandler,
    signals: StopSignals,
    resume: Resume,
    prompts: Sequence[Prompt],
) -> None:
    """Train to the last step, save when the run stops or fails, and log where the files are."""
    comm = run.strategy.comm
    trackers = Trackers(comm.accelerator)
    comm.run_on_main(lambda: trackers.init_trackers(run.config.log, flatten_config(run.config)))
    first_step, is_main, metrics_path = run.state.step, comm.is_main, _get_metrics_path(run.config.save)
    with signals, ProgressBar(run.plan.steps, first_step, "training", enabled=is_main) as progress:
        is_resumed = run.state.samples > 0  # another run's lines are not those of steps that are left out
        metrics_file = MetricsFile(metrics_path, first_step if is_resumed else 0) if is_main else None
        metric_logger = TrainingLogger(progress, metrics_file, trackers, run.state.samples)
        run = replace(run, metric_logger=metric_logger, callbacks=callbacks.list_all())
        for callback in sorted(run.callbacks, key=lambda callback: callback.id != callbacks.save_report.id):
            callback.on_train_begin(run)  # the facts of the run are there before its first previews
        resume.run_pending_callbacks(run)
        try:
            _train_and_check_sync(run, callbacks.weight_sync_check)
        except WeightsDiverged:
            signals.ignore_sigterm()
            raise
        except TooManyFailures:
            _save_partial_adapter(callbacks.save_adapter, run)
            raise
        except StopRequested as stop:
            raise resume.save_and_exit(run, callbacks.save_checkpoint, stop.pending, signals) from None
        except Exception as error:
            signals.ignore_sigterm()
            raise failure_handler.build_final_error(error, run, callbacks.save_checkpoint) from error
    callbacks.save_checkpoint.wait_until_written(run)
    run.bad_samples.log_summary()
    comm.accelerator.wait_for_everyone()
    drain_gloo_threads()
    trackers.end_training()
    grid = (
        _write_preview_grid(run.config.save, [prompt.text for prompt in prompts], resume.started_at)
        if is_main
        else None
    )
    _log_output_paths(callbacks, grid)
    callbacks.update_norms.fail_if_zero(run)


def _train_and_check_sync(run: TrainingRun, weight_sync_check: WeightSyncCheck) -> None:
    """Train; before a stopped run saves its checkpoint, check that all ranks hold the same weights."""
    try:
        train(run)
    except StopRequested:
        weight_sync_check.check(run)
        raise


def _save_partial_adapter(save_adapter: SaveWeights, run: TrainingRun) -> None:
    """Save what was trained so far; a failure must not hide why the run ended."""
    if not run.state.has_trained:
        return
    try:
        save_adapter.save(run, f"{run.config.save.output_name}-step{run.state.step:08d}")
    except UserError as error:
        logger.warning("the weights trained so far cannot be saved: %s", error)


def _write_preview_grid(save: SaveConfig, prompts: Sequence[str], started_at: float) -> Path | None:
    """Write all previews of the run as one image."""
    output_dir, name = Path(save.output_dir), save.output_name
    path = output_dir / f"{name}.before_after.png"
    try:
        return preview_grid.write_preview_grid(output_dir / "sample", name, prompts, started_at, path)
    except OSError as error:
        logger.warning("%s: cannot be written: %s", path, error)
        return None


def _log_output_paths(callbacks: RunCallbacks, grid: Path | None) -> None:
    for path in callbacks.save_adapter.last_paths:
        logger.info("%s: %s", callbacks.save_adapter.title, path)
    if callbacks.preview.output_dir.is_dir():
        logger.info("previews: %s", callbacks.preview.output_dir)
    if grid is not None:
        logger.info("previews side by side, before and after: %s", grid)
    logger.info("report: %s", callbacks.save_report.path)
