"""A training run as a whole: check, plan, load, train, say where the files are."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from ..atomic_files import find_write_error
from ..cache.encode import EncoderLoader
from ..cache.model_fingerprint import compute_quick_file_fingerprint, compute_quick_model_fingerprint
from ..cache.precompute import CacheReaders, cache_latents, cache_text_encoder_outputs
from ..cache.readers import build_validation_reader
from ..config import RunConfig
from ..config.options import flatten_config
from ..config.schema_output import PreviewConfig
from ..data.prepare import PreparedData
from ..data.prompts import Prompt, load_preview_prompts
from ..data.run_plan import RunPlan
from ..distributed.launcher_settings import find_overridden_settings
from ..distributed.signals import StopSignals
from ..distributed.trackers import Trackers
from ..errors import ConfigError, UserError
from ..estimate.dry_run import format_plan
from ..log import ProgressBar
from ..models.base import Family
from ..models.detect import DetectedModel, detect_model
from ..models.families import FAMILIES
from ..models.preflight import validate_attention_mode, validate_prompts
from ..optim.preflight import validate_elementwise_optimizer, validate_lr_schedule, validate_optimizer
from ..optim.schedules import build_lr_schedule
from ..parallel.strategy import Strategy
from ..parallel.strategy_registry import build_strategy
from ..report import preview_grid
from . import checkpoint_dir
from .callbacks import SaveReport, UpdateNorms, WeightsDiverged, WeightSyncCheck
from .checkpoint import SaveCheckpoint
from .export import SaveAdapter
from .init_weights import merge_base_weights, read_initial_weights
from .loop import train
from .metrics import MetricsFile, TrainingLogger
from .output_lock import hold_output_lock
from .preflight import check_model_parallel, check_quantize_offload
from .preview import Preview
from .resume import Resume
from .setup import build_run, load_training_pipeline, prepare_dataset
from .shutdown import FailureHandler
from .state import StopRequested, TrainingRun
from .step_guards import TooManyFailures
from .trainable import check_adapter_targets
from .validation import Validation

logger = logging.getLogger(__name__)


def run_training(config: RunConfig, locations: Mapping[str, str] | None = None) -> None:
    """Train from beginning to end; ``locations`` says where each option was written."""
    started_at = time.time()
    if problems := [*validate_optimizer(config.optim), *validate_lr_schedule(config.optim)]:
        raise ConfigError(problems)
    signals = StopSignals()
    strategy = build_strategy(config, lambda: signals.received is not None)
    folder, name = Path(config.save.output_dir), config.save.output_name
    with strategy.comm.process_group_scope(), closing(strategy):
        divider = strategy.optimizer_sharding_engine
        if divider and (problems := [*validate_elementwise_optimizer(config.optim, divider)]):
            raise ConfigError(problems)
        with ExitStack() as held:
            strategy.comm.run_on_main(lambda: _prepare_output_dir(config, folder, name, held))
            ending = FailureHandler(strategy.comm, config)
            try:
                _prepare_and_train(config, locations or {}, strategy, started_at, ending, signals)
            except Exception as error:
                if (end := ending.build_final_error(error)) is error:
                    raise
                raise end from error


def _prepare_and_train(
    config: RunConfig,
    locations: Mapping[str, str],
    strategy: Strategy,
    started_at: float,
    failure_handler: FailureHandler,
    signals: StopSignals,
) -> None:
    for line in find_overridden_settings(config, locations):
        logger.warning("%s", line)
    detected = detect_model(config.model)
    logger.info("model family %s: %s", detected.family, detected.reason)
    if problems := [*validate_attention_mode(config.distributed.attn_mode, detected)]:
        raise ConfigError(f"--attn_mode: {problem}" for problem in problems)
    family: Family = FAMILIES.get(detected.family)(config.model)
    check_adapter_targets(config, family, detected)
    check_model_parallel(config, family, detected)
    check_quantize_offload(config, strategy, family, detected)
    starts = read_initial_weights(config, family, detected)
    prompts = _read_prompts(config.preview, detected)
    strategy.comm.assert_equal_across_ranks(_compute_input_fingerprints(config, detected, prompts))
    prepared = prepare_dataset(config, strategy.comm, detected.size_multiple)
    plan = RunPlan.from_config(
        prepared.build_batch_plan(strategy.data_parallel_size, config.train), config.train, config.optim
    )
    strategy.comm.assert_equal_across_ranks(
        {"steps": plan.steps, "batch sizes": sorted({bucket.batch_size for bucket in plan.batch_plan.buckets})}
    )
    strategy.check_batch_sizes(
        {bucket.batch_size for bucket in plan.batch_plan.buckets}, plan.batch_plan.accumulation_steps
    )
    for line in format_plan(prepared, plan, strategy.data_parallel_size).splitlines():
        logger.info("%s", line)
    build_lr_schedule(config.optim, plan.steps)  # some schedulers fail for this number of steps
    going_on = Resume(config, strategy.comm, detected, prepared, plan, started_at)
    if going_on.is_complete(plan):
        return

    pictures = len(prepared.manifest.samples)
    encoders = EncoderLoader(strategy, family, detected, config.model, config.cache)
    prepared, latents = cache_latents(encoders, prepared)
    if len(prepared.manifest.samples) < pictures:
        batch_plan = prepared.build_batch_plan(strategy.data_parallel_size, config.train)
        plan = RunPlan.from_config(batch_plan, config.train, config.optim)
    texts = cache_text_encoder_outputs(encoders, prepared, plan, prompts)
    pipe = load_training_pipeline(config, strategy, family, detected, CacheReaders(latents, texts), prompts)
    merge_base_weights(pipe, starts)
    job, adapter = build_run(config, strategy, family, pipe, prepared, plan, CacheReaders(latents, texts), starts)
    strategy.comm.log_all_reduce_time(sum(parameter.nbytes for parameter in job.parameters))
    preview = _build_preview(config, prompts)
    export = SaveAdapter(adapter, prepared, strategy.data_parallel_size, going_on.started_at)
    strategy.comm.run_on_main(lambda: export.prepare(job))
    going_on.restore(job)
    validation = _build_validation(config, prepared, CacheReaders(latents, texts))
    told = format_plan(prepared, plan, strategy.data_parallel_size)
    _train_and_save(
        job,
        failure_handler,
        signals,
        export,
        going_on,
        [*validation, preview],
        told,
        [prompt.text for prompt in prompts],
    )


def _compute_input_fingerprints(
    config: RunConfig, detected: DetectedModel, prompts: Sequence[Prompt]
) -> dict[str, str]:
    """What files hold that may lie elsewhere on each machine; pictures take longer and come after."""
    adapter = config.adapter
    return {
        "model": compute_quick_model_fingerprint(detected),
        "network_weights": compute_quick_file_fingerprint([adapter.network_weights] if adapter.network_weights else []),
        "base_weights": compute_quick_file_fingerprint(adapter.base_weights),
        "prompts": str(prompts),
    }


def _train_and_save(
    run: TrainingRun,
    failure_handler: FailureHandler,
    signals: StopSignals,
    save_adapter: SaveAdapter,
    resume: Resume,
    evaluation_callbacks: Sequence[Validation | Preview],
    plan_text: str,
    prompts: Sequence[str],
) -> None:
    """From the first step to the last, with all that is done between steps, and what is told in the end."""
    config, strategy, folder = run.config, run.strategy, Path(run.config.save.output_dir)
    metrics = folder / f"{config.save.output_name}.metrics.jsonl"
    keeper = SaveCheckpoint(config.state, save_adapter, folder, resume.metadata)
    report, learnt = SaveReport(save_adapter, plan_text, prompts, metrics, resume.started_at), UpdateNorms()
    guard = WeightSyncCheck(config.distributed.check_sync_every_n_steps, [save_adapter, keeper])
    trackers, wanted = Trackers(strategy.comm), strategy.comm.is_main
    trackers.init_trackers(config.log, flatten_config(config))
    with signals, ProgressBar(run.plan.steps, run.state.step, "training", enabled=wanted) as progress:
        file = MetricsFile(metrics, run.state.step) if wanted else None
        run.metric_logger = TrainingLogger(progress, file, trackers, run.state.samples)
        run.callbacks = [guard, *evaluation_callbacks, learnt, save_adapter, report, keeper]
        if (profiled := config.train.profile_steps) is not None:
            from .profiler import StepProfiler

            run.callbacks = StepProfiler(profiled, folder / f"{config.save.output_name}.trace.json.gz").wrap(run)
        for look in evaluation_callbacks:
            look.on_train_begin(run)
        guard.on_train_begin(run)
        resume.run_pending_callbacks(run)
        try:
            _train_and_check_sync(run, guard)
        except WeightsDiverged:
            signals.ignore_sigterm()
            raise
        except TooManyFailures:
            _save_partial_adapter(save_adapter, run)
            raise
        except StopRequested as end:
            raise resume.save_and_exit(run, keeper, end.pending, signals) from None
        except Exception as error:
            signals.ignore_sigterm()
            raise failure_handler.build_final_error(error, run, keeper) from error
    keeper.wait_until_written(run)
    run.bad_samples.log_summary()
    trackers.end_training()
    sheet = _write_preview_grid(config, prompts, resume.started_at) if strategy.comm.is_main else None
    previews = folder / "sample"
    _log_output_paths(save_adapter.saved_paths, previews if previews.is_dir() else None, sheet, report.path)
    learnt.fail_if_zero(run)


def _train_and_check_sync(run: TrainingRun, sync_check: WeightSyncCheck) -> None:
    """To the last step, or to where the run is asked to end; what is saved there is the same everywhere."""
    try:
        train(run)
    except StopRequested:
        sync_check.on_train_begin(run)
        raise


def _save_partial_adapter(save_adapter: SaveAdapter, run: TrainingRun) -> None:
    """What was learnt until a run could not go on; why it could not is what the user has to read."""
    if not run.state.has_trained:
        return
    try:
        save_adapter.save(run, f"{run.config.save.output_name}-step{run.state.step:08d}.safetensors")
    except UserError as error:
        logger.warning("what was learnt so far is not saved: %s", error)


def _read_prompts(preview: PreviewConfig, detected: DetectedModel) -> list[Prompt]:
    """The prompts of previews, all of which this model can draw."""
    prompts = load_preview_prompts(preview)
    if problems := [*validate_prompts(prompts, preview.sample_sampler, detected)]:
        raise ConfigError(problems)
    return prompts


def _prepare_output_dir(config: RunConfig, output_dir: Path, name: str, held: ExitStack) -> None:
    """That files can be written, and by this run alone, is known before training, not after it."""
    named = config.distributed.compile_cache_dir
    places = {"output_dir": output_dir} | ({"compile_cache_dir": Path(named).expanduser()} if named is not None else {})
    if problems := [
        f"--{option}: {place} cannot be written to: {why}"
        for option, place in places.items()
        if (why := find_write_error(place))
    ]:
        raise ConfigError(problems)
    held.enter_context(hold_output_lock(output_dir, name))
    checkpoint_dir.remove_leftover_files(output_dir, name)


def _build_preview(config: RunConfig, prompts: Sequence[Prompt]) -> Preview:
    settings: PreviewConfig = config.preview
    return Preview(settings, prompts, Path(config.save.output_dir) / "sample", config.save.output_name)


def _build_validation(config: RunConfig, prepared: PreparedData, cache_readers: CacheReaders) -> list[Validation]:
    """One, where pictures are kept for it."""
    found = build_validation_reader(
        prepared, config.validate.max_validation_steps, cache_readers.latent_reader, cache_readers.text_reader
    )
    return [] if found is None else [Validation(config.validate, *found)]


def _write_preview_grid(config: RunConfig, prompts: Sequence[str], started_at: float) -> Path | None:
    """All previews of the run side by side; that they cannot be drawn does not spoil the run."""
    folder, name = Path(config.save.output_dir), config.save.output_name
    path = folder / f"{name}.before_after.png"
    try:
        return preview_grid.write_preview_grid(folder / "sample", name, prompts, started_at, path)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return None


def _log_output_paths(files: Sequence[Path], previews: Path | None, preview_grid: Path | None, report: Path) -> None:
    """The last lines: what to open."""
    logger.info("LoRA file: %s", files[-1])
    if previews is not None:
        logger.info("pictures: %s", previews)
    if preview_grid is not None:
        logger.info("before and after, side by side: %s", preview_grid)
    logger.info("all about this run: %s", report)
