"""When a run fails: save an emergency checkpoint, and let one rank report the cause and what to do."""

from collections.abc import Iterator
from pathlib import Path

from ..config import RunConfig
from ..data.batch import PixelBatch
from ..distributed.communicator import Communicator
from ..distributed.memory import OutOfMemory, is_out_of_memory
from ..distributed.watchdog import PeerMonitor, ProcessIdentity
from ..errors import ConfigError, CrashError, RunInterrupted, UserError, format_error, write_traceback
from .checkpoint import SaveCheckpoint
from .state import TrainingRun

MAX_IMAGES_SHOWN = 6


class FailureHandler:
    """Turns the exception that ended a run into the message for the user."""

    def __init__(self, comm: Communicator, config: RunConfig):
        self.rank, self.config = comm.rank, config
        self.peers = PeerMonitor(
            comm.rank,
            comm.all_gather_object(ProcessIdentity.get_current()),
            comm.open_key_value_store("ending"),
        )
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
        where = _describe_step(run)
        shown = (
            format_oom_message(error, self.config, run.state.step if run else None) if is_out_of_memory(error) else ""
        )
        kept = (
            self._save_emergency_checkpoint(run, save_checkpoint)
            if run is not None and save_checkpoint is not None and not is_reported
            else ""
        )
        told: UserError | CrashError
        if isinstance(error, UserError) or shown:
            told = UserError(_join_lines(shown or str(error), kept))
        else:
            save = self.config.save
            report = write_traceback(error, Path(save.output_dir) / f"{save.output_name}.error-rank{self.rank}.txt")
            lost = None if is_reported else self.peers.describe_lost_peer(error)
            todo = "" if lost else "If it comes again, report it together with that file"
            told = CrashError(_join_lines(lost or format_error(error), where, kept, f"{report}. {todo}".rstrip(". ")))
        told.is_reported = is_reported
        return told

    def _save_emergency_checkpoint(self, run: TrainingRun, save_checkpoint: SaveCheckpoint) -> str:
        """Roll back to the last snapshot and save it."""
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
    sizes = sorted(
        {
            "{1:.0f}x{0:.0f}".format(*batch.size_conditioning[0, -2:].tolist())
            for batch in run.step_batches.micro_batches
        }
    )
    done = run.state.step >= run.plan.steps
    when = f"after the last step, {run.plan.steps}" if done else f"in step {run.state.step + 1} of {run.plan.steps}"
    return f"{when}, with pictures of {' and '.join(sizes)}: {', '.join(names[:MAX_IMAGES_SHOWN])}{more}"


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


PHASE_DESCRIPTIONS = {
    "data": "while pictures were read",
    "encode": "while pictures and captions were encoded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "while the optimizer changed the weights",
    "communication": "while gradients were put together for the other processes",
    "another process": "on another process",
}


MAX_BATCH_IMAGES_SHOWN = 4


def format_oom_message(error: Exception, config: RunConfig, step: int | None) -> str:
    """Format the message; ``step`` counts from 0, None before the first step."""
    phase, batch, reason = "", None, str(error).partition("\n")[0]
    if isinstance(error, OutOfMemory):
        phase, batch, reason = error.phase, error.batch, error.reason
    when = (
        "before the first step" if step is None else f"in step {step + 1} {PHASE_DESCRIPTIONS.get(phase, '')}".rstrip()
    )
    what = f", with {_describe_batch(batch)}" if batch is not None else ""
    first, *others = suggest_oom_fixes(config, phase, len(batch) if batch is not None else 1)
    rest = f"\nIf that is not enough: {'; '.join(others)}." if others else ""
    return f"out of memory {when}{what}{f' ({reason})' if reason else ''}.\nTry next: {first}.{rest}"


def _describe_batch(batch: PixelBatch) -> str:
    height, width = (int(number) for number in batch.size_conditioning[0, -2:].tolist())
    more = f" and {len(batch) - MAX_BATCH_IMAGES_SHOWN} more" if len(batch) > MAX_BATCH_IMAGES_SHOWN else ""
    count = "1 picture" if len(batch) == 1 else f"{len(batch)} pictures"
    return f"{count} of {width}x{height}: {', '.join(batch.sample_keys[:MAX_BATCH_IMAGES_SHOWN])}{more}"


def suggest_oom_fixes(config: RunConfig, phase: str, batch_size: int) -> Iterator[str]:
    """Suggest settings that save memory: first those without cost, last those that change the LoRA."""
    cache, train = config.cache, config.train
    if phase == "encode" and cache.vae_batch_size > 1:
        yield "--vae_batch_size 1"
    if phase == "encode" and cache.text_encoder_batch_size > 1:
        yield "--text_encoder_batch_size 1"
    if not cache.caches_latents:
        yield "--cache_latents, which frees the VAE"
    if not cache.caches_text_outputs:
        yield "--cache_text_encoder_outputs, which frees the text encoders"
    if config.distributed.mixed_precision == "no":
        yield "--mixed_precision bf16"
    is_cut = config.parallel.pp_size * config.parallel.tp_size > 1
    is_whole = not (is_cut or config.sharding.fsdp or config.deepspeed.deepspeed)
    if (
        is_whole
        and config.parallel.model_parallel_size == 1
        and train.on_oom == "fail"
        and batch_size > 1
        and phase != "optimizer"
    ):
        yield "--on_oom recover, which cuts batches in parts as far as needed, with the same result"
    if not train.gradient_checkpointing:
        yield "--gradient_checkpointing, which computes activations twice"
    elif not train.cpu_offload_checkpointing:
        yield "--cpu_offload_checkpointing, which keeps what is computed twice in host memory"
    if is_whole and not train.blocks_to_swap and not config.distributed.torch_compile:
        yield "--blocks_to_swap, which keeps frozen weights of so many blocks in host memory"
    if is_whole and config.model.quantize_base == "none":
        yield "--quantize_base int8, which keeps frozen weights in half as many bits as bf16"
    if config.optim.optimizer_type.lower() in ("adamw", "adam"):
        yield "--optimizer_type AdamW8bit"
    yield "a smaller resolution in the dataset file, or a smaller --network_dim"
