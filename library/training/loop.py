"""The training loop: all that happens in a run happens here, in this order."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..data.loader import StepWork
from ..distributed.memory import phase
from ..optim.optimizers import learning_rates, set_learning_rates
from .health import STEPS_BETWEEN_READINGS
from .job import Ended, Figures, Run
from .probe import probe
from .rehearsal import try_later_stages
from .warm_up import warm_up


def train(run: Run) -> None:
    """Run every step from the state's on to the last; what goes wrong is taken back and left out."""
    if run.state.step >= run.plan.steps:
        return
    while not _ran_on(run):
        pass


def _ran_on(run: Run) -> bool:
    """Go on to the end, or to where something turned out to have gone wrong, which is undone by then."""
    first, unread = run.state.step, list[Figures]()
    run.watch.remember(run)
    for work, waited in _timed(run.loader.steps(first)):
        run.work, run.owed = work, ()
        if not run.is_probed:
            if run.compilation is not None:
                warm_up(run, run.compilation, work.batches[0])
            else:
                try_later_stages(run, work.batches[0])
            run.ladder.try_out(run.strategy, work.batches[0], first, partial(probe, run))
            run.is_probed = True
        unread.append(_step(run, work, waited))
        run.bad_samples.note(work.problems)
        run.teller.stepped(run)
        due = [action for action in run.actions if action.is_due(run)]
        is_last = run.state.step >= run.plan.steps
        must_end = run.strategy.must_end() and not is_last
        if due or is_last or must_end or run.state.step == 1 or len(unread) >= STEPS_BETWEEN_READINGS:
            if not run.watch.is_well(run, unread):
                return False
            run.bad_samples.settle(run.strategy)
            run.teller.told(run, unread)
            unread = []
            if not is_last:
                run.watch.remember(run)
                run.owed = tuple(type(action).__name__ for action in due)
        for action in due:
            if not (must_end and action.can_wait):
                action(run)
                run.owed = tuple(name for name in run.owed if name != type(action).__name__)
        if must_end:
            raise Ended(run.owed)
        if is_last:
            return True
    raise AssertionError("the loader goes on without end")


def _timed(steps: Iterator[StepWork]) -> Iterator[tuple[StepWork, float]]:
    """Each step's work with the seconds that it was waited for."""
    while True:
        started = time.perf_counter()
        with phase("data"):
            work = next(steps)
        yield work, time.perf_counter() - started


def _step(run: Run, work: StepWork, waited: float) -> Figures:
    """One optimizer step; nothing in it waits for the device."""
    state, strategy = run.state, run.strategy
    factor = run.schedule(state.step)
    set_learning_rates(run.optimizer, [group.rate for group in run.groups], factor)
    if run.compilation is not None:
        run.compilation.begin()
    loss = run.ladder.gradients(strategy, run.task, work, state.step)
    with phase("optimizer"):
        norm = strategy.clip(run.parameters, run.config.optim.max_grad_norm)
    figures = Figures(state.step, loss, norm, {}, tuple(run.task.seen), waited)
    learns = run.watch.may_learn_from(run, work, figures)
    if learns:
        with phase("optimizer"):
            run.optimizer.step()
            if run.limit is not None:
                run.limit()
                strategy.adapter_was_written()
    run.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.samples += work.samples
    state.has_learnt |= learns and factor > 0 and any(group.rate for group in run.groups)
    if learns and run.average is not None:
        run.average.update(state.step)
    rates = learning_rates(run.optimizer, [group.name for group in run.groups])
    return replace(figures, learning_rates=rates, is_left_out=not learns)
