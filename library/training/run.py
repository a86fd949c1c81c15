"""A training run as a whole: check, plan, load, train, say where the files are."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..config import RunConfig
from ..config.schema import PreviewConfig
from ..data.prepare import Prepared
from ..data.prompts import Prompt, read_prompts
from ..distributed.choice import strategy_of
from ..distributed.launcher_settings import find_overridden_settings
from ..distributed.signals import Signals
from ..distributed.strategy import DataParallel
from ..durable import why_not_writable
from ..errors import ConfigError, UserError
from ..families import FAMILIES
from ..families.attention import attention_misfit
from ..families.base import Family
from ..families.detect import Detected, detect
from ..families.drawable import undrawable
from ..families.identity import glance, glance_at
from ..log import Progress
from ..optim import optimizers, schedules
from ..optim.elementwise import whole_tensor_problems
from . import before_after, state_folder
from .assembly import assemble, load
from .bad_samples import NoMore
from .caching import Kept, keep_latents, keep_texts
from .ending import Ending
from .export import Export
from .going_on import GoingOn
from .job import Ended, Run
from .keep_state import KeepState
from .learnt import Learnt
from .loop import train
from .metrics import MetricsFile
from .outline import outline
from .output_lock import hold_output_lock
from .parallel_fit import refuse_misfits
from .pictures import same_pictures
from .plan import RunPlan
from .preview import Preview
from .reporting import Report
from .resting import rehearse_resting
from .same_weights import Diverged, SameWeights
from .starting import merge_bases, read_starts
from .track import Track, start_trackers
from .trained import rehearse
from .validation import Validation

logger = logging.getLogger(__name__)


def run(config: RunConfig, locations: Mapping[str, str] | None = None) -> None:
    """Train from beginning to end; ``locations`` says where each option was written."""
    started_at = time.time()
    optimizers.rehearse(config.optim)
    schedules.rehearse(config.optim)
    strategy = strategy_of(config)
    folder, name = Path(config.save.output_dir), config.save.output_name
    with strategy.until_left():
        divider = strategy.divides_optimizer
        if divider and (problems := whole_tensor_problems(config.optim, divider)):
            raise ConfigError(problems)
        with ExitStack() as held:
            strategy.on_main(lambda: _make_ready(config, folder, name, held))
            ending = Ending(strategy, config)
            try:
                _run(config, locations or {}, strategy, started_at, ending)
            except Exception as error:
                if (end := ending.of(error)) is error:
                    raise
                raise end from error


def _run(
    config: RunConfig, locations: Mapping[str, str], strategy: DataParallel, started_at: float, ending: Ending
) -> None:
    for line in find_overridden_settings(config, locations):
        logger.warning("%s", line)
    detected = detect(config.model)
    logger.info("model family %s: %s", detected.family, detected.reason)
    if problem := attention_misfit(config.distributed.attn_mode, detected):
        raise ConfigError([f"--attn_mode: {problem}"])
    family: Family = FAMILIES.get(detected.family)(config.model)
    rehearse(config, family, detected)
    refuse_misfits(config, family, detected)
    rehearse_resting(config, strategy, family, detected)
    starts = read_starts(config, family, detected)
    prompts = _prompts(config.preview, detected)
    strategy.agree(_seen_at_a_glance(config, detected, prompts))
    prepared = same_pictures(config, strategy, detected.pixel_step)
    plan = RunPlan.of(prepared.batch_plan(strategy.data_size, config.train), config.train, config.optim)
    strategy.agree({"steps": plan.steps, "batch sizes": sorted({bucket.batch_size for bucket in plan.batches.buckets})})
    strategy.refuse_other_batches({bucket.batch_size for bucket in plan.batches.buckets}, plan.batches.accumulation)
    for line in outline(prepared, plan, strategy.data_size).splitlines():
        logger.info("%s", line)
    schedules.make_schedule(config.optim, plan.steps)  # some are made for so many steps and no more
    going_on = GoingOn(config, strategy, detected, prepared, plan, started_at)
    if going_on.is_complete(plan):
        return

    pictures = len(prepared.manifest.samples)
    prepared, latents = keep_latents(config, strategy, family, detected, prepared)
    if len(prepared.manifest.samples) < pictures:
        plan = RunPlan.of(prepared.batch_plan(strategy.data_size, config.train), config.train, config.optim)
    texts = keep_texts(config, strategy, family, detected, prepared, plan, prompts)
    pipe = load(config, strategy, family, detected, Kept(latents, texts), prompts)
    merge_bases(pipe, starts)
    job, adapter = assemble(config, strategy, family, pipe, prepared, plan, Kept(latents, texts), starts)
    strategy.tell_exchange(sum(parameter.nbytes for parameter in job.parameters))
    preview = _preview(config, prompts)
    export = Export(adapter, prepared, strategy.data_size, going_on.started_at)
    strategy.on_main(lambda: export.rehearse(job))
    going_on.restore(job)
    validation = _validation(config, prepared, Kept(latents, texts))
    told = outline(prepared, plan, strategy.data_size)
    _train(job, ending, export, going_on, [*validation, preview], told, [prompt.text for prompt in prompts])


def _seen_at_a_glance(config: RunConfig, detected: Detected, prompts: Sequence[Prompt]) -> dict[str, str]:
    """What files hold that may lie elsewhere on each machine; pictures take longer and come after."""
    adapter = config.adapter
    return {
        "model": glance(detected),
        "network_weights": glance_at([adapter.network_weights] if adapter.network_weights else []),
        "base_weights": glance_at(adapter.base_weights),
        "prompts": str(prompts),
    }


def _train(job: Run, ending: Ending, export: Export, going_on: GoingOn, looks: Sequence[Validation | Preview],
           told: str, prompts: Sequence[str]) -> None:  # fmt: skip
    """From the first step to the last, with all that is done between steps, and what is told in the end."""
    config, strategy, folder = job.config, job.strategy, Path(job.config.save.output_dir)
    metrics = folder / f"{config.save.output_name}.metrics.jsonl"
    keeper = KeepState(config.state, export, folder, going_on.facts)
    report, learnt = Report(export, told, prompts, metrics, going_on.started_at), Learnt()
    guard = SameWeights(config.distributed.check_sync_every_n_steps, [export, keeper])
    start_trackers(config, strategy)
    wanted = strategy.is_main
    with Signals() as signals, Progress(job.plan.steps, job.state.step, "training", wanted=wanted) as progress:
        file = MetricsFile(metrics, job.state.step) if wanted else None
        job.teller = Track(progress, file, job.state.samples)
        job.actions = [guard, *looks, learnt, export, report, keeper]
        if (profiled := config.train.profile_steps) is not None:
            from .profiler import StepProfiler

            job.actions = StepProfiler(profiled, folder / f"{config.save.output_name}.trace.json.gz").wrap(job)
        strategy.is_asked = lambda: signals.asked is not None
        for look in looks:
            look.begin(job)
        guard.begin(job)
        going_on.pay(job)
        try:
            _train_on(job, guard)
        except Diverged:
            signals.ignore()
            raise
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
    previews = folder / "sample"
    _say_where(export.written, previews if previews.is_dir() else None, sheet, report.path)
    learnt.refuse_nothing(job)


def _train_on(job: Run, guard: SameWeights) -> None:
    """To the last step, or to where the run is asked to end; what is saved there is the same everywhere."""
    try:
        train(job)
    except Ended:
        guard.begin(job)
        raise


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


def _make_ready(config: RunConfig, folder: Path, name: str, held: ExitStack) -> None:
    """That files can be written, and by this run alone, is known before training, not after it."""
    named = config.distributed.compile_cache_dir
    places = {"output_dir": folder} | ({"compile_cache_dir": Path(named).expanduser()} if named is not None else {})
    if problems := [f"--{option}: {place} cannot be written to: {why}"
                    for option, place in places.items() if (why := why_not_writable(place))]:  # fmt: skip
        raise ConfigError(problems)
    held.enter_context(hold_output_lock(folder, name))
    state_folder.remove_leftovers(folder, name)


def _preview(config: RunConfig, prompts: Sequence[Prompt]) -> Preview:
    settings: PreviewConfig = config.preview
    return Preview(settings, prompts, Path(config.save.output_dir) / "sample", config.save.output_name)


def _validation(config: RunConfig, prepared: Prepared, kept: Kept) -> list[Validation]:
    """One, where pictures are kept for it."""
    found = prepared.held_out_batches(config.validate.max_validation_steps, kept.latents, kept.texts)
    return [] if found is None else [Validation(config.validate, *found)]


def _sheet(config: RunConfig, prompts: Sequence[str], started_at: float) -> Path | None:
    """All previews of the run side by side; that they cannot be drawn does not spoil the run."""
    folder, name = Path(config.save.output_dir), config.save.output_name
    path = folder / f"{name}.before_after.png"
    try:
        return before_after.write(folder / "sample", name, prompts, started_at, path)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return None


def _say_where(files: Sequence[Path], previews: Path | None, sheet: Path | None, report: Path) -> None:
    """The last lines: what to open."""
    logger.info("LoRA file: %s", files[-1])
    if previews is not None:
        logger.info("pictures: %s", previews)
    if sheet is not None:
        logger.info("before and after, side by side: %s", sheet)
    logger.info("all about this run: %s", report)
