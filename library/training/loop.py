"""The training loop: all that happens in a run happens here, in this order."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..data.loader import StepBatches
from ..distributed.memory import record_phase
from ..optim.optimizers import get_learning_rates, set_learning_rates
from .state import StepMetrics, StopRequested, TrainingRun
from .step_guards import CHECK_INTERVAL_STEPS
from .warmup import check_later_stages_fit, probe_gradients, warm_up_compilation


def train(run: TrainingRun) -> None:
    """Run every step from the state's on to the last; what goes wrong is taken back and left out."""
    if run.state.step >= run.plan.steps:
        return
    while not _train_until_roll_back(run):
        pass


def _train_until_roll_back(run: TrainingRun) -> bool:
    """Go on to the end, or to where something turned out to have gone wrong, which is undone by then."""
    first, unread = run.state.step, list[StepMetrics]()
    run.nan_guard.take_snapshot(run)
    for work, waited in _time_data_loading(run.loader.iter_steps(first)):
        run.step_batches, run.pending_callbacks = work, ()
        if not run.is_warmed_up:
            if run.compilation is not None:
                warm_up_compilation(run, run.compilation, work.micro_batches[0])
            else:
                check_later_stages_fit(run, work.micro_batches[0])
            run.oom_recovery.run_until_fits(run.strategy, work.micro_batches[0], first, partial(probe_gradients, run))
            run.is_warmed_up = True
        unread.append(_run_step(run, work, waited))
        run.bad_samples.add(work.bad_samples)
        run.metric_logger.advance_progress(run)
        due = [action for action in run.callbacks if action.should_run(run)]
        is_last = run.state.step >= run.plan.steps
        must_end = run.strategy.should_stop() and not is_last
        if due or is_last or must_end or run.state.step == 1 or len(unread) >= CHECK_INTERVAL_STEPS:
            if not run.nan_guard.check_or_roll_back(run, unread):
                return False
            run.bad_samples.sync_across_ranks(run.strategy)
            run.metric_logger.log_steps(run, unread)
            unread = []
            if not is_last:
                run.nan_guard.take_snapshot(run)
                run.pending_callbacks = tuple(type(action).__name__ for action in due)
        for action in due:
            if not (must_end and action.is_deferrable):
                action(run)
                run.pending_callbacks = tuple(name for name in run.pending_callbacks if name != type(action).__name__)
        if must_end:
            raise StopRequested(run.pending_callbacks)
        if is_last:
            return True
    raise AssertionError("the loader goes on without end")


def _time_data_loading(steps: Iterator[StepBatches]) -> Iterator[tuple[StepBatches, float]]:
    """Each step's work with the seconds that it was waited for."""
    while True:
        started = time.perf_counter()
        with record_phase("data"):
            work = next(steps)
        yield work, time.perf_counter() - started


def _run_step(run: TrainingRun, step_batches: StepBatches, data_wait_seconds: float) -> StepMetrics:
    """One optimizer step; nothing in it waits for the device."""
    state, strategy = run.state, run.strategy
    factor = run.lr_schedule(state.step)
    set_learning_rates(run.optimizer, [group.lr for group in run.param_groups], factor)
    if run.compilation is not None:
        run.compilation.mark_step_begin()
    loss = run.oom_recovery.compute_gradients(strategy, run.task, step_batches, state.step)
    with record_phase("optimizer"):
        norm = strategy.clip_grad_norm(run.parameters, run.config.optim.max_grad_norm)
    figures = StepMetrics(state.step, loss, norm, {}, tuple(run.task.micro_batch_stats), data_wait_seconds)
    learns = run.nan_guard.should_step(run, step_batches, figures)
    if learns:
        with record_phase("optimizer"):
            run.optimizer.step()
            if run.max_norm_regularizer is not None:
                run.max_norm_regularizer()
                strategy.sync_optimizer_copies()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += step_batches.num_global_samples
    state.has_trained |= learns and factor > 0 and any(group.lr for group in run.param_groups)
    if learns and run.ema is not None:
        run.ema.update(state.step)
    rates = get_learning_rates(run.optimizer, [group.name for group in run.param_groups])
    return replace(figures, learning_rates=rates, is_skipped=not learns)
