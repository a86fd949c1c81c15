"""The end of a run that nobody wanted: what was learnt is kept, and one process tells what happened and what to do."""

from pathlib import Path

from ..config import RunConfig
from ..distributed.memory import is_out_of_memory
from ..distributed.peers import Peers
from ..distributed.processes import Process
from ..distributed.strategy import DataParallel
from ..errors import ConfigError, Crash, Stopped, UserError
from ..traceback_file import sentence, write_traceback
from .job import Run
from .keep_state import KeepState
from .memory_advice import advice

SHOWN_NAMES = 6


class Ending:
    """Turns whatever ended a run into what is to be told about it."""

    def __init__(self, strategy: DataParallel, config: RunConfig):
        self.rank, self.config = strategy.rank, config
        self.peers = Peers(strategy.rank, strategy.gather(Process.own()), strategy.board("ending"))
        self._is_over = False

    def of(self, error: Exception, run: Run | None = None, keeper: KeepState | None = None) -> Exception:
        """What is to be raised in the place of ``error``; the same again where that was asked before.

        The process that fails first tells, and keeps the state, which is the same on all of them.
        """
        if self._is_over or isinstance(error, (ConfigError, Stopped)):
            return error
        self._is_over = True
        is_told = getattr(error, "is_told", False) or not self.peers.tells()
        where = _where(run)
        shown = advice(error, self.config, run.state.step if run else None) if is_out_of_memory(error) else ""
        kept = self._kept(run, keeper) if run is not None and keeper is not None and not is_told else ""
        told: UserError | Crash
        if isinstance(error, UserError) or shown:
            told = UserError(_lines(shown or str(error), kept))
        else:
            save = self.config.save
            report = write_traceback(error, Path(save.output_dir) / f"{save.output_name}.error-rank{self.rank}.txt")
            lost = None if is_told else self.peers.what_was_lost(error)
            todo = "" if lost else "If it comes again, report it together with that file"
            told = Crash(_lines(lost or sentence(error), where, kept, f"{report}. {todo}".rstrip(". ")))
        told.is_told = is_told
        return told

    def _kept(self, run: Run, keeper: KeepState) -> str:
        """Keep the run as it was when it was last seen to be well."""
        try:
            run.watch.take_back(run)
            name = f"{self.config.save.output_name}-step{run.state.step:08d}"
            path = keeper.save_here(run, name, run.owed) if run.state.step else None
        except Exception as failure:  # the device may be in no state to give anything back
            why = str(failure) if isinstance(failure, UserError) else sentence(failure)
            return f"the state after step {run.state.step} cannot be kept: {why}"
        if path is None:
            return "nothing was learnt yet"
        return f"the state after step {run.state.step} is in {path}; the same command with --auto_resume goes on"


def _where(run: Run | None) -> str:
    if run is None or run.work is None:
        return ""
    names = [name for batch in run.work.batches for name in batch.ids]
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    sizes = sorted({"{1:.0f}x{0:.0f}".format(*batch.frame[0, -2:].tolist()) for batch in run.work.batches})
    done = run.state.step >= run.plan.steps
    when = f"after the last step, {run.plan.steps}" if done else f"in step {run.state.step + 1} of {run.plan.steps}"
    return (f"{when}, with pictures of {' and '.join(sizes)}:"
            f" {', '.join(names[:SHOWN_NAMES])}{more}")  # fmt: skip


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
