"""The end of a run that nobody wanted: what was learnt is kept, and one process tells what happened and what to do."""

from pathlib import Path

from ..config import RunConfig
from ..distributed.memory import is_out_of_memory
from ..distributed.peers import PeerMonitor
from ..distributed.processes import ProcessIdentity
from ..distributed.strategy import Strategy
from ..errors import ConfigError, CrashError, RunInterrupted, UserError
from ..traceback_file import format_error, write_traceback
from .job import TrainingRun
from .keep_state import SaveCheckpoint
from .memory_advice import format_oom_message

MAX_IMAGES_SHOWN = 6


class FailureHandler:
    """Turns whatever ended a run into what is to be told about it."""

    def __init__(self, strategy: Strategy, config: RunConfig):
        self.rank, self.config = strategy.rank, config
        self.peers = PeerMonitor(strategy.rank, strategy.all_gather_object(ProcessIdentity.get_current()), strategy.open_key_value_store("ending"))
        self._is_handled = False

    def build_final_error(self, error: Exception, run: TrainingRun | None = None, save_checkpoint: SaveCheckpoint | None = None) -> Exception:
        """What is to be raised in the place of ``error``; the same again where that was asked before.

        The process that fails first tells, and keeps the state, which is the same on all of them.
        """
        if self._is_handled or isinstance(error, (ConfigError, RunInterrupted)):
            return error
        self._is_handled = True
        is_told = getattr(error, "is_told", False) or not self.peers.elect_reporter()
        where = _describe_step(run)
        shown = format_oom_message(error, self.config, run.state.step if run else None) if is_out_of_memory(error) else ""
        kept = self._save_emergency_checkpoint(run, save_checkpoint) if run is not None and save_checkpoint is not None and not is_told else ""
        told: UserError | CrashError
        if isinstance(error, UserError) or shown:
            told = UserError(_join_lines(shown or str(error), kept))
        else:
            save = self.config.save
            report = write_traceback(error, Path(save.output_dir) / f"{save.output_name}.error-rank{self.rank}.txt")
            lost = None if is_told else self.peers.describe_lost_peer(error)
            todo = "" if lost else "If it comes again, report it together with that file"
            told = CrashError(_join_lines(lost or format_error(error), where, kept, f"{report}. {todo}".rstrip(". ")))
        told.is_reported = is_told
        return told

    def _save_emergency_checkpoint(self, run: TrainingRun, save_checkpoint: SaveCheckpoint) -> str:
        """Keep the run as it was when it was last seen to be well."""
        try:
            run.nan_guard.roll_back(run)
            name = f"{self.config.save.output_name}-step{run.state.step:08d}"
            path = save_checkpoint.save_on_this_rank(run, name, run.pending_callbacks) if run.state.step else None
        except Exception as failure:  # the device may be in no state to give anything back
            why = str(failure) if isinstance(failure, UserError) else format_error(failure)
            return f"the state after step {run.state.step} cannot be kept: {why}"
        if path is None:
            return "nothing was learnt yet"
        return f"the state after step {run.state.step} is in {path}; the same command with --auto_resume goes on"


def _describe_step(run: TrainingRun | None) -> str:
    if run is None or run.step_batches is None:
        return ""
    names = [name for batch in run.step_batches.micro_batches for name in batch.sample_keys]
    more = f" and {len(names) - MAX_IMAGES_SHOWN} more" if len(names) > MAX_IMAGES_SHOWN else ""
    sizes = sorted({"{1:.0f}x{0:.0f}".format(*batch.size_conditioning[0, -2:].tolist()) for batch in run.step_batches.micro_batches})
    done = run.state.step >= run.plan.steps
    when = f"after the last step, {run.plan.steps}" if done else f"in step {run.state.step + 1} of {run.plan.steps}"
    return (f"{when}, with pictures of {' and '.join(sizes)}:"
            f" {', '.join(names[:MAX_IMAGES_SHOWN])}{more}")  # fmt: skip


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
