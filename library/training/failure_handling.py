"""Failure handling: save an emergency checkpoint, and let one rank report the cause and what to do.

The first rank that fails reports, as a counter in the key-value store decides: later errors are mostly consequences.
It also saves the emergency checkpoint, of the last snapshot: the failed step may have changed a part of the weights.

Out-of-memory errors are reported with the phase, the batch and the settings that save memory.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path

from ..config import RunConfig
from ..dataloader.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.step_phases import OutOfMemory, find_out_of_memory
from ..distributed.watchdog import PeerMonitor, ProcessIdentity
from ..errors import ConfigError, CrashError, RunInterrupted, UserError, format_error, write_traceback
from .checkpoint import SaveCheckpoint
from .oom_advice import suggest_oom_fixes
from .state import TrainingRun

MAX_IMAGES_SHOWN = 6

PHASE_DESCRIPTIONS = {
    "data": "while loading images",
    "encode": "while encoding images and captions",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "communication": "while all-reducing gradients",
    "another process": "on another rank",
}


class FailureHandler:
    """Turns the exception that ended a run into the message for the user."""

    def __init__(self, comm: Communicator, config: RunConfig):
        self.rank, self.config = comm.rank, config
        self.peers = PeerMonitor(
            comm.rank,
            comm.all_gather_object(ProcessIdentity.get_current()),
            comm.open_key_value_store("ending"),
        )
        self.stored_formats: tuple[str, ...] = ()
        """The formats in which the model's files have weights quantized, once they are read."""
        self._is_handled = False

    def build_final_error(
        self, error: Exception, run: TrainingRun | None = None, save_checkpoint: SaveCheckpoint | None = None
    ) -> Exception:
        """Return the exception to raise in place of ``error``, or ``error`` itself if it was already handled.

        The rank that fails first reports it and saves the checkpoint, which is the same on all ranks.
        """
        if self._is_handled or isinstance(error, (ConfigError, RunInterrupted)):
            return error
        self._is_handled = True
        is_reported = getattr(error, "is_reported", False) or not self.peers.elect_reporter()
        where = _describe_step(run)  # before the checkpoint rolls back to an earlier step
        out_of_memory = find_out_of_memory(error)
        oom_message = "" if out_of_memory is None else self._format_oom_message(out_of_memory, run)
        saved = ""
        if run is not None and save_checkpoint is not None and not is_reported:
            saved = self._save_emergency_checkpoint(error, run, save_checkpoint)
        final_error: UserError | CrashError
        if isinstance(error, UserError) or oom_message:
            final_error = UserError(_join_lines(oom_message or str(error), saved))
        else:
            save = self.config.save
            report = write_traceback(error, Path(save.output_dir) / f"{save.output_name}.error-rank{self.rank}.txt")
            lost = None if is_reported else self.peers.describe_lost_peer(error)
            hint = "" if lost else ". If the error recurs, report it together with that file"
            lines = lost or format_error(error), where, saved, f"{report}{hint}"
            final_error = CrashError(_join_lines(*lines))
        final_error.is_reported = is_reported
        return final_error

    def _format_oom_message(self, error: Exception, run: TrainingRun | None) -> str:
        phase, batch, reason = "", None, str(error).partition("\n")[0]
        if isinstance(error, OutOfMemory):
            phase, batch, reason = error.phase, error.batch, error.reason
        when = "before the first step"
        if run is not None:
            when = f"in step {run.state.step + 1} {PHASE_DESCRIPTIONS.get(phase, '')}".rstrip()
        images = "" if batch is None else f", with {_describe_batch(batch)}"
        batch_size = 1 if batch is None else len(batch)
        first, *others = suggest_oom_fixes(self.config, phase, batch_size, self.stored_formats)
        more = f"\nIf that is not enough: {'; '.join(others)}." if others else ""
        return f"out of memory {when}{images}{f' ({reason})' if reason else ''}.\nTry next: {first}.{more}"

    def _save_emergency_checkpoint(
        self, error: BaseException, run: TrainingRun, save_checkpoint: SaveCheckpoint
    ) -> str:
        """Roll back to the last snapshot and save it."""
        try:
            _free_failed_step(error, run)
            if run.strategy.optimizer_sharding_engine and not run.nan_guard.has_snapshots:
                return (
                    "no checkpoint: no rank holds all of the training state; resume from the last one (--auto_resume)"
                )
            fused = run.strategy.fused_backward
            is_in_step = isinstance(error, OutOfMemory) and error.phase == "optimizer"
            if not run.nan_guard.has_snapshots and (is_in_step or (fused is not None and fused.is_updating)):
                return "no checkpoint: the failed optimizer step may have changed a part of the weights"
            run.nan_guard.roll_back(run)
            name = f"{self.config.save.output_name}-step{run.state.step:08d}"
            path = save_checkpoint.save_on_this_rank(run, name, run.pending_callbacks) if run.state.step else None
        except Exception as failure:  # after some errors the device cannot be read
            reason = str(failure) if isinstance(failure, UserError) else format_error(failure)
            return f"the checkpoint after step {run.state.step} cannot be saved: {reason}"
        if path is None:
            return "no training step has completed, so there is no checkpoint"
        return f"the checkpoint after step {run.state.step} is in {path}; to resume, add --auto_resume"


def _free_failed_step(error: BaseException, run: TrainingRun) -> None:
    """Free the tensors of the failed step if it was out of memory: rolling back and saving need memory as well."""
    if find_out_of_memory(error) is None:
        return  # the traceback is still to be written, with what the frames hold
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        traceback.clear_frames(current.__traceback__)
        seen.append(current)
        current = current.__cause__ or current.__context__
    for parameter in run.parameters:  # DeepSpeed's engine has another zero_grad
        parameter.grad = None
    run.strategy.empty_device_cache()


def _describe_step(run: TrainingRun | None) -> str:
    if run is None or run.step_batches is None:
        return ""
    step, steps, batches = run.state.step, run.plan.steps, run.step_batches.micro_batches
    when = f"after the last step, {steps}" if step >= steps else f"in step {step + 1} of {steps}"
    sizes = " and ".join(sorted({_format_size(batch) for batch in batches}))
    return f"{when}, with images of {sizes}: {_format_keys([key for batch in batches for key in batch.sample_keys])}"


def _describe_batch(batch: PixelBatch) -> str:
    count = "1 image" if len(batch) == 1 else f"{len(batch)} images"
    return f"{count} of {_format_size(batch)}: {_format_keys(batch.sample_keys)}"


def _format_size(batch: PixelBatch) -> str:
    height, width = batch.size_conditioning[0, -2:].tolist()
    frames = "".join(f"x{count}" for count in batch.frame_shape)
    return f"{width:.0f}x{height:.0f}{frames}"


def _format_keys(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - MAX_IMAGES_SHOWN} more" if len(keys) > MAX_IMAGES_SHOWN else ""
    return ", ".join(keys[:MAX_IMAGES_SHOWN]) + more


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
