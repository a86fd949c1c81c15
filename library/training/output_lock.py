"""The lock on an output name, so that two runs never write the same checkpoints and LoRA files.

filelock's lease is a file created exclusively and refreshed by a heartbeat, so it also works on network file systems
without flock (Lustre mounted noflock, NFS with nolock).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import LeaseCompromise, LeaseSettingsMismatch, SoftFileLease, Timeout

from ..errors import UserError
from ..problems import Problem

logger = logging.getLogger(__name__)
LEASE_SECONDS = 60.0
"""A run on another machine or in another container is taken for dead if it has sent no heartbeat for this long."""

HEARTBEAT_SECONDS = 5.0
"""The interval at which the lease is refreshed, and so the longest wait of a second run until it is refused."""

_FINAL_FILES = ("{}.safetensors", "{}_high_noise.safetensors", "{}_low_noise.safetensors", "{}/model_index.json")
"""What a finished run leaves: a LoRA file, those of the trained experts, or the folder of a model."""


def has_final_output(output_dir: Path, output_name: str) -> bool:
    """Whether a run of this name has finished, or had before it was started again."""
    return any((output_dir / each.format(output_name)).exists() for each in _FINAL_FILES)


@contextmanager
def hold_output_lock(output_dir: Path, output_name: str) -> Iterator[None]:
    """Hold the lock of ``output_name`` inside the block; raise ``UserError`` if another run is alive and holds it.

    The lock of a run that was killed on this machine is taken over at once, because filelock knows the process by pid,
    start time and pid namespace. Of a process elsewhere only the heartbeat tells, which is waited for.
    """
    path = output_dir / f".{output_name}.lock"
    lease = SoftFileLease(
        path,
        lease_duration=LEASE_SECONDS,
        heartbeat_interval=HEARTBEAT_SECONDS,
        on_compromise=_warn_about_lost_lease,
        poll_interval=HEARTBEAT_SECONDS / 10,
    )
    try:
        lease.acquire(timeout=LEASE_SECONDS + 2 * HEARTBEAT_SECONDS, cancel_check=_detect_heartbeat(path))
    except (Timeout, LeaseSettingsMismatch):  # the latter: a run of another version, which has other lease times
        owner = lease.owner
        host = owner.hostname.partition("?")[0] if owner is not None else ""  # filelock appends "?" and the namespace
        other = "an unknown process" if owner is None else f"process {owner.pid} on {host}"
        raise UserError(
            Problem(
                "output_dir",
                f"another run is writing to {output_dir} with this output_name: {other}.\nUse another"
                f" --output_name or --output_dir. If that process no longer runs, delete {path}",
            )
        ) from None
    try:
        yield
    finally:
        lease.release()


def _detect_heartbeat(path: Path) -> Callable[[], bool]:
    """Return a check that is true as soon as the file's time changes, which is when its owner refreshes it."""
    first: int | None = None

    def is_refreshed() -> bool:
        nonlocal first
        try:
            now = path.stat().st_mtime_ns
        except OSError:  # released or taken over just now; the next attempt shows which
            return False
        if first is None:
            first = now
            logger.info("%s exists; waiting up to %g s for its owner's heartbeat", path, LEASE_SECONDS)
        return now != first

    return is_refreshed


def _warn_about_lost_lease(loss: LeaseCompromise) -> None:
    """Warn when another run took the lock over, for example because this process was suspended for too long."""
    what = f"{loss.lock_file}: the lock was lost ({loss.reason})"
    logger.warning("%s; another run may write files of the same name", what)
