"""The training loop: load data, forward and backward, clip gradients, step the optimizer, log, run callbacks.

Its types and protocols are in state.py, the loss of a batch in task.py, what runs before the first step in
trial_steps.py, NaN, out of memory and unreadable images in nan_and_oom_handling.py; gradient accumulation, clipping
and synchronization in parallel/gradient_accumulation.py, parallel/gradient_clipping.py and parallel/gradient_sync.py.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..dataloader.loader import StepBatches
from ..distributed.step_phases import record_phase
from ..optim.learning_rates import get_learning_rates, set_learning_rates
from .state import StepMetrics, StopRequested, TrainingRun
from .trial_steps import check_later_stages_fit, probe_gradients, warm_up_compilation


def train(run: TrainingRun) -> None:
    """Train from the current step to the last one; steps with a non-finite loss are rolled back and skipped."""
    if run.state.step >= run.plan.steps:
        return
    while not _train_to_end_or_roll_back(run):
        pass


def _train_to_end_or_roll_back(run: TrainingRun) -> bool:
    """Train to the last step and return True, or return False after rolling back to the last snapshot.

    A resumed run skips no batches: the loader builds those of any step from the batch plan (``dataloader.batch_plan``).
    The optimizer steps after the backward pass; with ``--fused_backward_pass`` within it (``optim.fused_backward``).
    """
    first_step, unchecked = run.state.step, list[StepMetrics]()
    run.nan_guard.take_snapshot(run)
    for step_batches, data_wait_seconds in _time_data_loading(run.loader.iter_steps(first_step)):
        run.step_batches, run.pending_callbacks = step_batches, ()
        if not run.is_warmed_up:
            _warm_up(run, step_batches, first_step)
            run.nan_guard.restart_timer()
        unchecked.append(_run_step(run, step_batches, data_wait_seconds))
        run.bad_samples.add(step_batches.bad_samples)
        run.metric_logger.advance_progress(run)
        due = [callback for callback in run.callbacks if callback.should_run(run)]
        is_last = run.state.step >= run.plan.steps
        must_stop = run.strategy.should_stop() and not is_last
        # Reading metrics waits for the device, so they are read only now and then, and before every callback.
        if due or is_last or must_stop or run.state.step == 1 or len(unchecked) >= run.nan_guard.check_interval:
            if not run.nan_guard.check_or_roll_back(run, unchecked):
                return False
            run.nan_guard.choose_check_interval(run, len(unchecked))
            run.bad_samples.sync_across_ranks(run.strategy)
            run.metric_logger.log_steps(run, unchecked)
            unchecked = []
            if not is_last:
                run.nan_guard.take_snapshot(run)
                run.pending_callbacks = tuple(callback.id for callback in due)
        for callback in due:
            if not (must_stop and callback.is_deferrable):
                callback(run)
                run.pending_callbacks = tuple(name for name in run.pending_callbacks if name != callback.id)
                run.nan_guard.restart_timer()
        if must_stop:
            raise StopRequested(run.pending_callbacks)
        if is_last:
            return True
    raise AssertionError("the data loader ended before the last step")


def _warm_up(run: TrainingRun, step_batches: StepBatches, first_step: int) -> None:
    """Prepare the first step: compile, try the largest batch, and check that every parameter gets a gradient."""
    batch = step_batches.micro_batches[0]
    if run.compilation is not None:
        warm_up_compilation(run, run.compilation, batch)
    else:
        check_later_stages_fit(run, batch)
    run.oom_recovery.run_until_fits(run.strategy, batch, first_step, partial(probe_gradients, run))
    run.is_warmed_up = True


def _time_data_loading(steps: Iterator[StepBatches]) -> Iterator[tuple[StepBatches, float]]:
    """Yield the batches of each step with the seconds spent waiting for the data loader."""
    while True:
        started = time.perf_counter()
        with record_phase("data"):
            step_batches = next(steps)
        yield step_batches, time.perf_counter() - started


def _run_step(run: TrainingRun, step_batches: StepBatches, data_wait_seconds: float) -> StepMetrics:
    """Run one optimizer step; nothing in it waits for the device."""
    state = run.state
    lr_factor = run.lr_schedule(state.step)
    set_learning_rates(run.optimizer, [group.lr for group in run.param_groups], lr_factor)
    if run.compilation is not None:
        run.compilation.mark_step_begin()
    loss = accumulate_gradients(run, step_batches)
    grad_norm = _clip_gradients(run)
    metrics = StepMetrics(
        step=state.step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rates={},
        micro_batches=tuple(run.task.micro_batch_stats),
        data_wait_seconds=data_wait_seconds,
    )
    should_step = run.nan_guard.should_step(run, step_batches, metrics)
    if should_step:
        with record_phase("optimizer"):
            run.strategy.update_weights(state.step)
            if run.max_norm_regularizer is not None:
                run.max_norm_regularizer()
                run.strategy.sync_master_weights()
    else:
        run.strategy.discard_gradients()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += step_batches.num_global_samples
    state.has_trained |= should_step and lr_factor > 0 and any(group.lr for group in run.param_groups)
    if should_step and run.ema is not None:
        run.ema.update(state.step)
    learning_rates = get_learning_rates(run.optimizer, [group.name for group in run.param_groups])
    return replace(metrics, learning_rates=learning_rates, is_skipped=not should_step)


def accumulate_gradients(run: TrainingRun, step_batches: StepBatches) -> Tensor:
    """Run forward and backward of all micro-batches, all-reduce their gradients, and return the loss."""
    step = run.state.step
    if run.oom_recovery.is_enabled:
        return run.oom_recovery.compute_gradients(run.strategy, run.task, step_batches, step)
    return run.strategy.compute_gradients(run.task, step_batches.micro_batches, step_batches.num_global_samples, step)


def _clip_gradients(run: TrainingRun) -> Tensor:
    """Clip gradients to ``max_grad_norm``; return the norm before clipping."""
    with record_phase("optimizer"):
        return run.strategy.clip_grad_norm(run.parameters, run.config.optim.max_grad_norm)
